"""How exported models are compared with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.testing import assert_close

from tests.export.conftest import IN, LAYERS, STACKS, Example
from tgnn.nn.model import GNN

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
# Every kind of layer in a plain stack; every stack around one of each kind.
CASES = [(layer, "plain") for layer in LAYERS] + [
    (layer, stack)
    for layer in ("sage-mean", "sage-gcn", "gcn", "gat", "gatv2", "gin")
    for stack in STACKS
    if stack != "plain"
]


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Raise where any element differs by more than `tolerance` of the largest expected one."""
    assert_close(got, expected, rtol=0, atol=tolerance * float(expected.detach().abs().max()))


def same_gradients(model: GNN, theirs: torch.nn.Module, read_back: Callable, tolerance: float) -> None:
    """Compare the gradients of all parameters: those of `theirs` travel to ours as weights do.

    Measured by the largest of them all: that of an attention vector may be nothing but cancelled terms.
    """
    carrier = copy.deepcopy(theirs)
    with torch.no_grad():
        for value, parameter in zip(carrier.parameters(), theirs.parameters(), strict=True):
            value.copy_(parameter.grad)
    got = torch.cat([value.detach().flatten() for value in read_back(carrier).parameters()])
    close(got, torch.cat([value.grad.flatten() for value in model.parameters()]), tolerance)


def same_model(one: GNN, other: GNN) -> None:
    """Raise where two models differ in a weight, an option or a mode."""
    assert (one.training, one.dropout, one.activation) == (other.training, other.dropout, other.activation)
    assert [type(layer) for layer in one.layers] == [type(layer) for layer in other.layers]
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("concat", "slope", "heads", "attention_dropout", "aggregator"):
            assert getattr(mine, name, None) == getattr(theirs, name, None)
    assert list(one.state_dict()) == list(other.state_dict())
    for name, value in one.state_dict().items():
        assert_close(other.state_dict()[name], value, rtol=0, atol=0)
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]


def rows(example: Example, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random features of the example's vertices."""
    return torch.randn(example.num_vertices, IN, generator=torch.Generator().manual_seed(2)).to(dtype)
