"""OGB's raw directories: the samples equal Planetoid Cora, small ones made here have the quirks."""

from __future__ import annotations

import gzip
import tracemalloc

import numpy as np
import pytest

from tgnn import errors
from tgnn.data import DataOptions, data_fingerprint, load
from tgnn.data.readers import npz
from tgnn.errors import UserError
from tgnn.train import main as train


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(text)


@pytest.fixture
def folder(tmp_path):
    """A function that makes a csv directory of 4 vertices and 3 edges with other files as given."""

    def make(name="ogbn_arxiv", **files):
        root = tmp_path / name
        files = {key.replace("_", "-", key != "edge_weight"): text for key, text in files.items()}
        content = {
            "edge": "0,1\n2,1\n1,3\n",
            "num-node-list": "4\n",
            "num-edge-list": "3\n",
            "node-feat": "1.0,2\n0,0.5\n3,4\n5,6\n",
            "node-label": "0\nnan\n2.0\n1\n",
            **files,
        }
        for key, text in content.items():
            put(root / "raw" / f"{key}.csv.gz", text)
        for split, text in (("train", "2\n0\n"), ("valid", "3\n"), ("test", "")):
            put(root / "split" / "time" / f"{split}.csv.gz", text)
        (root / "RELEASE_v2.txt").write_text(f"# Release note for {name.replace('_', '-')}\n")
        return root

    return make


def edges_of(data):
    return sorted(zip(*data.graph.edge_index().tolist(), strict=True))


@pytest.mark.parametrize("variant", ["csv", "bin"])
def test_the_samples_equal_planetoid_cora(shared_data, variant, monkeypatch):
    monkeypatch.setattr(npz, "_MAPPED_BYTES", 1 << 16)
    options = DataOptions(add_inverse_edge=True if variant == "csv" else None)
    data = load(shared_data / "ogb" / f"ogbn_cora_sample_{variant}", options)
    cora = load(shared_data / "planetoid" / "cora")
    for field in ("x", "y", "train", "val", "test"):
        np.testing.assert_array_equal(getattr(data, field), getattr(cora, field))
    np.testing.assert_array_equal(data.graph.indptr, cora.graph.indptr)
    np.testing.assert_array_equal(data.graph.indices, cora.graph.indices)
    assert data.num_classes == 7
    assert data.options["ogb_variant"] == {"csv": "csv", "bin": "binary"}[variant]
    assert data.options["ogb_release"] == "v1" and data.options["ogb_split"] == "public"


def test_ddi_reads_as_a_graph(shared_data):
    data = load(shared_data / "ogb" / "ogbl_ddi")
    # OGB's table has every edge of this one repeated the other way round.
    assert (data.name, data.num_vertices, data.num_edges) == ("ogbl-ddi", 4267, 2 * 1_067_911)
    assert data.x is None and data.y is None and len(data.train) == 0
    assert data.options["add_inverse_edge"] is True and data.options["ogb_split"] is None
    np.testing.assert_array_equal(data.graph.degree_in(), data.graph.degree_out())


def test_a04_labels_may_be_missing(folder):
    for text in ("0\nnan\n2.0\n1\n", "0\n-1\n2\n1\n", "0.0\nNaN\n2.0\n1.0\n"):
        data = load(folder(node_label=text))
        np.testing.assert_array_equal(data.y, [0, -1, 2, 1])
        assert data.num_classes == 3
        np.testing.assert_array_equal(data.train, [0, 2])
    with pytest.raises(UserError, match="train: got 1 of 2 vertices without a label"):
        load(folder(node_label="0\n1\nnan\n1\n"))


def test_several_label_columns_are_multi_label(folder):
    data = load(folder(node_label="0,1\n1,nan\n,1\n0,0\n"))
    assert data.task == "multi-label" and data.num_classes == 2
    np.testing.assert_array_equal(data.y, [[0, 1], [1, np.nan], [np.nan, 1], [0, 0]])
    with pytest.raises(UserError, match=r"node-label\.csv\.gz, line 3: got '2,1', expected 0, 1 or nan"):
        load(folder(node_label="0,1\n1,nan\n2,1\n0,0\n"))


