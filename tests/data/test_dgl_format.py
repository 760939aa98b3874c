"""DGL's files: byte for byte as DGL writes them, read back, refused where damaged, loaded by DGL itself."""

from __future__ import annotations

import io
import json
import tracemalloc

import numpy as np
import pytest

from tests.frameworks import imported
from tgnn import errors
from tgnn.data import Dataset, Graph, load
from tgnn.data.dgl_binary import (
    Edges,
    Rows,
    StoredGraph,
    read_graphs,
    read_tensors,
    write_graph,
    write_tensors,
)
from tgnn.data.readers.dgl import read_dgl_graph
from tgnn.errors import UserError
from tgnn.export.__main__ import main as export
from tgnn.export.dgl_files import write_dgl_graph, write_dgl_partition
from tgnn.export.frameworks import DGL
from tgnn.partition.store import write_store
from tgnn.train import main as train


@pytest.fixture
def samples(shared_data):
    return shared_data / "dgl_samples"


@pytest.fixture
def dgl():
    return imported(DGL)


@pytest.fixture
def karate(samples):
    """The sample graph and, as DGL partitioned it, the part of each vertex."""
    expected = np.load(samples / "karate_2part_expected.npz")
    part_of = np.zeros(34, np.int64)
    part_of[expected["orig_nids"][17:]] = 1
    return load(samples / "karate_save_graphs.bin"), part_of


@pytest.fixture
def weighted():
    """Directed, weighted, multi-label, with parallel edges, a loop, an isolated vertex, one mask."""
    edges = [[0, 0, 2, 1, 3, 5, 5, 6], [1, 1, 1, 1, 2, 5, 0, 3]]
    y = np.array([[0, 1, np.nan]] * 7 + [[np.nan] * 3], np.float32)
    graph = Graph.from_edge_index(edges, 8, np.arange(8) + 0.5)
    return Dataset("eight", graph, np.arange(16.0).reshape(8, 2), y, train=[0, 5])


@pytest.fixture
def store(weighted, tmp_path):
    return write_store(weighted, np.array([1, 0, 2, 1, 0, 2, 0, 1]), tmp_path / "store")


def triples(graph, names=None):
    """Sorted (source, destination, weight)."""
    edges = graph.edge_index() if names is None else names[graph.edge_index()]
    weight = np.zeros(graph.num_edges) if graph.edge_weight is None else graph.edge_weight
    return sorted(zip(*edges.tolist(), weight.tolist(), strict=True))


def assert_same_data(got, expected, names=None):
    """Equal graph, features, labels and splits; `names` are the expected ids of the vertices in `got`."""
    ids = np.arange(expected.num_vertices) if names is None else names
    assert triples(got.graph, ids) == triples(expected.graph)
    for field in ("x", "y"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field)[ids])
    for split in ("train", "val", "test"):
        np.testing.assert_array_equal(np.sort(ids[getattr(got, split)]), getattr(expected, split))


def test_what_we_write_is_what_dgl_wrote(samples):
    path = samples / "karate_save_graphs.bin"
    (graph,), labels = read_graphs(path)
    assert labels["glabel"].tolist() == [7, 8, 9]
    file = io.BytesIO()
    write_graph(file, graph, labels)
    assert file.getvalue() == path.read_bytes()
    for tensors in samples.glob("karate_*2part/part*/*_feat.dgl"):
        file = io.BytesIO()
        write_tensors(file, read_tensors(tensors))
        assert file.getvalue() == tensors.read_bytes()


def test_the_sample_graph(samples):
    expected = np.load(samples / "karate_expected.npz")
    data = load(samples / "karate_save_graphs.bin")
    edges = np.stack([expected["src"], expected["dst"]])
    assert triples(data.graph) == triples(Graph.from_edge_index(edges, 34, expected["weight"]))
    np.testing.assert_array_equal(data.x, expected["feat"])
    np.testing.assert_array_equal(data.y, expected["label"])
    np.testing.assert_array_equal(data.train, np.flatnonzero(expected["train_mask"]))
    assert data.options["left_out"] == ["orig_eid"]


@pytest.mark.parametrize("name", ["karate_2part", "karate_rand_2part"])
def test_the_sample_partitions(samples, name):
    data, whole = load(samples / name), load(samples / "karate_save_graphs.bin")
    assert_same_data(data, whole, np.load(samples / f"{name}_expected.npz")["orig_nids"])
    assert data.options["dgl_parts"] == 2
    (description,) = (samples / name).glob("*.json")
    assert triples(load(description).graph) == triples(data.graph)


