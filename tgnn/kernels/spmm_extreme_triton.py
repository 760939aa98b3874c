"""Triton kernels of spmm max and min.

Launch: as in `spmm_triton`, with a best value and its place for each element of the step's tile, so a step
compares and moves nothing between threads. The winner of an element is kept as the edge's rank in its row
(int32): the lowest one among equals. As in torch, NaN beats everything.

The backward goes over the transposed block and lets an edge's gradient through where the edge won: it reads
more than a scatter would, but adds in a fixed order.
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
    columns,
    config_of,
    dense_rows,
    lanes,
    later_piece,
    launch,
    load_elements,
    pointers,
    row_tile_configs,
    store_sums,
    wide_type,
)
from tgnn.kernels.spmm_triton import SCALARS, SIZES, finish_configs, finish_sum, heads_of, source_of
from tgnn.kernels.tuning import KernelSpec

# Rank of a winner before there is one.
UNSET = tl.constexpr(0x7FFFFFFF)


@triton.jit
def beats(value, best, MAXIMUM: tl.constexpr):
    """Whether `value` takes the place of `best`, which came before it: NaN beats all but NaN."""
    larger = value > best if MAXIMUM else value < best
    return larger | ((value != value) & (best == best))


@triton.jit
def first_best(best, rank, MAXIMUM: tl.constexpr):
    """Over axis 0: the best value among those with a rank, and the lowest rank that has it (UNSET: none)."""
    WORST: tl.constexpr = float("-inf") if MAXIMUM else float("inf")
    has_rank = rank != UNSET
    is_nan = has_rank & (best != best)
    any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    ordered = tl.where(has_rank & (best == best), best, WORST)
    top = tl.max(ordered, 0) if MAXIMUM else tl.min(ordered, 0)
    wins = tl.where(any_nan[None], is_nan, has_rank & (best == top[None]))
    return tl.where(any_nan, float("nan"), top), tl.min(tl.where(wins, rank, UNSET), 0)


@triton.jit(do_not_specialize=SIZES)
def spmm_extreme_kernel(
    indptr, indices, table, rest, rows, weight, out, winner, scratch, scratch_rank,
    n_rows, n_edges, n_row_tiles, search_steps, n_prefix,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, REST_STRIDE: tl.constexpr,
    MAXIMUM: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[v, h, :] = max or min over e of row v of weight[e, h] * table[rows[u], h, :], u = indices[e].

    winner [n_rows, H * D]: the rank in its row of the edge that won. Rows without edges get 0 and no winner.
    Arguments as in `spmm_sum_kernel`.

    Example: indptr = [0, 2, 2], indices = [1, 2], table = [[1], [2], [5]]: max [[5], [0]], winners 1, none.
    """
    WIDE: tl.constexpr = scratch.dtype.element_ty
    head, at, inside = columns(WIDTH, BLOCK_D)
    row, start, stop, slot, live = lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE, ROWS)
    best = tl.zeros([EDGES, ROWS, BLOCK_D], WIDE)
    place_of_best = tl.full([EDGES, ROWS, BLOCK_D], UNSET, tl.int32)
    for first in range(0, tl.max(stop - start, 0).to(tl.int32), EDGES):
        place_in_piece = first + tl.arange(0, EDGES)
        e = start[None, :] + place_in_piece[:, None]
        active = e < stop[None, :]
        u = tl.load(indices + e, mask=active, other=0)
        number = u if rows is None else tl.load(rows + u, mask=active, other=0)
        value = load_elements(
            table, rest, number, active, at, inside, n_prefix, STRIDE, REST_STRIDE, WIDTH % BLOCK_D == 0, WIDE
        )
        if weight is not None:
            value *= tl.load(weight + e * HEADS + head, mask=active, other=0).to(WIDE)[:, :, None]
        better = active[:, :, None] & (beats(value, best, MAXIMUM) | (place_of_best == UNSET))
        best = tl.where(better, value, best)
        place_of_best = tl.where(better, place_in_piece[:, None, None], place_of_best)
    result, rank = first_best(best, place_of_best, MAXIMUM)
    whole = slot < 0
    result = tl.where(whole[:, None] & (rank == UNSET), 0, result)
    mask = live[:, None] & inside[None, :]
    here = row[:, None] * (HEADS * WIDTH) + at[None, :]
    tl.store(out + here, result.to(out.dtype.element_ty), mask=mask & whole[:, None])
    tl.store(winner + here, rank, mask=mask & whole[:, None])
    left = mask & (slot >= 0)[:, None]
    here = slot[:, None] * (HEADS * WIDTH) + at[None, :]
    tl.store(scratch + here, result, mask=left)
    tl.store(scratch_rank + here, rank, mask=left)


