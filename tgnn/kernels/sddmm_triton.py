"""Triton kernels of sddmm: a dot product or a sum of the two ends of every edge.

Launch: lanes as in `segment_triton`, so that a destination's row is read once for its edges and no list of
destination rows is needed. `dot` steps over [EDGES, ROWS, BLOCK_D] elements, the columns across the threads
of a warp; `add` over [ROWS, EDGES, BLOCK_D], the edges across the threads, as rows are only as wide as there
are heads. Every edge is written once and nothing is left to add up.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.block import Block
from tgnn.kernels.segment_triton import (
    PIECE,
    Cut,
    Source,
    config_of,
    dense_rows,
    lanes,
    launch,
    load_elements,
    pointers,
    row_tile_configs,
)
from tgnn.kernels.spmm_triton import SCALARS, SIZES, sum_back, sum_rows
from tgnn.kernels.tuning import Config, KernelSpec


@triton.jit(do_not_specialize=SIZES)
def edge_dot_kernel(
    indptr, indices, table, rest, rows, dst, winner, out,
    n_rows, n_edges, n_row_tiles, search_steps, n_prefix,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, REST_STRIDE: tl.constexpr,
    DST_STRIDE: tl.constexpr, MEAN: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[e, h] = <dst[v, h], table[rows[u], h]> for every edge e = u -> v, u = indices[e].

    MEAN divides by the edges of v. With winner [n_rows, H * D], the ranks of `spmm_extreme_kernel`, only the
    columns that e won count. Arguments as in `spmm_sum_kernel`.

    Example: indptr = [0, 2], indices = [1, 2], dst = [[10]], table = [[1], [2], [5]]: out = [[20], [50]].
    """
    WIDE: tl.constexpr = tl.float64 if dst.dtype.element_ty == tl.float64 else tl.float32
    head = tl.program_id(1)
    row, start, stop, slot, live = lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE, ROWS)
    begin = tl.load(indptr + row, mask=live, other=0)
    own = dst + row * DST_STRIDE + head * WIDTH
    won_at = row * (HEADS * WIDTH) + head * WIDTH
    for first in range(0, tl.max(stop - start, 0).to(tl.int32), EDGES):
        e = start[None, :] + (first + tl.arange(0, EDGES))[:, None]
        active = e < stop[None, :]
        u = tl.load(indices + e, mask=active, other=0)
        number = u if rows is None else tl.load(rows + u, mask=active, other=0)
        total = tl.zeros([EDGES, ROWS], WIDE)
        for left in tl.static_range(0, WIDTH, BLOCK_D):
            column = left + tl.arange(0, BLOCK_D)
            inside = column < WIDTH
            mask = live[:, None]
            if WIDTH % BLOCK_D != 0:
                mask = mask & inside[None, :]
            value = load_elements(
                table, rest, number, active, head * WIDTH + column, inside, n_prefix,
                STRIDE, REST_STRIDE, WIDTH % BLOCK_D == 0, WIDE,
            )  # fmt: skip
            mine = tl.load(own[:, None] + column[None, :], mask=mask, other=0).to(WIDE)
            product = value * mine[None, :, :]
            if winner is not None:
                won = tl.load(winner + won_at[:, None] + column[None, :], mask=mask, other=0)
                rank = (e - begin[None, :]).to(tl.int32)
                product = tl.where(won[None, :, :] == rank[:, :, None], product, 0)
            total += tl.sum(product, 2)
        if MEAN:
            end = tl.load(indptr + row + 1, mask=live, other=1)
            total /= tl.maximum(end - begin, 1).to(WIDE)[None, :]
        tl.store(out + e * HEADS + head, total.to(out.dtype.element_ty), mask=active)


