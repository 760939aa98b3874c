"""TransformerConv: its equations written out edge by edge, PyG's numbers, and law 2 over ranks and modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dist.ranks import run_ranks, same
from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn
from tgnn.kernels import rng
from tgnn.kernels.attention import edge_keep
from tgnn.kernels.block import Block
from tgnn.nn import GNN, TransformerConv
from tgnn.nn.layer import Rows
from tgnn.parallel import all_reduce_gradients, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology
from tgnn.training.loss import loss_sum

LAYERS: dict[str, Callable[[], TransformerConv]] = {
    "joined": lambda: TransformerConv(5, 3, heads=2),
    "averaged": lambda: TransformerConv(5, 3, heads=3, concat=False),
    "gated": lambda: TransformerConv(5, 4, heads=2, beta=True),
    "gated, averaged, no bias": lambda: TransformerConv(5, 2, heads=2, beta=True, concat=False, bias=False),
}


def make_layer(name: str) -> TransformerConv:
    """A layer with no parameter at zero, so that a forgotten bias shows."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += torch.rand_like(parameter) * 0.5
    return layer


def dense(layer: TransformerConv, block: Block, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """Shi et al. 2021, eq. 3 to 5, edge by edge; x [n_src, F] with the destinations first, keep [n_edges, H]."""
    width, outputs = layer.head_features, []
    for row in range(block.n_dst):
        edges = range(int(block.indptr[row]), int(block.indptr[row + 1]))
        heads = []
        for head in range(layer.heads):
            part = slice(head * width, (head + 1) * width)

            def project(linear: torch.nn.Linear, vertex: int, part: slice = part) -> Tensor:
                return linear.weight[part] @ x[vertex] + linear.bias[part]

            query, out = project(layer.lin_query, row), x.new_zeros(width)
            sources = [int(block.indices[e]) for e in edges]
            powers = [(query @ project(layer.lin_key, u) / width**0.5).exp() for u in sources]
            for e, u, power in zip(edges, sources, powers, strict=True):
                kept = 1 if keep is None else keep[e, head]
                out = out + kept * power / sum(powers) * project(layer.lin_value, u)
            heads.append(out)
        message = torch.cat(heads) if layer.concat else torch.stack(heads).mean(0)
        skip = F.linear(x[row], layer.lin_skip.weight, layer.lin_skip.bias)
        if layer.lin_beta is None:
            outputs.append(message + skip)
        else:
            gate = torch.sigmoid(layer.lin_beta.weight[0] @ torch.cat([message, skip, message - skip]))
            outputs.append(gate * skip + (1 - gate) * message)
    return torch.stack(outputs)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("transformer") / "store"
    return write_store(hand_drawn(with_weights=False), np.zeros(12, dtype=np.int64), path)


@pytest.mark.parametrize("fanout, replace", [(-1, False), (2, False), (3, True), (0, False)])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_its_equation(store: Store, name: str, fanout: int, replace: bool) -> None:
    """Outputs, and the gradients of the input rows and of every parameter."""
    sampler = NeighborSampler(Topology.of_whole(store), replace=replace)
    # The hub, a self-loop, parallel edges, a vertex without in-edges, the isolated one; not in order.
    hop = sampler.hop(torch.tensor([4, 11, 2, 0, 10, 1, 7]), fanout, key=5)
    layer, generator = make_layer(name), torch.Generator().manual_seed(1)
    x = torch.randn(len(hop.rows), 5, dtype=torch.float64, generator=generator).requires_grad_()
    out, expected = layer(hop.block, x), dense(layer, hop.block, x)
    assert out.shape == (7, layer.out_features)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(out, inputs, grad)
    # Zero times everything: with no edge some outputs depend on nothing at all.
    nothing = 0 * sum(tensor.sum() for tensor in inputs)
    right = torch.autograd.grad((expected * grad).sum() + nothing, inputs)
    for gradient, reference in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", LAYERS)
def test_a01_vertices_nobody_points_at(name: str) -> None:
    """Their output is the skip term, gated against a message of 0."""
    layer, x = make_layer(name), torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    for indptr, indices, alone in (([0, 0, 1, 1, 1], [0], [0, 2, 3]), ([0] * 5, [], [0, 1, 2, 3])):
        block = Block(torch.tensor(indptr), torch.tensor(indices, dtype=torch.int64), 4)
        out = layer(block, x)
        skip = layer.lin_skip(x)
        if layer.lin_beta is not None:
            gate = torch.sigmoid(layer.lin_beta(torch.cat([torch.zeros_like(skip), skip, -skip], 1)))
            skip = gate * skip
        torch.testing.assert_close(out[alone], skip[alone], rtol=1e-14, atol=0)
        out.square().sum().backward()
        assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in (x, *layer.parameters()))


def test_key_and_value_travel_together(store: Store) -> None:
    """Every vertex is projected once, by its owner; with rows at hand `forward` needs no other."""
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.tensor([4, 2, 11]), 2, key=1)
    layer, x = make_layer("joined"), torch.randn(12, 5, dtype=torch.float64)[hop.rows]
    travels = layer.before_exchange(x)
    torch.testing.assert_close(travels, torch.cat([layer.lin_key(x), layer.lin_value(x)], 1))
    assert travels.shape == (len(x), 2 * 2 * 3)
    out = layer(hop.block, Rows(x[: hop.block.n_dst], travels))
    torch.testing.assert_close(out, layer(hop.block, x), rtol=0, atol=0)


