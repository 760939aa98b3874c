"""To DGL and back: which layer of `dgl.nn` stands for which of ours, with its parameters' names and options.

Meant for DGL 1.1 to 2.4, whose layers have the same parameters throughout; earlier ones put SAGE's bias
elsewhere. Parameter names of ours follow DGL's, but for GIN's MLP. DGL has no SAGE with a plain maximum: a
few lines on its message passing come with the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tgnn.errors import wrong
from tgnn.export.frameworks import DGL, import_framework
from tgnn.export.source import Target, instantiate, merged, module_source
from tgnn.export.stack import (
    JOINED,
    Kind,
    Stack,
    Written,
    put_together,
    refuse_options,
    take_apart,
    weights_to_theirs,
)
from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv

TARGET = Target(
    layers_module="dgl.nn",
    parts="parts_dgl.py",
    inputs="g, x",
    inputs_doc="g: DGLGraph, or a list of blocks, input layer first. x: features of its (source) vertices.",
    own_rows="h[: blocks[{number}].num_dst_nodes()]",
    takes_blocks=True,
)
_WEIGHTED_CALL = "{layer}(blocks[{number}], h, edge_weight=weights[{number}])"


def _write_sage(layer: SAGEConv, weighted: bool) -> Written:
    bias_holder = layer if layer.fc_self is None else layer.fc_self
    bias = "" if bias_holder.bias is not None else ", bias=False"
    common = {"call": _WEIGHTED_CALL, "arguments": ("edge_weight",), "width": layer.out_features}
    if layer.aggregator == "max":
        make = f"MaxSAGEConv({layer.in_features}, {layer.out_features}{bias})"
        return Written(make=make, parts=("MaxSAGEConv",), **common)
    make = f'SAGEConv({layer.in_features}, {layer.out_features}, "{layer.aggregator}"{bias})'
    return Written(make=make, imports=("SAGEConv",), **common)


def _read_sage(layer: nn.Module, heads: str | None) -> SAGEConv:
    if type(layer).__name__ == "MaxSAGEConv":
        fc = layer.fc_self
        return SAGEConv(fc.in_features, fc.out_features, "max", bias=fc.bias is not None)
    refuse_options(layer, "DGL", {
        "an LSTM": (layer._aggre_type == "lstm", "mean, pool or gcn, since it depends on the order of edges"),
        "norm": (layer.norm is not None, "norm=None, since norms stand between layers here"),
        **_common(layer, ("_in_src_feats", "_in_dst_feats")),
    })  # fmt: skip
    bias = layer.bias if layer._aggre_type == "gcn" else layer.fc_self.bias
    return SAGEConv(layer._in_src_feats, layer._out_feats, layer._aggre_type, bias=bias is not None)


def _common(layer: nn.Module, widths: tuple[str, str] | None = None) -> dict[str, tuple[bool, str]]:
    """Options of many DGL layers that tgnn has at the stack, or not at all."""
    activation = getattr(layer, "activation", getattr(layer, "_activation", None))
    drop = getattr(layer, "feat_drop", None)
    found = {
        "activation": (activation is not None, "activation=None, with GNN's activation instead"),
        "feat_drop": (drop is not None and drop.p > 0, "feat_drop=0, with GNN's dropout instead"),
    }
    if widths is not None:
        two = getattr(layer, widths[0]) != getattr(layer, widths[1])
        found["two input widths"] = (two, "one width of input rows")
    return found


def _write_gcn(layer: GCNConv, weighted: bool) -> Written:
    bias = "" if layer.bias is not None else ", bias=False"
    make = (
        f'GraphConv({layer.in_features}, {layer.out_features}, norm="both"{bias}, allow_zero_in_degree=True)'
    )
    return Written(
        make=make,
        call="{layer}(blocks[{number}], h, edge_weight=weight)",
        before="weight = full_degree_weight(blocks[{number}], degrees, weights[{number}], h.dtype)",
        imports=("GraphConv",),
        parts=("full_degree_weight",),
        arguments=("edge_weight", "degrees"),
        width=layer.out_features,
    )


def _read_gcn(layer: nn.Module, heads: str | None) -> GCNConv:
    refuse_options(layer, "DGL", {
        f"norm={layer._norm!r}": (layer._norm != "both", 'norm="both"'),
        "weight=False": (layer.weight is None, "a weight of its own"),
        **_common(layer),
    })  # fmt: skip
    return GCNConv(layer._in_feats, layer._out_feats, bias=layer.bias is not None)


def _write_attention(layer: GATConv | GATv2Conv, weighted: bool) -> Written:
    name = type(layer).__name__
    has_bias = (layer.bias if name == "GATConv" else layer.fc_src.bias) is not None
    options = [f"{layer.in_features}, {layer.head_features}, {layer.heads}"]
    options += [f"attn_drop={layer.attention_dropout!r}"] if layer.attention_dropout else []
    options += [f"negative_slope={layer.slope!r}"] if layer.slope != 0.2 else []
    options += ["allow_zero_in_degree=True"] + ([] if has_bias else ["bias=False"])
    call, heads = merged("{layer}(blocks[{number}], h)", layer)
    make = f"{name}({', '.join(options)})"
    return Written(make=make, call=call, imports=(name,), heads=heads, width=layer.out_features)


def _sizes(layer: nn.Module) -> tuple[int, int, int]:
    return layer._in_src_feats, layer._out_feats, layer._num_heads


def _attention_options(layer: nn.Module) -> dict[str, object]:
    drop, slope = layer.attn_drop.p, layer.leaky_relu.negative_slope
    return {"attention_dropout": drop, "slope": slope}


def _read_gat(layer: nn.Module, heads: str | None) -> GATConv:
    refuse_options(layer, "DGL", {
        "residual": (layer.res_fc is not None, "residual=False, with GNN's residual instead"),
        **_common(layer, ("_in_src_feats", "_in_dst_feats")),
    })  # fmt: skip
    return GATConv(
        *_sizes(layer), bias=layer.bias is not None, concat=heads == JOINED, **_attention_options(layer)
    )


def _read_gatv2(layer: nn.Module, heads: str | None) -> GATv2Conv:
    refuse_options(layer, "DGL", {
        "residual": (layer.res_fc is not None, "residual=False, with GNN's residual instead"),
        "share_weights": (layer.share_weights, "share_weights=False"),
        **_common(layer, ("_in_src_feats", "_in_dst_feats")),
    })  # fmt: skip
    return GATv2Conv(
        *_sizes(layer),
        bias=layer.fc_src.bias is not None,
        concat=heads == JOINED,
        **_attention_options(layer),
    )


def gin_mlp(layer: GINConv) -> str:
    """The layer's MLP as code; raises UserError for one that is not two linear layers and a ReLU."""
    if [type(module) for module in layer.mlp] != [nn.Linear, nn.ReLU, nn.Linear]:
        got, expected = "a GINConv with another mlp", "linear, ReLU, linear as GINConv makes it"
        raise wrong("export", got, expected, "rewrite that layer there by hand")
    first, _, second = layer.mlp
    return "nn.Sequential({}, nn.ReLU(), {})".format(
        *(f"nn.Linear({linear.in_features}, {linear.out_features})" for linear in (first, second))
    )


