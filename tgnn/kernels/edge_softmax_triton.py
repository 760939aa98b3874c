"""Triton path of edge_softmax: one program a destination (or piece of a long one) and tile of heads.

A program reads its scores twice, the second time out of a cache: once for their maximum and the sum of
exponentials, once to write. Pieces of long rows (segment_triton.py) leave both numbers; after them every
piece merges those of its row, in order, and writes its edges. The backward, weight * (grad - sum of weight *
grad), runs through the same kernels, with that sum in the place of the maximum and the sum.

Example: scores 0 and log 2: maximum log 2, sum 1.5, weights 1/3 and 2/3.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.attention_tiles_triton import WHOLE_ROW, piece_of
from tgnn.kernels.block import Block
from tgnn.kernels.segment_triton import PIECE, Cut, config_of, later_piece, launch, pointers, wide_type
from tgnn.kernels.tuning import Config, KernelSpec

SIZES = ["n_rows", "n_edges", "n_windows", "search_steps"]


@triton.jit
def load_tile(x, edge, end, head, HEADS: tl.constexpr, ACC: tl.constexpr):
    """x[edge, head] of x [n_edges, HEADS]: [E, BLOCK_H]; 0 from edge `end` on."""
    inside = (edge < end)[:, None] & (head < HEADS)[None, :]
    return tl.load(x + edge[:, None] * HEADS + head[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def collect(
    x, y, start, end, head, BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """(largest x, sum of exp(x - largest)) of edges start .. end - 1; backward (0, sum of x * y)."""
    peak = tl.full((BLOCK_H,), 0.0 if BACKWARD else float("-inf"), ACC)
    total = tl.zeros((BLOCK_H,), ACC)
    for first in range(start, end, BLOCK_E):
        edge = first + tl.arange(0, BLOCK_E)
        tile = load_tile(x, edge, end, head, HEADS, ACC)
        if BACKWARD:
            total += tl.sum(tile * load_tile(y, edge, end, head, HEADS, ACC), 0)
        else:
            tile = tl.where((edge < end)[:, None], tile, float("-inf"))
            higher = tl.maximum(peak, tl.max(tile, 0))
            total = total * tl.exp(peak - higher) + tl.sum(tl.exp(tile - higher[None, :]), 0)
            peak = higher
    return peak, total


@triton.jit
def write(
    x, y, out, start, end, head, peak, total, BACKWARD: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_E: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """out = exp(x - peak) / total of edges start .. end - 1; backward x * (y - total)."""
    for first in range(start, end, BLOCK_E):
        edge = first + tl.arange(0, BLOCK_E)
        tile = load_tile(x, edge, end, head, HEADS, ACC)
        if BACKWARD:
            tile *= load_tile(y, edge, end, head, HEADS, ACC) - total[None, :]
        else:
            tile = tl.exp(tile - peak[None, :]) / total[None, :]
        inside = (edge < end)[:, None] & (head < HEADS)[None, :]
        tl.store(out + edge[:, None] * HEADS + head[None, :], tile.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def edge_softmax_kernel(
    x, y, indptr, out, part_peak, part_sum, n_rows, n_edges, search_steps,
    BACKWARD: tl.constexpr, PIECE: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """x scores, y None, out weights; backward: x weights, y their gradient, out the scores'."""
    ACC: tl.constexpr = part_sum.dtype.element_ty
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    place = tl.program_id(0).to(tl.int64)
    row, start, end, slot = piece_of(indptr, place, n_rows, n_edges, search_steps, PIECE)
    peak, total = collect(x, y, start, end, head, BACKWARD, HEADS, BLOCK_E, BLOCK_H, ACC)
    if slot == WHOLE_ROW:
        write(x, y, out, start, end, head, peak, total, BACKWARD, HEADS, BLOCK_E, ACC)
    elif slot >= 0:
        tl.store(part_peak + slot * HEADS + head, peak, mask=head < HEADS)
        tl.store(part_sum + slot * HEADS + head, total, mask=head < HEADS)


