"""What export needs to know of a trained stack, whatever the framework it goes to or comes from.

A framework is described by its `Kind`s, one per layer of ours: how such a layer is written there, how theirs
is read back, and what its parameters are called. One more layer is one more entry in each framework's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tgnn.errors import UserError, wrong
from tgnn.nn.layer import PlainLayer
from tgnn.nn.model import ACTIVATIONS, GNN
from tgnn.nn.norm import SyncBatchNorm

ACTIVATION_MODULES = {
    "relu": "ReLU", "elu": "ELU", "gelu": "GELU",
    "leaky_relu": "LeakyReLU", "tanh": "Tanh", "none": "Identity",
}  # fmt: skip
JOINED, AVERAGED = "joined", "averaged"


@dataclass(frozen=True, kw_only=True)
class Written:
    """One layer in another framework's code."""

    make: str
    """Expression that makes it, for example `GATConv(16, 8, 4, allow_zero_in_degree=True)`."""
    call: str
    """Expression of its output; `{layer}` stands for the layer and `{number}` for its place in the stack."""
    before: str = ""
    """A statement that `call` needs first."""
    imports: tuple[str, ...] = ()
    """Names that `make` needs from the framework's layers."""
    parts: tuple[str, ...] = ()
    """Names that `make` and `call` need from the framework's parts file."""
    arguments: tuple[str, ...] = ()
    """What `call` needs besides the graph and the rows: some of edge_weight, degrees, gcn_weight."""
    heads: str | None = None
    """What becomes of the heads where there are any: joined or averaged."""
    width: int = 0
    """Columns of a vertex's output row, heads merged."""


@dataclass(frozen=True)
class Kind:
    """How one layer of ours is written in another framework, and read back."""

    write: Callable[[nn.Module, bool], Written]
    """(our layer, whether the data has edge weights) -> code."""
    theirs: tuple[str, ...]
    """Class names of their layers that `read` understands."""
    read: Callable[[nn.Module, str | None], nn.Module]
    """(their layer, what becomes of its heads) -> our layer, weights not yet copied; raises UserError."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Their name of each of our parameters or prefixes (ending in a dot) that differs."""
    transposed: frozenset[str] = frozenset()
    """Our parameters that they keep transposed."""

    def name(self, ours: str) -> str:
        """Their name of our parameter."""
        for prefix, theirs in self.names.items():
            if ours == prefix or (prefix.endswith(".") and ours.startswith(prefix)):
                return theirs + ours[len(prefix) :]
        return ours

    def weights_to_theirs(self, layer: nn.Module) -> dict[str, Tensor]:
        """The layer's state dict under their names and layouts; the tensors are copies."""
        state = {}
        for ours, value in layer.state_dict().items():
            value = value.t() if ours in self.transposed else value
            state[self.name(ours)] = value.detach().clone(memory_format=torch.contiguous_format)
        return state

    def copy_back(self, theirs: nn.Module, layer: nn.Module) -> nn.Module:
        """Give `layer` (ours) the weights of `theirs`; UserError where the two do not have the same ones."""
        state = {name: value.detach().clone() for name, value in theirs.state_dict().items()}
        taken = {}
        for ours in layer.state_dict():
            name = self.name(ours)
            if name not in state:
                raise _other_weights(theirs, f"no {name}")
            value = state.pop(name)
            taken[ours] = (value.t() if ours in self.transposed else value).contiguous()
        if state:
            raise _other_weights(theirs, ", ".join(sorted(state)))
        shapes = {ours: tuple(value.shape) for ours, value in layer.state_dict().items()}
        for ours, value in taken.items():
            if tuple(value.shape) != shapes[ours]:
                raise _other_weights(theirs, f"{self.name(ours)} of shape {tuple(value.shape)}")
        dtype = next(iter(taken.values())).dtype
        layer.to(dtype).load_state_dict(taken, strict=True)
        return layer


def _other_weights(theirs: nn.Module, got: str) -> UserError:
    what, do = f"{type(theirs).__name__} to read back", "convert it to one that tgnn.nn has"
    return wrong(what, got, "the weights of a layer that tgnn has", do)


@dataclass(frozen=True)
class Stack:
    """A GNN taken apart; `check` has looked at every piece."""

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
        if type(module) not in (nn.LayerNorm, SyncBatchNorm, nn.Linear, nn.Identity):
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


def refuse_options(layer: nn.Module, framework: str, refused: Mapping[str, tuple[bool, str]]) -> None:
    """Raise UserError for the first option, name -> (whether it is set, why tgnn cannot have it), that is
    set.
    """
    for option, (is_set, why) in refused.items():
        if is_set:
            raise wrong(
                f"from {framework}", f"{type(layer).__name__} with {option}", why, "change it there first"
            )
