"""GraphSAGE in DGL and PyG.

DGL has its names and its one bias; a plain maximum, which it lacks, is a few lines on its message passing.
PyG has the bias at the neighbours' linear layer, `pool` as `project=True`, and neither `gcn` nor edge
weights: both come as a few lines of their own.
"""

from __future__ import annotations

from torch import nn

from tgnn.export.kinds.kind import (
    DGL_WEIGHTED_CALL,
    Kind,
    Written,
    dgl_options,
    expression,
    pyg_call,
    refuse_options,
    unless,
)
from tgnn.nn.sage import SAGEConv


def _has_bias(layer: SAGEConv) -> bool:
    return (layer if layer.fc_self is None else layer.fc_self).bias is not None


def _write_dgl(layer: SAGEConv, weighted: bool) -> Written:
    name, aggregator = "SAGEConv", [f'"{layer.aggregator}"']
    if layer.aggregator == "max":
        name, aggregator = "MaxSAGEConv", []
    sizes, bias = (layer.in_features, layer.out_features), unless(_has_bias(layer), True)
    make = expression(name, *sizes, *aggregator, bias=bias)
    return Written(make=make, call=DGL_WEIGHTED_CALL, names=(name,), arguments=("edge_weight",))


def _read_dgl(layer: nn.Module, heads: str | None) -> SAGEConv:
    if type(layer).__name__ == "MaxSAGEConv":
        fc = layer.fc_self
        return SAGEConv(fc.in_features, fc.out_features, "max", bias=fc.bias is not None)
    refuse_options(layer, "DGL", {
        "an LSTM": (layer._aggre_type == "lstm", "mean, pool or gcn, since it depends on the order of edges"),
        "norm": (layer.norm is not None, "norm=None, since norms stand between layers here"),
        **dgl_options(layer, one_width=True),
    })  # fmt: skip
    bias = layer.bias if layer._aggre_type == "gcn" else layer.fc_self.bias
    return SAGEConv(layer._in_src_feats, layer._out_feats, layer._aggre_type, bias=bias is not None)


def _write_pyg(layer: SAGEConv, weighted: bool) -> Written:
    name, options = "WeightedSAGEConv" if weighted else "SAGEConv", {}
    if layer.aggregator == "gcn":
        name = "GCNSAGEConv"
    else:
        options["aggr"] = "mean" if layer.aggregator == "mean" else "max"
        options["project"] = unless(layer.aggregator == "pool", False)
    sizes, bias = (layer.in_features, layer.out_features), unless(_has_bias(layer), True)
    return Written(make=expression(name, *sizes, **options, bias=bias), names=(name,), **pyg_call(weighted))


def _read_pyg(layer: nn.Module, heads: str | None) -> SAGEConv:
    out_features, in_features = layer.lin_l.weight.shape
    has_bias = layer.lin_l.bias is not None
    if type(layer).__name__ == "GCNSAGEConv":
        return SAGEConv(in_features, out_features, "gcn", bias=has_bias)
    projects = getattr(layer, "project", getattr(layer, "lin", None) is not None)
    allowed = ("max",) if projects else ("mean", "max")
    refuse_options(layer, "PyG", {
        f"aggr={layer.aggr!r}": (layer.aggr not in allowed, "mean, max, or max with project=True"),
        "normalize": (getattr(layer, "normalize", False), "normalize=False"),
        "root_weight=False": (not hasattr(layer, "lin_r"), "root_weight=True"),
        "two input widths": (isinstance(getattr(layer, "in_channels", 0), tuple), "one width of input rows"),
    })  # fmt: skip
    return SAGEConv(in_features, out_features, "pool" if projects else layer.aggr, bias=has_bias)


KINDS = {
    "dgl": Kind(_write_dgl, ("SAGEConv", "MaxSAGEConv"), _read_dgl),
    "pyg": Kind(
        _write_pyg,
        ("SAGEConv", "WeightedSAGEConv", "GCNSAGEConv"),
        _read_pyg,
        {
            "fc_self.weight": "lin_r.weight",
            "fc_self.bias": "lin_l.bias",
            "fc_neigh.": "lin_l.",
            "fc_pool.": "lin.",
            "bias": "lin_l.bias",
        },
    ),
}