@triton.jit(do_not_specialize=SIZES)
def edge_add_kernel(
    indptr, indices, dst, src, out, n_rows, n_edges, n_row_tiles, search_steps,
    HEADS: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[e, h] = dst[v, h] + src[u, h] for every edge e = u -> v, u = indices[e].

    Example: indptr = [0, 2], indices = [1, 2], dst = [[10]], src = [[1], [2], [5]]: out = [[12], [15]].
    """
    WIDE: tl.constexpr = tl.float64 if dst.dtype.element_ty == tl.float64 else tl.float32
    head = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = head < HEADS
    row, start, stop, slot, live = lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE, ROWS)
    own = tl.load(
        dst + row[:, None] * HEADS + head[None, :], mask=live[:, None] & inside[None, :], other=0
    ).to(WIDE)
    for first in range(0, tl.max(stop - start, 0).to(tl.int32), EDGES):
        e = start[:, None] + (first + tl.arange(0, EDGES))[None, :]
        active = e < stop[:, None]
        u = tl.load(indices + e, mask=active, other=0).to(tl.int64)
        mask = active[:, :, None] & inside[None, None, :]
        value = tl.load(src + u[:, :, None] * HEADS + head[None, None, :], mask=mask, other=0).to(WIDE)
        value += own[:, None, :]
        place = out + e[:, :, None] * HEADS + head[None, None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=mask)


def edge_dot(
    block: Block, dst: Tensor, source: Source, heads: int, out_type: torch.dtype, *,
    mean: bool = False, winner: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Launch `edge_dot_kernel` on dst [n_dst, H * D] with dense rows: [n_edges, H] in `out_type`."""
    total_width = dst.shape[1]
    width = total_width // max(1, heads)
    cut = Cut.of(block.indptr, block.n_edges)
    out = torch.empty(cut.n_edges, heads, dtype=out_type, device=dst.device)
    if width == 0:
        return out.zero_()
    spec = DOT if winner is None else DOT_OF_WINNERS
    config = config_of(spec, dst, width, cut.n_edges, cut.n_rows)
    rows = config.tiles["ROWS"]
    grid = (cut.programs(rows) if cut.n_edges else 0, heads)
    launch(
        spec, config, grid, block.indptr, block.indices.contiguous(), source.table, source.rest, source.rows,
        dst, winner, out,
        cut.n_rows, cut.n_edges, cut.row_tiles(rows), cut.search_steps, source.n_prefix,
        HEADS=heads, WIDTH=width, **source.strides, DST_STRIDE=dst.stride(0), MEAN=mean, PIECE=cut.piece,
    )  # fmt: skip
    return out


def edge_add(block: Block, dst: Tensor, src: Tensor) -> Tensor:
    """Launch `edge_add_kernel` on contiguous dst [n_dst, H], src [n_src, H]: [n_edges, H] in src's dtype."""
    heads = src.shape[1]
    cut = Cut.of(block.indptr, block.n_edges)
    out = src.new_empty(cut.n_edges, heads)
    config = config_of(ADD, src, heads, cut.n_edges, cut.n_rows)
    rows = config.tiles["ROWS"]
    grid = (cut.programs(rows) if cut.n_edges else 0, -(-heads // config.tiles["BLOCK_D"]))
    launch(
        ADD, config, grid, block.indptr, block.indices.contiguous(), dst, src, out,
        cut.n_rows, cut.n_edges, cut.row_tiles(rows), cut.search_steps, HEADS=heads, PIECE=cut.piece,
    )  # fmt: skip
    return out


def sddmm_triton(block: Block, dst: Tensor, src: Tensor, op: str) -> Tensor:
    """`sddmm` by Triton kernels."""
    return (_Dot if op == "dot" else _Add).apply(block, dst, src)


class _Dot(torch.autograd.Function):
    """The gradient at one end is the sum of the rows at the other end, weighted by the edges' gradients."""

    @staticmethod
    def forward(ctx, block, dst, src):
        ctx.block = block
        ctx.save_for_backward(dst, src)
        return edge_dot(block, dense_rows(dst), Source(dense_rows(src)), src.shape[1], src.dtype)

    @staticmethod
    def backward(ctx, grad):
        block, (dst, src), grad = ctx.block, ctx.saved_tensors, grad.contiguous()
        grad_dst = grad_src = None
        if ctx.needs_input_grad[1]:
            grad_dst = sum_rows(
                block.indptr, block.indices.contiguous(), block.n_edges, Source(dense_rows(src)),
                src.shape[1], dst.dtype, weight=grad,
            ).view(dst.shape)  # fmt: skip
        if ctx.needs_input_grad[2]:
            grad_src = sum_back(block.transposed, dst, src.shape[1], src.dtype, weight=grad).view(src.shape)
        return None, grad_dst, grad_src


class _Add(torch.autograd.Function):
    """The gradient at each end is the sum of its edges' gradients."""

    @staticmethod
    def forward(ctx, block, dst, src):
        ctx.block, ctx.dtypes = block, (dst.dtype, src.dtype)
        return edge_add(block, dst.contiguous(), src.contiguous())

    @staticmethod
    def backward(ctx, grad):
        block, back, source = ctx.block, ctx.block.transposed, Source(dense_rows(grad))
        grad_dst = grad_src = None
        if ctx.needs_input_grad[1]:
            grad_dst = sum_rows(block.indptr, None, block.n_edges, source, 1, ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            grad_src = sum_rows(back.indptr, back.edge, block.n_edges, source, 1, ctx.dtypes[1])
        return None, grad_dst, grad_src


def _dot_signature(winner: torch.dtype | None, dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = {"indptr": torch.int64, "indices": index, "table": dtype, "rest": None, "rows": None}
    names |= {"dst": dtype, "winner": winner, "out": dtype}
    constexprs = ("HEADS", "WIDTH", "STRIDE", "REST_STRIDE", "DST_STRIDE", "MEAN", "PIECE")
    constexprs += ("ROWS", "EDGES", "BLOCK_D")
    return {**pointers(names), **SCALARS, **dict.fromkeys(constexprs, "constexpr")}


def _dot_constants(width: int) -> dict[str, Any]:
    strides = {"STRIDE": width, "REST_STRIDE": 0, "DST_STRIDE": width}
    return {"HEADS": 1, "WIDTH": width, **strides, "MEAN": False, "PIECE": PIECE, "rest": None, "rows": None}


def _add_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = {"indptr": torch.int64, "indices": index, "dst": dtype, "src": dtype, "out": dtype}
    scalars = {name: kind for name, kind in SCALARS.items() if name != "n_prefix"}
    constexprs = ("HEADS", "PIECE", "ROWS", "EDGES", "BLOCK_D")
    return {**pointers(names), **scalars, **dict.fromkeys(constexprs, "constexpr")}


def _add_configs(heads: int) -> tuple[Config, ...]:
    block_d = min(32, triton.next_power_of_2(max(1, heads)))
    return tuple(
        Config({"ROWS": max(1, rows // block_d), "EDGES": edges, "BLOCK_D": block_d}, 1, 1)
        for rows, edges in ((16, 8), (8, 16), (32, 8), (16, 16))
    )


DOT = KernelSpec(
    "edge_dot",
    "sddmm",
    edge_dot_kernel,
    lambda dtype, index: _dot_signature(None, dtype, index),
    lambda width: _dot_constants(width) | {"winner": None},
    lambda width: row_tile_configs(width, 8),
)
DOT_OF_WINNERS = KernelSpec(
    "edge_dot_of_winners",
    "spmm",
    edge_dot_kernel,
    lambda dtype, index: _dot_signature(torch.int32, dtype, index),
    _dot_constants,
    lambda width: row_tile_configs(width, 8),
)
ADD = KernelSpec(
    "edge_add",
    "sddmm",
    edge_add_kernel,
    _add_signature,
    lambda heads: {"HEADS": heads, "PIECE": PIECE},
    _add_configs,
)
SPECS = (DOT, DOT_OF_WINNERS, ADD)
