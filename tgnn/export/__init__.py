"""Trained models for the Deep Graph Library and PyG, and back; `python -m tgnn.export` writes them as
folders.

>>> module = to_dgl(model)       # torch.nn.Module of dgl.nn layers: module(g, x)
>>> model = from_dgl(module)     # tgnn.nn.GNN
"""

from tgnn.export.dgl import from_dgl, to_dgl
from tgnn.export.pyg import from_pyg, to_pyg

__all__ = ["from_dgl", "from_pyg", "to_dgl", "to_pyg"]