@triton.jit(do_not_specialize=SIZES)
def spmm_extreme_finish_kernel(
    indptr, scratch, scratch_rank, out, winner, n_rows, n_edges, n_windows, search_steps,
    WIDTH: tl.constexpr, MAXIMUM: tl.constexpr, PIECE: tl.constexpr,
    EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The best of what the pieces of each longer row left in scratch; equals go to the earlier piece."""
    window = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < WIDTH
    row, start, end, live = later_piece(indptr, window, n_rows, n_edges, search_steps, PIECE)
    begin = tl.load(indptr + row)
    if live & (start == begin + PIECE):
        here = (n_windows + begin // PIECE) * WIDTH + column
        best = tl.load(scratch + here, mask=inside, other=0)
        rank = tl.load(scratch_rank + here, mask=inside, other=0)
        pieces = ((end - start + PIECE - 1) // PIECE).to(tl.int32)
        for k in range(0, pieces, EDGES):
            piece = k + tl.arange(0, EDGES)
            mask = (piece < pieces)[:, None] & inside[None, :]
            parts = (window + piece)[:, None] * WIDTH + column[None, :]
            value = tl.load(scratch + parts, mask=mask, other=0)
            place = tl.load(scratch_rank + parts, mask=mask, other=0) + (piece[:, None] + 1) * PIECE
            value, place = first_best(value, tl.where(mask, place, UNSET), MAXIMUM)
            better = beats(value, best, MAXIMUM)
            best = tl.where(better, value, best)
            rank = tl.where(better, place, rank)
        here = row * WIDTH + column
        tl.store(out + here, best.to(out.dtype.element_ty), mask=inside)
        tl.store(winner + here, rank, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def spmm_extreme_backward_kernel(
    indptr, indices, edge, row_start, winner, weight, grad, out, scratch,
    n_rows, n_edges, n_row_tiles, search_steps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[u, h, :] = sum over edges u -> v of weight[e, h] * grad[v, h, :] where edge e won in v.

    (indptr, indices, edge): the transposed block; row_start: the block's own indptr, from which ranks count.

    Example: as in `spmm_extreme_kernel`, with grad = [[7], [9]]: out = [[0], [0], [7]].
    """
    WIDE: tl.constexpr = scratch.dtype.element_ty
    head, at, inside = columns(WIDTH, BLOCK_D)
    row, start, stop, slot, live = lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE, ROWS)
    total = tl.zeros([EDGES, ROWS, BLOCK_D], WIDE)
    for first in range(0, tl.max(stop - start, 0).to(tl.int32), EDGES):
        e = start[None, :] + (first + tl.arange(0, EDGES))[:, None]
        active = e < stop[None, :]
        v = tl.load(indices + e, mask=active, other=0).to(tl.int64)
        number = tl.load(edge + e, mask=active, other=0)
        rank = (number - tl.load(row_start + v, mask=active, other=0)).to(tl.int32)
        if WIDTH % BLOCK_D == 0:
            mask = active[:, :, None]
        else:
            mask = active[:, :, None] & inside[None, None, :]
        won = tl.load(winner + (v * (HEADS * WIDTH))[:, :, None] + at[None, None, :], mask=mask, other=UNSET)
        value = tl.load(grad + (v * STRIDE)[:, :, None] + at[None, None, :], mask=mask, other=0).to(WIDE)
        value = tl.where(won == rank[:, :, None], value, 0)
        if weight is not None:
            value *= tl.load(weight + number * HEADS + head, mask=active, other=0).to(WIDE)[:, :, None]
        total += value
    result = tl.sum(total, 0)
    store_sums(out, scratch, result, row, slot, live, at, inside, HEADS * WIDTH)


