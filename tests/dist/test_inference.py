"""Layer-wise inference: exact, in chunks of any size, over any number of ranks, by original id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dist.ranks import run_ranks
from tests.dist.test_laws import near, once_per_ranks
from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError
from tgnn.kernels.block import Block
from tgnn.kernels.spmm import spmm
from tgnn.nn import GNN
from tgnn.parallel import all_reduce_gradients, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.training.inference import LayerwiseInference, predict

RANKS = (1, 2, 3)
CHUNKS = {torch.float32: (7, 1000), torch.float64: (1, 7, 20, 1000)}


class Gathered(nn.Module):
    """A user's own layer: itself and the sum of its in-neighbours, side by side."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.linear = nn.Linear(2 * in_features, out_features)

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return self.linear(torch.cat([x[: block.n_dst], spmm(block, x, block.weight)], 1))


class Itself(nn.Module):
    """Passes the destinations' rows through."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return x[: block.n_dst]


MODELS: dict[str, Callable[[], GNN]] = {
    "sage mean": lambda: GNN.build("sage", 5, 8, 3, 2, dropout=0.5),
    "sage max": lambda: GNN.build("sage", 5, 8, 3, 3, aggregator="max", norm="layer", residual=True),
    "sage pool": lambda: GNN.build("sage", 5, 4, 3, 2, aggregator="pool", activation="elu"),
    "gcn": lambda: GNN.build("gcn", 5, 8, 3, 3, norm="batch", residual=True, dropout=0.5),
    "gat": lambda: GNN.build("gat", 5, 4, 3, 2, heads=2, output_heads=2, attention_dropout=0.5),
    "gatv2": lambda: GNN.build("gatv2", 5, 4, 3, 2, heads=2, output_heads=2, attention_dropout=0.5),
    "gin": lambda: GNN.build("gin", 5, 6, 3, 2, norm="batch"),
    "own layer": lambda: GNN([Gathered(5, 4), Gathered(4, 3)], norm="layer", residual=True),
    "one layer": lambda: GNN.build("sage", 5, 4, 3, 1),
}


def make_model(name: str) -> GNN:
    """In training mode, with running statistics that have seen something."""
    torch.manual_seed(3)
    model = MODELS[name]()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("running_mean", "running_var")):
            buffer.add_(torch.rand_like(buffer))
    return model


def hub_graph() -> Dataset:
    """20 vertices: everyone sends to vertex 0, which has 19 in-edges; edges 3 -> 4 run parallel."""
    rng = np.random.default_rng(2)
    others = np.arange(1, 20)
    source = np.r_[others, rng.integers(1, 20, 20), 0, 3, 3]
    edges = np.stack([source, np.r_[0 * others, rng.integers(1, 18, 20), 7, 4, 4]])
    graph = Graph.from_edge_index(edges, 20, rng.uniform(0.5, 1.5, edges.shape[1]))
    x, y = rng.standard_normal((20, 5)), rng.integers(0, 3, 20)
    return Dataset("hub", graph, x, y, np.arange(20), [], [], num_classes=3)


def own_id_graph() -> Dataset:
    """Six vertices in a ring, each one's feature its own id."""
    ids = np.arange(6)
    graph = Graph.from_edge_index(np.stack([ids, (ids + 1) % 6]), 6)
    return Dataset("own id", graph, ids[:, None], ids % 2, ids[:4], ids[4:], [], num_classes=2)


def isolated_last_graph() -> Dataset:
    """Edges among 0 .. 4 only, and six rows of features; the last vertex is a seed."""
    rng = np.random.default_rng(0)
    graph = Graph.from_edge_index(rng.integers(0, 5, (2, 12)), 6)
    x = rng.standard_normal((6, 5))
    return Dataset("isolated last", graph, x, np.arange(6) % 3, [0, 2, 5], [1], [3], num_classes=3)


def part_of(num_vertices: int, parts: int) -> np.ndarray:
    """Scattered, the hub not in part 0; part 1 of three is empty."""
    assigned = (np.arange(num_vertices) * 7 + 2) % 5 % parts
    return np.where(assigned == 1, 2, assigned) if parts == 3 else assigned


DATASETS = {"hub": hub_graph, "own id": own_id_graph, "isolated last": isolated_last_graph}


def run_inference(folder: Path) -> None:
    """All predictions, as one of the current ranks; each rank saves what it got."""
    comm = current()
    hub, own_id, isolated = (Store.open(folder / f"{name} {comm.ranks}") for name in DATASETS)
    seen: dict[Any, Any] = {}
    for name in MODELS:
        for dtype, chunks in CHUNKS.items():
            model = make_model(name).to(dtype)
            for chunk in chunks[-2:] if comm.ranks > 2 else chunks:
                seen[name, dtype, chunk] = predict(model, hub, chunk_edges=chunk)
            assert model.training
            seen[name, dtype, "batch"] = full_fanout(model.eval(), hub, dtype)
    seen["own id"] = predict(GNN([Itself(), Itself()], activation="none"), own_id)
    seen["isolated last"] = train_isolated(isolated)
    seen["bfloat16"] = predict(make_model("sage mean"), hub, dtype=torch.bfloat16)
    inference = LayerwiseInference(hub, chunk_edges=7)
    seen["chunks"], seen["indptr"] = inference._chunks, torch.from_numpy(inference.part.indptr)
    seen["again"] = called_twice(hub)
    torch.save(seen, folder / f"seen-{comm.ranks}-{comm.rank}.pt")


