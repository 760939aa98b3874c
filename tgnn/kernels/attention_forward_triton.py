"""Forward of the Triton attention: one program a destination (or piece of a long one) and tile of heads.

A program keeps running maximum, sum and weighted sum of the values in registers while it reads its edges a
tile at a time; nothing of an edge is written. The forward leaves out and the log-sum-exp of the scores,
[n_dst, H], from which the backward (attention_backward_triton.py) computes the weights again. Rows of more
than PIECE edges go in pieces (segment_triton.py) that are merged by (maximum, sum, weighted sum) in order.

value and src are read in place whatever the distance of their rows, if a row itself lies in one piece; else
they are copied. Where value and src are one tensor (GATv2) a row is read once.

Example: one destination, one head, scores 0 and log 2, values 2 and 5, an edge at a time: (maximum, sum,
weighted sum) is (0, 1, 2), then, rescaled by exp(0 - log 2), (log 2, 1.5, 6): out = 4, log-sum-exp = log 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.attention_tiles_triton import (
    WHOLE_ROW,
    kept,
    load_att,
    load_end,
    load_ends,
    load_row,
    load_rows,
    piece_of,
    scores,
    store_row,
)
from tgnn.kernels.block import Block
from tgnn.kernels.segment import HALF_TYPES
from tgnn.kernels.segment_triton import PIECE, Cut, config_of, later_piece, pointers, wide_type
from tgnn.kernels.segment_triton import launch as run
from tgnn.kernels.tuning import Config, KernelSpec

KINDS = ("gat", "gatv2", "dot")
SPEC_HEADS = 4
HALF = 32768  # dropout of one half, for the specifications of kernels with dropout
SIZES = ["n_rows", "n_edges", "n_windows", "search_steps", "key"]
# (kind, 0 or HALF) -> specification of a row kernel
Specs = dict[tuple[str, int], KernelSpec]


@triton.jit(do_not_specialize=SIZES)
def attention_forward(
    value, src, dst, att, indptr, indices, dst_id, position, out, lse, part_out, part_peak, part_sum,
    n_rows, n_edges, search_steps, key,
    KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr, SHARED: tl.constexpr,
    PIECE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [n_dst, H, D] and lse [n_dst, H]; pieces leave their weighted sum, maximum and sum in part_*."""
    ACC: tl.constexpr = lse.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row, start, end, slot = piece_of(indptr, place, n_rows, n_edges, search_steps, PIECE)
    att_tile = load_att(att, head, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    dst_tile = load_end(dst, row, head, HEADS * SCORE_WIDTH, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
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
        else:
            src_tile = load_ends(
                src, source, valid, head, SRC_STRIDE, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC
            )
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
    inside = head < HEADS
    if slot == WHOLE_ROW:
        divisor = tl.where(total > 0, total, tl.full((), 1.0, ACC))
        store_row(out, row, head, weighted / divisor[:, None], HEADS, WIDTH, BLOCK_D)
        peak = tl.where(total > 0, peak, tl.zeros((), ACC))
        tl.store(lse + row * HEADS + head, peak + tl.log(divisor), mask=inside)
    elif slot >= 0:
        store_row(part_out, slot, head, weighted, HEADS, WIDTH, BLOCK_D)
        tl.store(part_peak + slot * HEADS + head, peak, mask=inside)
        tl.store(part_sum + slot * HEADS + head, total, mask=inside)


@triton.jit(do_not_specialize=SIZES)
def attention_merge(
    part_out, part_peak, part_sum, indptr, out, lse, n_rows, n_edges, n_windows, search_steps,
    PIECE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out and lse of each longer row from its pieces, in order: the window of its second piece does."""
    ACC: tl.constexpr = lse.dtype.element_ty
    window = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < HEADS
    row, start, end, live = later_piece(indptr, window, n_rows, n_edges, search_steps, PIECE)
    begin = tl.load(indptr + row)
    if live & (start == begin + PIECE):
        peak = tl.full((BLOCK_H,), float("-inf"), ACC)
        total = tl.zeros((BLOCK_H,), ACC)
        weighted = tl.zeros((BLOCK_H, BLOCK_D), ACC)
        pieces = ((end - begin + PIECE - 1) // PIECE).to(tl.int32)
        for number in range(0, pieces):
            slot = tl.where(number == 0, n_windows + begin // PIECE, window + number - 1)
            part = load_row(part_out, slot, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
            part_max = tl.load(part_peak + slot * HEADS + head, mask=inside, other=0.0)
            higher = tl.maximum(peak, part_max)
            rescale, part_scale = tl.exp(peak - higher), tl.exp(part_max - higher)
            total = (
                total * rescale + tl.load(part_sum + slot * HEADS + head, mask=inside, other=1.0) * part_scale
            )
            weighted = weighted * rescale[:, None] + tl.sum(part, 0) * part_scale[:, None]
            peak = higher
        store_row(out, row, head, weighted / total[:, None], HEADS, WIDTH, BLOCK_D)
        tl.store(lse + row * HEADS + head, peak + tl.log(total), mask=inside)


@dataclass(frozen=True)
class Launch:
    """What all kernels of one call share: shapes, strides in elements, constants, numbers of dropout."""

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
    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that the row kernels of both directions share, but PIECE and the tiles."""
        return {
            "KIND": self.kind, "SLOPE": self.slope, "SCALE": self.score_width**-0.5, "DROP": self.drop,
            "SHARED": self.shared, "HEADS": self.heads, "WIDTH": self.width, "SCORE_WIDTH": self.score_width,
            "VALUE_STRIDE": self.value_stride, "SRC_STRIDE": self.src_stride,
            "BLOCK_D": triton.next_power_of_2(self.width),
            "BLOCK_S": triton.next_power_of_2(self.score_width),
        }  # fmt: skip

    def choose(self, specs: Specs, x: Tensor, cut: Cut) -> tuple[KernelSpec, Config, int]:
        """(row kernel, its configuration for this many heads, tiles of heads)."""
        spec = specs[self.kind, HALF if self.drop else 0]
        config = config_of(spec, x, self.width, cut.n_edges, cut.n_rows)
        # Fewer heads than a tile would take leave room for more edges.
        block_h = min(config.tiles["BLOCK_H"], triton.next_power_of_2(self.heads))
        block_e = min(32, config.tiles["BLOCK_E"] * config.tiles["BLOCK_H"] // block_h)
        config = replace(config, tiles={"BLOCK_E": block_e, "BLOCK_H": block_h})
        return spec, config, triton.cdiv(self.heads, block_h)

    def keys(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        """dst_id and position of the block where there is dropout, contiguous."""
        return (block.dst_id.contiguous(), block.position.contiguous()) if self.drop else (None, None)


def build_spec(
    kernel: Any, kind: str, tile_elements: int, drop: int = 0, tile_edges: int = 8, edge_elements: int = 256
) -> KernelSpec:  # fmt: skip
    """The row kernel `kernel` for one kind, as it is launched on 4 heads of equal widths.

    tile_elements: of a tile of the default configuration, per warp; tile_edges: the most that a tile has;
    edge_elements: of one edge, per warp. drop > 0: with attention dropout.
    """
    name = kernel.fn.__name__ + f"_{kind}" + ("_dropout" if drop else "")
    absent = {"grad_src", "part_src"} if kind == "gatv2" else {"att", "grad_att"}
    absent |= set() if drop else {"dst_id", "position", "edges"}

    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        def type_of(argument: str) -> torch.dtype | None:
            if argument in absent:
                return None
            if argument in ("indptr", "dst_id", "position", "edges"):
                return torch.int64
            wide = argument in ("out", "lse", "delta", "grad_att") or argument.startswith("part_")
            return index if argument == "indices" else wide_type(dtype) if wide else dtype

        scalars = {
            "n_rows": "i32",
            "n_edges": "i32",
            "search_steps": "i32",
            "key": "i64",
            "places": "i32",
            "rows": "i32",
        }
        types = {argument: "constexpr" for argument in kernel.arg_names if argument.isupper()} | scalars
        types |= pointers({name: type_of(name) for name in kernel.arg_names if name not in types})
        return {argument: types[argument] for argument in kernel.arg_names}

    def constants(width: int) -> dict[str, Any]:
        stride = SPEC_HEADS * width
        ends = (1, stride, SPEC_HEADS) if kind == "gat" else (width, stride, stride)
        launch = Launch(kind, SPEC_HEADS, width, *ends, shared=kind == "gatv2", drop=drop)
        return (
            launch.constants | {"PIECE": PIECE} | {name: None for name in kernel.arg_names if name in absent}
        )

    def configs(width: int) -> tuple[Config, ...]:
        return _configs(width, tile_elements, tile_edges, edge_elements)

    # Where a row is read once for both its uses, Triton 3.6 keeps half types beside what they are widened to.
    halves = kernel is attention_forward and kind == "gatv2"
    doubled = (torch.float64, *(HALF_TYPES if halves else ()))
    return KernelSpec(name, "attention", kernel, signature, constants, configs, doubled)


def _configs(width: int, tile_elements: int, tile_edges: int, edge_elements: int) -> tuple[Config, ...]:
    """Tiles of up to 4 heads and `edge_elements` an edge, one warp for each so many; the first is the default."""
    block_d = triton.next_power_of_2(width)
    found, default = [], edge_elements
    for elements, edge_elements in ((tile_elements, default), (tile_elements // 2, default), (tile_elements, 128),
                                    (tile_elements, 256), (2 * tile_elements, default),
                                    (tile_elements, 512)):  # fmt: skip
        block_h = max(1, min(4, edge_elements // block_d))
        warps = min(16, max(1, block_h * block_d // edge_elements))
        block_e = max(1, min(tile_edges, warps * elements // (block_h * block_d)))
        config = Config({"BLOCK_E": block_e, "BLOCK_H": block_h}, num_warps=warps, num_stages=1)
        found += [] if config in found else [config]
    return tuple(found)


def _merge_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    wide = wide_type(dtype)
    names = {name: wide for name in ("part_out", "part_peak", "part_sum")}
    # out is wide where a backward follows.
    names |= {"indptr": torch.int64, "out": wide, "lse": wide}
    scalars = dict.fromkeys(("n_rows", "n_edges", "n_windows", "search_steps"), "i32")
    constants = dict.fromkeys(("PIECE", "HEADS", "WIDTH", "BLOCK_H", "BLOCK_D"), "constexpr")
    return {**pointers(names), **scalars, **constants}


def _merge_constants(width: int) -> dict[str, Any]:
    return {"PIECE": PIECE, "HEADS": SPEC_HEADS, "WIDTH": width, "BLOCK_D": triton.next_power_of_2(width)}


def _merge_configs(width: int) -> tuple[Config, ...]:
    """Few rows are long, so tiles are small; each lane has eight columns by default."""
    block_d = triton.next_power_of_2(width)
    warps = max(1, min(4, block_d // 256))
    heads = max(1, min(4, 256 // block_d))
    choices = ((heads, warps), (max(1, heads // 2), warps), (heads, 2 * warps))
    return tuple(Config({"BLOCK_H": block_h}, of_warps, 1) for block_h, of_warps in dict.fromkeys(choices))


FORWARD = {
    (kind, drop): build_spec(attention_forward, kind, 1024, drop) for kind in KINDS for drop in (0, HALF)
}
MERGE = KernelSpec(
    "attention_merge", "attention", attention_merge, _merge_signature, _merge_constants, _merge_configs
)
SPECS = (*FORWARD.values(), MERGE)


def run_forward(
    launch: Launch, block: Block, value: Tensor, src: Tensor, dst: Tensor, att: Tensor | None, out: Tensor,
    lse: Tensor
) -> None:  # fmt: skip
    """Fill out [n_dst, H, D] and lse [n_dst, H]; the block has edges."""
    cut = Cut.of(block.indptr, block.n_edges)
    spec, config, head_tiles = launch.choose(FORWARD, value, cut)
    parts = [cut.scratch(lse, launch.heads * size, lse.dtype) for size in (launch.width, 1, 1)]
    run(
        spec, config, (cut.n_rows + cut.n_windows, head_tiles),
        value, src, dst, att, block.indptr, block.indices, *launch.keys(block), out, lse, *parts,
        cut.n_rows, cut.n_edges, cut.search_steps, launch.key, **launch.constants, PIECE=cut.piece,
    )  # fmt: skip
    merge = config_of(MERGE, parts[0], launch.width, cut.n_edges, cut.n_rows)
    run(
        MERGE, merge, (cut.n_windows, triton.cdiv(launch.heads, merge.tiles["BLOCK_H"])),
        *parts, block.indptr, out, lse, cut.n_rows, cut.n_edges, cut.n_windows, cut.search_steps,
        PIECE=cut.piece, HEADS=launch.heads, WIDTH=launch.width, BLOCK_D=launch.constants["BLOCK_D"],
    )  # fmt: skip
