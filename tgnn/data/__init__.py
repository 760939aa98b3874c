"""Graphs and data sets: what they are, where they come from, and what may be done to them."""

from tgnn.data.graph import Dataset, Graph
from tgnn.data.interop import dataset_from_dgl, from_pyg, graph_from_dgl
from tgnn.data.load import DataOptions, data_fingerprint, load
from tgnn.data.readers.tgnn_npz import save_npz

__all__ = [
    "DataOptions",
    "Dataset",
    "Graph",
    "data_fingerprint",
    "dataset_from_dgl",
    "from_pyg",
    "graph_from_dgl",
    "load",
    "save_npz",
]