@torch.no_grad()
def full_fanout(model: GNN, store: Store, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(ids, logits) of this rank's vertices by mini-batches of whole neighbourhoods."""
    ids, logits = [], []
    for batch in Loader(store, [-1] * len(model.layers), batch_size=8):
        batch.x = batch.x.to(dtype)
        ids.append(batch.seeds)
        logits.append(model(batch))
    return torch.cat(ids), torch.cat(logits)


def train_isolated(store: Store) -> dict[str, Any]:
    """Two epochs, the gradient of the features on the way, then the predictions."""
    model, gradients = make_model("sage mean"), []
    for _ in range(2):
        for batch in Loader(store, [-1, -1], batch_size=3):
            batch.x.requires_grad_()
            model.zero_grad()
            (model(batch).square().sum() / batch.global_seeds).backward()
            all_reduce_gradients(model)
            gradients.append((batch.ids[0], batch.x.grad))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    return {"predictions": predict(model, store), "gradient": gradients[-1]}


def called_twice(store: Store) -> list[Tensor]:
    """One LayerwiseInference, two models: the kept block must not keep any result."""
    inference = LayerwiseInference(store)
    return [
        inference(make_model("sage mean")),
        inference(make_model("gcn")),
        inference(make_model("sage mean")),
    ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`seen(P)`: for each rank of P what it got."""
    folder = tmp_path_factory.mktemp("inference")

    @once_per_ranks
    def load(ranks: int) -> list[dict[Any, Any]]:
        for name, make in DATASETS.items():
            dataset = make()
            assigned = part_of(dataset.num_vertices, ranks)
            write_store(dataset, assigned, folder / f"{name} {ranks}", num_parts=ranks)
        run_ranks(run_inference, ranks, folder, timeout=240.0)
        return [torch.load(folder / f"seen-{ranks}-{rank}.pt") for rank in range(ranks)]

    return load


def by_original_id(of_ranks: list[dict[Any, Any]], key: Any) -> Tensor:
    """The mini-batches' logits of all ranks, row k of vertex k."""
    ids = torch.cat([one[key][0] for one in of_ranks])
    assert ids.sort().values.tolist() == list(range(20))
    return torch.cat([one[key][1] for one in of_ranks])[ids.argsort()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_inference_equals_full_fanout_batches(seen: Any, ranks: int, name: str, dtype: torch.dtype):
    expected = by_original_id(seen(1), (name, dtype, "batch"))
    near(by_original_id(seen(ranks), (name, dtype, "batch")), expected, 1e-6, "mini-batches")
    near(seen(ranks)[0][name, dtype, 1000], expected, 1e-6, "layer-wise")
    assert expected.dtype == dtype and expected.std() > 0.01


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a24_chunks_and_ranks_change_nothing(seen: Any, ranks: int, name: str):
    for dtype, chunks in CHUNKS.items():
        expected = seen(1)[0][name, dtype, 1000]
        for chunk in chunks[-2:] if ranks > 2 else chunks:
            near(seen(ranks)[0][name, dtype, chunk], expected, 1e-6, f"chunks of {chunk}")
            assert [one[name, dtype, chunk] for one in seen(ranks)[1:]] == [None] * (ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_chunks_are_bounded_and_as_many_on_every_rank(seen: Any, ranks: int):
    """At most 7 in-edges, or one vertex (the hub has 19); together every row once."""
    counts = set()
    for one in seen(ranks):
        chunks, indptr = one["chunks"], one["indptr"]
        counts.add(len(chunks))
        for first, end in chunks:
            assert int(indptr[end] - indptr[first]) <= 7 or end == first + 1
        assert [row for first, end in chunks for row in range(first, end)] == list(range(len(indptr) - 1))
    assert len(counts) == 1
    if ranks == 1:
        assert chunks[0] == (0, 1) and len(chunks) > 3


@pytest.mark.parametrize("ranks", RANKS)
def test_a19_results_come_in_original_order(seen: Any, ranks: int):
    expected = torch.arange(6.0)[:, None]
    torch.testing.assert_close(seen(ranks)[0]["own id"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", RANKS)
def test_a02_last_vertex_isolated(seen: Any, ranks: int):
    """Six rows of predictions, six of gradients, all finite; the last is the isolated vertex's."""
    found = seen(ranks)[0]["isolated last"]["predictions"]
    assert found.shape == (6, 3) and found.isfinite().all()
    near(found, seen(1)[0]["isolated last"]["predictions"], 1e-5, "predictions")
    gradient = torch.zeros(6, 5)
    for one in seen(ranks):
        ids, mine = one["isolated last"]["gradient"]
        gradient.index_add_(0, ids, mine)
    assert gradient.isfinite().all() and (gradient[5] != 0).any()


@pytest.mark.parametrize("ranks", RANKS)
def test_inference_keeps_no_result(seen: Any, ranks: int):
    for one in seen(ranks):
        first, other, again = one["again"]
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        assert len(first) == 0 or not torch.equal(first, other)


@pytest.mark.parametrize("ranks", RANKS)
def test_a09_bfloat16_inference(seen: Any, ranks: int):
    found, expected = seen(ranks)[0]["bfloat16"], seen(1)[0]["sage mean", torch.float32, 1000]
    assert found.dtype == torch.float32
    near(found, expected, 0.03, "bfloat16")


def test_inference_needs_features_and_its_own_number_of_parts(tmp_path: Path):
    dataset = hub_graph()
    bare = Dataset("bare", dataset.graph, None, dataset.y, [0], [], [], num_classes=3)
    store = write_store(bare, np.zeros(20, int), tmp_path / "bare")
    with pytest.raises(UserError, match="without features"):
        predict(make_model("sage mean"), store)
    store = write_store(dataset, np.arange(20) % 2, tmp_path / "two")
    with pytest.raises(UserError, match="2 parts"):
        predict(make_model("sage mean"), store)
