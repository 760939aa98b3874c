"""GAT and GATv2 in DGL and PyG.

DGL has our parameters' names. PyG would add self-loops, and averages heads before the bias: it gets
`add_self_loops=False`, and the heads are merged outside. Its GATv2 has one bias more, at the output: it is
taken out.
"""

from __future__ import annotations

from torch import nn

from tgnn.export.kinds.kind import (
    DGL_CALL,
    JOINED,
    PYG_CALL,
    Kind,
    Written,
    dgl_options,
    expression,
    refuse_options,
    unless,
)
from tgnn.nn.gat import GATConv, GATv2Conv

_RESIDUAL = "residual=False, with GNN's residual instead"


def _has_bias(layer: GATConv | GATv2Conv) -> bool:
    return (layer.bias if isinstance(layer, GATConv) else layer.fc_src.bias) is not None


def _write_dgl(layer: GATConv | GATv2Conv, weighted: bool) -> Written:
    name = type(layer).__name__
    make = expression(
        name, layer.in_features, layer.head_features, layer.heads,
        attn_drop=unless(layer.attention_dropout, 0.0), negative_slope=unless(layer.slope, 0.2),
        allow_zero_in_degree=True, bias=unless(_has_bias(layer), True),
    )  # fmt: skip
    merge = ".flatten(1)" if layer.concat else ".mean(1)"
    return Written(make=make, call=DGL_CALL + merge, names=(name,))


def _read_dgl(layer: nn.Module, heads: str | None) -> GATConv | GATv2Conv:
    is_v2 = type(layer).__name__ == "GATv2Conv"
    refuse_options(layer, "DGL", {
        "residual": (layer.res_fc is not None, _RESIDUAL),
        "share_weights": (getattr(layer, "share_weights", False), "share_weights=False"),
        **dgl_options(layer, one_width=True),
    })  # fmt: skip
    bias = layer.fc_src.bias if is_v2 else layer.bias
    return (GATv2Conv if is_v2 else GATConv)(
        layer._in_src_feats, layer._out_feats, layer._num_heads, attention_dropout=layer.attn_drop.p,
        slope=layer.leaky_relu.negative_slope, bias=bias is not None, concat=heads == JOINED,
    )  # fmt: skip


def _write_pyg(layer: GATConv | GATv2Conv, weighted: bool) -> Written:
    name = type(layer).__name__
    make, names = expression(
        name, layer.in_features, layer.head_features, heads=layer.heads,
        negative_slope=unless(layer.slope, 0.2), dropout=unless(layer.attention_dropout, 0.0),
        add_self_loops=False, bias=unless(_has_bias(layer), True),
    ), (name,)  # fmt: skip
    if name == "GATv2Conv" and _has_bias(layer):
        make, names = f"without_output_bias({make})", (name, "without_output_bias")
    call = PYG_CALL
    if not layer.concat and layer.heads > 1:
        call += f".view(-1, {layer.heads}, {layer.head_features}).mean(1)"
    return Written(make=make, call=call, names=names)


def _read_pyg(layer: nn.Module, heads: str | None) -> GATConv | GATv2Conv:
    is_v2 = type(layer).__name__ == "GATv2Conv"
    why = "add_self_loops=False, with self-loops in the data (--self-loops) instead"
    refuse_options(layer, "PyG", {
        "add_self_loops": (layer.add_self_loops, why),
        "edge_dim": (layer.edge_dim is not None, "edge_dim=None"),
        "residual": (getattr(layer, "residual", False), _RESIDUAL),
        "share_weights": (getattr(layer, "share_weights", False), "share_weights=False"),
        "two input widths": (not isinstance(layer.in_channels, int), "one width of input rows"),
        "concat=False": (not layer.concat and layer.heads > 1, "concat=True, heads averaged after the bias"),
        "a bias at its output": (is_v2 and layer.bias is not None, "biases at its two linear layers alone"),
    })  # fmt: skip
    bias = layer.lin_l.bias if is_v2 else layer.bias
    return (GATv2Conv if is_v2 else GATConv)(
        layer.in_channels, layer.out_channels, layer.heads, attention_dropout=layer.dropout,
        slope=layer.negative_slope, bias=bias is not None, concat=heads == JOINED,
    )  # fmt: skip


GAT = {
    "dgl": Kind(_write_dgl, ("GATConv",), _read_dgl),
    "pyg": Kind(
        _write_pyg, ("GATConv",), _read_pyg, {"fc.": "lin.", "attn_l": "att_src", "attn_r": "att_dst"}
    ),
}
GATV2 = {
    "dgl": Kind(_write_dgl, ("GATv2Conv",), _read_dgl),
    "pyg": Kind(
        _write_pyg, ("GATv2Conv",), _read_pyg, {"fc_src.": "lin_l.", "fc_dst.": "lin_r.", "attn": "att"}
    ),
}
