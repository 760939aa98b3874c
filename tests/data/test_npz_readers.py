"""The three `.npz` layouts: Shchur, heterophilous, tgnn's own; tiny ones written here and the published."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from tgnn.data import DataOptions, Dataset, Graph, load, save_npz, synthetic
from tgnn.errors import UserError


def pairs_of(data):
    return sorted(zip(*data.graph.edge_index().tolist(), strict=True))


def shchur_keys(adjacency, attributes=None, **more):
    """The arrays of Shchur's layout."""
    keys = {}
    for prefix, matrix in (("adj", adjacency), ("attr", attributes)):
        if matrix is not None:
            keys |= {
                f"{prefix}_{part}": getattr(matrix, part) for part in ("data", "indices", "indptr", "shape")
            }
    return keys | more


@pytest.fixture
def unsorted_adjacency():
    """Directed, with a self-loop at 1 and a row whose columns descend."""
    return sp.csr_matrix(
        (np.ones(5, np.float32), np.array([3, 1, 1, 0, 0]), np.array([0, 2, 3, 4, 5])), shape=(4, 4)
    )


def test_shchur_is_made_symmetric_without_loops(tmp_path, unsorted_adjacency):
    x = sp.random(4, 6, 0.5, "csr", np.float32, random_state=0)
    np.savez(tmp_path / "g.npz", **shchur_keys(unsorted_adjacency, x, labels=np.int8([0, 1, 2, 1])))
    data = load(tmp_path / "g.npz")
    assert pairs_of(data) == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]
    assert data.graph.edge_weight is None
    np.testing.assert_array_equal(data.x, x.toarray())
    np.testing.assert_array_equal(data.y, [0, 1, 2, 1])
    assert data.options["self_loops_in_file"] == "removed"


def test_shchur_dense_attributes_and_unseen_class_names(tmp_path, unsorted_adjacency):
    x = np.arange(8.0).reshape(4, 2)
    names = np.array(["a", "b", "c"])
    np.savez(
        tmp_path / "g.npz",
        **shchur_keys(unsorted_adjacency, attr_matrix=x, labels=[0, 1, 0, 1], class_names=names),
    )
    data = load(tmp_path / "g.npz")
    np.testing.assert_array_equal(data.x, x)
    assert data.num_classes == 3


def test_shchur_faults(tmp_path, unsorted_adjacency):
    keys = shchur_keys(unsorted_adjacency, labels=[0, 1, 0, 1])
    faults = {
        "lacks.npz": ({k: v for k, v in keys.items() if k != "labels"}, "lacks.npz.*the key labels"),
        "ids.npz": (keys | {"adj_indices": np.array([9, 1, 1, 0, 0])}, "ids.npz.*cannot be read"),
        "object.npz": (
            keys | {"labels": np.array([None, 1, 2, 3], object)},
            "object.npz.*no pickled objects",
        ),
        "square.npz": (keys | {"adj_shape": np.array([4, 5])}, "square"),
        "short.npz": (keys | {"labels": [0, 1]}, r"y: got shape \(2,\)"),
    }
    for name, (arrays, message) in faults.items():
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "n", "edges", "component", "labels"),
    [
        ("cora", 2708, 5278, (2485, 5069), None),
        ("citeseer", 3312, 4536, (2110, 3668), None),
        (
            "amazon_electronics_computers.converted",
            13752,
            245861,
            (13381, 245778),
            [436, 2142, 1414, 542, 5158, 308, 487, 818, 2156, 291],
        ),
    ],
)
def test_shchur_counts(shared_data, name, n, edges, component, labels):
    data = load(shared_data / "gnn_benchmark" / f"{name}.npz")
    assert (data.num_vertices, data.graph.num_edges) == (n, 2 * edges)
    if labels is not None:
        np.testing.assert_array_equal(np.bincount(data.y), labels)
    options = DataOptions(largest_component=True, split="random:20,30")
    cut = load(shared_data / "gnn_benchmark" / f"{name}.npz", options)
    assert (cut.num_vertices, cut.graph.num_edges) == (component[0], 2 * component[1])
    assert (np.bincount(cut.y[cut.train]) == 20).all() and (np.bincount(cut.y[cut.val]) == 30).all()
    assert len(cut.train) + len(cut.val) + len(cut.test) == component[0]


def heterophilous_keys():
    """4 vertices, 3 undirected edges each once, 2 splits."""
    masks = np.eye(4, dtype=bool)
    return {
        "node_features": np.ones((4, 2), np.float32),
        "node_labels": np.array([0, 1, 0, 1]),
        "edges": np.array([[0, 1], [2, 1], [0, 3]]),
        "train_masks": masks[[0, 1]],
        "val_masks": masks[[1, 2]],
        "test_masks": masks[[2, 3]],
    }


