"""To PyG and back.

Meant for PyG 2.5 to 2.8, where GATConv has one projection under one name. Which layer of
`torch_geometric.nn` stands for which of ours, and what differs there: `kinds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tgnn.export.bridge import Bridge
from tgnn.export.frameworks import PYG
from tgnn.export.source import Target
from tgnn.nn.model import GNN

BRIDGE = Bridge(
    PYG,
    Target(
        layers_module="torch_geometric.nn",
        parts="parts_pyg.py",
        inputs="x, edge_index",
        inputs_doc="x: features, one row per vertex. edge_index: int64 [2, E], sources and destinations.",
        own_rows="h",
        takes_blocks=False,
    ),
)


def to_pyg(model: GNN, weighted: bool = False) -> nn.Module:
    """The model as a module of `torch_geometric.nn` layers with copies of its weights, in its mode, type and
    device.

    `module(x, edge_index)` gives the logits of every vertex. A stack with GCN layers takes `gcn_weight` too,
    which `module.gcn_weight(edge_index, num_nodes)` computes from the degrees of the whole graph. With
    `weighted` a stack with SAGE or GIN layers takes the data's `edge_weight`.

    Raises: UserError for a layer or module that PyG has no counterpart of, and where PyG is absent or not
    supported.
    """
    return BRIDGE.export(model, weighted)


def from_pyg(
    module: nn.Module | Sequence[nn.Module], *, heads: Sequence[str] | None = None, **options: object
) -> GNN:
    """The model of a module that `to_pyg` or an exported folder made, with copies of its weights.

    Layers of `torch_geometric.nn` made elsewhere come as a list, input layer first, with `options` as for
    `tgnn.nn.GNN` (activation, dropout, ...) and `heads`: "joined" or "averaged" for each GAT or GATv2 layer
    (hidden ones are joined by default); a TransformerConv says so itself.

    Raises: UserError for layers, or options of layers, that tgnn does not have, with the reason.
    """
    return BRIDGE.read(module, heads, options)
