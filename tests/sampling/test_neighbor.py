"""Neighbour sampling: direction, duplicates, fanouts, whole neighbourhoods; and the topology it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn
from tgnn.kernels.block import Block
from tgnn.nn import GNN, SAGEConv
from tgnn.parallel import Comm
from tgnn.partition.store import Store, write_store
from tgnn.sampling.features import PartColumn, open_columns
from tgnn.sampling.loader import Loader
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology


def make_dataset(edges: list[tuple[int, int]], num_vertices: int, x: np.ndarray | None = None) -> Dataset:
    """All vertices are for training."""
    graph = Graph.from_edge_index(np.array(edges, dtype=np.int64).reshape(-1, 2).T, num_vertices)
    x = np.eye(num_vertices, dtype=np.float32) if x is None else x
    y, ids = np.zeros(num_vertices, int), np.arange(num_vertices)
    return Dataset("small", graph, x, y, ids, [], [], num_classes=2)


def one_part(dataset: Dataset, tmp_path) -> Store:
    return write_store(dataset, np.zeros(dataset.num_vertices, int), tmp_path / "store")


def edges_of(block: Block, ids: Tensor) -> list[tuple[int, int]]:
    """(source, destination) of every edge, in original ids, sorted."""
    return sorted(zip(ids[block.indices].tolist(), block.dst_id[block.dst_rows].tolist(), strict=True))


def test_a16_messages_go_from_source_to_destination(tmp_path):
    """Path 0 -> 1 -> 2: vertex 2 sees 1, then 0; vertex 0 sees nobody, least of all 2."""
    store = one_part(make_dataset([(0, 1), (1, 2)], 3), tmp_path)
    sampler = NeighborSampler(Topology.of_whole(store))
    outer, inner = sampler.sample(torch.tensor([2]), [-1, -1], 0, 0)
    assert (outer.rows.tolist(), inner.rows.tolist()) == ([2, 1, 0], [2, 1])
    assert edges_of(inner.block, inner.rows) == [(1, 2)]
    assert edges_of(outer.block, outer.rows) == [(0, 1), (1, 2)]
    for hop in sampler.sample(torch.tensor([0]), [-1, -1], 0, 0):
        assert hop.rows.tolist() == [0] and hop.block.n_edges == 0
    # The gradient of vertex 0's output reaches its own features only.
    torch.manual_seed(0)
    batch = next(iter(Loader(store, [-1, -1], shuffle=False)))
    batch.x.requires_grad_()
    GNN.build("sage", 3, 4, 2, 2)(batch)[0].sum().backward()
    reached = batch.ids[0][batch.x.grad.abs().sum(1) > 0]
    assert reached.tolist() == [0]


def test_a16_parallel_edges_count_each(tmp_path):
    """Vertex 1 with in-edges from 0, 0 and 2: mean (2 x0 + x2) / 3."""
    x = np.array([[1.0], [10.0], [100.0]], np.float32)
    store = one_part(make_dataset([(0, 1), (0, 1), (2, 1)], 3, x), tmp_path)
    batch = next(iter(Loader(store, [-1], shuffle=False)))
    layer = SAGEConv(1, 1, bias=False)
    with torch.no_grad():
        layer.fc_self.weight.zero_()
        layer.fc_neigh.weight.fill_(1)
    torch.testing.assert_close(GNN([layer])(batch)[:, 0], torch.tensor([0.0, (2 * 1 + 100) / 3, 0.0]))
    assert batch.blocks[0].position.tolist() == [0, 1, 2]
    assert batch.blocks[0].degree_in.tolist() == [0, 3, 0]
    assert batch.blocks[0].degree_out.tolist() == [2, 0, 1]


def test_self_loop_is_an_edge_like_others(tmp_path):
    store = one_part(make_dataset([(1, 1), (0, 1)], 2), tmp_path)
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.tensor([1]), -1, 0)
    assert edges_of(hop.block, hop.rows) == [(0, 1), (1, 1)] and hop.rows.tolist() == [1, 0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The hand-drawn graph in three parts of scattered vertices."""
    part_of = np.array([0, 1, 2, 0, 2, 1, 1, 0, 2, 0, 1, 2])
    return write_store(hand_drawn(with_weights=True), part_of, tmp_path_factory.mktemp("neighbor") / "store")


