"""Dot-product attention in DGL and PyG.

PyG's TransformerConv has our parameters and names; without `bias` it also drops those of keys, queries and
values in newer versions, so that the one bias is taken out instead. DGL's DotGatConv has one projection for
all three and no own term: the layer comes as a few lines on DGL's message passing. Both merge their heads
themselves.
"""

from __future__ import annotations

from torch import nn

from tgnn.export.kinds.kind import DGL_CALL, PYG_CALL, Kind, Written, expression, refuse_options, unless
from tgnn.nn.transformer import TransformerConv


def _options(layer: TransformerConv) -> dict[str, object]:
    """What both have under one name, where it is not the default."""
    return {"concat": unless(layer.concat, True), "beta": unless(layer.lin_beta is not None, False)}


def _ours(layer: nn.Module, in_features: int, out_features: int, heads: int, drop: float) -> TransformerConv:
    return TransformerConv(
        in_features, out_features, heads, attention_dropout=drop, concat=layer.concat,
        beta=layer.lin_beta is not None, bias=layer.lin_skip.bias is not None,
    )  # fmt: skip


def _write_dgl(layer: TransformerConv, weighted: bool) -> Written:
    make = expression(
        "TransformerConv", layer.in_features, layer.head_features, layer.heads, **_options(layer),
        attn_drop=unless(layer.attention_dropout, 0.0), bias=unless(layer.lin_skip.bias is not None, True),
    )  # fmt: skip
    return Written(make=make, call=DGL_CALL, names=("TransformerConv",))


def _read_dgl(layer: nn.Module, heads: str | None) -> TransformerConv:
    sizes = layer.in_feats, layer.out_feats, layer.num_heads
    return _ours(layer, *sizes, layer.attn_drop.p)


def _write_pyg(layer: TransformerConv, weighted: bool) -> Written:
    make, names = expression(
        "TransformerConv", layer.in_features, layer.head_features, heads=layer.heads, **_options(layer),
        dropout=unless(layer.attention_dropout, 0.0),
    ), ("TransformerConv",)  # fmt: skip
    if layer.lin_skip.bias is None:
        make, names = f"without_skip_bias({make})", (*names, "without_skip_bias")
    return Written(make=make, call=PYG_CALL, names=names)


def _read_pyg(layer: nn.Module, heads: str | None) -> TransformerConv:
    projected = (layer.lin_key, layer.lin_query, layer.lin_value)
    why = "bias=True, since keys, queries and values have biases here"
    refuse_options(layer, "PyG", {
        "edge_dim": (layer.edge_dim is not None, "edge_dim=None"),
        "root_weight=False": (not layer.root_weight, "root_weight=True"),
        "two input widths": (not isinstance(layer.in_channels, int), "one width of input rows"),
        "bias=False": (any(linear.bias is None for linear in projected), why),
    })  # fmt: skip
    return _ours(layer, layer.in_channels, layer.out_channels, layer.heads, layer.dropout)


KINDS = {
    "dgl": Kind(_write_dgl, ("TransformerConv",), _read_dgl),
    "pyg": Kind(_write_pyg, ("TransformerConv",), _read_pyg),
}
