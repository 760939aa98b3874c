"""To PyG and back: which layer of `torch_geometric.nn` stands for which of ours, and its parameters' names.

Meant for PyG 2.5 to 2.8, where GATConv has one projection under one name. What differs there:

* SAGE has its bias at the neighbours' linear layer; `pool` is `project=True`, `gcn` comes as a few lines of
  its own.
* GCN would take in-degrees at both ends and add self-loops: it gets `normalize=False` and explicit weights.
* GAT would add self-loops, and averages heads before the bias: it gets `add_self_loops=False`, and the heads
  are merged outside. GATv2 has one bias more at its output: it is taken out.
* SAGE and GIN know no edge weights: where the data has them, a few lines on PyG's message passing
  come with the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tgnn.export.dgl import gin_mlp, read_gin
from tgnn.export.frameworks import PYG, import_framework
from tgnn.export.source import Target, instantiate, module_source
from tgnn.export.stack import (
    AVERAGED,
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
    layers_module="torch_geometric.nn",
    parts="parts_pyg.py",
    inputs="x, edge_index",
    inputs_doc="x: features, one row per vertex. edge_index: int64 [2, E], sources and destinations.",
    own_rows="h",
    takes_blocks=False,
)
_CALL = "{layer}(h, edge_index)"
_WEIGHTED_CALL = "{layer}(h, edge_index, edge_weight)"


def _call(weighted: bool) -> dict[str, object]:
    return {"call": _WEIGHTED_CALL, "arguments": ("edge_weight",)} if weighted else {"call": _CALL}


def _write_sage(layer: SAGEConv, weighted: bool) -> Written:
    sizes = f"{layer.in_features}, {layer.out_features}"
    bias_holder = layer if layer.fc_self is None else layer.fc_self
    bias = "" if bias_holder.bias is not None else ", bias=False"
    common = {"width": layer.out_features, **_call(weighted)}
    if layer.aggregator == "gcn":
        return Written(make=f"GCNSAGEConv({sizes}{bias})", parts=("GCNSAGEConv",), **common)
    aggregator = 'aggr="mean"' if layer.aggregator == "mean" else 'aggr="max"'
    project = ", project=True" if layer.aggregator == "pool" else ""
    if weighted:
        make = f"WeightedSAGEConv({sizes}, {aggregator}{project}{bias})"
        return Written(make=make, parts=("WeightedSAGEConv",), **common)
    return Written(make=f"SAGEConv({sizes}, {aggregator}{project}{bias})", imports=("SAGEConv",), **common)


def _read_sage(layer: nn.Module, heads: str | None) -> SAGEConv:
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


def _write_gcn(layer: GCNConv, weighted: bool) -> Written:
    bias = "" if layer.bias is not None else ", bias=False"
    make = f"GCNConv({layer.in_features}, {layer.out_features}, normalize=False, add_self_loops=False{bias})"
    call = "{layer}(h, edge_index, gcn_weight.to(h.dtype))"
    needs = {"imports": ("GCNConv",), "parts": ("gcn_weight",), "arguments": ("gcn_weight",)}
    return Written(make=make, call=call, width=layer.out_features, **needs)


def _read_gcn(layer: nn.Module, heads: str | None) -> GCNConv:
    why = "normalize=False and explicit weights, since PyG's normalisation takes in-degrees at both ends"
    refuse_options(layer, "PyG", {"normalize": (layer.normalize, why)})
    return GCNConv(layer.in_channels, layer.out_channels, bias=layer.bias is not None)


def _write_attention(layer: GATConv | GATv2Conv, weighted: bool) -> Written:
    name = type(layer).__name__
    has_bias = (layer.bias if name == "GATConv" else layer.fc_src.bias) is not None
    options = [f"{layer.in_features}, {layer.head_features}, heads={layer.heads}"]
    options += [f"negative_slope={layer.slope!r}"] if layer.slope != 0.2 else []
    options += [f"dropout={layer.attention_dropout!r}"] if layer.attention_dropout else []
    options += ["add_self_loops=False"] + ([] if has_bias else ["bias=False"])
    make, parts = f"{name}({', '.join(options)})", ()
    if name == "GATv2Conv" and has_bias:
        make, parts = f"without_output_bias({make})", ("without_output_bias",)
    call = _CALL
    if not layer.concat and layer.heads > 1:
        call += f".view(-1, {layer.heads}, {layer.head_features}).mean(1)"
    heads = JOINED if layer.concat else AVERAGED
    return Written(make=make, call=call, imports=(name,), parts=parts, heads=heads, width=layer.out_features)


def _read_attention(layer: nn.Module, heads: str | None) -> GATConv | GATv2Conv:
    is_v2 = type(layer).__name__ == "GATv2Conv"
    bias = layer.lin_l.bias if is_v2 else layer.bias
    why = "add_self_loops=False, with self-loops in the data (--self-loops) instead"
    refuse_options(layer, "PyG", {
        "add_self_loops": (layer.add_self_loops, why),
        "edge_dim": (layer.edge_dim is not None, "edge_dim=None"),
        "residual": (getattr(layer, "residual", False), "residual=False, with GNN's residual instead"),
        "share_weights": (getattr(layer, "share_weights", False), "share_weights=False"),
        "two input widths": (not isinstance(layer.in_channels, int), "one width of input rows"),
        "concat=False": (not layer.concat and layer.heads > 1, "concat=True, heads averaged after the bias"),
        "a bias at its output": (is_v2 and layer.bias is not None, "biases at its two linear layers alone"),
    })  # fmt: skip
    kind = GATv2Conv if is_v2 else GATConv
    return kind(layer.in_channels, layer.out_channels, layer.heads, attention_dropout=layer.dropout,
                slope=layer.negative_slope, bias=bias is not None, concat=heads == JOINED)  # fmt: skip


def _write_gin(layer: GINConv, weighted: bool) -> Written:
    learns = isinstance(layer.eps, nn.Parameter)
    name = "WeightedGINConv" if weighted else "GINConv"
    needs = {"parts": (name,)} if weighted else {"imports": (name,)}
    make = f"{name}({gin_mlp(layer)}, train_eps={learns})"
    return Written(make=make, **needs, width=layer.out_features, **_call(weighted))


def _read_gin(layer: nn.Module, heads: str | None) -> GINConv:
    return read_gin(layer, layer.nn, "PyG")


_SAGE_NAMES = {"fc_self.weight": "lin_r.weight", "fc_self.bias": "lin_l.bias", "fc_neigh.": "lin_l.",
               "fc_pool.": "lin.", "bias": "lin_l.bias"}  # fmt: skip

KINDS: dict[type, Kind] = {
    SAGEConv: Kind(_write_sage, ("SAGEConv", "WeightedSAGEConv", "GCNSAGEConv"), _read_sage, _SAGE_NAMES),
    GCNConv: Kind(_write_gcn, ("GCNConv",), _read_gcn, {"weight": "lin.weight"}, frozenset({"weight"})),
    GATConv: Kind(
        _write_attention,
        ("GATConv",),
        _read_attention,
        {"fc.": "lin.", "attn_l": "att_src", "attn_r": "att_dst"},
    ),
    GATv2Conv: Kind(
        _write_attention,
        ("GATv2Conv",),
        _read_attention,
        {"fc_src.": "lin_l.", "fc_dst.": "lin_r.", "attn": "att"},
    ),
    GINConv: Kind(_write_gin, ("GINConv", "WeightedGINConv"), _read_gin, {"mlp.": "nn."}),
}


def write(stack: Stack, weighted: bool) -> list[Written]:
    """The layers in PyG's code."""
    return [KINDS[type(layer)].write(layer, weighted) for layer in stack.layers]