def rows_of(topology: Topology, ids: list[int]) -> Tensor:
    """Local rows of original ids."""
    original = topology.original_id.tolist()
    return torch.tensor([original.index(i) for i in ids])


@pytest.mark.parametrize("replace", [False, True])
def test_full_fanout_is_the_whole_neighbourhood(store: Store, replace: bool):
    """-1 gives every in-edge once, with its weight and position, also where draws are with replacement."""
    graph, topology = hand_drawn(with_weights=True).graph, Topology.of_whole(store)
    hop = NeighborSampler(topology, replace=replace).hop(torch.randperm(12), -1, 0)
    block, ids = hop.block, topology.original_id[hop.rows]
    source, destination = graph.edge_index()
    assert edges_of(block, ids) == sorted(zip(source.tolist(), destination.tolist(), strict=True))
    entry = torch.from_numpy(graph.indptr)[block.dst_id[block.dst_rows]] + block.position
    torch.testing.assert_close(block.weight, torch.from_numpy(graph.edge_weight)[entry], rtol=0, atol=0)
    torch.testing.assert_close(
        ids[block.indices], torch.from_numpy(graph.indices)[entry].long(), rtol=0, atol=0
    )
    torch.testing.assert_close(
        block.degree_in, torch.from_numpy(graph.degree_in())[block.dst_id], rtol=0, atol=0
    )
    torch.testing.assert_close(block.degree_out, torch.from_numpy(graph.degree_out())[ids], rtol=0, atol=0)


def test_fanouts_bound_the_draws(store: Store):
    """0 draws nothing, K at most K of distinct positions in order, a K beyond every degree all of them."""
    topology = Topology.of_whole(store)
    frontier = torch.arange(12)
    sampler = NeighborSampler(topology)
    assert sampler.hop(frontier, 0, 1).block.n_edges == 0
    degree = topology.indptr.diff()
    for fanout in (1, 2, 3, 100):
        block = sampler.hop(frontier, fanout, 1).block
        torch.testing.assert_close(block.degrees, degree.clamp(max=fanout), rtol=0, atol=0)
        for first, end in zip(block.indptr[:-1].tolist(), block.indptr[1:].tolist(), strict=True):
            row = block.position[first:end].tolist()
            assert row == sorted(set(row))
    block = NeighborSampler(topology, replace=True).hop(frontier, 3, 1).block
    torch.testing.assert_close(block.degrees, (degree > 0) * 3, rtol=0, atol=0)


def test_fanout_zero_in_the_middle(store: Store):
    """A hop that draws nothing leaves the next one its frontier; a model runs on it."""
    part = np.zeros(12, int)
    whole = write_store(hand_drawn(), part, store.path.parent / "one part")
    for fanouts in ([0, 2], [2, 0], [0, 0]):
        batch = next(iter(Loader(whole, fanouts, batch_size=4)))
        assert [block.n_edges == 0 for block in reversed(batch.blocks)] == [fanout == 0 for fanout in fanouts]
        assert GNN.build("gat", 5, 4, 3, 2)(batch).isfinite().all()


def test_empty_frontier(store: Store):
    sampler = NeighborSampler(Topology.of_whole(store))
    for fanout in (-1, 0, 2):
        hop = sampler.hop(torch.empty(0, dtype=torch.int64), fanout, 1)
        assert (hop.block.n_dst, hop.block.n_src, hop.block.n_edges, len(hop.rows)) == (0, 0, 0, 0)


def test_sample_does_not_depend_on_who_else_is_asked(store: Store):
    """A vertex draws the same in-edges alone, in company, and in any order."""
    topology = Topology.of_whole(store)
    sampler = NeighborSampler(topology, seed=3)
    order = rows_of(topology, [4, 0, 1, 7, 9])
    together = sampler.hop(order, 2, 8).block
    for place, row in enumerate(order.tolist()):
        alone = sampler.hop(torch.tensor([row]), 2, 8).block
        mine = together.position[together.indptr[place] : together.indptr[place + 1]]
        torch.testing.assert_close(alone.position, mine, rtol=0, atol=0)
    backwards = sampler.hop(order.flip(0), 2, 8).block
    assert backwards.position.view(-1, 2).flip(0).tolist() == together.position.view(-1, 2).tolist()