def test_a16_inverse_edges_follow_the_name_or_the_option(folder):
    once, both = [(0, 1), (1, 3), (2, 1)], [(0, 1), (1, 0), (1, 2), (1, 3), (2, 1), (3, 1)]
    assert edges_of(load(folder("ogbn_arxiv"))) == once
    assert edges_of(load(folder("ogbn_products"))) == both
    assert edges_of(load(folder("products"))) == both
    with pytest.warns(UserWarning, match="my-graph is no name that OGB lists.*--add-inverse-edge"):
        data = load(folder("my_graph"))
    assert edges_of(data) == once and data.options["add_inverse_edge"] is False
    assert edges_of(load(folder("my_graph"), DataOptions(add_inverse_edge=True))) == both
    no = load(folder("ogbn_products"), DataOptions(add_inverse_edge=False))
    assert edges_of(no) == once and no.options["add_inverse_edge"] is False
    assert edges_of(load(folder("other"), DataOptions(add_reverse=True))) == both
    # As OGB does: an edge that is there in both directions is there twice afterwards.
    twice = load(folder("ogbn_products", edge="0,1\n1,0\n1,3\n"))
    assert edges_of(twice) == [(0, 1), (0, 1), (1, 0), (1, 0), (1, 3), (3, 1)]
    with pytest.raises(UserError, match="--add-inverse-edge: got karate, which is no OGB"):
        load("karate", DataOptions(add_inverse_edge=True))


def test_weights_are_repeated_with_their_edges(folder):
    data = load(folder("ogbl_collab", edge_weight="1\n2\n3\n"))
    pairs = dict(zip(map(tuple, data.graph.edge_index().T.tolist()), data.graph.edge_weight, strict=True))
    assert pairs == {(0, 1): 1, (1, 0): 1, (2, 1): 2, (1, 2): 2, (1, 3): 3, (3, 1): 3}


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"edge": "0,1\n2,1\n1,4\n"}, r"edge\.csv\.gz, line 3: got '1,4', expected ids in \[0, 4\)"),
        ({"edge": "0,1\n-1,1\n1,3\n"}, "edge.csv.gz, line 2: got '-1,1'"),
        ({"edge": "0,1\n2,x\n1,3\n"}, "edge.csv.gz, line 2: got 'x' in column 2"),
        ({"edge": "0,1\n2,1.0\n1,3\n"}, "edge.csv.gz, line 2: got '1.0'"),
        ({"edge": "0,1\n2,1\n"}, "edge.csv.gz: got 2 lines, expected 3"),
        ({"edge": "0,1\n2,1\n1,3\n3,3\n"}, "edge.csv.gz, line 4: got '3,3', expected 3 lines"),
        ({"edge": "0,1,2\n2,1,2\n1,3,2\n"}, "edge.csv.gz: got 3 columns"),
        ({"node_feat": "1,2\n1\n1,2\n1,2\n"}, "node-feat.csv.gz, line 2"),
        ({"node_feat": "1,2\n1,2\n1,2\n1,inf\n"}, "node-feat.csv.gz, line 4: got '1,inf', expected finite"),
        ({"node_label": "0\n1.5\n0\n1\n"}, "node-label.csv.gz, line 2: got '1.5'"),
        ({"num_node-list": "4\n5\n"}, "num-node-list.csv.gz: got 2 counts, expected one graph"),
    ],
)
def test_a03_faults_name_file_and_line(folder, files, text):
    with pytest.raises(UserError, match=text) as caught:
        load(folder(**files))
    assert "\n" not in str(caught.value)


