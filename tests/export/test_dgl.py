"""Our models and DGL's: same outputs, gradients and weights, on a graph with isolated and zero-in-degree
vertices.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.export.comparing import CASES, TOLERANCE, close, rows, same_gradients, same_model
from tests.export.conftest import IN, LAYERS, OUT, Example, make_model
from tgnn.errors import UserError
from tgnn.export import from_dgl, to_dgl
from tgnn.nn.gat import GATConv
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv


def graph_of(dgl, example: Example):
    return dgl.graph((example.edges[0], example.edges[1]), num_nodes=example.num_vertices)


@pytest.mark.parametrize(("layer", "stack"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_gradients_and_keys(dgl, example, layer: str, stack: str, dtype: torch.dtype):
    model = make_model(layer, stack, dtype)
    theirs = to_dgl(model)
    keys = list(theirs.state_dict())
    mine, other = rows(example, dtype).requires_grad_(), rows(example, dtype).requires_grad_()
    expected, got = example.ours(model, mine), theirs(graph_of(dgl, example), other)
    assert list(theirs.state_dict()) == keys
    assert len(keys) == len(model.state_dict())
    close(got, expected, TOLERANCE[dtype])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    close(other.grad, mine.grad, 2 * TOLERANCE[dtype])
    same_gradients(model, theirs, from_dgl, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("layer", ["sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gin"])
def test_edge_weights(dgl, example, layer: str):
    model, x = make_model(layer), rows(example)
    theirs = to_dgl(model, weighted=True)
    got = theirs(graph_of(dgl, example), x, example.weight)
    close(got, example.ours(model, x, weighted=True), 1e-5)
    with pytest.raises(TypeError, match="edge_weight"):
        theirs(graph_of(dgl, example), x)


@pytest.mark.parametrize(
    "layer", ["sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gat", "gatv2", "gin"]
)
def test_blocks_of_all_in_edges_equal_the_whole_graph(dgl, example, layer: str):
    model, x, g = make_model(layer, "residual"), rows(example), graph_of(dgl, example)
    theirs, seeds = to_dgl(model), torch.tensor([29, 28, 27, 3, 1])
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(3)
    inputs, _, blocks = sampler.sample(g, seeds)
    more = {"degrees": (g.in_degrees(), g.out_degrees())} if layer == "gcn" else {}
    close(theirs(blocks, x[inputs], **more), theirs(g, x)[seeds], 1e-5)
    if layer == "gcn":
        with pytest.raises(ValueError, match="degrees"):
            theirs(blocks, x[inputs])


@pytest.mark.parametrize(("layer", "stack"), CASES)
def test_round_trip_gives_equal_weights(dgl, layer: str, stack: str):
    model = make_model(layer, stack, torch.float64)
    same_model(from_dgl(to_dgl(model.train())), model)


def test_no_edges_at_all(dgl):
    x = torch.randn(4, IN)
    empty = Example(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), 4)
    for layer in LAYERS:
        model = make_model(layer)
        close(to_dgl(model)(graph_of(dgl, empty), x), empty.ours(model, x), 1e-5)


@pytest.mark.parametrize("aggregator", ["mean", "max", "pool", "gcn"])
def test_a22_the_bias_counts_once(dgl, aggregator: str):
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 3]])
    graph = Example(edges, torch.ones(4), 5)
    for weights in ("zero", "random"):
        model = GNN([SAGEConv(3, 3, aggregator), SAGEConv(3, 2, aggregator)], activation="none").eval()
        bias = torch.tensor([0.5, -2.0])
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.zeros_like(value) if weights == "zero" else torch.randn_like(value))
            (model.layers[1].fc_self or model.layers[1]).bias.copy_(bias)
        x = torch.randn(5, 3)
        got = to_dgl(model)(graph_of(dgl, graph), x)
        close(got, graph.ours(model, x), 1e-5)
        if weights == "zero":
            assert_close(got, bias.expand(5, 2), rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["swap attention vectors", "double a bias"])
def test_the_comparison_sees_faults(dgl, example, fault: str):
    model = make_model("gat")
    theirs, x = to_dgl(model), rows(example)
    close(theirs(graph_of(dgl, example), x), example.ours(model, x), 1e-5)
    layer = theirs.layers[1]
    with torch.no_grad():
        if fault == "double a bias":
            layer.bias.mul_(2)
        else:
            left = layer.attn_l.clone()
            layer.attn_l.copy_(layer.attn_r)
            layer.attn_r.copy_(left)
    with pytest.raises(AssertionError):
        close(theirs(graph_of(dgl, example), x), example.ours(model, x), 1e-5)


def test_mode_and_type_carry_over(dgl):
    model = make_model("gat", "layer-norm", torch.float64).train()
    theirs = to_dgl(model)
    assert theirs.training and theirs.dropout.p == 0.5 and theirs.layers[0].attn_drop.p == 0.3
    assert {value.dtype for value in theirs.parameters()} == {torch.float64}
    value = next(theirs.parameters())
    assert value.data_ptr() != next(model.parameters()).data_ptr()


def test_layers_made_in_dgl(dgl, example):
    nn, x = dgl.nn, rows(example)
    layers = [nn.GATConv(IN, 4, 2, allow_zero_in_degree=True), nn.SAGEConv(8, OUT, "gcn")]
    model, g = from_dgl(layers, activation="elu").eval(), graph_of(dgl, example)
    expected = layers[1](g, torch.nn.functional.elu(layers[0](g, x).flatten(1)))
    close(example.ours(model, x), expected, 1e-5)
    assert isinstance(from_dgl(nn.GATConv(IN, 4, 2)).layers[0], GATConv)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda nn: nn.SAGEConv(4, 4, "lstm"), "order of edges"),
        (lambda nn: nn.SAGEConv((4, 3), 4, "mean"), "one width"),
        (lambda nn: nn.GraphConv(4, 4, norm="left"), 'norm="both"'),
        (lambda nn: nn.GATConv(4, 4, 2, residual=True), "GNN's residual"),
        (lambda nn: nn.GATConv(4, 4, 2, feat_drop=0.5), "GNN's dropout"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, share_weights=True), "share_weights=False"),
        (lambda nn: nn.GINConv(torch.nn.Linear(4, 4)), "linear, ReLU, linear"),
        (lambda nn: nn.SAGEConv(4, 4, "mean", activation=torch.relu), "GNN's activation"),
        (lambda nn: nn.SGConv(4, 4), "SGConv"),
    ],
)
def test_what_tgnn_does_not_have_is_refused_on_the_way_back(dgl, make, why: str):
    with pytest.raises(UserError, match=why):
        from_dgl([make(dgl.nn)])
