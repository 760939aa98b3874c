"""Where data lie on a GPU machine: feature tiers, pinned edges, batches made ahead on a stream of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgnn.data.graph import Dataset, Graph
from tgnn.kernels import last_ran
from tgnn.parallel import Comm
from tgnn.partition.store import Store, write_store
from tgnn.sampling.features import PartColumn, Tiers
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

DEVICE = torch.device("cuda")
NUM_VERTICES = 200
# (sampler, with replacement)
WAYS = [("uniform", False), ("uniform", True), ("labor", False), ("weighted", False), ("weighted", True)]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none here"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One part; weighted edges, one in five of weight 0; the features tell vertices apart."""
    generator = np.random.default_rng(5)
    edges, weight = generator.integers(0, NUM_VERTICES, (2, 4000)), generator.exponential(1.0, 4000)
    graph = Graph.from_edge_index(edges, NUM_VERTICES, weight * (generator.random(4000) > 0.2))
    x, y = generator.random((NUM_VERTICES, 7), np.float32), np.arange(NUM_VERTICES) % 3
    data = Dataset("gpu", graph, x, y, np.arange(0, NUM_VERTICES, 2), [1], [3], num_classes=3)
    return write_store(data, np.zeros(NUM_VERTICES, int), tmp_path_factory.mktemp("gpu") / "store")


@pytest.mark.parametrize(
    ("cached", "pinned"), [(0, 0), (40, 0), (0, 40), (30, 50), (30, 70), (0, 100), (100, 0)]
)
def test_rows_come_from_whichever_tier_holds_them(cached: int, pinned: int):
    table = np.random.default_rng(0).random((100, 5), np.float32)
    tiers = Tiers(table)
    tiers.place(cached, pinned, DEVICE)
    assert (tiers.cached, tiers.pinned) == (cached, pinned)
    for rows in (torch.tensor([99, 0, 30, 31, 79, 80, 0, 50]), torch.arange(0), torch.tensor([95])):
        expected = torch.from_numpy(table)[rows]
        for where in (rows, rows.to(DEVICE)):
            found = tiers.load(where, DEVICE)
            assert found.device.type == DEVICE.type and torch.equal(found.cpu(), expected)
            out = torch.full((len(rows), 5), torch.nan, device=DEVICE)
            assert tiers.load(where, DEVICE, out) is out and torch.equal(out.cpu(), expected)


def test_rows_of_several_parts():
    tables = [np.random.default_rng(part).random((30, 4), np.float32) for part in range(3)]
    column = PartColumn(tables)
    for tiers, (cached, pinned) in zip(column._tiers, [(10, 10), (30, 0), (0, 30)], strict=True):
        tiers.place(cached, pinned, DEVICE)
    rows = torch.randperm(90, generator=torch.Generator().manual_seed(0))
    found = column.load(rows.to(DEVICE), DEVICE)
    assert torch.equal(found.cpu(), torch.from_numpy(np.concatenate(tables))[rows])
    assert column.hits(rows.to(DEVICE)) == 40


@pytest.mark.parametrize(("sampler", "replace"), WAYS)
@pytest.mark.parametrize("placement", ["device", "pinned"])
def test_hops_are_those_of_the_cpu_wherever_the_edges_lie(
    store: Store, placement: str, sampler: str, replace: bool
):
    def hops(device: torch.device, placement: str) -> list[torch.Tensor]:
        topology = Topology.of_part(store, 0, device, source_ids=True, placement=placement)
        assert topology.is_pinned == (placement == "pinned")
        drawer = NeighborSampler(topology, sampler=sampler, replace=replace, seed=4)
        found = drawer.sample(torch.arange(20, device=device), (4, -1, 3), 0, 0)
        blocks = [hop.block for hop in found]
        parts = [(b.indptr, b.indices, b.weight, b.position, b.degree_out) for b in blocks]
        return [x.cpu() for part in parts for x in part] + [hop.rows.cpu() for hop in found]

    expected = hops(torch.device("cpu"), "device")
    for mine, theirs in zip(hops(DEVICE, placement), expected, strict=True):
        assert torch.equal(mine, theirs)
    assert last_ran("sample_neighbors") == "triton"


def held(batch: MiniBatch) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in batch.tensors()]


@pytest.mark.parametrize("feature_cache", [0, 50 * 7 * 4, None])
@pytest.mark.parametrize(("prefetch", "placement"), [(0, "device"), (1, "pinned"), (3, "device")])
def test_batches_are_those_of_the_cpu(store: Store, prefetch: int, placement: str, feature_cache: int | None):
    """While the current stream is kept busy, so that a batch that is read too early, or freed, would show."""

    def batches(device: str, **options) -> list[list[torch.Tensor]]:
        loader = Loader(store, (4, 3), 16, seed=1, sampler="weighted", comm=Comm(device=device), **options)
        found = []
        for epoch in range(2):
            for batch in loader:
                if device != "cpu":
                    torch.cuda._sleep(2_000_000)
                    batch.x = batch.x * 1
                found.append(held(batch))
                if device != "cpu" and epoch == 0 and batch.step == 0:
                    loader.fill_device()
        return found

    options = {"prefetch": prefetch, "graph_placement": placement, "feature_cache": feature_cache}
    expected, found = batches("cpu"), batches(DEVICE.type, **options)
    assert len(found) == len(expected) == 14
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs)
        for got, right in zip(mine, theirs, strict=True):
            assert torch.equal(got, right)