def test_topology_of_a_part_agrees_with_the_whole(store: Store):
    """Every row of a part is the whole graph's row, in new ids; out-degrees are known of all vertices."""
    whole = Topology.of_whole(store)
    assert (whole.first, whole.end, whole.num_rows, whole.offsets) == (0, 12, 12, (0, 4, 8, 12))
    torch.testing.assert_close(whole.original_id, torch.from_numpy(store.original_ids()), rtol=0, atol=0)
    for number in range(3):
        part = Topology.of_part(store, number)
        assert (part.first, part.end, part.num_rows) == (4 * number, 4 * number + 4, 4)
        torch.testing.assert_close(part.degree_out, whole.degree_out, rtol=0, atol=0)
        torch.testing.assert_close(part.original_id, whole.original_id[part.first : part.end], rtol=0, atol=0)
        first, end = int(whole.indptr[part.first]), int(whole.indptr[part.end])
        torch.testing.assert_close(
            part.indptr + first, whole.indptr[part.first : part.end + 1], rtol=0, atol=0
        )
        torch.testing.assert_close(part.indices, whole.indices[first:end], rtol=0, atol=0)
        torch.testing.assert_close(part.edge_weight, whole.edge_weight[first:end], rtol=0, atol=0)
    graph = hand_drawn().graph
    torch.testing.assert_close(
        whole.degree_out, torch.from_numpy(graph.degree_out())[whole.original_id], rtol=0, atol=0
    )


def test_the_sample_is_the_same_in_every_partitioning(store: Store, tmp_path):
    """Positions keep the order of original ids, so each vertex draws the same sources from any store."""
    alone = Topology.of_whole(one_part(hand_drawn(with_weights=True), tmp_path))
    found = []
    for topology in (alone, Topology.of_whole(store)):
        hops = NeighborSampler(topology, seed=2).sample(rows_of(topology, [4, 1, 7]), [2, 2], 1, 3)
        found.append([edges_of(hop.block, topology.original_id[hop.rows]) for hop in hops])
    assert found[0] == found[1]


def test_columns_of_several_parts(store: Store):
    """Rows by new id over all parts, by local row in one; any order, repeats, none at all."""
    dataset, original = hand_drawn(), torch.from_numpy(store.original_ids())
    features, labels = open_columns(store, [0, 1, 2])
    rows = torch.tensor([11, 0, 5, 5, 8])
    expected = torch.from_numpy(np.asarray(dataset.x))[original[rows]]
    torch.testing.assert_close(features.load(rows), expected, rtol=0, atol=0)
    torch.testing.assert_close(labels.load(rows), torch.from_numpy(dataset.y)[original[rows]], rtol=0, atol=0)
    assert features.load(rows[:0]).shape == (0, 5)
    features, _ = open_columns(store, [1])
    torch.testing.assert_close(
        features.load(torch.tensor([3, 0])),
        torch.from_numpy(np.asarray(dataset.x))[original[[7, 4]]],
        rtol=0,
        atol=0,
    )
    empty = PartColumn(
        [np.zeros((0, 2), np.float32), np.ones((3, 2), np.float32), np.zeros((0, 2), np.float32)]
    )
    torch.testing.assert_close(empty.load(torch.tensor([2, 0])), torch.ones(2, 2), rtol=0, atol=0)


def test_rank_without_seeds_in_data_mode(store: Store):
    """Seven training vertices, three ranks, batches of 2: some rank has an ordinary empty batch."""
    for rank in range(3):
        batches = list(Loader(store, [2, 2], 2, parallel="data", comm=Comm(rank, 3)))
        assert len(batches) == 4
        for batch in batches:
            out = GNN.build("sage", 5, 4, 3, 2)(batch)
            assert out.shape == (len(batch.seeds), 3)
            if not len(batch.seeds):
                assert batch.work["edges"] == batch.work["feature_rows_loaded"] == 0
                out.sum().backward()
    assert sum(len(batch.seeds) == 0 for batch in batches) == 4  # the last rank's share