@triton.jit(do_not_specialize=SIZES)
def edge_softmax_finish_kernel(
    x, y, indptr, out, part_peak, part_sum, n_rows, n_edges, n_windows, search_steps,
    BACKWARD: tl.constexpr, PIECE: tl.constexpr, HEADS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write the edges of the later piece that starts in a window; a first piece's with the second's."""
    ACC: tl.constexpr = part_sum.dtype.element_ty
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    window = tl.program_id(0).to(tl.int64)
    row, start, end, live = later_piece(indptr, window, n_rows, n_edges, search_steps, PIECE)
    if live:
        begin = tl.load(indptr + row)
        peak = tl.full((BLOCK_H,), 0.0 if BACKWARD else float("-inf"), ACC)
        total = tl.zeros((BLOCK_H,), ACC)
        pieces = ((end - begin + PIECE - 1) // PIECE).to(tl.int32)
        for number in range(0, pieces):
            slot = begin // PIECE + tl.where(number == 0, n_windows, number)
            part = tl.load(part_sum + slot * HEADS + head, mask=head < HEADS, other=1.0)
            if BACKWARD:
                total += part
            else:
                part_max = tl.load(part_peak + slot * HEADS + head, mask=head < HEADS, other=0.0)
                higher = tl.maximum(peak, part_max)
                total = total * tl.exp(peak - higher) + part * tl.exp(part_max - higher)
                peak = higher
        first = tl.where(start == begin + PIECE, begin, start)
        stop = tl.minimum(start + PIECE, end)
        write(x, y, out, first, stop, head, peak, total, BACKWARD, HEADS, BLOCK_E, ACC)


def _run(block: Block, x: Tensor, y: Tensor | None, out: Tensor) -> None:
    """Fill `out` [n_edges, H] from x, and in the backward y, contiguous ones."""
    heads, wide = x.shape[1], wide_type(x.dtype)
    cut = Cut.of(block.indptr, block.n_edges)
    parts = [cut.scratch(x, heads, wide) for _ in range(2)]
    backward = y is not None
    for spec, programs, scalars in (
        (ROWS[backward], cut.n_rows + cut.n_windows, (cut.n_rows, cut.n_edges, cut.search_steps)),
        (FINISH[backward], cut.n_windows, (cut.n_rows, cut.n_edges, cut.n_windows, cut.search_steps)),
    ):
        config = config_of(spec, x, heads, cut.n_edges, cut.n_rows)
        grid = (programs, triton.cdiv(heads, config.tiles["BLOCK_H"]))
        constants = {"BACKWARD": backward, "PIECE": cut.piece, "HEADS": heads}
        launch(spec, config, grid, x, y, block.indptr, out, *parts, *scalars, **constants)


def edge_softmax_triton(block: Block, score: Tensor) -> Tensor:
    """`edge_softmax.edge_softmax` on Triton kernels; the arguments are checked by the caller."""
    return _EdgeSoftmax.apply(block, score)


class _EdgeSoftmax(torch.autograd.Function):
    """Saves the weights, before the cast of half types."""

    @staticmethod
    def forward(ctx, block, score):
        score = score.contiguous()
        dtype = wide_type(score.dtype) if ctx.needs_input_grad[1] else score.dtype
        weight = torch.empty(score.shape, dtype=dtype, device=score.device)
        if score.numel():
            _run(block, score, None, weight)
        ctx.block, ctx.dtype = block, score.dtype
        ctx.save_for_backward(weight)
        return weight.to(score.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        out = torch.empty(weight.shape, dtype=ctx.dtype, device=weight.device)
        if out.numel():
            _run(ctx.block, weight, grad.contiguous(), out)
        return None, out


def _spec(kernel: Any, backward: bool) -> KernelSpec:
    """The spec of one of the kernels; its width is the number of heads."""

    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        wide = wide_type(dtype)
        y = dtype if backward else None
        types = pointers({
            "x": wide if backward else dtype, "y": y, "indptr": torch.int64,
            "out": dtype if backward else wide, "part_peak": wide, "part_sum": wide,
        })  # fmt: skip
        scalars = {name: "i32" for name in SIZES if name in kernel.arg_names}
        constants = {name: "constexpr" for name in kernel.arg_names if name.isupper()}
        return {**types, **scalars, **constants}

    def constants(width: int) -> dict[str, Any]:
        return {"BACKWARD": backward, "PIECE": PIECE, "HEADS": width, **({} if backward else {"y": None})}

    name = kernel.fn.__name__.removesuffix("_kernel") + ("_backward" if backward else "")
    return KernelSpec(name, "edge_softmax", kernel, signature, constants, _configs)


def _configs(width: int) -> tuple[Config, ...]:
    """A lane an edge, with its heads in one load; the width is the number of heads."""
    block_h = min(8, triton.next_power_of_2(max(1, width)))
    return tuple(
        Config({"BLOCK_E": edges, "BLOCK_H": block_h}, num_warps=1, num_stages=1) for edges in (32, 16, 64)
    )


ROWS = {backward: _spec(edge_softmax_kernel, backward) for backward in (False, True)}
FINISH = {backward: _spec(edge_softmax_finish_kernel, backward) for backward in (False, True)}
SPECS = (*ROWS.values(), *FINISH.values())
