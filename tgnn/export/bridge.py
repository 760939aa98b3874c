"""A framework as export sees it, and the way there and back that all frameworks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tgnn.export.frameworks import Framework, import_framework
from tgnn.export.kinds import kinds_of
from tgnn.export.kinds.kind import Kind, Written
from tgnn.export.source import Target, instantiate, module_source
from tgnn.export.stack import Stack, put_together, take_apart, weights_to_theirs
from tgnn.nn.model import GNN


@dataclass(frozen=True)
class Bridge:
    """Models of ours to a framework and back."""

    framework: Framework
    target: Target

    @property
    def kinds(self) -> Mapping[type, Kind]:
        """The counterpart of each of our layers."""
        return kinds_of(self.framework.name)

    def take_apart(self, model: nn.Module) -> Stack:
        """The pieces of a `GNN`; raises UserError for anything that has no counterpart."""
        return take_apart(model, self.kinds, self.framework.title)

    def write(self, stack: Stack, weighted: bool) -> list[Written]:
        """The layers in the framework's code, for data with or without edge weights."""
        return [self.kinds[type(layer)].write(layer, weighted) for layer in stack.layers]

    def weights(self, stack: Stack) -> dict[str, Tensor]:
        """The state dict of the exported module, copies on the CPU."""
        return weights_to_theirs(stack, self.kinds)

    def source(self, title: str, stack: Stack, weighted: bool, steps: Sequence[str] | None = None) -> str:
        """The text of `model.py`, as `module_source` has it."""
        return module_source(title, stack, self.write(stack, weighted), self.target, weighted, steps)

    def export(self, model: GNN, weighted: bool) -> nn.Module:
        """The model as a module of the framework, in its mode, type and device."""
        stack = self.take_apart(model)
        text = self.source("Exported by tgnn.", stack, weighted)
        import_framework(self.framework)
        return instantiate(text, self.framework.name, self.weights(stack), model)

    def read(self, module: object, heads: Sequence[str] | None, options: Mapping[str, object]) -> GNN:
        """The model of an exported module, or of the framework's layers with options of `GNN`."""
        return put_together(module, self.kinds, self.framework.title, heads, options)
