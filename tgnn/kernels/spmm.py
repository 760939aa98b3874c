"""spmm: aggregate source rows over each destination's in-edges.

    out[v] = reduce over edges u -> v of weight[u -> v] * x[u],     reduce = sum, mean, max or min

Half types are accumulated in float32 and cast once, forward and backward (a mean is divided before the cast).
The backward sums over the transposed block, edge by edge in a fixed order, so it is deterministic. `max` and
`min` give the whole gradient of a tie to the edge of the lowest position. A destination without edges gets 0
for every reduction.

Example: edges 1 -> 0 and 2 -> 0, none into row 1, x = [[1], [2], [5]]:
sum [[7], [0]], mean [[3.5], [0]], max [[5], [0]], min [[2], [0]].
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels.backend import choose
from tgnn.kernels.block import Block
from tgnn.kernels.segment import bag_sum, chunk_limit, edge_chunks, edge_slices, segment_sum, widened

REDUCTIONS = ("sum", "mean", "max", "min")


def spmm(block: Block, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Aggregate source rows over in-edges; differentiable in `x` and `weight`.

    Args:
        block: n_src sources, n_dst destinations, n_edges edges.
        x: [n_src, D] floating, or [n_src, H, D] with one weight per head; any strides.
        weight: [n_edges], or [n_edges, H] for a three-dimensional x; None stands for ones.
        reduce: `sum`, `mean` (sum over the number of edges, weighted or not), `max` or `min`.

    Returns: [n_dst, D] or [n_dst, H, D] in x's dtype.
    Raises: UserError when shapes do not fit or `reduce` is unknown.
    """
    _check(block, x, weight, reduce)
    if choose("spmm", x) == "triton":
        from tgnn.kernels import spmm_triton

        return spmm_triton.spmm_triton(block, x, weight, reduce)
    return spmm_torch(block, x, weight, reduce)