def test_heterophilous_edges_are_doubled_and_splits_numbered(tmp_path):
    np.savez(tmp_path / "h.npz", **heterophilous_keys())
    data = load(tmp_path / "h.npz")
    assert pairs_of(data) == [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (3, 0)]
    assert (list(data.train), list(data.val), list(data.test)) == ([0], [1], [2])
    second = load(tmp_path / "h.npz", DataOptions(split="1"))
    assert (list(second.train), list(second.val), list(second.test)) == ([1], [2], [3])
    assert (data.options["split"], second.options["split"]) == ("0", "1")
    with pytest.raises(UserError, match="split 2 of masks"):
        load(tmp_path / "h.npz", DataOptions(split="2"))
    np.savez(tmp_path / "bad.npz", **(heterophilous_keys() | {"edges": np.zeros((2, 3), int)}))
    with pytest.raises(UserError, match=r"edges of shape \(2, 3\)"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("name", "n", "edges", "labels"),
    [
        ("minesweeper", 10000, 39402, [8000, 2000]),
        ("chameleon_filtered", 890, 8854, [242, 134, 209, 164, 141]),
    ],
)
def test_heterophilous_counts(shared_data, name, n, edges, labels):
    path = shared_data / "heterophilous" / f"{name}.npz"
    data = load(path)
    assert (data.num_vertices, data.graph.num_edges) == (n, 2 * edges)
    np.testing.assert_array_equal(np.bincount(data.y), labels)
    trains = []
    for split in range(10):
        cut = load(path, DataOptions(split=str(split)))
        assert len(cut.train) + len(cut.val) + len(cut.test) == n
        trains.append(tuple(cut.train))
    assert len(set(trains)) == 10


def tgnn_keys(**changes):
    """A tiny data set in tgnn's layout."""
    keys = {
        "edge_index": np.array([[0, 1, 2], [1, 2, 1]]),
        "num_nodes": 4,
        "x": np.ones((4, 2)),
        "y": np.array([0, 1, np.nan, 1]),
        "train": np.array([True, False, False, False]),
        "val": [1],
        "test": [3],
    }
    return {key: value for key, value in (keys | changes).items() if value is not None}


def test_tgnn_npz_in_both_forms_of_edges(tmp_path):
    np.savez(tmp_path / "edges.npz", **tgnn_keys(edge_weight=[1.0, 2.0, 3.0]))
    np.savez(
        tmp_path / "rows.npz",
        **tgnn_keys(edge_index=None, indptr=[0, 0, 2, 3, 3], indices=[2, 0, 1], num_nodes=None),
    )
    edges, rows = load(tmp_path / "edges.npz"), load(tmp_path / "rows.npz")
    assert pairs_of(edges) == pairs_of(rows) == [(0, 1), (1, 2), (2, 1)]
    np.testing.assert_array_equal(edges.graph.edge_weight, np.float32([1, 3, 2]))
    np.testing.assert_array_equal(edges.y, [0, 1, -1, 1])
    assert (list(edges.train), list(edges.val), list(edges.test)) == ([0], [1], [3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": [1], "labels": [2]}, "unknown keys features, labels"),
        ({"num_nodes": None, "x": None, "y": None}, "edges without num_nodes"),
        ({"num_nodes": 5}, "g.npz: num_nodes: got 5, expected 4, the rows of x"),
        ({"num_nodes": 1.5}, "num_nodes"),
        ({"indptr": [0, 0]}, "either edge_index or indptr"),
        ({"edge_index": None}, "edge_index ... .tgnn"),
        ({"edge_index": [[0], [4]]}, r"g.npz: edge_index: got edge 0 = \(0, 4\)"),
        ({"train": [2]}, "g.npz: train: got 1 of 1 vertices without a label"),
        ({"train": [1]}, "train and val"),
        ({"val": [0.5]}, "boolean mask or a list"),
        ({"indptr": [0, 0, 2, 3], "indices": [2, 0, 1], "edge_index": None}, "num_nodes: got 4, expected 3"),
    ],
)
def test_bad_tgnn_npz(tmp_path, changes, message):
    np.savez(tmp_path / "g.npz", **tgnn_keys(**changes))
    with pytest.raises(UserError, match=message):
        load(tmp_path / "g.npz")


@pytest.mark.parametrize("multi", [False, True])
def test_save_npz_reads_back_the_same(tmp_path, multi):
    data = synthetic.hand_drawn(with_weights=True)
    if multi:
        y = np.float32([[0, 1], [1, np.nan]] * 6)
        data = Dataset("multi", data.graph, data.x, y, data.train)
    save_npz(data, tmp_path / "saved.npz")
    again = load(tmp_path / "saved.npz")
    for field in ("x", "y", "train", "val", "test"):
        np.testing.assert_array_equal(getattr(again, field), getattr(data, field))
    np.testing.assert_array_equal(again.graph.edge_index(), data.graph.edge_index())
    np.testing.assert_array_equal(again.graph.edge_weight, data.graph.edge_weight)
    assert again.num_vertices == 12 and again.task == data.task
    assert [path.name for path in tmp_path.iterdir()] == ["saved.npz"]


def test_save_npz_leaves_nothing_half_written(tmp_path, monkeypatch):
    (tmp_path / "old.npz").write_bytes(b"old")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        save_npz(Dataset("tiny", Graph.from_edge_index([[0], [1]], 2)), tmp_path / "old.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["old.npz"]
    assert (tmp_path / "old.npz").read_bytes() == b"old"


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 torn"])
def test_damaged_npz_is_named(tmp_path, content):
    (tmp_path / "g.npz").write_bytes(content)
    with pytest.raises(UserError, match="g.npz"):
        load(tmp_path / "g.npz")


def test_truncated_npz_is_named(tmp_path):
    path = tmp_path / "g.npz"
    np.savez_compressed(path, **tgnn_keys())
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[len(whole) // 3 : len(whole) // 2] = b"\0" * (len(whole) // 2 - len(whole) // 3)
    path.write_bytes(bytes(spoilt))
    with pytest.raises(UserError, match="g.npz"):
        load(path)
