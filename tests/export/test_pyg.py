"""Our models and PyG's: same outputs, gradients and weights, on a graph with isolated and zero-in-degree
vertices.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.export.comparing import CASES, TOLERANCE, close, rows, same_gradients, same_model
from tests.export.conftest import IN, LAYERS, OUT, Example, make_model
from tgnn.errors import UserError
from tgnn.export import from_pyg, to_pyg
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv


def run(
    theirs: torch.nn.Module, example: Example, x: torch.Tensor, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Their logits of every vertex."""
    more = [] if weight is None else [weight]
    if hasattr(theirs, "gcn_weight"):
        more = [theirs.gcn_weight(example.edges, example.num_vertices, weight)]
    return theirs(x, example.edges, *more)


@pytest.mark.parametrize(("layer", "stack"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_gradients_and_keys(pyg, example, layer: str, stack: str, dtype: torch.dtype):
    model = make_model(layer, stack, dtype)
    theirs = to_pyg(model)
    keys = list(theirs.state_dict())
    mine, other = rows(example, dtype).requires_grad_(), rows(example, dtype).requires_grad_()
    expected, got = example.ours(model, mine), run(theirs, example, other)
    assert list(theirs.state_dict()) == keys
    assert len(keys) == len(model.state_dict())
    close(got, expected, TOLERANCE[dtype])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    close(other.grad, mine.grad, 2 * TOLERANCE[dtype])
    same_gradients(model, theirs, from_pyg, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("layer", ["sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gin"])
def test_edge_weights(pyg, example, layer: str):
    model, x = make_model(layer), rows(example)
    theirs = to_pyg(model, weighted=True)
    close(run(theirs, example, x, example.weight), example.ours(model, x, weighted=True), 1e-5)
    same_model(from_pyg(theirs), model)
    with pytest.raises(TypeError, match="weight"):
        theirs(x, example.edges)


@pytest.mark.parametrize(("layer", "stack"), CASES)
def test_round_trip_gives_equal_weights(pyg, layer: str, stack: str):
    model = make_model(layer, stack, torch.float64)
    same_model(from_pyg(to_pyg(model.train())), model)


def test_no_edges_at_all(pyg):
    x = torch.randn(4, IN)
    empty = Example(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), 4)
    for layer in LAYERS:
        model = make_model(layer)
        close(run(to_pyg(model), empty, x), empty.ours(model, x), 1e-5)


@pytest.mark.parametrize("aggregator", ["mean", "max", "pool", "gcn"])
def test_a22_the_bias_counts_once(pyg, aggregator: str):
    graph = Example(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 3]]), torch.ones(4), 5)
    for weights in ("zero", "random"):
        model = GNN([SAGEConv(3, 3, aggregator), SAGEConv(3, 2, aggregator)], activation="none").eval()
        bias = torch.tensor([0.5, -2.0])
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.zeros_like(value) if weights == "zero" else torch.randn_like(value))
            (model.layers[1].fc_self or model.layers[1]).bias.copy_(bias)
        x = torch.randn(5, 3)
        got = run(to_pyg(model), graph, x)
        close(got, graph.ours(model, x), 1e-5)
        if weights == "zero":
            assert_close(got, bias.expand(5, 2), rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["swap attention vectors", "double a bias"])
def test_the_comparison_sees_faults(pyg, example, fault: str):
    model = make_model("gat")
    theirs, x = to_pyg(model), rows(example)
    close(run(theirs, example, x), example.ours(model, x), 1e-5)
    layer = theirs.layers[1]
    with torch.no_grad():
        if fault == "double a bias":
            layer.bias.mul_(2)
        else:
            source = layer.att_src.clone()
            layer.att_src.copy_(layer.att_dst)
            layer.att_dst.copy_(source)
    with pytest.raises(AssertionError):
        close(run(theirs, example, x), example.ours(model, x), 1e-5)


def test_layers_made_in_pyg(pyg, example):
    from torch_geometric import nn

    layers = [nn.GATv2Conv(IN, 4, 2, add_self_loops=False, bias=False), nn.SAGEConv(8, OUT)]
    model, x = from_pyg(layers, activation="elu").eval(), rows(example)
    expected = layers[1](torch.nn.functional.elu(layers[0](x, example.edges)), example.edges)
    close(example.ours(model, x), expected, 1e-5)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda nn: nn.GCNConv(4, 4), "in-degrees at both ends"),
        (lambda nn: nn.GATConv(4, 4, 2), "self-loops in the data"),
        (lambda nn: nn.GATConv(4, 4, 2, add_self_loops=False, concat=False), "heads averaged after the bias"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, add_self_loops=False), "a bias at its output"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, add_self_loops=False, share_weights=True), "share_weights=False"),
        (lambda nn: nn.SAGEConv(4, 4, normalize=True), "normalize=False"),
        (lambda nn: nn.SAGEConv(4, 4, aggr="sum"), "mean, max"),
        (lambda nn: nn.GINConv(torch.nn.Linear(4, 4)), "linear, ReLU, linear"),
        (lambda nn: nn.SGConv(4, 4), "SGConv"),
    ],
)
def test_what_tgnn_does_not_have_is_refused_on_the_way_back(pyg, make, why: str):
    from torch_geometric import nn

    with pytest.raises(UserError, match=why):
        from_pyg([make(nn)])
