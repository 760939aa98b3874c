"""Layers, and the stack that trains them over any number of ranks."""

from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.model import GNN
from tgnn.nn.norm import SyncBatchNorm
from tgnn.nn.products import Linear
from tgnn.nn.sage import SAGEConv
from tgnn.nn.transformer import TransformerConv

__all__ = [
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "GINConv",
    "GNN",
    "Layer",
    "Linear",
    "Rows",
    "SAGEConv",
    "SyncBatchNorm",
    "TransformerConv",
]
