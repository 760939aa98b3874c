"""How one layer of ours is described for another framework, and the few words its descriptions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tgnn.errors import UserError, wrong

JOINED, AVERAGED = "joined", "averaged"
DGL_CALL = "{layer}(blocks[{number}], h)"
DGL_WEIGHTED_CALL = "{layer}(blocks[{number}], h, edge_weight=weights[{number}])"
PYG_CALL = "{layer}(h, edge_index)"
PYG_WEIGHTED_CALL = "{layer}(h, edge_index, edge_weight)"


@dataclass(frozen=True, kw_only=True)
class Written:
    """One layer in another framework's code."""

    make: str
    """Expression that makes it, for example `GATConv(16, 8, 4, allow_zero_in_degree=True)`."""
    call: str
    """Expression of its output; `{layer}` stands for the layer and `{number}` for its place in the stack."""
    names: tuple[str, ...]
    """What `make` and `call` need: definitions of the framework's parts file, else layers of the framework."""
    before: str = ""
    """A statement that `call` needs first."""
    arguments: tuple[str, ...] = ()
    """What `call` needs besides the graph and the rows: some of edge_weight, degrees, gcn_weight."""


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


def expression(name: str, *positional: object, **options: object) -> str:
    """The code of a call; an option that is None is left out.

    >>> expression("SAGEConv", 16, 8, aggr="max", bias=None)
    'SAGEConv(16, 8, aggr="max")'
    """
    words = [str(value) for value in positional]
    for option, value in options.items():
        if value is not None:
            words.append(f'{option}="{value}"' if isinstance(value, str) else f"{option}={value!r}")
    return f"{name}({', '.join(words)})"


def unless(value: object, default: object) -> object | None:
    """The value, or None where it is their default and need not be written."""
    return None if value == default else value


def heads_of(layer: nn.Module) -> str | None:
    """What our layer does with its heads; None for one without."""
    return {True: JOINED, False: AVERAGED, None: None}[getattr(layer, "concat", None)]


def pyg_call(weighted: bool) -> dict[str, object]:
    """Fields of `Written` for a layer of PyG that takes the data's edge weights where there are any."""
    return {"call": PYG_WEIGHTED_CALL, "arguments": ("edge_weight",)} if weighted else {"call": PYG_CALL}


def refuse_options(layer: nn.Module, framework: str, refused: Mapping[str, tuple[bool, str]]) -> None:
    """Raise UserError for the first option, name -> (whether it is set, why tgnn cannot have it), that is
    set.
    """
    for option, (is_set, why) in refused.items():
        if is_set:
            raise wrong(
                f"from {framework}", f"{type(layer).__name__} with {option}", why, "change it there first"
            )


def dgl_options(layer: nn.Module, one_width: bool = False) -> dict[str, tuple[bool, str]]:
    """For `refuse_options`: options of many DGL layers that tgnn has at the stack, or not at all."""
    activation = getattr(layer, "activation", getattr(layer, "_activation", None))
    drop = getattr(layer, "feat_drop", None)
    found = {
        "activation": (activation is not None, "activation=None, with GNN's activation instead"),
        "feat_drop": (drop is not None and drop.p > 0, "feat_drop=0, with GNN's dropout instead"),
    }
    if one_width:
        found["two input widths"] = (layer._in_src_feats != layer._in_dst_feats, "one width of input rows")
    return found
