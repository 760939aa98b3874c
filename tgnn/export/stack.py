"""What export needs to know of a trained stack, whatever the framework it goes to or comes from.

A framework is described by its `Kind`s, one per layer of ours: how such a layer is written there, how theirs
is read back, and what its parameters are called. One more layer is one more entry in the table of `kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.export.kinds.kind import AVERAGED, JOINED, Kind
from tgnn.nn.layer import PlainLayer
from tgnn.nn.model import ACTIVATIONS, GNN
from tgnn.nn.norm import SyncBatchNorm
from tgnn.nn.products import Linear

ACTIVATION_MODULES = {
    "relu": "ReLU", "elu": "ELU", "gelu": "GELU",
    "leaky_relu": "LeakyReLU", "tanh": "Tanh", "none": "Identity",
}  # fmt: skip


@dataclass(frozen=True)
class Stack:
    """A GNN taken apart; `take_apart` has looked at every piece."""

    layers: Sequence[nn.Module]
    dropout: float
    activation: str
    norms: Sequence[nn.Module] | None
    residuals: Sequence[nn.Module] | None
    dtype: torch.dtype
    in_features: int
    out_features: int


def take_apart(model: nn.Module, kinds: Mapping[type, Kind], framework: str) -> Stack:
    """The pieces of a `GNN`; raises UserError, with the reason, for anything that export would not
    reproduce.
    """
    what = f"export to {framework}"
    if type(model) is not GNN:
        got, do = f"a {type(model).__name__}", "export the GNN, and carry code of your own over by hand"
        raise wrong(what, got, "a tgnn.nn.GNN, whose forward pass is known", do)
    for number, layer in enumerate(model.layers):
        if type(layer) not in kinds:
            module = layer.module if isinstance(layer, PlainLayer) else layer
            known = ", ".join(sorted(kind.__name__ for kind in kinds))
            got = f"layer {number} of type {type(module).__name__}, whose code is the user's own"
            raise wrong(
                what, got, f"layers with a counterpart there ({known})", "rewrite that layer there by hand"
            )
    if model.activation not in ACTIVATIONS:
        raise wrong(
            what,
            f"activation {model.activation!r}",
            f"one of {', '.join(ACTIVATIONS)}",
            "choose one of these",
        )
    for module in [*(model.norms or ()), *(model.residuals or ())]:
        if type(module) not in (nn.LayerNorm, SyncBatchNorm, Linear, nn.Linear, nn.Identity):
            got, expected = (
                f"a {type(module).__name__} between layers",
                "the norms and residuals that GNN makes",
            )
            raise wrong(what, got, expected, "rewrite it there by hand")
    dtypes = {value.dtype for value in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        got = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise wrong(
            what, f"weights in {got}", "all in float32 or all in float64", "convert the model, e.g. .float()"
        )
    first, last = model.layers[0], model.layers[-1]
    return Stack(
        list(model.layers), float(model.dropout), model.activation,
        None if model.norms is None else list(model.norms),
        None if model.residuals is None else list(model.residuals),
        dtypes.pop(), first.in_features, last.out_features,
    )  # fmt: skip


def weights_to_theirs(stack: Stack, kinds: Mapping[type, Kind]) -> dict[str, Tensor]:
    """The state dict of the exported module."""
    state = {}
    for number, layer in enumerate(stack.layers):
        for name, value in kinds[type(layer)].weights_to_theirs(layer).items():
            state[f"layers.{number}.{name}"] = value
    for group, modules in (("norms", stack.norms), ("residuals", stack.residuals)):
        for number, module in enumerate(modules or ()):
            for name, value in module.state_dict().items():
                state[f"{group}.{number}.{name}"] = value.detach().clone()
    return {name: value.cpu() for name, value in state.items()}


def put_together(module: object, kinds: Mapping[type, Kind], framework: str, heads: Sequence[str] | None,
                 options: Mapping[str, object]) -> GNN:  # fmt: skip
    """The `GNN` of an exported module, or of a layer or a sequence of layers with `options` of GNN.

    Raises UserError for layers, or options of layers, that tgnn does not have.
    """
    marker = getattr(module, "tgnn_heads", None)
    if marker is not None:
        if options or heads is not None:
            do = "leave them out, or give its layers as a list"
            raise wrong("options beside an exported module", "some", "none, for it has its own", do)
        layers, heads = list(module.layers), marker
        options = _own_options(module)
    elif isinstance(module, (list, tuple, nn.ModuleList)):
        layers = list(module)
    elif type(module).__name__ in {name for kind in kinds.values() for name in kind.theirs}:
        layers = [module]
    else:
        got = f"a {type(module).__name__}, whose forward pass only its own code knows"
        do = "give its layers as a list, with activation=, dropout= and so on as for tgnn.nn.GNN"
        raise wrong(f"from {framework}", got, "a module that tgnn exported, or a list of layers", do)
    ours = [_read(layer, kinds, framework, heads[number] if heads else _heads_of(layers, number))
            for number, layer in enumerate(layers)]  # fmt: skip
    model = GNN(ours, **options)
    model.to(next(ours[0].parameters()).dtype)
    if marker is not None:
        for group in ("norms", "residuals"):
            theirs = getattr(module, group, None)
            if theirs is not None:
                getattr(model, group).load_state_dict(theirs.state_dict(), strict=True)
                for mine, other in zip(getattr(model, group), theirs, strict=True):
                    if hasattr(other, "eps"):
                        mine.eps = other.eps
                    if hasattr(other, "momentum"):
                        mine.momentum = other.momentum
        model.train(module.training)
        model.to(next(module.parameters()).device)
    return model


def _read(layer: nn.Module, kinds: Mapping[type, Kind], framework: str, heads: str | None) -> nn.Module:
    for kind in kinds.values():
        if type(layer).__name__ in kind.theirs:
            return kind.copy_back(layer, kind.read(layer, heads))
    known = ", ".join(sorted(name for kind in kinds.values() for name in kind.theirs))
    raise wrong(
        f"from {framework}",
        f"a {type(layer).__name__}",
        f"one of {known}",
        "tgnn has no such layer: write one",
    )


def _own_options(module: nn.Module) -> dict[str, object]:
    """Options of GNN from the attributes of an exported module."""
    named = {theirs: ours for ours, theirs in ACTIVATION_MODULES.items()}
    norm, norms = "none", getattr(module, "norms", None)
    if norms is not None and len(norms):
        norm = "layer" if isinstance(norms[0], nn.LayerNorm) else "batch"
    return {
        "dropout": module.dropout.p, "activation": named[type(module.activation).__name__], "norm": norm,
        "residual": getattr(module, "residuals", None) is not None,
    }  # fmt: skip


def _heads_of(layers: Sequence[nn.Module], number: int) -> str:
    """Of a bare list of layers: hidden layers join their heads, the last averages them, as GNN.build makes
    them.
    """
    return AVERAGED if number == len(layers) - 1 else JOINED