def test_attention_dropout_only_while_training(store: Store) -> None:
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.arange(12), -1, key=0)
    layer, x = make_layer("joined"), torch.randn(12, 5, dtype=torch.float64)[hop.rows]
    without = layer(hop.block, x)
    layer.attention_dropout = 0.5
    out = layer(hop.block, Rows(x, layer.before_exchange(x), attention_key=7))
    keep = edge_keep(hop.block, 2, 0.5, 7, torch.float64)
    torch.testing.assert_close(out, dense(layer, hop.block, x, keep), rtol=1e-11, atol=1e-11)
    assert not torch.equal(out, without)
    torch.testing.assert_close(layer.eval()(hop.block, x), without, rtol=0, atol=0)


def test_weights_start_as_pyg_starts_them() -> None:
    """Uniform within 1 / sqrt(in_features), anew with every reset."""
    layer = TransformerConv(16, 8, heads=4, beta=True)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert sorted(before) == [
        "lin_beta.weight", "lin_key.bias", "lin_key.weight", "lin_query.bias", "lin_query.weight",
        "lin_skip.bias", "lin_skip.weight", "lin_value.bias", "lin_value.weight",
    ]  # fmt: skip
    layer.reset_parameters()
    for name, value in layer.state_dict().items():
        bound = (96 if "beta" in name else 16) ** -0.5
        assert not torch.equal(value, before[name])
        assert bound / 2 < value.abs().max() <= bound


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("concat", [False, True])
def test_equals_pyg(store: Store, beta: bool, concat: bool) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.arange(12), 3, key=0)
    ours = TransformerConv(5, 4, heads=2, beta=beta, concat=concat).double()
    theirs = pyg.TransformerConv(5, 4, heads=2, beta=beta, concat=concat).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(len(hop.rows), 5, dtype=torch.float64)
    edge_index = torch.stack([hop.block.indices.long(), hop.block.dst_rows])
    expected = theirs((x, x[: hop.block.n_dst]), edge_index)
    torch.testing.assert_close(ours(hop.block, x), expected, rtol=1e-12, atol=1e-12)


# ---- law 2: any number of ranks and either mode give the dense reference's loss and gradients

NUM_VERTICES, FANOUTS = 24, (3, 2)


def law_dataset() -> Dataset:
    """Parallel edges and self-loops; vertex 22 has no in-edges, 23 none at all, both are seeds."""
    numbers = np.random.default_rng(5)
    edges = np.stack([numbers.integers(0, 23, 150), numbers.integers(0, 22, 150)])
    x, y = numbers.standard_normal((NUM_VERTICES, 4)), numbers.integers(0, 3, NUM_VERTICES)
    train = np.r_[0:16, 22, 23]
    graph = Graph.from_edge_index(edges, NUM_VERTICES)
    return Dataset("transformer-laws", graph, x, y, train, np.r_[16:19], np.r_[19:22], num_classes=3)


def law_model() -> GNN:
    torch.manual_seed(3)
    return GNN.build("transformer", 4, 5, 3, 2, heads=2, output_heads=2, attention_dropout=0.4).double()


def loss_and_gradients(store: Store, mode: str, forward: Callable | None = None) -> list[Tensor]:
    """[loss, gradients ...] of the first two steps, summed over ranks."""
    model, seen = law_model(), []
    for _, batch in zip(range(2), Loader(store, FANOUTS, 10, parallel=mode, seed=2), strict=False):
        batch.x = batch.x.double()
        model.zero_grad(set_to_none=True)
        out = model(batch) if forward is None else forward(model, batch)
        loss = loss_sum(out, batch.y, store.task) / batch.global_seeds
        loss.backward()
        seen += [
            all_reduce_gradients(model, extra=loss.detach().view(1)),
            *(p.grad for p in model.parameters()),
        ]
    return seen


def dense_forward(model: GNN, batch) -> Tensor:
    """The stack on the dense layer, with the same dropped edges."""
    x = batch.x
    for number, layer in enumerate(model.layers):
        block, key = batch.blocks[number], batch.dropout_key(rng.ATTENTION_DROPOUT, number)
        x = dense(layer, block, x, edge_keep(block, layer.heads, 0.4, key, torch.float64))
        x = x if number else x.relu()
    return x


def compare_with_dense(folder: Path) -> None:
    """As one of the ranks: both modes against what one rank computed densely."""
    store = Store.open(folder / f"store-{current().ranks}")
    expected = torch.load(folder / "dense.pt", weights_only=True)
    for mode in ("split", "data"):
        for found, reference in zip(loss_and_gradients(store, mode), expected, strict=True):
            scale = max(1.0, reference.abs().max().item())
            same(found, reference, atol=1e-9 * scale)


@pytest.fixture(scope="module")
def law_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer-laws")
    for ranks in (1, 2, 3):
        assigned = np.random.default_rng(ranks).permutation(np.arange(NUM_VERTICES) % ranks)
        write_store(law_dataset(), assigned, folder / f"store-{ranks}", num_parts=ranks)
    expected = loss_and_gradients(Store.open(folder / "store-1"), "split", dense_forward)
    torch.save(expected, folder / "dense.pt")
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_law_2(law_folder: Path, ranks: int) -> None:
    """The sampled step of P ranks has the loss and gradients of the equations, dropped edges included."""
    run_ranks(compare_with_dense, ranks, law_folder)
