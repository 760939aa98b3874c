"""Our models and those of DGL and PyG: same outputs, gradients and weights, on a directed graph with isolated
and zero-in-degree vertices.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tests.export.comparing import TOLERANCE, Side, close, rows, same_gradients, same_model
from tests.export.conftest import IN, LAYERS, STACKS, Example, make_model
from tgnn import nn as layers
from tgnn.export.kinds import KINDS
from tgnn.nn.model import ACTIVATIONS, GNN
from tgnn.nn.products import Linear
from tgnn.nn.sage import SAGEConv

WEIGHTED = ("sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gin")


def test_every_layer_has_one_entry_for_both_frameworks():
    ours = {value for name, value in vars(layers).items() if name.endswith("Conv")}
    assert ours == set(KINDS) == {type(make(3, 3, False)) for make in LAYERS.values()}
    assert {frozenset(counterparts) for counterparts in KINDS.values()} == {frozenset({"dgl", "pyg"})}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_gradients_and_keys(side: Side, example: Example, layer: str, stack: str, dtype: torch.dtype):
    model = make_model(layer, stack, dtype)
    theirs = side.to(model)
    keys = list(theirs.state_dict())
    mine, other = rows(example, dtype).requires_grad_(), rows(example, dtype).requires_grad_()
    expected, got = example.ours(model, mine), side.run(theirs, example, other)
    assert list(theirs.state_dict()) == keys
    assert len(keys) == len(model.state_dict())
    close(got, expected, TOLERANCE[dtype])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    close(other.grad, mine.grad, 2 * TOLERANCE[dtype])
    same_gradients(model, theirs, side.back, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("layer", ["gin", "sage-mean"])
def test_torchs_own_linear_maps_are_taken_too(side: Side, example: Example, layer: str):
    """A user may put them in, and models that were saved whole before ours have them."""
    model, x = make_model(layer, "residual"), rows(example)
    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = torch.nn.Linear
    close(side.run(side.to(model), example, x), example.ours(model, x), 1e-4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(side: Side, example: Example, activation: str):
    model, x = make_model("gcn"), rows(example)
    model.activation = activation
    theirs = side.to(model)
    close(side.run(theirs, example, x), example.ours(model, x), 1e-5)
    same_model(side.back(theirs), model)


@pytest.mark.parametrize("layer", WEIGHTED)
def test_edge_weights(side: Side, example: Example, layer: str):
    model, x = make_model(layer), rows(example)
    theirs = side.to(model, weighted=True)
    close(side.run(theirs, example, x, example.weight), example.ours(model, x, weighted=True), 1e-5)
    same_model(side.back(theirs), model)
    with pytest.raises(TypeError, match="weight"):
        theirs(*side.inputs(example, x))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_round_trip_gives_equal_weights(side: Side, layer: str, stack: str):
    model = make_model(layer, stack, torch.float64)
    same_model(side.back(side.to(model.train())), model)


def test_no_edges_at_all(side: Side):
    x = torch.randn(4, IN)
    empty = Example(torch.zeros(2, 0, dtype=torch.int64), torch.zeros(0), 4)
    for layer in LAYERS:
        model = make_model(layer)
        close(side.run(side.to(model), empty, x), empty.ours(model, x), 1e-5)


@pytest.mark.parametrize("aggregator", ["mean", "max", "pool", "gcn"])
def test_a22_the_bias_counts_once(side: Side, aggregator: str):
    graph = Example(torch.tensor([[0, 1, 2, 0], [1, 2, 0, 3]]), torch.ones(4), 5)
    for weights in ("zero", "random"):
        model = GNN([SAGEConv(3, 3, aggregator), SAGEConv(3, 2, aggregator)], activation="none").eval()
        bias = torch.tensor([0.5, -2.0])
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.zeros_like(value) if weights == "zero" else torch.randn_like(value))
            (model.layers[1].fc_self or model.layers[1]).bias.copy_(bias)
        x = torch.randn(5, 3)
        got = side.run(side.to(model), graph, x)
        close(got, graph.ours(model, x), 1e-5)
        if weights == "zero":
            assert_close(got, bias.expand(5, 2), rtol=0, atol=0)


SWAPS = {
    ("gat", "dgl"): ("attn_l", "attn_r"),
    ("gat", "pyg"): ("att_src", "att_dst"),
    ("gatv2", "dgl"): ("fc_src.weight", "fc_dst.weight"),
    ("gatv2", "pyg"): ("lin_l.weight", "lin_r.weight"),
    ("transformer", "dgl"): ("lin_key.weight", "lin_query.weight"),
    ("transformer", "pyg"): ("lin_key.weight", "lin_query.weight"),
}


@pytest.mark.parametrize("layer", ["gat", "gatv2", "transformer"])
def test_the_comparison_sees_source_and_destination_swapped(side: Side, example: Example, layer: str):
    model, x = make_model(layer), rows(example)
    theirs = side.to(model)
    one, other = (theirs.layers[1].get_parameter(name) for name in SWAPS[layer, side.name])
    with torch.no_grad():
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    with pytest.raises(AssertionError):
        close(side.run(theirs, example, x), example.ours(model, x), 1e-5)


@pytest.mark.parametrize("layer", [*WEIGHTED, "gat", "gatv2", "transformer"])
def test_the_comparison_sees_a_doubled_bias(side: Side, example: Example, layer: str):
    model, x = make_model(layer), rows(example)
    theirs, seen = side.to(model), 0
    expected = example.ours(model, x)
    close(side.run(theirs, example, x), expected, 1e-5)
    for name, bias in theirs.layers[1].named_parameters():
        # A bias of the keys adds the same to all scores of a destination: the softmax takes it out again.
        if not name.endswith("bias") or name == "lin_key.bias":
            continue
        seen += 1
        with torch.no_grad():
            bias.mul_(2)
            with pytest.raises(AssertionError):
                close(side.run(theirs, example, x), expected, 1e-5)
            bias.div_(2)
    assert seen


def test_mode_type_and_copies(side: Side):
    model = make_model("gat", "layer-norm", torch.float64).train()
    theirs = side.to(model)
    assert theirs.training and theirs.dropout.p == 0.5
    drop = theirs.layers[0].attn_drop.p if side.name == "dgl" else theirs.layers[0].dropout
    assert drop == 0.3
    assert {value.dtype for value in theirs.parameters()} == {torch.float64}
    mine = {value.data_ptr() for value in model.parameters()}
    assert not mine & {value.data_ptr() for value in theirs.parameters()}
