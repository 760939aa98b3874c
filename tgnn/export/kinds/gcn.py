"""GCN in DGL and PyG.

DGL normalises by the degrees of what it is given, so that sampled blocks take weights made up for the whole
graph's. PyG would take in-degrees at both ends and add self-loops: it gets `normalize=False` and explicit
weights.
"""

from __future__ import annotations

from torch import nn

from tgnn.export.kinds.kind import Kind, Written, dgl_options, expression, refuse_options, unless
from tgnn.nn.gcn import GCNConv


def _write_dgl(layer: GCNConv, weighted: bool) -> Written:
    options = {"norm": "both", "bias": unless(layer.bias is not None, True), "allow_zero_in_degree": True}
    return Written(
        make=expression("GraphConv", layer.in_features, layer.out_features, **options),
        call="{layer}(blocks[{number}], h, edge_weight=weight)",
        names=("GraphConv", "full_degree_weight"),
        before="weight = full_degree_weight(blocks[{number}], degrees, weights[{number}], h.dtype)",
        arguments=("edge_weight", "degrees"),
    )


def _read_dgl(layer: nn.Module, heads: str | None) -> GCNConv:
    refuse_options(layer, "DGL", {
        f"norm={layer._norm!r}": (layer._norm != "both", 'norm="both"'),
        "weight=False": (layer.weight is None, "a weight of its own"),
        **dgl_options(layer),
    })  # fmt: skip
    return GCNConv(layer._in_feats, layer._out_feats, bias=layer.bias is not None)


def _write_pyg(layer: GCNConv, weighted: bool) -> Written:
    options = {"normalize": False, "add_self_loops": False, "bias": unless(layer.bias is not None, True)}
    return Written(
        make=expression("GCNConv", layer.in_features, layer.out_features, **options),
        call="{layer}(h, edge_index, gcn_weight.to(h.dtype))",
        names=("GCNConv", "gcn_weight"),
        arguments=("gcn_weight",),
    )


def _read_pyg(layer: nn.Module, heads: str | None) -> GCNConv:
    why = "normalize=False and explicit weights, since PyG's normalisation takes in-degrees at both ends"
    refuse_options(layer, "PyG", {"normalize": (layer.normalize, why)})
    return GCNConv(layer.in_channels, layer.out_channels, bias=layer.bias is not None)


KINDS = {
    "dgl": Kind(_write_dgl, ("GraphConv",), _read_dgl),
    "pyg": Kind(_write_pyg, ("GCNConv",), _read_pyg, {"weight": "lin.weight"}, frozenset({"weight"})),
}
