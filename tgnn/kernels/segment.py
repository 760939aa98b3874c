"""Sums and extremes over the segments of a CSR: what the torch paths of the sparse ops are built of.

Sums run through `embedding_bag`, which adds each segment in order (deterministic) without a [n_edges, D]
temporary; a tuning table may name another of `SUM_STRATEGIES`.
"""

from __future__ import annotations

import warnings
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from tgnn.kernels.room import first_rows, is_plain, rounded_rows
from tgnn.kernels.tuning import strategy

HALF_TYPES = (torch.float16, torch.bfloat16)
# Bound on the elements of a [edges, D] temporary where an op cannot do without one.
CHUNK_ELEMENTS = 1 << 25
# The same on a CPU: what stays in cache, and in memory that the allocator keeps, is several times faster.
CPU_CHUNK_ELEMENTS = 1 << 19


def widened(x: Tensor) -> Tensor:
    """`x` in the type its sums are accumulated in: float32 for half types, else its own."""
    return x.float() if x.dtype in HALF_TYPES else x


def bag_sum(table: Tensor, rows: Tensor, indptr: Tensor, weight: Tensor | None = None) -> Tensor:
    """`out[s] = sum over e in segment s of weight[e] * table[rows[e]]`.

    Args: table [n, D] floating; rows [E] int32 or int64; indptr [S + 1] int64; weight [E] or None; any
    strides.
    Returns [S, D] in table's dtype; half types are accumulated in float32 and cast once. Empty segments give
    0.
    """
    segments = indptr.numel() - 1
    if rows.numel() == 0 or table.shape[1] == 0:
        return table.new_zeros(segments, table.shape[1])
    if rows.numel() >= 1 << 31:  # embedding_bag wants offsets of the rows' type, and these pass 32 bits
        rows = rows.to(torch.int64)
    degree = rows.numel() / max(1, segments)
    chosen = strategy("bag_sum", table.device, table.dtype, table.shape[1], degree, tuple(SUM_STRATEGIES))
    return SUM_STRATEGIES[chosen](table.contiguous(), rows.contiguous(), indptr, weight)


def by_embedding_bag(table: Tensor, rows: Tensor, indptr: Tensor, weight: Tensor | None) -> Tensor:
    """`bag_sum` by `embedding_bag`: each segment in order, without a [E, D] temporary."""
    # embedding_bag adds half types in float32, but wants weights of the table's dtype: that would round them.
    wide = table if weight is None else widened(table)
    if weight is not None:
        weight = weight.to(wide.dtype).contiguous()
    indptr, segments = indptr.to(rows.dtype), indptr.numel() - 1
    roomy = is_plain(table, rows) and not torch.is_grad_enabled()
    if roomy:  # empty segments behind the others
        indptr = F.pad(indptr, (0, rounded_rows(segments) - segments), value=rows.numel())
    out = F.embedding_bag(rows, wide, indptr, mode="sum", per_sample_weights=weight, include_last_offset=True)
    return (first_rows(out, segments) if roomy else out).to(table.dtype)


def by_sparse_csr(table: Tensor, rows: Tensor, indptr: Tensor, weight: Tensor | None) -> Tensor:
    """`bag_sum` as a product of a sparse CSR matrix with the table."""
    _silence_beta_warning()
    wide = widened(table)
    values = wide.new_ones(rows.numel()) if weight is None else weight.to(wide.dtype).contiguous()
    shape = (indptr.numel() - 1, table.shape[0])
    matrix = torch.sparse_csr_tensor(indptr.to(rows.dtype), rows, values, shape, check_invariants=False)
    return (matrix @ wide).to(table.dtype)


def by_segment_reduce(table: Tensor, rows: Tensor, indptr: Tensor, weight: Tensor | None) -> Tensor:
    """`bag_sum` by gathering the rows in bounded runs and reducing those segment by segment."""
    wide = widened(table)
    out = wide.new_empty(indptr.numel() - 1, table.shape[1])
    for segments, edges in edge_chunks(indptr, table.shape[1]):
        values = wide.index_select(0, rows[edges])
        if weight is not None:
            values *= weight[edges].to(wide.dtype)[:, None]
        offsets = indptr[segments.start : segments.stop + 1] - edges.start
        out[segments] = torch.segment_reduce(values, "sum", offsets=offsets, axis=0)
    return out.to(table.dtype)