def read_gin(layer: nn.Module, mlp: nn.Module, framework: str) -> GINConv:
    """Our layer for a GIN layer with this MLP; raises UserError where the MLP has another form."""
    kinds = [type(module) for module in mlp] if isinstance(mlp, nn.Sequential) else [type(mlp)]
    if kinds != [nn.Linear, nn.ReLU, nn.Linear] or mlp[0].out_features != mlp[2].out_features:
        got = f"a GINConv around {' and '.join(kind.__name__ for kind in kinds)}"
        expected = "linear, ReLU, linear, both linear layers as wide as the output"
        raise wrong(f"from {framework}", got, expected, "write a layer of that form")
    learns = isinstance(layer.eps, nn.Parameter)
    return GINConv(mlp[0].in_features, mlp[2].out_features, layer.eps.item(), learn_eps=learns)


def _write_gin(layer: GINConv, weighted: bool) -> Written:
    learns = isinstance(layer.eps, nn.Parameter)
    make = f'GINConv({gin_mlp(layer)}, "sum", learn_eps={learns})'
    return Written(
        make=make,
        call=_WEIGHTED_CALL,
        imports=("GINConv",),
        arguments=("edge_weight",),
        width=layer.out_features,
    )


def _read_gin(layer: nn.Module, heads: str | None) -> GINConv:
    refuse_options(layer, "DGL", {
        f"aggregator {layer._aggregator_type}": (layer._aggregator_type != "sum", "sum"), **_common(layer),
    })  # fmt: skip
    return read_gin(layer, layer.apply_func, "DGL")


KINDS: dict[type, Kind] = {
    SAGEConv: Kind(_write_sage, ("SAGEConv", "MaxSAGEConv"), _read_sage),
    GCNConv: Kind(_write_gcn, ("GraphConv",), _read_gcn),
    GATConv: Kind(_write_attention, ("GATConv",), _read_gat),
    GATv2Conv: Kind(_write_attention, ("GATv2Conv",), _read_gatv2),
    GINConv: Kind(_write_gin, ("GINConv",), _read_gin, {"mlp.": "apply_func."}),
}


def write(stack: Stack, weighted: bool) -> list[Written]:
    """The layers in DGL's code."""
    return [KINDS[type(layer)].write(layer, weighted) for layer in stack.layers]


def to_dgl(model: GNN, weighted: bool = False) -> nn.Module:
    """The model as a module of `dgl.nn` layers with copies of its weights, in its mode, type and device.

    `module(g, x)` gives the logits of every vertex of a DGLGraph `g`, `module(blocks, x)` those of the last
    block's destinations; GCN on blocks also needs `degrees=(g.in_degrees(), g.out_degrees())` of the whole
    graph. Where the data has edge weights give them as `edge_weight`; with `weighted` they are demanded.

    Raises: UserError for a layer or module that DGL has no counterpart of, and where DGL is absent or not
    supported.
    """
    stack = take_apart(model, KINDS, DGL.title)
    text = module_source("Exported by tgnn.", stack, write(stack, weighted), TARGET, weighted)
    import_framework(DGL)
    return instantiate(text, "dgl", weights_to_theirs(stack, KINDS), model)


def from_dgl(
    module: nn.Module | Sequence[nn.Module], *, heads: Sequence[str] | None = None, **options: object
) -> GNN:
    """The model of a module that `to_dgl` or an exported folder made, with copies of its weights.

    Layers of `dgl.nn` made elsewhere come as a list, input layer first, with `options` as for `tgnn.nn.GNN`
    (activation, dropout, ...) and `heads`: "joined" or "averaged" for each layer (hidden ones are joined by
    default).

    Raises: UserError for layers, or options of layers, that tgnn does not have.
    """
    return put_together(module, KINDS, DGL.title, heads, options)
