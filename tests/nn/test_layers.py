"""Each layer against its equation written out edge by edge: neighbourhoods whole, sampled and empty."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.nn.dense import dense, drawn_edges
from tgnn.data.synthetic import hand_drawn
from tgnn.errors import UserError
from tgnn.kernels.block import Block
from tgnn.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv
from tgnn.nn.layer import PlainLayer, Rows
from tgnn.partition.store import Store, write_store
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sage mean, narrower": lambda: SAGEConv(5, 3),
    "sage mean, wider": lambda: SAGEConv(5, 7, bias=False),
    "sage max": lambda: SAGEConv(5, 3, "max"),
    "sage pool": lambda: SAGEConv(5, 4, "pool"),
    "sage gcn, narrower": lambda: SAGEConv(5, 3, "gcn"),
    "sage gcn, wider": lambda: SAGEConv(5, 6, "gcn", bias=False),
    "gcn, narrower": lambda: GCNConv(5, 3),
    "gcn, wider": lambda: GCNConv(5, 6),
    "gcn without bias": lambda: GCNConv(5, 5, bias=False),
    "gin": lambda: GINConv(5, 4, eps=0.25),
    "gin with fixed eps": lambda: GINConv(5, 4, eps=-0.5, learn_eps=False),
    "gat": lambda: GATConv(5, 3, heads=2),
    "gat, heads averaged": lambda: GATConv(5, 3, heads=3, concat=False, slope=0.1),
    "gat without bias": lambda: GATConv(5, 2, bias=False),
    "gatv2": lambda: GATv2Conv(5, 3, heads=2),
    "gatv2, heads averaged": lambda: GATv2Conv(5, 3, heads=3, concat=False, slope=0.1),
    "gatv2 without bias": lambda: GATv2Conv(5, 2, bias=False),
}


def make_layer(name: str) -> nn.Module:
    """A layer with no parameter at zero, so that a forgotten bias shows."""
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += torch.rand_like(parameter) * 0.5
    return layer


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.fixture(scope="module", params=["weights", "no weights"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    dataset = hand_drawn(with_weights=request.param == "weights")
    path = tmp_path_factory.mktemp("layers") / "store"
    return write_store(dataset, torch.zeros(12, dtype=torch.int64).numpy(), path)


@pytest.mark.parametrize("fanout, replace", [(-1, False), (2, False), (3, True), (0, False)])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_its_equation(store: Store, name: str, fanout: int, replace: bool):
    """Outputs, and the gradients of the input rows and of every parameter."""
    graph = hand_drawn(with_weights=store.has_edge_weight).graph
    sampler = NeighborSampler(Topology.of_whole(store), replace=replace)
    # The hub, a self-loop, parallel edges, a vertex without in-edges, the isolated one; not in order.
    hop = sampler.hop(torch.tensor([4, 11, 2, 0, 10, 1, 7]), fanout, key=5)
    layer = make_layer(name)
    x = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.randn(
        7, layer.out_features, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    inputs = [x, *layer.parameters()]

    out = layer(hop.block, x[hop.rows])
    expected = dense(layer, graph, drawn_edges(graph, hop.block), x)
    close(out, expected)
    found = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
    # Zero times everything: with no edge some outputs depend on nothing at all.
    nothing = 0 * sum(tensor.sum() for tensor in inputs)
    right = torch.autograd.grad((expected * weight).sum() + nothing, inputs)
    for gradient, reference in zip(found, right, strict=True):
        close(torch.zeros_like(reference) if gradient is None else gradient, reference)


def test_sampled_blocks_really_sample(store: Store):
    """The fanouts above leave in-edges out, draw some twice, and meet a factor deg_in / drawn of 5."""
    sampler = NeighborSampler(Topology.of_whole(store))
    block = sampler.hop(torch.tensor([4, 11, 2]), 2, key=5).block
    assert block.degrees.tolist() == [2, 0, 2] and block.degree_in.tolist() == [10, 0, 3]
    block = NeighborSampler(Topology.of_whole(store), replace=True).hop(torch.tensor([8, 2]), 3, key=5).block
    assert block.degrees.tolist() == [3, 3] and block.position[:3].tolist() == [0, 0, 0]


def block_of_four(edges: list[tuple[int, int]]) -> Block:
    """All in-edges of 4 vertices as a block."""
    edges = sorted(edges, key=lambda edge: edge[1])
    into = torch.bincount(torch.tensor([v for _, v in edges], dtype=torch.int64), minlength=4)
    out_of = torch.bincount(torch.tensor([u for u, _ in edges], dtype=torch.int64), minlength=4)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), into.cumsum(0)])
    position = torch.arange(len(edges)) - torch.repeat_interleave(indptr[:-1], into)
    indices = torch.tensor([u for u, _ in edges], dtype=torch.int32)
    return Block(
        indptr, indices, 4, position=position, dst_id=torch.arange(4), degree_in=into, degree_out=out_of
    )


def root_term(layer: nn.Module, x: Tensor) -> Tensor:
    """What a vertex gives where nobody points at it."""
    if isinstance(layer, SAGEConv):
        if layer.aggregator != "gcn":
            return layer.fc_self(x)
        own = layer.fc_neigh(x)
        return own if layer.bias is None else own + layer.bias
    if isinstance(layer, GINConv):
        return layer.mlp((1 + layer.eps) * x)
    bias = getattr(layer, "bias", None)  # GATv2's bias is part of its sources
    bias = torch.zeros(layer.out_features, dtype=x.dtype) if bias is None else bias
    if isinstance(layer, GATConv) and not layer.concat:
        bias = bias.view(layer.heads, -1).mean(0)
    return bias.expand(len(x), -1)


@pytest.mark.parametrize("edges", [[(0, 1)], []], ids=["one edge", "no edge"])
@pytest.mark.parametrize("name", LAYERS)
def test_a01_vertices_nobody_points_at(name: str, edges: list[tuple[int, int]]):
    layer, x = make_layer(name), torch.randn(4, 5, dtype=torch.float64).requires_grad_()
    out = layer(block_of_four(edges), x)
    alone = [0, 2, 3] if edges else [0, 1, 2, 3]
    torch.testing.assert_close(out[alone], root_term(layer, x)[alone], rtol=0, atol=0)
    assert out.isfinite().all()
    out.square().sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is None or tensor.grad.isfinite().all()


@pytest.mark.parametrize("name", ["gat", "gatv2"])
def test_attention_dropout_only_while_training(store: Store, name: str):
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.arange(12), -1, key=0)
    layer, x = make_layer(name), torch.randn(12, 5, dtype=torch.float64)[hop.rows]
    without = layer(hop.block, x)
    layer.attention_dropout = 0.5

    def out(key: int) -> Tensor:
        return layer(hop.block, Rows(x, layer.before_exchange(x), attention_key=key))

    assert not torch.equal(out(1), without)
    assert not torch.equal(out(1), out(2))
    torch.testing.assert_close(out(1), out(1), rtol=0, atol=0)
    torch.testing.assert_close(layer.eval()(hop.block, x), without, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sage mean, narrower", "sage gcn, narrower", "gcn, narrower"])
def test_projecting_first_changes_nothing(store: Store, name: str):
    """The narrower rows travel, and the outputs are those of projecting after the sum."""
    hop = NeighborSampler(Topology.of_whole(store)).hop(torch.tensor([4, 2, 11]), 2, key=1)
    layer, x = make_layer(name), torch.randn(12, 5, dtype=torch.float64)[hop.rows]
    assert layer.projects_first and layer.before_exchange(x).shape == (len(x), 3)
    first = layer(hop.block, x)
    layer.projects_first = False
    assert layer.before_exchange(x) is x
    close(first, layer(hop.block, x))


class Twice(nn.Module):
    """A layer as a user writes one."""

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return 2 * x[: block.n_dst]


def test_plain_module_becomes_a_layer():
    block, x = block_of_four([(0, 1)]), torch.randn(4, 5)
    layer = PlainLayer(Twice())
    assert layer.before_exchange(x) is x
    torch.testing.assert_close(layer(block, x), 2 * x, rtol=0, atol=0)
    torch.testing.assert_close(layer(block, Rows(x, x)), 2 * x, rtol=0, atol=0)


def one_sentence(error: UserError) -> str:
    text = str(error)
    assert text.endswith(".") and ". " not in text and "\n" not in text and "expected" in text
    return text


def test_errors_of_layers():
    block, x = block_of_four([(0, 1)]), torch.randn(4, 5)
    with pytest.raises(UserError) as caught:
        SAGEConv(5, 3, "median")
    assert "'median'" in one_sentence(caught.value)
    for bad in (x[:3], x[0]):
        with pytest.raises(UserError) as caught:
            SAGEConv(5, 3)(block, bad)
        assert "(4, width)" in one_sentence(caught.value)
    with pytest.raises(UserError) as caught:
        GCNConv(5, 3)(Block(block.indptr, block.indices, 4), x)
    assert "degree" in one_sentence(caught.value)