def _forward(
    block: Block, source: Source, weight: Tensor | None, heads: int, maximum: bool, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernels: (out [n_dst, *shape], winner [n_dst, H * D] int32)."""
    total_width = source.table.shape[1]
    heads = heads if weight is not None else 1
    width = total_width // max(1, heads)
    cut = Cut.of(block.indptr, block.n_edges)
    out = source.table.new_empty(cut.n_rows, *shape)
    winner = torch.empty(cut.n_rows, total_width, dtype=torch.int32, device=out.device)
    scratch = cut.scratch(out, total_width, wide_type(out.dtype))
    scratch_rank = cut.scratch(out, total_width, torch.int32)
    if out.numel() == 0:
        return out, winner
    config = config_of(EXTREME, source.table, width, cut.n_edges, cut.n_rows)
    rows = config.tiles["ROWS"]
    launch(
        EXTREME, config, (cut.programs(rows), heads * -(-width // config.tiles["BLOCK_D"])),
        block.indptr, block.indices.contiguous(), source.table, source.rest, source.rows, weight,
        out, winner, scratch, scratch_rank,
        cut.n_rows, cut.n_edges, cut.row_tiles(rows), cut.search_steps, source.n_prefix,
        HEADS=heads, WIDTH=width, **source.strides, MAXIMUM=maximum, PIECE=cut.piece,
    )  # fmt: skip
    config = config_of(EXTREME_FINISH, scratch, total_width)
    launch(
        EXTREME_FINISH, config, (cut.n_windows, -(-total_width // config.tiles["BLOCK_D"])),
        block.indptr, scratch, scratch_rank, out, winner,
        cut.n_rows, cut.n_edges, cut.n_windows, cut.search_steps,
        WIDTH=total_width, MAXIMUM=maximum, PIECE=cut.piece,
    )  # fmt: skip
    return out, winner


def _backward(block: Block, grad: Tensor, winner: Tensor, weight: Tensor | None, heads: int) -> Tensor:
    """Launch the backward kernels: the gradient of x, [n_src, H * D]."""
    total_width = winner.shape[1]
    heads = heads if weight is not None else 1
    width = total_width // max(1, heads)
    back = block.transposed
    cut = Cut.of(back.indptr, block.n_edges)
    out = grad.new_empty(cut.n_rows, total_width)
    if out.numel() == 0:
        return out
    scratch = cut.scratch(out, total_width, wide_type(out.dtype))
    config = config_of(EXTREME_BACKWARD, grad, width, cut.n_edges, cut.n_rows)
    rows = config.tiles["ROWS"]
    launch(
        EXTREME_BACKWARD, config, (cut.programs(rows), heads * -(-width // config.tiles["BLOCK_D"])),
        back.indptr, back.indices, back.edge, block.indptr, winner, weight, grad, out, scratch,
        cut.n_rows, cut.n_edges, cut.row_tiles(rows), cut.search_steps,
        HEADS=heads, WIDTH=width, STRIDE=grad.stride(0), PIECE=cut.piece,
    )  # fmt: skip
    finish_sum(cut, back.indptr, scratch, out, mean=False)
    return out


def extreme(
    block: Block, x: Tensor, weight: Tensor | None, maximum: bool, rows: Tensor | None, rest: Tensor | None
) -> Tensor:
    """`spmm` max or min by Triton kernels; arguments as in `spmm_triton.spmm_triton`."""
    return _Extreme.apply(block, x, weight, maximum, rows, rest)


class _Extreme(torch.autograd.Function):
    """max or min over in-edges; remembers each winner's rank in its row."""

    @staticmethod
    def forward(ctx, block, x, weight, maximum, rows, rest):
        dense = None if weight is None else weight.contiguous()
        out, winner = _forward(block, source_of(x, rows, rest), dense, heads_of(x), maximum, x.shape[1:])
        ctx.block = block
        kept = (x, rows, rest) if ctx.needs_input_grad[2] else (None, None, None)
        ctx.save_for_backward(winner, weight, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        from tgnn.kernels.sddmm_triton import edge_dot

        block, (winner, weight, x, rows, rest) = ctx.block, ctx.saved_tensors
        dense, heads = dense_rows(grad), heads_of(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            of_edge = None if weight is None else weight.contiguous()
            grad_x = _backward(block, dense, winner, of_edge, heads).view(block.n_src, *grad.shape[1:])
        if ctx.needs_input_grad[2]:
            source = source_of(x, rows, rest)
            grad_weight = edge_dot(block, dense, source, heads, weight.dtype, winner=winner)
            grad_weight = grad_weight.view(weight.shape)
        return None, grad_x, grad_weight, None, None, None


def _forward_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = {"indptr": torch.int64, "indices": index, "table": dtype}
    names |= {"rest": None, "rows": None, "weight": None}
    names |= {"out": dtype, "winner": torch.int32, "scratch": wide_type(dtype), "scratch_rank": torch.int32}
    constexprs = ("HEADS", "WIDTH", "STRIDE", "REST_STRIDE", "MAXIMUM", "PIECE", "ROWS", "EDGES", "BLOCK_D")
    return {**pointers(names), **SCALARS, **dict.fromkeys(constexprs, "constexpr")}


def _forward_constants(width: int) -> dict[str, Any]:
    absent = {"rest": None, "rows": None, "weight": None, "REST_STRIDE": 0}
    return {"HEADS": 1, "WIDTH": width, "STRIDE": width, "MAXIMUM": True, "PIECE": PIECE, **absent}


def _finish_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = {"indptr": torch.int64, "scratch": wide_type(dtype), "scratch_rank": torch.int32}
    names |= {"out": dtype, "winner": torch.int32}
    scalars = {"n_rows": "i32", "n_edges": "i32", "n_windows": "i32", "search_steps": "i32"}
    constexprs = ("WIDTH", "MAXIMUM", "PIECE", "EDGES", "BLOCK_D")
    return {**pointers(names), **scalars, **dict.fromkeys(constexprs, "constexpr")}


def _backward_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = dict.fromkeys(("indptr", "indices", "edge", "row_start"), torch.int64)
    names |= {"winner": torch.int32, "weight": None, "grad": dtype, "out": dtype, "scratch": wide_type(dtype)}
    scalars = {name: kind for name, kind in SCALARS.items() if name != "n_prefix"}
    constexprs = ("HEADS", "WIDTH", "STRIDE", "PIECE", "ROWS", "EDGES", "BLOCK_D")
    return {**pointers(names), **scalars, **dict.fromkeys(constexprs, "constexpr")}


EXTREME = KernelSpec(
    "spmm_extreme",
    "spmm",
    spmm_extreme_kernel,
    _forward_signature,
    _forward_constants,
    lambda width: row_tile_configs(width, 4),
)
EXTREME_FINISH = KernelSpec(
    "spmm_extreme_finish",
    "spmm",
    spmm_extreme_finish_kernel,
    _finish_signature,
    lambda width: {"WIDTH": width, "MAXIMUM": True, "PIECE": PIECE},
    finish_configs,
)
EXTREME_BACKWARD = KernelSpec(
    "spmm_extreme_backward",
    "spmm",
    spmm_extreme_backward_kernel,
    _backward_signature,
    lambda width: {"HEADS": 1, "WIDTH": width, "STRIDE": width, "weight": None, "PIECE": PIECE},
    lambda width: row_tile_configs(width, 4),
)
SPECS = (EXTREME, EXTREME_FINISH, EXTREME_BACKWARD)