def test_every_layout_gives_the_same_edges(tmp_path):
    source, destination = np.array([2, 0, 1, 0]), np.array([0, 1, 1, 2])
    by_source, by_destination = np.argsort(source, kind="stable"), np.argsort(destination, kind="stable")
    layouts = {
        "coo": Edges("coo", (3, 3), Rows(np.int64, (4,), [source[:1], source[1:]]), destination),
        "csr": Edges("csr", (3, 3), np.array([0, 2, 3, 4]), destination[by_source], by_source),
        "csc": Edges("csc", (3, 3), np.array([0, 1, 3, 4]), source[by_destination], by_destination),
    }
    for name, edges in layouts.items():
        path = tmp_path / name
        with open(path, "wb") as file:
            write_graph(file, StoredGraph([3], [edges], [{}], [{}]))
        (graph,), _ = read_graphs(path)
        np.testing.assert_array_equal(graph.edges[0].in_id_order(), [source, destination])


def test_other_files_are_refused_in_one_sentence(samples, tmp_path):
    with pytest.raises(UserError, match=r"item, user.*buys, follows.*one type") as caught:
        load(samples / "hetero_save_graphs.bin")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="tensor file, which holds no edges"):
        load(samples / "karate_2part/part0/node_feat.dgl")
    content = (samples / "karate_save_graphs.bin").read_bytes()
    for place, text in ((8, "version 9"), (0, "start of a DGL graph file")):
        (tmp_path / "other.bin").write_bytes(content[:place] + b"\x09" + content[place + 1 :])
        with pytest.raises(UserError, match=text):
            read_dgl_graph(tmp_path / "other.bin")


def test_damage_is_told_by_file_and_byte(samples, tmp_path):
    content, path = (samples / "karate_save_graphs.bin").read_bytes(), tmp_path / "cut.bin"
    for size in (*range(0, 64, 7), *range(4090, len(content), 61)):
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cut\.bin, byte \d+: got .*, expected .*; "):
            read_graphs(path)
    path.write_bytes(content + b"more")
    with pytest.raises(UserError, match=f"byte {len(content)}: got 4 more bytes"):
        read_graphs(path)


def test_no_changed_byte_crashes(samples, tmp_path):
    content, path = bytearray((samples / "karate_save_graphs.bin").read_bytes()), tmp_path / "changed.bin"
    for place in [*range(0, 40), *range(4096, 4700, 3), *range(7000, len(content), 97)]:
        changed = content.copy()
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            read_dgl_graph(path)
        except UserError as error:
            assert str(path) in str(error)


def test_a03_edges_outside_the_graph_are_refused(tmp_path):
    for edges, text in (
        (Edges("coo", (3, 3), np.array([0, 3]), np.array([1, 1])), r"ids 0 to 3.*\[0, 3\)"),
        (Edges("csr", (3, 3), np.array([0, 2, 1, 2]), np.array([0, 0])), "offsets"),
        (Edges("coo", (3, 3), np.array([0, 2]), np.array([1, 1]), np.array([0, 0])), "edge ids"),
        (Edges("coo", (3, 2), np.array([0, 2]), np.array([1, 1])), "3 at both ends"),
    ):
        with open(tmp_path / "g.bin", "wb") as file:
            write_graph(file, StoredGraph([3], [edges], [{}], [{}]))
        with pytest.raises(UserError, match=text):
            load(tmp_path / "g.bin")


def test_data_of_the_wrong_length_or_name(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())

    def file_of(**ndata):
        edges = Edges("coo", (3, 3), np.array([0]), np.array([1]))
        with open(tmp_path / "g.bin", "wb") as file:
            write_graph(file, StoredGraph([3], [edges], [ndata], [{}]))
        return tmp_path / "g.bin"

    with pytest.raises(UserError, match=r"g\.bin, feat: got shape \(2, 1\), expected 3 rows"):
        load(file_of(feat=np.zeros((2, 1))))
    with pytest.raises(UserError, match="train_mask: got int64.*0 or 1"):
        load(file_of(train_mask=np.array([0, 1, 2])))
    with pytest.warns(UserWarning, match="has no feat and label; its x are not used"):
        assert load(file_of(x=np.zeros((3, 1)))).x is None


