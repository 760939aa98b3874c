"""The layers that can be exported: for each of ours one entry, with its counterparts in DGL and in PyG."""

from collections.abc import Mapping

from tgnn.export.kinds import gat, gcn, gin, sage, transformer
from tgnn.export.kinds.kind import Kind
from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.sage import SAGEConv
from tgnn.nn.transformer import TransformerConv

KINDS: Mapping[type, Mapping[str, Kind]] = {
    SAGEConv: sage.KINDS,
    GCNConv: gcn.KINDS,
    GATConv: gat.GAT,
    GATv2Conv: gat.GATV2,
    GINConv: gin.KINDS,
    TransformerConv: transformer.KINDS,
}


def kinds_of(framework: str) -> dict[type, Kind]:
    """The counterparts in the framework that `--to` calls so."""
    return {layer: counterparts[framework] for layer, counterparts in KINDS.items()}