def test_splits(folder, tmp_path):
    root = folder()
    put(root / "split" / "random" / "train.csv.gz", "1\n")
    assert load(root).options["ogb_split"] == "time"
    put(root / "split" / "time" / "valid.csv.gz", "3\n4\n")
    with pytest.raises(UserError, match=r"valid\.csv\.gz, line 2: got '4', expected ids in \[0, 4\)"):
        load(root)
    split = tmp_path / "s.json"
    split.write_text('{"train": [0], "val": [3]}')
    np.testing.assert_array_equal(load(root, DataOptions(split_file=str(split))).val, [3])
    (root / "split" / "time" / "split_dict.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"split_dict\.pt, a pickle.*--split-file"):
        load(root)
    assert len(load(root, DataOptions(split="0.5,0.25,0.25")).train)
    other = folder("my_graph")
    put(other / "split" / "random" / "train.csv.gz", "1\n")
    with pytest.raises(UserError, match="the splits random, time"):
        load(other, DataOptions(add_inverse_edge=False))


def test_the_binary_variant(tmp_path):
    raw = tmp_path / "ogbn_papers100M" / "raw"
    raw.mkdir(parents=True)
    arrays = {"edge_index": np.array([[0, 2], [1, 1]]), "num_nodes_list": np.array([4])}
    arrays |= {"num_edges_list": np.array([2]), "node_feat": np.ones((4, 2), np.float16)}
    arrays |= {"node_year": np.ones((4, 1)), "edge_feat": np.array(None)}
    np.savez_compressed(raw / "data.npz", **arrays)
    labels = np.array([[0], [np.nan], [1], [np.nan]], np.float32)
    np.savez_compressed(raw / "node-label.npz", node_label=labels)
    data = load(raw.parent)
    np.testing.assert_array_equal(data.y, [0, -1, 1, -1])
    assert edges_of(data) == [(0, 1), (2, 1)] and data.x.dtype == np.float32
    assert data.options["left_out"] == ["edge_feat", "node_year"] and data.options["ogb_release"] is None
    with pytest.raises(UserError, match="--add-inverse-edge.*binary.*--add-reverse"):
        load(raw.parent, DataOptions(add_inverse_edge=True))
    np.savez_compressed(raw / "data.npz", **{**arrays, "edge_index": np.array([[0, 2], [1, 4]])})
    with pytest.raises(UserError, match=r"edge 1 = \(2, 4\)"):
        load(raw.parent)
    np.savez_compressed(raw / "data.npz", **{**arrays, "node_feat": np.array(None)})
    assert load(raw.parent).x is None
    content = (raw / "data.npz").read_bytes()
    (raw / "data.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"data\.npz"):
        load(raw.parent)


def test_graphs_of_several_types_are_refused(folder):
    root = folder("ogbn_mag")
    put(root / "raw" / "triplet-type-list.csv.gz", "author,writes,paper\n")
    with pytest.raises(UserError, match="several types"):
        load(root)


def test_a20_csv_is_read_in_pieces(folder, monkeypatch):
    monkeypatch.setattr("tgnn.data.readers.text._BLOCK_CHARS", 1 << 13)
    n, width, e = 2000, 64, 30_000
    rng = np.random.default_rng(0)
    ends = rng.integers(0, n, (e, 2)).tolist()
    files = {"edge": "".join(f"{u},{v}\n" for u, v in ends), "num_node-list": f"{n}\n"}
    files |= {"num_edge-list": f"{e}\n", "node_label": "0\n1\n" * (n // 2)}
    files["node_feat"] = "".join(",".join(map(str, row)) + "\n" for row in rng.integers(0, 99, (n, width)))
    root = folder("ogbn_arxiv", **files)
    tracemalloc.start()
    data = load(root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.num_edges == e and data.x.shape == (n, width)
    # The features and a few copies of the edges while they are sorted.
    assert peak < data.x.nbytes + 8 * data.graph.indices.nbytes + (1 << 19)


def test_the_fingerprint_sees_every_file(folder):
    root = folder()
    before = data_fingerprint(root)
    put(root / "split" / "time" / "train.csv.gz", "0\n")
    assert data_fingerprint(root) != before
    assert data_fingerprint(root, DataOptions(add_inverse_edge=True)) != data_fingerprint(root)


@pytest.mark.parametrize("variant", ["csv", "bin"])
def test_a_training_run_from_each(shared_data, variant, tmp_path, monkeypatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    argv = [str(shared_data / "ogb" / f"ogbn_cora_sample_{variant}"), "--epochs", "1", "--ranks", "1"]
    argv += ["--device", "cpu", "--hidden", "4", "--run-dir", str(tmp_path / "run")]
    argv += ["--add-inverse-edge"] if variant == "csv" else []
    assert train(argv) == 0