def test_damaged_partitions_are_refused(karate, tmp_path):
    data, part_of = karate
    description = write_dgl_partition(write_store(data, part_of, tmp_path / "store"), tmp_path / "p")
    content = json.loads(description.read_text())
    inside = tmp_path / "p" / "part1"
    for change, text in (
        ({"ntypes": {"a": 0, "b": 1}}, "vertex types a, b"),
        ({"num_parts": 3}, "one per part"),
        ({"node_map": {"_N": [[0, 16], [17, 34]]}}, "do not cover 0 to 34"),
        ({"node_map": {"_N": [[0, 16], [16, 34]]}}, "17 own vertices of part 0.*0 to 15"),
        ({"part-1": {"part_graph": "part1/graph.dgl"}}, "no node_feats"),
        ({"part-1": {"part_graph_graphbolt": "x.pt"}}, "GraphBolt"),
        ({"part-1": {**content["part-1"], "part_graph": "part9/graph.dgl"}}, "part9/graph.dgl"),
        ({"part-1": {**content["part-1"], "node_feats": "part1/edge_feat.dgl"}}, r"weight: got shape"),
    ):
        description.write_text(json.dumps({**content, **change}))
        with pytest.raises(UserError, match=text) as caught:
            load(tmp_path / "p")
        assert "\n" not in str(caught.value)
    description.write_text(json.dumps(content))
    with open(inside / "node_feat.dgl", "wb") as file:
        write_tensors(file, {"_N/feat": np.zeros((17, 8), np.float32)})
    with pytest.raises(UserError, match=r"data feat, expected .*label.* as in the first part"):
        load(tmp_path / "p")
    older = {**content, "node_map": [17, 34], "edge_map": [78, 156]}
    write_dgl_partition(write_store(data, part_of, tmp_path / "again"), tmp_path / "q")
    (tmp_path / "q/karate_save_graphs.json").write_text(json.dumps(older))
    assert load(tmp_path / "q").num_edges == 156


def test_round_trips_in_original_and_new_ids(weighted, store, tmp_path):
    write_dgl_graph(store, tmp_path / "original.dgl")
    assert_same_data(load(tmp_path / "original.dgl"), weighted)
    write_dgl_graph(store, tmp_path / "new.dgl", ids="new")
    new = load(tmp_path / "new.dgl")
    np.testing.assert_array_equal(new.original_names, store.original_ids())
    assert_same_data(new, weighted, new.original_names)
    write_dgl_partition(store, tmp_path / "parts")
    parted = load(tmp_path / "parts")
    np.testing.assert_array_equal(parted.original_names, store.original_ids())
    assert_same_data(parted, weighted, parted.original_names)


@pytest.mark.parametrize(
    "names",
    [np.array([7, 10, 500, -3, 2**40, 1, 2, 3]), np.array(["a", "b", "Zürich", "d d", "", "f", "g", "h"])],
    ids=["integers", "text"],
)
@pytest.mark.parametrize("ids", ["original", "new"])
def test_a03_names_of_the_source_are_kept(weighted, tmp_path, names, ids):
    part_of = np.array([0, 0, 0, 1, 1, 1, 1, 1] if ids == "original" else [1, 0, 1, 0, 0, 1, 1, 0])
    named = write_store(weighted.changed(original_names=names), part_of, tmp_path / "named")
    expected = names if ids == "original" else names[named.original_ids()]
    write_dgl_graph(named, tmp_path / "g.bin", ids)
    write_dgl_partition(named, tmp_path / "p", ids)
    for path in (tmp_path / "g.bin", tmp_path / "p"):
        got = load(path)
        np.testing.assert_array_equal(got.original_names, expected)
        assert got.options["left_out"] == []


@pytest.mark.parametrize("value", [np.zeros(8, np.float32), np.full((8, 2), 255, np.uint8)])
def test_names_that_cannot_be_read(weighted, store, tmp_path, value):
    write_dgl_graph(store, tmp_path / "g.bin")
    (graph,), _ = read_graphs(tmp_path / "g.bin")
    graph.ndata[0]["orig_name"] = value
    with open(tmp_path / "h.bin", "wb") as file:
        write_graph(file, graph)
    with pytest.raises(UserError, match=r"h\.bin.*orig_name"):
        load(tmp_path / "h.bin")


def test_edges_remember_their_number_in_original_ids(weighted, store, tmp_path):
    write_dgl_graph(store, tmp_path / "new.dgl", ids="new")
    (graph,), _ = read_graphs(tmp_path / "new.dgl")
    number = graph.edata[0]["orig_id"]
    ends = store.original_ids()[np.stack(graph.edges[0].in_id_order())]
    np.testing.assert_array_equal(ends, weighted.graph.edge_index()[:, number])
    np.testing.assert_array_equal(graph.edata[0]["weight"], weighted.graph.edge_weight[number])


