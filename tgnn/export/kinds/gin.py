"""GIN in DGL and PyG: the same layer around the same MLP. PyG's knows no edge weights: where the data has
them, a few lines on its message passing come with the model.
"""

from __future__ import annotations

from torch import nn

from tgnn.errors import wrong
from tgnn.export.kinds.kind import (
    DGL_WEIGHTED_CALL,
    Kind,
    Written,
    dgl_options,
    expression,
    pyg_call,
    refuse_options,
)
from tgnn.nn.gin import GINConv
from tgnn.nn.products import Linear


def _mlp(layer: GINConv) -> str:
    """The layer's MLP as code; raises UserError for one that is not two linear layers and a ReLU."""
    kinds = [nn.Linear if type(module) is Linear else type(module) for module in layer.mlp]
    if kinds != [nn.Linear, nn.ReLU, nn.Linear]:
        got, expected = "a GINConv with another mlp", "linear, ReLU, linear as GINConv makes it"
        raise wrong("export", got, expected, "rewrite that layer there by hand")
    first, _, second = layer.mlp
    return "nn.Sequential({}, nn.ReLU(), {})".format(
        *(f"nn.Linear({linear.in_features}, {linear.out_features})" for linear in (first, second))
    )


def _learns(layer: nn.Module) -> bool:
    return isinstance(layer.eps, nn.Parameter)


def _read(layer: nn.Module, mlp: nn.Module, framework: str) -> GINConv:
    """Our layer for a GIN layer with this MLP; raises UserError where the MLP has another form."""
    kinds = [type(module) for module in mlp] if isinstance(mlp, nn.Sequential) else [type(mlp)]
    if kinds != [nn.Linear, nn.ReLU, nn.Linear] or mlp[0].out_features != mlp[2].out_features:
        got = f"a GINConv around {' and '.join(kind.__name__ for kind in kinds)}"
        expected = "linear, ReLU, linear, both linear layers as wide as the output"
        raise wrong(f"from {framework}", got, expected, "write a layer of that form")
    return GINConv(mlp[0].in_features, mlp[2].out_features, layer.eps.item(), learn_eps=_learns(layer))


def _write_dgl(layer: GINConv, weighted: bool) -> Written:
    make = expression("GINConv", _mlp(layer), '"sum"', learn_eps=_learns(layer))
    return Written(make=make, call=DGL_WEIGHTED_CALL, names=("GINConv",), arguments=("edge_weight",))


def _read_dgl(layer: nn.Module, heads: str | None) -> GINConv:
    aggregator = layer._aggregator_type
    refused = {f"aggregator {aggregator}": (aggregator != "sum", "sum"), **dgl_options(layer)}
    refuse_options(layer, "DGL", refused)
    return _read(layer, layer.apply_func, "DGL")


def _write_pyg(layer: GINConv, weighted: bool) -> Written:
    name = "WeightedGINConv" if weighted else "GINConv"
    make = expression(name, _mlp(layer), train_eps=_learns(layer))
    return Written(make=make, names=(name,), **pyg_call(weighted))


def _read_pyg(layer: nn.Module, heads: str | None) -> GINConv:
    return _read(layer, layer.nn, "PyG")


KINDS = {
    "dgl": Kind(_write_dgl, ("GINConv",), _read_dgl, {"mlp.": "apply_func."}),
    "pyg": Kind(_write_pyg, ("GINConv", "WeightedGINConv"), _read_pyg, {"mlp.": "nn."}),
}