# Which is fastest depends on the machine: the first, unless a tuning table names another.
SUM_STRATEGIES = {
    "embedding_bag": by_embedding_bag,
    "sparse_csr": by_sparse_csr,
    "segment_reduce": by_segment_reduce,
}


@cache
def _silence_beta_warning() -> None:
    """torch says at the first CSR matrix that these are in beta; a user of ours cannot act on that."""
    warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)


def segment_sum(values: Tensor, indptr: Tensor, order: Tensor | None = None) -> Tensor:
    """Sum of `values[order]` ([E, ...]; `order` defaults to 0 .. E-1) over segments of `indptr`: [S, ...]."""
    if order is None:
        order = torch.arange(values.shape[0], device=values.device)
    flat = values.reshape(values.shape[0], prod(values.shape[1:]))
    return bag_sum(flat, order, indptr).view(indptr.numel() - 1, *values.shape[1:])


def segment_max(values: Tensor, indptr: Tensor) -> Tensor:
    """Largest of `values` ([E, D], floating) in each segment: [S, D]; empty segments give -inf."""
    segments = indptr.numel() - 1
    out = values.new_full((segments, values.shape[1]), float("-inf"))
    if values.numel() == 0:
        return out
    rows = torch.repeat_interleave(indptr.diff(), output_size=len(values))
    return out.scatter_reduce_(0, rows[:, None].expand_as(values), values, "amax", include_self=True)


def chunk_limit(device: torch.device, width: int) -> int:
    """How many rows of `width` elements a temporary may have on this device; at least 1."""
    elements = min(CHUNK_ELEMENTS, CPU_CHUNK_ELEMENTS) if device.type == "cpu" else CHUNK_ELEMENTS
    return max(1, elements // max(1, width))


def row_chunks(indptr: Tensor, width: int) -> list[tuple[int, int]]:
    """Cut the segments into runs whose [edges, width] temporaries stay in bounds (one device sync a run).

    Returns (first, end) segment numbers; a single segment longer than the bound is a run of its own.
    """
    segments = indptr.numel() - 1
    limit = chunk_limit(indptr.device, width)
    if int(indptr[-1]) <= limit:
        return [(0, segments)] if segments else []
    ends, first = [], 0
    while first < segments:
        reach = torch.searchsorted(indptr, indptr[first] + limit, right=True)
        end = min(segments, max(first + 1, int(reach) - 1))
        ends.append((first, end))
        first = end
    return ends


def edge_chunks(indptr: Tensor, width: int) -> list[tuple[slice, slice]]:
    """`row_chunks` as slices: (segments, their edges), device syncs as there."""
    return [(slice(a, b), slice(int(indptr[a]), int(indptr[b]))) for a, b in row_chunks(indptr, width)]


def edge_slices(n_edges: int, device: torch.device, width: int) -> list[slice]:
    """Slices of the edges whose [edges, width] temporaries stay in bounds, wherever segments begin."""
    limit = chunk_limit(device, width)
    return [slice(first, min(first + limit, n_edges)) for first in range(0, n_edges, limit)]


def edge_runs(indptr: Tensor, n_edges: int, width: int) -> list[tuple[slice, slice, Tensor]]:
    """`edge_slices` with the segments they meet, a long segment in several (one device sync).

    Returns (segments, edges, ends): segment `segments.start + i` has edges ends[i] .. ends[i + 1] - 1 of the
    slice, so that sums over slices add up to those over segments. Example: indptr = [0, 1, 4, 5], slices of
    3 edges: segments 0 and 1 with ends [0, 1, 3], then 1 and 2 with ends [0, 1, 2].
    """
    slices = edge_slices(n_edges, indptr.device, width)
    if not slices:
        return []
    stops = torch.tensor([[edges.start, edges.stop] for edges in slices], device=indptr.device)
    first = torch.searchsorted(indptr, stops[:, 0].contiguous(), right=True) - 1
    end = torch.searchsorted(indptr, stops[:, 1].contiguous())
    bounds = zip(first.tolist(), end.tolist(), slices, strict=True)
    return [(slice(a, b), e, indptr[a : b + 1].clamp(e.start, e.stop) - e.start) for a, b, e in bounds]