def test_small_pieces_give_the_same_files(store, tmp_path, monkeypatch):
    write_dgl_partition(store, tmp_path / "whole")
    monkeypatch.setattr("tgnn.export.dgl_files.CHUNK_BYTES", 8)
    write_dgl_partition(store, tmp_path / "pieces")
    for path in sorted((tmp_path / "whole").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "pieces" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a20_writing_takes_tables_and_a_piece_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tgnn.export.dgl_files.CHUNK_BYTES", 1 << 15)
    n, rng = 3000, np.random.default_rng(0)
    graph = Graph.from_edge_index(rng.integers(0, n, (2, 150_000)), n, rng.random(150_000))
    data = Dataset("big", graph, rng.random((n, 300), np.float32), rng.integers(0, 3, n), train=[0])
    store = write_store(data, np.arange(n) % 3, tmp_path / "store")
    vertex_tables = 8 * 8 * n
    for write, out in ((write_dgl_graph, "g.bin"), (write_dgl_partition, "p")):
        tracemalloc.start()
        write(store, tmp_path / out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # The arrays take 3.6 MB of features and 3.6 MB of edges.
        assert peak < vertex_tables + 20 * (1 << 15) < 1e6, f"{peak} bytes for {out}"


def test_original_ids_in_a_partition_need_parts_that_are_ranges(weighted, store, tmp_path):
    with pytest.raises(UserError, match=r"--ids: got original for a store of 3 parts.*range"):
        write_dgl_partition(store, tmp_path / "p", ids="original")
    assert not (tmp_path / "p").exists()
    ranges = write_store(weighted, np.array([0, 0, 0, 1, 1, 1, 1, 3]), tmp_path / "ranges")
    write_dgl_partition(ranges, tmp_path / "p", ids="original")
    data = load(tmp_path / "p")
    assert data.original_names is None
    assert_same_data(data, weighted)


def test_halo_and_flags_as_dgl_writes_them(karate, samples, tmp_path):
    data, part_of = karate
    store = write_store(data, part_of, tmp_path / "store")
    write_dgl_partition(store, tmp_path / "p")
    expected, ours = np.load(samples / "karate_2part_expected.npz"), store.original_ids()
    for part in range(2):
        (graph,), _ = read_graphs(tmp_path / f"p/part{part}/graph.dgl")
        (theirs,), _ = read_graphs(samples / f"karate_2part/part{part}/graph.dgl")
        assert graph.ndata[0].keys() == theirs.ndata[0].keys()
        assert graph.edata[0].keys() == theirs.edata[0].keys()
        assert [v.dtype for v in graph.ndata[0].values()] == [
            theirs.ndata[0][key].dtype for key in graph.ndata[0]
        ]
        found = []
        for this, original in ((graph, ours), (theirs, expected["orig_nids"])):
            ids = original[this.ndata[0]["_ID"]]
            source, destination = this.edges[0].in_id_order()
            inner, owner = this.ndata[0]["inner_node"], this.ndata[0]["part_id"]
            edges = zip(ids[source], ids[destination], this.edata[0]["inner_edge"], strict=True)
            found.append((set(zip(ids, inner, owner, strict=True)), sorted(edges)))
            assert inner[: inner.sum()].all() and len(ids) == len(set(ids))
        assert found[0] == found[1]


@pytest.mark.parametrize("ids", ["original", "new"])
def test_dgl_loads_our_graph(dgl, weighted, store, tmp_path, ids):
    write_dgl_graph(store, tmp_path / "g.bin", ids)
    (g,), _ = dgl.load_graphs(str(tmp_path / "g.bin"))
    assert (g.num_nodes(), g.num_edges()) == (8, 8) and g.is_homogeneous
    original, number = store.original_ids() if ids == "new" else np.arange(8), np.arange(8)
    if ids == "new":
        np.testing.assert_array_equal(g.ndata["orig_id"].numpy(), original)
        number = g.edata["orig_id"].numpy()
    edges = original[np.stack([end.numpy() for end in g.edges(order="eid")])]
    np.testing.assert_array_equal(edges, weighted.graph.edge_index()[:, number])
    np.testing.assert_array_equal(g.ndata["feat"].numpy(), weighted.x[original])
    np.testing.assert_array_equal(g.ndata["label"].numpy(), weighted.y[original])
    assert sorted(original[g.ndata["train_mask"].bool().numpy()]) == weighted.train.tolist()
    np.testing.assert_array_equal(g.edata["weight"].numpy(), weighted.graph.edge_weight[number])
    np.testing.assert_array_equal(g.in_degrees().numpy(), weighted.graph.degree_in()[original])


@pytest.mark.parametrize("ids", ["original", "new"])
def test_dgl_loads_our_partition(dgl, weighted, tmp_path, ids):
    part_of = [0, 0, 0, 1, 1, 1, 2, 2] if ids == "original" else [1, 0, 2, 1, 0, 2, 0, 1]
    store = write_store(weighted, np.array(part_of), tmp_path / "parts")
    description = write_dgl_partition(store, tmp_path / "p", ids)
    new_edges = np.argsort(store.original_ids())[weighted.graph.edge_index()]
    for part in range(3):
        graph, nodes, edges, book, name, _, _ = dgl.distributed.load_partition(str(description), part)
        own = store.part(part)
        inner = graph.ndata["inner_node"].bool()
        assert name == "eight" and int(inner.sum()) == own.num_vertices
        assert int(graph.edata["inner_edge"].sum()) == own.num_edges
        ids_of = graph.ndata["_ID"]
        assert book.nid2partid(ids_of[inner]).tolist() == [part] * own.num_vertices
        assert (book.nid2partid(ids_of) == graph.ndata["part_id"]).all()
        touched = np.isin(new_edges, ids_of[inner].numpy()).any(0)
        halo = set(new_edges[:, touched].flatten()) - set(ids_of[inner].tolist())
        assert set(ids_of[~inner].tolist()) == halo and graph.num_edges() == touched.sum()
        np.testing.assert_array_equal(graph.in_degrees()[inner].numpy(), np.diff(own.indptr))
        np.testing.assert_array_equal(nodes["_N/feat"].numpy(), own.features)
        if ids == "new":
            np.testing.assert_array_equal(nodes["_N/orig_id"].numpy(), own.original_id)
        np.testing.assert_array_equal(np.flatnonzero(nodes["_N/train_mask"].numpy()), own.train)
        np.testing.assert_array_equal(edges["_N:_E:_N/weight"].numpy(), own.edge_weight)
        assert book._num_edges() == 8 and len(book.partid2eids(part)) == own.num_edges


def test_we_load_what_dgl_writes(dgl, weighted, store, tmp_path):
    write_dgl_graph(store, tmp_path / "g.bin")
    (g,), _ = dgl.load_graphs(str(tmp_path / "g.bin"))
    ids, _ = dgl.distributed.partition_graph(
        g, "theirs", 2, str(tmp_path / "theirs"), part_method="random", return_mapping=True
    )
    assert_same_data(load(tmp_path / "theirs"), weighted, ids.numpy())
    dgl.save_graphs(str(tmp_path / "csc.bin"), [g], formats=["csc", "csr"])
    assert_same_data(load(tmp_path / "csc.bin"), weighted)


def test_the_command(karate, tmp_path, capsys):
    data, part_of = karate
    write_store(data, part_of, tmp_path / "store")
    command = [str(tmp_path / "store"), "--to"]
    assert export([*command, "dgl-graph", "--out", str(tmp_path / "g.bin")]) == 0
    assert export([*command, "dgl-partition", "--out", str(tmp_path / "p")]) == 0
    assert "2 parts, new ids" in capsys.readouterr().out
    assert_same_data(load(tmp_path / "g.bin"), data)
    origin = json.loads((tmp_path / "g.bin.json").read_text())
    assert origin["dataset"]["num_vertices"] == 34 and origin["options"]["reader"] == "dgl-graph"
    assert json.loads((tmp_path / "p/karate_save_graphs.json").read_text())["tgnn"]["ids"] == "new"
    for more, text in (
        (["dgl-graph", "--out", str(tmp_path / "g.bin")], "which exists"),
        (["dgl-partition", "--out", str(tmp_path / "p")], "holds files"),
        (["dgl-graph", "--out", str(tmp_path / "h.bin"), "--verify"], "--verify"),
        (["dgl", "--out", str(tmp_path / "h"), "--ids", "new"], "--ids"),
        (["dgl-graph", "--out", str(tmp_path / "g.bin/h")], "g.bin/h"),
    ):
        with pytest.raises(UserError, match=text):
            export([*command, *more])


@pytest.mark.parametrize("name", ["karate_save_graphs.bin", "karate_2part"])
def test_a_training_run_from_each(samples, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    argv = [str(samples / name), "--epochs", "1", "--ranks", "1", "--device", "cpu", "--hidden", "4"]
    run = tmp_path / "run"
    assert train([*argv, "--run-dir", str(run)]) == 0
    assert export([str(run), "--to", "dgl-graph", "--out", str(tmp_path / "g.bin")]) == 0
    assert load(tmp_path / "g.bin").num_edges == 156
