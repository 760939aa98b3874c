"""Sparse ops, one a module: public function, torch reference, autograd; Triton kernels beside them if any."""

from tgnn.kernels.attention import attention
from tgnn.kernels.backend import last_ran, set_backend, use_backend
from tgnn.kernels.block import Block
from tgnn.kernels.dropout import dropout
from tgnn.kernels.edge_softmax import edge_softmax
from tgnn.kernels.gather import gather
from tgnn.kernels.gather_spmm import gather_spmm
from tgnn.kernels.sample import sample_neighbors
from tgnn.kernels.sddmm import sddmm
from tgnn.kernels.spmm import spmm
from tgnn.kernels.unique import DirectTable, unique

__all__ = [
    "Block",
    "DirectTable",
    "attention",
    "dropout",
    "edge_softmax",
    "gather",
    "gather_spmm",
    "last_ran",
    "sample_neighbors",
    "sddmm",
    "set_backend",
    "spmm",
    "unique",
    "use_backend",
]