def spmm_torch(block: Block, x: Tensor, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """`spmm` on torch's own operations; the reference of the Triton path."""
    if reduce in ("sum", "mean"):
        return _Sum.apply(block, x, weight, reduce == "mean")
    heads = x if x.dim() == 3 else x[:, None]
    if weight is not None and weight.dim() == 1:
        weight = weight[:, None]
    out = _Extreme.apply(block, heads, weight, 1 if reduce == "max" else -1)
    return out if x.dim() == 3 else out[:, 0]


def _check(block: Block, x: Tensor, weight: Tensor | None, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        raise wrong("spmm reduce", repr(reduce), f"one of {', '.join(REDUCTIONS)}", "choose one of these")
    if x.dim() not in (2, 3) or x.shape[0] != block.n_src or not x.is_floating_point():
        expected = f"[{block.n_src}, D] or [{block.n_src}, H, D] floating"
        raise wrong("spmm x", f"{tuple(x.shape)} {x.dtype}", expected, "give one row per source")
    if weight is not None and weight.shape != (block.n_edges, *x.shape[1:-1]):
        expected = (block.n_edges, *x.shape[1:-1])
        raise wrong("spmm weight", tuple(weight.shape), expected, "give one weight per edge (and head)")


def _heads_as_rows(indices: Tensor, indptr: Tensor, n_src: int, heads: int) -> tuple[Tensor, Tensor]:
    """CSR of `heads` copies of a block, one after the other: head h reads rows h * n_src .. of the table."""
    offsets = torch.arange(heads, device=indices.device)[:, None]
    rows = (indices.to(torch.int64)[None, :] + offsets * n_src).reshape(-1)
    starts = (indptr[:-1][None, :] + offsets * indices.numel()).reshape(-1)
    return rows, torch.cat([starts, starts.new_tensor([heads * indices.numel()])])


def weighted_sum(indices: Tensor, indptr: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    """`sum over e in row v of weight[e] * x[indices[e]]` for x [n, D] or [n, H, D], weight [E] or [E, H]."""
    if x.dim() == 2:
        return bag_sum(x, indices, indptr, weight)
    n, heads, width = x.shape
    segments = indptr.numel() - 1
    if weight is None:
        return bag_sum(x.reshape(n, heads * width), indices, indptr).view(segments, heads, width)
    rows, starts = _heads_as_rows(indices, indptr, n, heads)
    table = x.transpose(0, 1).reshape(heads * n, width)
    out = bag_sum(table, rows, starts, weight.t().reshape(-1))
    return out.view(heads, segments, width).transpose(0, 1).contiguous()


def edge_dot(block: Block, dst: Tensor, src: Tensor) -> Tensor:
    """`out[e] = <dst[v], src[u]>` over the last axis for every edge; [E] or [E, H], at least float32."""
    wide = torch.float64 if dst.dtype == torch.float64 else torch.float32
    out = torch.empty(block.n_edges, *src.shape[1:-1], dtype=wide, device=src.device)
    for edges in edge_slices(block.n_edges, src.device, prod(src.shape[1:])):
        product = src.index_select(0, block.indices[edges]).to(wide)
        product *= dst.index_select(0, block.dst_rows[edges])
        torch.sum(product, -1, out=out[edges])
    return out


class _Sum(torch.autograd.Function):
    """Weighted sum or mean over in-edges; backward over the transposed block."""

    @staticmethod
    def forward(ctx, block, x, weight, mean):
        ctx.block, ctx.mean, ctx.dtype = block, mean, x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        out = weighted_sum(block.indices, block.indptr, widened(x) if mean else x, weight)
        if mean:
            out /= _divisor(block, out)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        block, (x, weight) = ctx.block, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.mean:
            wide = widened(grad)
            grad = wide / _divisor(block, wide)
        if ctx.needs_input_grad[1]:
            back = block.transposed
            of_edge = None if weight is None else weight.index_select(0, back.edge)
            grad_x = weighted_sum(back.indices, back.indptr, grad, of_edge).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            grad_weight = edge_dot(block, grad, x).to(weight.dtype)
        return None, grad_x, grad_weight, None


def _divisor(block: Block, out: Tensor) -> Tensor:
    """The number of edges of every destination, at least 1, shaped to divide `out` [n_dst, ...]."""
    return block.degrees.clamp(min=1).to(out.dtype).view(-1, *[1] * (out.dim() - 1))


class _Extreme(torch.autograd.Function):
    """max (sign 1) or min (sign -1) over in-edges of x [n_src, H, D]; remembers each winner's edge."""

    @staticmethod
    def forward(ctx, block, x, weight, sign):
        _, heads, width = x.shape
        table = x.reshape(block.n_src, heads * width)
        out = x.new_zeros(block.n_dst, heads * width)
        winner = torch.full(out.shape, -1, dtype=torch.int64, device=x.device)
        for rows, degree in _equal_degrees(block, heads * width):
            edges = block.indptr.index_select(0, rows)[:, None] + torch.arange(degree, device=x.device)
            values = table.index_select(0, block.indices.index_select(0, edges.view(-1)))
            if weight is not None:
                values = _times(
                    values.view(edges.numel(), heads, width), weight.index_select(0, edges.view(-1))
                )
            # max and min over an axis give the first of equal elements, which is the lowest position.
            values = values.view(*edges.shape, heads * width)
            best, rank = values.max(1) if sign > 0 else values.min(1)
            out.index_copy_(0, rows, best.to(out.dtype))
            winner.index_copy_(0, rows, rank.add_(edges[:, :1]))
        ctx.block = block
        ctx.save_for_backward(winner, x if ctx.needs_input_grad[2] else None, weight)
        return out.view(block.n_dst, heads, width)

    @staticmethod
    def backward(ctx, grad):
        block, (winner, x, weight) = ctx.block, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            back = block.transposed
            grad_x = grad.new_empty(block.n_src, *grad.shape[1:])
            for rows, edges in edge_chunks(back.indptr, winner.shape[1]):
                edge = back.edge[edges]
                share = _Extreme.share(winner, grad, back.indices[edges], edge)
                if weight is not None:
                    share = _times(share, weight.index_select(0, edge))
                ends = back.indptr[rows.start : rows.stop + 1] - edges.start
                grad_x[rows] = segment_sum(share, ends)
        if ctx.needs_input_grad[2]:
            grad_weight = torch.empty_like(weight)
            for _, edges in edge_chunks(block.indptr, winner.shape[1]):
                number = torch.arange(edges.start, edges.stop, device=grad.device)
                share = widened(_Extreme.share(winner, grad, block.dst_rows[edges], number))
                grad_weight[edges] = (share * x.index_select(0, block.indices[edges])).sum(-1)
        return None, grad_x, grad_weight, None

    @staticmethod
    def share(winner: Tensor, grad: Tensor, rows: Tensor, edge: Tensor) -> Tensor:
        """The part of `grad` [n_dst, H, D] that belongs to edges `edge` [e] into `rows` [e]: [e, H, D]."""
        share = grad.index_select(0, rows)
        lost = winner.index_select(0, rows) != edge[:, None]
        return share.masked_fill_(lost.view(share.shape), 0)


def _times(values: Tensor, weight: Tensor) -> Tensor:
    """values [e, H, D] times weight [e, H], in float32 at least."""
    wide = widened(values)
    return wide * weight.to(wide.dtype)[..., None]


def _equal_degrees(block: Block, width: int) -> list[tuple[Tensor, int]]:
    """Destinations with edges as (rows, their common degree), in runs of bounded [edges, width]."""
    degrees, order = block.degrees.sort(stable=True)
    values, counts = degrees.unique_consecutive(return_counts=True)
    groups = []
    for rows, degree in zip(order.split(counts.tolist()), values.tolist(), strict=True):
        if degree > 0:
            per_run = chunk_limit(rows.device, width * degree)
            groups += [(run, degree) for run in rows.split(per_run)]
    return groups
