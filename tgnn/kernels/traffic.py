"""How many bytes each op has to move, and how many flops it does, as a function of its block.

A benchmark divides bytes by time and by what a plain copy reaches in the same run. The models count what a
kernel asks of memory when no row stays in a cache: every edge reads the row at its other end, every index,
weight and row pointer is read once, every result is written once. Where rows repeat and caches are large,
more than the copy bandwidth can come out; what pieces of hub rows leave and read again is not counted.

Letters: E edges, W = H x D elements of a row, s bytes of an element, i bytes of an index.

Example: spmm of two edges into two rows, W = 1, float32 and int64: 2 x (4 + 8) + 2 x 4 + 3 x 8 = 56 bytes,
and 2 additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tgnn.kernels.block import Block

POINTER_BYTES = 8  # of indptr, of the transposed block's indices and edge numbers, and of ids


@dataclass(frozen=True)
class Traffic:
    """Bytes to and from memory, and floating-point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.flops + other.flops)


def spmm(
    block: Block, width: int, dtype: torch.dtype, *, heads: int = 1, weighted: bool = False,
    indirect: bool = False,
) -> Traffic:  # fmt: skip
    """Forward: E x (W s + i) + n_dst W s + indptr; with weights E x H s more, through `rows` (indirect) E x
    8.
    """
    size = heads * width
    per_edge = size * dtype.itemsize + block.indices.element_size()
    per_edge += heads * dtype.itemsize * weighted + POINTER_BYTES * indirect
    bytes_ = block.n_edges * per_edge + block.n_dst * size * dtype.itemsize + _pointers(block.n_dst)
    return Traffic(bytes_, block.n_edges * size * (1 + weighted))


def spmm_backward(
    block: Block, width: int, dtype: torch.dtype, *, heads: int = 1, weighted: bool = False,
    mean: bool = False,
) -> Traffic:  # fmt: skip
    """To x, over the transposed block: E x (W s + 8) + n_src W s + its indptr; with weights E x (H s + 8)
    more, for a mean E x 4.
    """
    size = heads * width
    per_edge = size * dtype.itemsize + POINTER_BYTES + 4 * mean
    per_edge += (heads * dtype.itemsize + POINTER_BYTES) * weighted
    bytes_ = block.n_edges * per_edge + block.n_src * size * dtype.itemsize + _pointers(block.n_src)
    return Traffic(bytes_, block.n_edges * size * (1 + weighted + mean))


def spmm_extreme_backward(block: Block, width: int, dtype: torch.dtype) -> Traffic:
    """To x of max and min: E x (W (s + 4) + 24) + n_src W s + the transposed indptr; winners are int32."""
    per_edge = width * (dtype.itemsize + 4) + 3 * POINTER_BYTES
    bytes_ = block.n_edges * per_edge + block.n_src * width * dtype.itemsize + _pointers(block.n_src)
    return Traffic(bytes_, block.n_edges * width)


def gather(rows: Tensor, width: int, dtype: torch.dtype) -> Traffic:
    """m x (2 W s + i) for m rows."""
    return Traffic(rows.numel() * (2 * width * dtype.itemsize + rows.element_size()), 0)


def sddmm(block: Block, width: int, dtype: torch.dtype, *, heads: int = 1, op: str = "dot") -> Traffic:
    """E x (W s + i + H s) + n_dst W s + indptr; W = H for `add`."""
    size = heads * width if op == "dot" else heads
    per_edge = (size + heads) * dtype.itemsize + block.indices.element_size()
    bytes_ = block.n_edges * per_edge + block.n_dst * size * dtype.itemsize + _pointers(block.n_dst)
    return Traffic(bytes_, block.n_edges * size * (2 if op == "dot" else 1))


def edge_softmax(block: Block, heads: int, dtype: torch.dtype) -> Traffic:
    """Forward: 2 E H s + indptr."""
    bytes_ = 2 * block.n_edges * heads * dtype.itemsize + _pointers(block.n_dst)
    return Traffic(bytes_, 4 * block.n_edges * heads)


def attention(
    block: Block, kind: str, heads: int, width: int, dtype: torch.dtype, *, dropout: bool = False
) -> Traffic:
    """Forward: E x (value and src rows + i) + n_dst x (dst row + out row + lse) + indptr; with dropout E x 8
    for the positions. gatv2's value and src are one row, a gat's src and dst have H elements.
    """
    size, wide = heads * width, _wide(dtype)
    source, end = _attention_rows(kind, heads, width)
    per_edge = source * dtype.itemsize + block.indices.element_size() + POINTER_BYTES * dropout
    per_row = (end + size) * dtype.itemsize + heads * wide + POINTER_BYTES * dropout
    flops = block.n_edges * (2 * size + (4 * size if kind == "gatv2" else 2 * end) + 4 * heads)
    return Traffic(block.n_edges * per_edge + block.n_dst * per_row + _pointers(block.n_dst), flops)


def attention_backward(
    block: Block, kind: str, heads: int, width: int, dtype: torch.dtype, *, dropout: bool = False
) -> Traffic:  # fmt: skip
    """Two passes. Destinations: the forward's E x (..), and n_dst x (dst, grad, out, lse, delta, grad_dst).
    Sources: E x (dst and grad rows, lse and delta, 8; with dropout 24 more) + n_src x (value and src rows,
    and their gradients).
    """
    size, wide = heads * width, _wide(dtype)
    source, end = _attention_rows(kind, heads, width)
    per_edge = source * dtype.itemsize + block.indices.element_size() + POINTER_BYTES * dropout
    per_edge += (end + size) * dtype.itemsize + 2 * heads * wide + POINTER_BYTES * (1 + 3 * dropout)
    per_dst = (2 * end + size) * dtype.itemsize + (size + 2 * heads) * wide
    per_src = 2 * source * dtype.itemsize
    bytes_ = block.n_edges * per_edge + block.n_dst * per_dst + block.n_src * per_src
    flops = block.n_edges * 2 * (4 * size + (4 * size if kind == "gatv2" else 2 * end) + 6 * heads)
    return Traffic(bytes_ + _pointers(block.n_dst) + _pointers(block.n_src), flops)


def dropout(n_rows: int, width: int, dtype: torch.dtype) -> Traffic:
    """n x (2 W s + 8)."""
    return Traffic(n_rows * (2 * width * dtype.itemsize + POINTER_BYTES), n_rows * width)


def sample_neighbors(n_rows: int, n_drawn: int, indices: Tensor) -> Traffic:
    """n x 40 for row, id, two row pointers in and one out; for each drawn edge its index, and index, position
    and edge number out.
    """
    return Traffic(n_rows * 5 * POINTER_BYTES + n_drawn * (2 * indices.element_size() + 2 * POINTER_BYTES), 0)


def unique(ids: Tensor, n_distinct: int) -> Traffic:
    """n i in and the distinct ids out."""
    return Traffic((ids.numel() + n_distinct) * ids.element_size(), 0)


def _attention_rows(kind: str, heads: int, width: int) -> tuple[int, int]:
    """Elements read at an edge's source (value and src), and at its destination (dst)."""
    size = heads * width
    return {"gat": (size + heads, heads), "gatv2": (size, size), "dot": (2 * size, size)}[kind]


def _wide(dtype: torch.dtype) -> int:
    """Bytes of the type that sums over `dtype` are kept in."""
    return max(4, dtype.itemsize)


def _pointers(n_rows: int) -> int:
    return (n_rows + 1) * POINTER_BYTES
