"""To DGL and back.

Meant for DGL 1.1 to 2.4, whose layers have the same parameters throughout; earlier ones put SAGE's bias
elsewhere. Which layer of `dgl.nn` stands for which of ours: `kinds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tgnn.export.bridge import Bridge
from tgnn.export.frameworks import DGL
from tgnn.export.source import Target
from tgnn.nn.model import GNN

BRIDGE = Bridge(
    DGL,
    Target(
        layers_module="dgl.nn",
        parts="parts_dgl.py",
        inputs="g, x",
        inputs_doc="g: DGLGraph, or a list of blocks, input layer first. x: features of its (source) vertices.",
        own_rows="h[: blocks[{number}].num_dst_nodes()]",
        takes_blocks=True,
    ),
)


def to_dgl(model: GNN, weighted: bool = False) -> nn.Module:
    """The model as a module of `dgl.nn` layers with copies of its weights, in its mode, type and device.

    `module(g, x)` gives the logits of every vertex of a DGLGraph `g`, `module(blocks, x)` those of the last
    block's destinations; GCN on blocks also needs `degrees=(g.in_degrees(), g.out_degrees())` of the whole
    graph. Where the data has edge weights give them as `edge_weight`; with `weighted` they are demanded.

    Raises: UserError for a layer or module that DGL has no counterpart of, and where DGL is absent or not
    supported.
    """
    return BRIDGE.export(model, weighted)


def from_dgl(
    module: nn.Module | Sequence[nn.Module], *, heads: Sequence[str] | None = None, **options: object
) -> GNN:
    """The model of a module that `to_dgl` or an exported folder made, with copies of its weights.

    Layers of `dgl.nn` made elsewhere come as a list, input layer first, with `options` as for `tgnn.nn.GNN`
    (activation, dropout, ...) and `heads`: "joined" or "averaged" for each layer (hidden ones are joined by
    default).

    Raises: UserError for layers, or options of layers, that tgnn does not have.
    """
    return BRIDGE.read(module, heads, options)
