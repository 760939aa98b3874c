"""load: names and paths, the order of edits, options that cannot apply, fingerprints, and DataOptions."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest

from tgnn.data import DataOptions, Dataset, Graph, data_fingerprint, load, save_npz
from tgnn.errors import UserError


@pytest.fixture
def saved(tmp_path):
    """A small tgnn npz: parallel edges, a loop at 1, vertex 5 apart with a loop, vertex 4 alone."""
    edges = [[0, 0, 2, 1, 3, 5], [1, 1, 1, 1, 2, 5]]
    y = [0, 1, 0, 1, 0, 1]
    data = Dataset(
        "six", Graph.from_edge_index(edges, 6), np.arange(12.0).reshape(6, 2), y, train=[0, 5], val=[1]
    )
    save_npz(data, tmp_path / "six.npz")
    return str(tmp_path / "six.npz")


def pairs_of(data):
    return sorted(zip(*data.graph.edge_index().tolist(), strict=True))


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("sbm", 8000),
        ("sbm:600", 600),
        ("rmat:6", 64),
        ("ring:6", 6),
        ("hand-drawn", 12),
        ("karate", 34),
        ("community:1000", 1000),
    ],
)
def test_generators_by_name(name, n):
    data = load(name)
    assert data.num_vertices == n and data.name == name.partition(":")[0]
    json.dumps(data.options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("core", "'core'.*sbm, community, rmat, ring, hand-drawn, karate, cora, .*ogbn-arxiv.*path"),
        ("sbm:many", "'sbm:many'"),
        ("sbm:", "'sbm:'"),
        ("sbm:-5", "'sbm:-5'"),
        ("karate:3", "size is fixed"),
        ("rmat:31", "1 to 30"),
        ("no/such/graph.txt", "no/such/graph.txt"),
    ],
)
def test_unknown_names_are_one_sentence(name, message):
    with pytest.raises(UserError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_unknown_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="without ind.<name>.graph"):
        load(tmp_path)
    (tmp_path / "g.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match="DGL graph file, or a file ending in .npz, .txt"):
        load(tmp_path / "g.parquet")
    np.savez(tmp_path / "g.npz", a=[1])
    with pytest.raises(UserError, match="keys a, expected adj_data"):
        load(tmp_path / "g.npz")


def test_a16_nothing_is_edited_unless_asked_and_the_record_says_so(saved):
    data = load(saved)
    assert pairs_of(data) == [(0, 1), (0, 1), (1, 1), (2, 1), (3, 2), (5, 5)]
    expected = {
        "duplicates": "keep",
        "add_reverse": False,
        "self_loops": "keep",
        "relabel": False,
        "largest_component": False,
        "feature_norm": "none",
        "split": "fixed",
    }
    assert expected.items() <= data.options.items()


def test_a16_every_option_together_in_the_documented_order(saved):
    options = DataOptions(
        duplicates="merge",
        add_reverse=True,
        self_loops="add",
        largest_component=True,
        split="0.5,0.25,0.25",
        feature_norm="row",
    )
    data = load(saved, options)
    np.testing.assert_array_equal(data.original_names, [0, 1, 2, 3])
    both = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert pairs_of(data) == sorted(both + [(v, v) for v in range(4)])
    assert [len(data.train), len(data.val), len(data.test)] == [2, 1, 1]
    np.testing.assert_allclose(data.x.sum(axis=1), 1, rtol=1e-6)
    given = {key: value for key, value in options.as_dict().items() if key in options.given()}
    assert given.items() <= data.options.items()
    json.dumps(data.options)


def test_self_loops_are_removed_before_the_component_is_taken(saved):
    assert pairs_of(load(saved, DataOptions(self_loops="remove"))) == [(0, 1), (0, 1), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("data", "options", "flag"),
    [
        ("sbm:50", {"feature_file": "x.npy"}, "--feature-file"),
        ("sbm:50", {"label_file": "y.npy"}, "--label-file"),
        ("karate", {"num_vertices": 34}, "--num-vertices"),
        ("karate", {"relabel": True}, "--relabel"),
        ("karate", {"delimiter": "tab"}, "--delimiter"),
        ("karate", {"weight_column": 3}, "--weight-column"),
        ("karate", {"split": "3"}, "--split: got 3"),
        ("karate", {"split": "random:1,1", "split_file": "s.json"}, "--split.*--split-file"),
        ("karate", {"split_file": "absent.json"}, "absent.json"),
        ("ring:5", {"split": "sometimes"}, "--split: got 'sometimes'"),
    ],
)
def test_options_that_cannot_apply(data, options, flag):
    with pytest.raises(UserError, match=flag):
        load(data, DataOptions(**options))


def test_split_file_replaces_the_split_of_any_data(saved, tmp_path):
    (tmp_path / "s.json").write_text('{"train": [3], "test": [0]}')
    data = load(saved, DataOptions(split_file=str(tmp_path / "s.json")))
    assert (list(data.train), list(data.val), list(data.test)) == ([3], [], [0])
    assert data.options["split"] == "file"


def test_fingerprint_changes_with_files_options_and_names(saved, tmp_path):
    first = data_fingerprint(saved)
    assert first == data_fingerprint(saved, DataOptions())
    prints = {
        first,
        data_fingerprint(saved, DataOptions(add_reverse=True)),
        data_fingerprint("sbm"),
        data_fingerprint("sbm:500"),
    }
    stat = os.stat(saved)
    os.utime(saved, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    prints.add(data_fingerprint(saved))
    assert len(prints) == 5
    (tmp_path / "g.txt").write_text("0 1\n")
    labels = tmp_path / "y.txt"
    labels.write_text("0\n1\n")
    options = DataOptions(label_file=str(labels))
    before = data_fingerprint(tmp_path / "g.txt", options)
    labels.write_text("0\n1\n1\n")
    assert data_fingerprint(tmp_path / "g.txt", options) != before
    with pytest.raises(UserError):
        data_fingerprint("no such name")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"duplicates": "drop"}, "--duplicates: got 'drop', expected one of keep, merge"),
        ({"self_loops": "twice"}, "--self-loops.*keep, add, remove"),
        ({"feature_norm": "l2"}, "--feature-norm.*none, row, column"),
        ({"delimiter": "|"}, "--delimiter"),
        ({"num_vertices": -1}, "--num-vertices: got -1, expected at least 0"),
        ({"num_vertices": 2.0}, "--num-vertices"),
        ({"num_vertices": True}, "--num-vertices"),
        ({"relabel": "yes"}, "--relabel"),
        ({"split": 3}, "--split"),
        ({"split_seed": None}, "--split-seed"),
    ],
)
def test_bad_option_values_name_the_flag(options, message):
    with pytest.raises(UserError, match=message):
        DataOptions(**options)


def test_every_option_has_a_help_and_survives_json():
    for field in dataclasses.fields(DataOptions):
        assert field.metadata["help"]
        assert field.default in field.metadata.get("choices", [field.default])
    options = DataOptions(split="random:20,30", num_vertices=7)
    assert DataOptions(**json.loads(json.dumps(options.as_dict()))) == options
    assert options.given() == ["num_vertices", "split"]
    with pytest.raises(TypeError):
        DataOptions(7)


def test_a_store_is_told_from_a_folder_without_its_description(tmp_path):
    store = tmp_path / "store"
    (store / "part-0000").mkdir(parents=True)
    with pytest.raises(UserError, match="part-0000 but without store.json"):
        load(store)
    (store / "store.json").write_text("{}")
    with pytest.raises(UserError, match="got a partition store.*python -m tgnn.train"):
        load(store)


@pytest.mark.parametrize(("key", "value"), [("x", np.zeros((6, 2))), ("y", np.zeros(6, int))])
def test_num_nodes_is_compared_with_the_rows(tmp_path, key, value):
    edges = np.array([[0, 1], [1, 2]])
    np.savez(tmp_path / "g.npz", edge_index=edges, num_nodes=2**62, **{key: value})
    with pytest.raises(UserError, match=f"g.npz: num_nodes: got {2**62}, expected 6, the rows of {key}"):
        load(tmp_path / "g.npz")
    np.savez(tmp_path / "g.npz", edge_index=edges, num_nodes=2**62)
    with pytest.raises(UserError, match="g.npz: number of vertices: got .*memory"):
        load(tmp_path / "g.npz")
