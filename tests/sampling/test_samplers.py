"""The ways to draw in-edges through samplers and loaders: the same sample in any partitioning, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError
from tgnn.nn import GCNConv, SAGEConv
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.samplers import SAMPLERS
from tgnn.sampling.topology import Topology

NUM_VERTICES = 300


def make_dataset(weighted: bool = True) -> Dataset:
    generator = np.random.default_rng(5)
    edges = generator.integers(0, NUM_VERTICES, (2, 6000))
    weight = generator.exponential(1.0, 6000) * (generator.random(6000) > 0.2) if weighted else None
    graph = Graph.from_edge_index(edges, NUM_VERTICES, weight)
    x, y = np.zeros((NUM_VERTICES, 2), np.float32), np.zeros(NUM_VERTICES, int)
    return Dataset("samplers", graph, x, y, np.arange(0, NUM_VERTICES, 3), [1], [2], num_classes=2)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """The same weighted graph in 1 and in 3 parts, and one part without weights under 0."""
    folder, data = tmp_path_factory.mktemp("samplers"), make_dataset()
    scattered = np.random.default_rng(1).integers(0, 3, NUM_VERTICES)
    one = np.zeros(NUM_VERTICES, int)
    return {
        1: write_store(data, one, folder / "1"),
        3: write_store(data, scattered, folder / "3", num_parts=3),
        0: write_store(make_dataset(weighted=False), one, folder / "0"),
    }


def hops_of(store: Store, sampler: str, replace: bool = False, seed: int = 0, step: int = 0, fanouts=(4, 3)):
    """For each hop, seeds outward: (destination, position, source) of every edge by original ids, in one order."""
    topology = Topology.of_whole(store)
    drawer = NeighborSampler(topology, sampler=sampler, replace=replace, seed=seed)
    new_of = torch.argsort(topology.original_id)
    found = []
    for hop in reversed(drawer.sample(new_of[:60], fanouts, 0, step)):
        block, ids = hop.block, topology.original_id[hop.rows]
        edges = torch.stack([block.dst_id[block.dst_rows], block.position, ids[block.indices.long()]], 1)
        found.append(edges[np.lexsort(edges.numpy().T[::-1])])
    return found


@pytest.mark.parametrize(("sampler", "replace"), [*((s, False) for s in SAMPLERS), ("weighted", True)])
def test_a14_the_same_sample_in_any_partitioning(stores, sampler: str, replace: bool):
    once, other = hops_of(stores[1], sampler, replace), hops_of(stores[3], sampler, replace)
    for mine, theirs in zip(once, other, strict=True):
        assert len(mine) > 60 and torch.equal(mine, theirs)
    again = hops_of(stores[1], sampler, replace, step=1)
    assert not torch.equal(again[0], once[0])


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanout", [3, 500, -1])
def test_weighted_never_draws_an_edge_of_weight_0(stores, replace: bool, fanout: int):
    """Told by the drawn edges' positions: the weight that an edge carries is not its own."""
    topology = Topology.of_whole(stores[1])
    sampler = NeighborSampler(topology, sampler="weighted", replace=replace)
    block = sampler.hop(torch.arange(NUM_VERTICES), fanout, key=1).block
    assert (topology.edge_weight == 0).sum() > 1000
    drawn = topology.edge_weight[topology.indptr[block.dst_rows] + block.position]
    assert block.n_edges > 800 and (drawn > 0).all() and (block.weight > 0).all()
    if fanout == -1 or fanout == 500 and not replace:
        assert block.n_edges == int((topology.edge_weight > 0).sum())


@pytest.mark.parametrize("make", [SAGEConv, GCNConv])
def test_layers_on_all_edges_that_weighted_can_draw_equal_exact_inference(stores, make):
    """Inference counts in-edges of weight 0 in its means; those that are drawn make up for their absence."""
    topology = Topology.of_whole(stores[1])
    torch.manual_seed(0)
    layer, x = make(5, 4).double(), torch.randn(NUM_VERTICES, 5, dtype=torch.float64)

    def outputs(sampler: str, fanout: int) -> torch.Tensor:
        drawer = NeighborSampler(topology, sampler=sampler)
        hop = drawer.hop(torch.arange(NUM_VERTICES), fanout, key=1)
        return layer(hop.block, x[hop.rows])

    exact = outputs("uniform", -1)
    for fanout in (-1, 500):
        torch.testing.assert_close(outputs("weighted", fanout), exact, rtol=0, atol=1e-6)
    assert (outputs("weighted", 3) - exact).abs().max() > 0.1


def test_labor_shares_sources_within_a_hop_and_dependent_labor_between_hops(stores):
    """Every in-edge drawn at hop 0 is drawn again at hop 1 by the layer-dependent form, its number being the same."""

    def pairs(edges: torch.Tensor) -> set[tuple[int, int]]:
        return {tuple(row) for row in edges[:, :2].tolist()}

    outer, inner = hops_of(stores[1], "labor-dependent", fanouts=(4, 4))
    assert pairs(outer) <= pairs(inner)
    outer, inner = hops_of(stores[1], "labor", fanouts=(4, 4))
    assert not pairs(outer) <= pairs(inner)


def test_labor_meets_fewer_vertices_and_dependent_labor_fewer_still(stores):
    def input_rows(sampler: str) -> int:
        drawer = NeighborSampler(Topology.of_whole(stores[1]), sampler=sampler)
        return sum(len(drawer.sample(torch.arange(20), (4, 4), 0, step)[0].rows) for step in range(20))

    rows = {sampler: input_rows(sampler) for sampler in ("uniform", "labor", "labor-dependent")}
    assert rows["labor-dependent"] < rows["labor"] < 0.9 * rows["uniform"]


def test_loader_passes_the_sampler_on(stores):
    def edges(sampler: str) -> list[int]:
        loader = Loader(stores[1], (4, 3), batch_size=40, parallel="split", sampler=sampler, seed=2)
        return [batch.work["edges"] for batch in loader]

    assert len({tuple(edges(sampler)) for sampler in SAMPLERS}) == len(SAMPLERS)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        Loader(*args, **kwargs)
    sentence = str(caught.value)
    assert sentence.endswith(".") and sentence.count(". ") == 0
    return sentence


def test_what_is_refused(stores):
    assert "without edge weights" in refusal(stores[0], (2,), sampler="weighted")
    assert "--replace" in refusal(stores[1], (2,), sampler="labor", replace=True)
    assert "--replace" in refusal(stores[1], (2,), sampler="labor-dependent", replace=True)
    assert "one of uniform, labor" in refusal(stores[1], (2,), sampler="random")