def to_pyg(model: GNN, weighted: bool = False) -> nn.Module:
    """The model as a module of `torch_geometric.nn` layers with copies of its weights, in its mode, type and
    device.

    `module(x, edge_index)` gives the logits of every vertex. A stack with GCN layers takes `gcn_weight` too,
    which `module.gcn_weight(edge_index, num_nodes)` computes from the degrees of the whole graph. With
    `weighted` a stack with SAGE or GIN layers takes the data's `edge_weight`.

    Raises: UserError for a layer or module that PyG has no counterpart of, and where PyG is absent or not
    supported.
    """
    stack = take_apart(model, KINDS, PYG.title)
    text = module_source("Exported by tgnn.", stack, write(stack, weighted), TARGET, weighted)
    import_framework(PYG)
    return instantiate(text, "pyg", weights_to_theirs(stack, KINDS), model)


def from_pyg(
    module: nn.Module | Sequence[nn.Module], *, heads: Sequence[str] | None = None, **options: object
) -> GNN:
    """The model of a module that `to_pyg` or an exported folder made, with copies of its weights.

    Layers of `torch_geometric.nn` made elsewhere come as a list, input layer first, with `options` as for
    `tgnn.nn.GNN` (activation, dropout, ...) and `heads`: "joined" or "averaged" for each layer (hidden ones
    are joined by default).

    Raises: UserError for layers, or options of layers, that tgnn does not have, with the reason.
    """
    return put_together(module, KINDS, PYG.title, heads, options)
