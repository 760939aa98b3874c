"""How exported models are compared with ours, and how the command line refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing import assert_close

from tests.export.conftest import IN, Example
from tgnn.errors import run_command
from tgnn.export import from_dgl, from_pyg, to_dgl, to_pyg
from tgnn.export.__main__ import main
from tgnn.nn.model import GNN

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class Side:
    """A framework as the tests use it; its package must be there."""

    name: str
    to: Callable[..., torch.nn.Module]
    back: Callable[..., GNN]

    def graph(self, example: Example) -> Any:
        """The example as a graph of the framework."""
        if self.name == "pyg":
            return example.edges
        import dgl

        return dgl.graph((example.edges[0], example.edges[1]), num_nodes=example.num_vertices)

    def inputs(self, example: Example, x: torch.Tensor) -> tuple[Any, Any]:
        """Graph and rows in the framework's order."""
        return (self.graph(example), x) if self.name == "dgl" else (x, self.graph(example))

    def run(
        self, theirs: torch.nn.Module, example: Example, x: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Their logits of every vertex."""
        more = [] if weight is None else [weight]
        if hasattr(theirs, "gcn_weight"):
            more = [theirs.gcn_weight(example.edges, example.num_vertices, weight)]
        return theirs(*self.inputs(example, x), *more)


SIDES = {"dgl": Side("dgl", to_dgl, from_dgl), "pyg": Side("pyg", to_pyg, from_pyg)}


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


def refused(capsys, *argv: object) -> str:
    """The one sentence with which a command is refused."""
    assert run_command(main, [str(word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error
