"""Triton path of attention: one program a destination (or piece of a long one) and tile of heads, online softmax.

A program keeps running maximum, sum and weighted sum of the values in registers while it reads its edges a tile at a
time; nothing of an edge is written. The forward leaves out and the log-sum-exp of the scores, [n_dst, H], from which
the backward (attention_backward_triton.py) computes the weights again. Rows of more than `pieces.LIMIT` edges go in
pieces that are merged by (maximum, sum, weighted sum) in order (pieces_triton.py).

value and src are read in place whatever the distance of their rows, if a row itself lies in one piece; else they are
copied. Where value and src are one tensor (GATv2) a row is read once.

Example: one destination, one head, scores 0 and log 2, values 2 and 5, an edge at a time: (maximum, sum, weighted sum)
is (0, 1, 2), then, rescaled by exp(0 - log 2), (log 2, 1.5, 6): out = 4, log-sum-exp = log 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels import pieces_triton as pieces
from tgnn.kernels.attention_tiles_triton import kept, load_heads, load_row, load_rows, scores, store_row
from tgnn.kernels.block import Block
from tgnn.kernels.dropout import threshold
from tgnn.kernels.pieces_triton import long_row, piece, short_row
from tgnn.kernels.tuning import Config, KernelSpec, lookup


@triton.jit(do_not_specialize=["key"])
def attention_forward(
    value, src, dst, att, indptr, indices, dst_id, position, out, lse, part_sum, n_dst, n_edges, key,
    KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr, SHARED: tl.constexpr,
    PIECES: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Rows: out [n_dst, H, D] and lse [n_dst, H]. Pieces: the weighted sums, maxima and sums of each slot."""
    ACC: tl.constexpr = lse.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if PIECES:
        row, start, end, live = piece(indptr, n_dst, n_edges, tl.program_id(0), LIMIT)
    else:
        row = place
        start, end, live = short_row(indptr, n_dst, row, LIMIT)
    att_tile = 0.0
    if KIND == "gat":
        dst_tile = load_heads(dst, row + tl.arange(0, 1), tl.arange(0, 1) == 0, head, HEADS, HEADS, ACC)
    else:
        dst_tile = load_row(dst, row, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
        if KIND == "gatv2":
            att_tile = load_row(att, place * 0, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    if DROP > 0:
        ids = tl.load(dst_id + row)
    peak = tl.full((BLOCK_H,), float("-inf"), ACC)
    total = tl.zeros((BLOCK_H,), ACC)
    weighted = tl.zeros((BLOCK_H, BLOCK_D), ACC)
    for first in range(start, end, BLOCK_E):
        edge = first + tl.arange(0, BLOCK_E)
        valid = edge < end
        source = tl.load(indices + edge, mask=valid, other=0).to(tl.int64)
        value_tile = load_rows(value, source, valid, head, VALUE_STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        if SHARED:
            src_tile = value_tile
        elif KIND == "gat":
            src_tile = load_heads(src, source, valid, head, SRC_STRIDE, HEADS, ACC)
        else:
            src_tile = load_rows(src, source, valid, head, SRC_STRIDE, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
        score = scores(dst_tile, src_tile, att_tile, KIND, SLOPE, SCALE)
        score = tl.where(valid[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        weight = tl.exp(score - higher[None, :])
        rescale = tl.exp(peak - higher)
        total = total * rescale + tl.sum(weight, 0)
        if DROP > 0:
            weight *= kept(key, ids, tl.load(position + edge, mask=valid, other=0), head, DROP, BLOCK_H, ACC)
        weighted = weighted * rescale[:, None] + tl.sum(weight[:, :, None] * value_tile, 0)
        peak = higher
    per_head = place * HEADS + head
    inside = live & (head < HEADS)
    if PIECES:
        store_row(out, place, head, weighted, live, HEADS, WIDTH, BLOCK_D)
        tl.store(lse + per_head, peak, mask=inside)
        tl.store(part_sum + per_head, total, mask=inside)
    else:
        divisor = tl.where(total > 0, total, tl.full((), 1.0, ACC))
        store_row(out, place, head, weighted / divisor[:, None], live, HEADS, WIDTH, BLOCK_D)
        tl.store(lse + per_head, tl.where(total > 0, peak, tl.zeros((), ACC)) + tl.log(divisor), mask=inside)


@triton.jit
def attention_merge(
    part_out, part_peak, part_sum, indptr, out, lse, n_dst, n_edges, LIMIT: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out and lse of the long row that starts in each window, from its pieces in order; grid (windows, head tiles)."""
    ACC: tl.constexpr = lse.dtype.element_ty
    window = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row, slot, last, live = long_row(indptr, n_dst, n_edges, window, LIMIT)
    inside = live & (head < HEADS)
    peak = tl.full((BLOCK_H,), float("-inf"), ACC)
    total = tl.zeros((BLOCK_H,), ACC)
    weighted = tl.zeros((BLOCK_H, BLOCK_D), ACC)
    for number in range(window, last + 1):
        at = tl.where(number == window, slot, 2 * number).to(tl.int64)
        part = load_row(part_out, at, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        part_at_peak = tl.load(part_peak + at * HEADS + head, mask=inside, other=0.0)
        higher = tl.maximum(peak, part_at_peak)
        rescale, part_scale = tl.exp(peak - higher), tl.exp(part_at_peak - higher)
        part_total = tl.load(part_sum + at * HEADS + head, mask=inside, other=1.0)
        total = total * rescale + part_total * part_scale
        weighted = weighted * rescale[:, None] + tl.sum(part, 0) * part_scale[:, None]
        peak = higher
    divisor = tl.where(total > 0, total, tl.full((), 1.0, ACC))
    store_row(out, row, head, weighted / divisor[:, None], live, HEADS, WIDTH, BLOCK_D)
    tl.store(lse + row * HEADS + head, peak + tl.log(divisor), mask=inside)


@dataclass(frozen=True)
class Launch:
    """What all kernels of one call share: shapes, strides in elements, constants, and the numbers of dropout."""

    kind: str
    heads: int
    width: int
    score_width: int
    value_stride: int
    src_stride: int
    shared: bool
    slope: float = 0.2
    drop: int = 0
    """Of the 2^16 numbers, how many drop an edge's weight."""
    key: int = 0

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The tile sizes that the widths alone decide."""
        sizes = {"BLOCK_D": self.width, "BLOCK_S": self.score_width}
        return {name: triton.next_power_of_2(size) for name, size in sizes.items()}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that the row kernels of both directions share."""
        return {
            "KIND": self.kind, "SLOPE": self.slope, "SCALE": self.score_width**-0.5, "DROP": self.drop,
            "SHARED": self.shared, "LIMIT": pieces.LIMIT, "HEADS": self.heads, "WIDTH": self.width,
            "SCORE_WIDTH": self.score_width, "VALUE_STRIDE": self.value_stride, "SRC_STRIDE": self.src_stride,
            **self.blocks,
        }  # fmt: skip

    def tiles(self, spec: KernelSpec, x: Tensor, rows: int, edges: int) -> tuple[int, dict[str, Any]]:
        """(head tiles, launch options) of a kernel on x's device and type."""
        config = lookup(spec, x.device, x.dtype, self.width, edges / max(1, rows))
        tiles = dict(config.tiles)
        tiles["BLOCK_H"] = min(tiles["BLOCK_H"], triton.next_power_of_2(self.heads))
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
        return triton.cdiv(self.heads, tiles["BLOCK_H"]), {**tiles, **options}


def in_rows(x: Tensor) -> Tensor:
    """x [n, H, D] or [n, H] itself if each of its rows lies in one piece, else a contiguous copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def wide_dtype(x: Tensor) -> torch.dtype:
    """What sums are accumulated in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def run_forward(
    launch: Launch, block: Block, value: Tensor, src: Tensor, dst: Tensor, att: Tensor | None, out: Tensor, lse: Tensor
) -> None:  # fmt: skip
    """Fill out [n_dst, H, D] and lse [n_dst, H]; the block has edges."""
    spec = SPEC_OF["attention_forward", launch.kind]
    head_tiles, options = launch.tiles(spec, value, block.n_dst, block.n_edges)
    ids, position = (block.dst_id, block.position) if launch.drop else (None, None)
    inputs = (value, src, dst, att, block.indptr, block.indices, ids, position)
    options |= launch.constants
    counts = (block.n_dst, block.n_edges, launch.key)
    attention_forward[block.n_dst, head_tiles](*inputs, out, lse, None, *counts, PIECES=False, **options)
    windows = pieces.windows(block.n_edges, pieces.LIMIT)
    if windows:
        part_out = lse.new_empty(2 * windows, launch.heads, launch.width)
        part_peak, part_sum = lse.new_empty(2, 2 * windows, launch.heads)
        parts = (part_out, part_peak, part_sum)
        attention_forward[2 * windows, head_tiles](*inputs, *parts, *counts, PIECES=True, **options)
        attention_merge[windows, head_tiles](
            *parts, block.indptr, out, lse, block.n_dst, block.n_edges, LIMIT=pieces.LIMIT, HEADS=launch.heads,
            WIDTH=launch.width, BLOCK_H=options["BLOCK_H"], BLOCK_D=options["BLOCK_D"], num_warps=options["num_warps"],
            enable_fp_fusion=True,
        )  # fmt: skip


def attention_triton(
    block: Block, value: Tensor, kind: str, src: Tensor, dst: Tensor, att: Tensor | None = None, *,
    slope: float = 0.2, dropout: float = 0.0, key: int = 0,
) -> Tensor:  # fmt: skip
    """`attention.attention` on Triton kernels; the arguments are checked by the caller."""
    shared = kind == "gatv2" and src is value
    return _Attention.apply(block, value, None if shared else src, dst, att, kind, slope, threshold(dropout), key)


class _Attention(torch.autograd.Function):
    """src is None where it is the value. Saves the inputs, out and lse."""

    @staticmethod
    def forward(ctx, block, value, src, dst, att, kind, slope, drop, key):
        value, dst = in_rows(value), dst.contiguous()
        src = value if src is None else in_rows(src)
        att = None if att is None else att.contiguous()
        launch = Launch(
            kind, value.shape[1], value.shape[2], 1 if kind == "gat" else src.shape[2], value.stride(0), src.stride(0),
            src is value, slope, drop, key,
        )  # fmt: skip
        # The backward needs what the sums were before the cast.
        keeps = any(ctx.needs_input_grad)
        shape = (block.n_dst, *value.shape[1:])
        out = value.new_empty(shape, dtype=wide_dtype(value) if keeps else value.dtype)
        lse = value.new_empty(shape[:2], dtype=wide_dtype(value))
        if block.n_edges and out.numel():
            with torch.cuda.device_of(value):
                run_forward(launch, block, value, src, dst, att, out, lse)
        else:
            out.zero_()
        ctx.block, ctx.launch = block, launch
        ctx.save_for_backward(value, None if src is value else src, dst, att, out, lse)
        return out.to(value.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        from tgnn.kernels.attention_backward_triton import run_backward

        value, src, dst, att, out, lse = ctx.saved_tensors
        needs = dict(zip(("value", "src", "dst", "att"), ctx.needs_input_grad[1:5], strict=True))
        with torch.cuda.device_of(value):
            grads = run_backward(ctx.launch, ctx.block, value, src, dst, att, out, lse, grad.contiguous(), needs)
        return None, *grads, None, None, None, None
