"""Triton kernels of spmm sum and mean, and of every other sum over the rows of a CSR.

Launch: lanes as in `segment_triton`; a step loads EDGES indices of each of ROWS rows, then their
[EDGES, ROWS, BLOCK_D] elements, so EDGES independent 128-bit loads a thread are in flight. The tile's first
axis stays in one thread: the sum over it needs no shuffle. The second grid axis is (head, tile of columns).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.block import Block, Transposed
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
from tgnn.kernels.tuning import Config, KernelSpec

SIZES = ["n_rows", "n_edges", "n_row_tiles", "n_windows", "search_steps", "n_prefix"]


@triton.jit(do_not_specialize=SIZES)
def spmm_sum_kernel(
    indptr, indices, table, rest, rows, weight, edge, scale, out, scratch,
    n_rows, n_edges, n_row_tiles, search_steps, n_prefix,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, REST_STRIDE: tl.constexpr,
    MEAN: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[v, h, :] = sum over e of row v of weight[edge[e], h] * scale[u] * table[rows[u], h, :].

    u = indices[e].
    Any of indices, rows, edge (identity), weight, scale (ones), rest (one-tier table) may be None. MEAN
    divides by the row's edges. Rows longer than PIECE leave parts in scratch for `spmm_finish_kernel`.

    Example: indptr = [0, 2, 2], indices = [1, 2], table = [[1], [2], [5]]: out = [[7], [0]].
    """
    WIDE: tl.constexpr = scratch.dtype.element_ty
    head, at, inside = columns(WIDTH, BLOCK_D)
    row, start, stop, slot, live = lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE, ROWS)
    total = tl.zeros([EDGES, ROWS, BLOCK_D], WIDE)
    for first in range(0, tl.max(stop - start, 0).to(tl.int32), EDGES):
        e = start[None, :] + (first + tl.arange(0, EDGES))[:, None]
        active = e < stop[None, :]
        u = e if indices is None else tl.load(indices + e, mask=active, other=0)
        number = u if rows is None else tl.load(rows + u, mask=active, other=0)
        value = load_elements(
            table, rest, number, active, at, inside, n_prefix, STRIDE, REST_STRIDE, WIDTH % BLOCK_D == 0, WIDE
        )
        if weight is not None:
            of_edge = e if edge is None else tl.load(edge + e, mask=active, other=0)
            value *= tl.load(weight + of_edge * HEADS + head, mask=active, other=0).to(WIDE)[:, :, None]
        if scale is not None:
            value *= tl.load(scale + u, mask=active, other=0).to(WIDE)[:, :, None]
        total += value
    result = tl.sum(total, 0)
    if MEAN:
        count = tl.maximum(stop - start, 1).to(WIDE)
        result = tl.where((slot < 0)[:, None], result / count[:, None], result)
    store_sums(out, scratch, result, row, slot, live, at, inside, HEADS * WIDTH)


@triton.jit(do_not_specialize=SIZES)
def spmm_finish_kernel(
    indptr, scratch, out, n_rows, n_edges, n_windows, search_steps,
    WIDTH: tl.constexpr, MEAN: tl.constexpr, PIECE: tl.constexpr, EDGES: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the parts that pieces left in scratch: the window of a longer row's second piece adds the row's."""
    window = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < WIDTH
    row, start, end, live = later_piece(indptr, window, n_rows, n_edges, search_steps, PIECE)
    begin = tl.load(indptr + row)
    if live & (start == begin + PIECE):
        first = scratch + (n_windows + begin // PIECE) * WIDTH + column
        total = tl.load(first, mask=inside, other=0)
        pieces = ((end - start + PIECE - 1) // PIECE).to(tl.int32)
        for k in range(0, pieces, EDGES):
            piece = k + tl.arange(0, EDGES)
            place = scratch + (window + piece)[:, None] * WIDTH + column[None, :]
            part = tl.load(place, mask=(piece < pieces)[:, None] & inside[None, :], other=0)
            total += tl.sum(part, 0)
        if MEAN:
            total /= (end - begin).to(total.dtype)
        tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(
    indptr: Tensor, indices: Tensor | None, n_edges: int, source: Source, heads: int, out_type: torch.dtype,
    *, weight: Tensor | None = None, edge: Tensor | None = None, scale: Tensor | None = None,
    mean: bool = False, shape: tuple[int, ...] | None = None,
) -> Tensor:  # fmt: skip
    """Launch `spmm_sum_kernel`: [n_rows, *shape] in `out_type`, contiguous; shape: (width of the table,) by default.

    weight [E] or [E, heads]; heads counts only with weights per head, else it is 1.
    """
    heads = heads if weight is not None else 1
    total_width = source.table.shape[1]
    cut = Cut.of(indptr, n_edges)
    # Made in its final shape: what a Function returns may be changed in place only if it is no view.
    out = torch.empty(cut.n_rows, *(shape or (total_width,)), dtype=out_type, device=indptr.device)
    scratch = cut.scratch(out, total_width, wide_type(source.table.dtype))
    width = total_width // max(1, heads)
    if out.numel() == 0:
        return out
    optional = {"rest": source.rest, "rows": source.rows, "weight": weight, "edge": edge, "scale": scale}
    spec = spec_of(frozenset(name for name, tensor in optional.items() if tensor is not None), mean)
    config = config_of(spec, source.table, width, n_edges, cut.n_rows)
    rows = config.tiles["ROWS"]
    tiles = -(-width // config.tiles["BLOCK_D"])
    launch(
        spec, config, (cut.programs(rows), heads * tiles),
        indptr, indices, source.table, source.rest, source.rows, weight, edge, scale, out, scratch,
        cut.n_rows, n_edges, cut.row_tiles(rows), cut.search_steps, source.n_prefix,
        HEADS=heads, WIDTH=width, **source.strides, MEAN=mean, PIECE=cut.piece,
    )  # fmt: skip
    finish_sum(cut, indptr, scratch, out.view(cut.n_rows, total_width), mean=mean)
    return out


def finish_sum(cut: Cut, indptr: Tensor, scratch: Tensor, out: Tensor, *, mean: bool) -> None:
    """Launch `spmm_finish_kernel` where rows may be longer than a piece."""
    width = out.shape[1]
    config = config_of(FINISH, scratch, width)
    launch(
        FINISH, config, (cut.n_windows, -(-width // config.tiles["BLOCK_D"])),
        indptr, scratch, out, cut.n_rows, cut.n_edges, cut.n_windows, cut.search_steps,
        WIDTH=width, MEAN=mean, PIECE=cut.piece,
    )  # fmt: skip


def sum_back(
    back: Transposed, grad: Tensor, heads: int, out_type: torch.dtype, *,
    weight: Tensor | None = None, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over a block's out-edges: grad [n_dst, width] times weight of the edge: [n_src, width]."""
    edge = None if weight is None else back.edge
    return sum_rows(
        back.indptr, back.indices, back.edge.numel(), Source(dense_rows(grad)), heads, out_type,
        weight=weight, edge=edge, scale=scale,
    )  # fmt: skip


def spmm_triton(
    block: Block, x: Tensor, weight: Tensor | None, reduce: str,
    rows: Tensor | None = None, rest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`spmm` by Triton kernels; with `rows` (and `rest`), `gather_spmm` on a table without gradient."""
    if reduce in ("sum", "mean"):
        return _Sum.apply(block, x, weight, reduce == "mean", rows, rest)
    from tgnn.kernels.spmm_extreme_triton import extreme

    return extreme(block, x, weight, reduce == "max", rows, rest)


def source_of(x: Tensor, rows: Tensor | None, rest: Tensor | None) -> Source:
    """The rows of `x` (and `rest`) [n, ...] as kernels read them."""
    rows = None if rows is None else rows.contiguous()
    return Source(dense_rows(x), None if rest is None else dense_rows(rest), rows)


def heads_of(x: Tensor) -> int:
    """Heads of x [n, D] (one) or [n, H, D]."""
    return x.shape[1] if x.dim() == 3 else 1


class _Sum(torch.autograd.Function):
    """Weighted sum or mean over in-edges; backward over the transposed block."""

    @staticmethod
    def forward(ctx, block, x, weight, mean, rows, rest):
        ctx.block, ctx.mean, ctx.n_dims, ctx.dtype = block, mean, x.dim(), x.dtype
        kept = (x, rows, rest) if ctx.needs_input_grad[2] else (None, None, None)
        ctx.save_for_backward(weight, *kept)
        weight = None if weight is None else weight.contiguous()
        return sum_rows(
            block.indptr, block.indices.contiguous(), block.n_edges, source_of(x, rows, rest), heads_of(x),
            x.dtype, weight=weight, mean=mean, shape=x.shape[1:],
        )  # fmt: skip

    @staticmethod
    def backward(ctx, grad):
        from tgnn.kernels.sddmm_triton import edge_dot

        block, (weight, x, rows, rest) = ctx.block, ctx.saved_tensors
        heads = heads_of(grad)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[1]:
            scale = block.degrees.clamp(min=1).to(wide_type(ctx.dtype)).reciprocal() if ctx.mean else None
            of_edge = None if weight is None else weight.contiguous()
            grad_x = sum_back(block.transposed, grad, heads, ctx.dtype, weight=of_edge, scale=scale)
            grad_x = grad_x.view(block.n_src, *grad.shape[1:])
        if ctx.needs_input_grad[2]:
            source = source_of(x, rows, rest)
            grad_weight = edge_dot(block, dense_rows(grad), source, heads, weight.dtype, mean=ctx.mean)
            grad_weight = grad_weight.view(weight.shape)
        return None, grad_x, grad_weight, None, None, None


SCALARS = {"n_rows": "i32", "n_edges": "i32", "n_row_tiles": "i32", "search_steps": "i32", "n_prefix": "i32"}


# Types of the optional arguments; None for that of the table.
OPTIONAL = {"rest": None, "rows": torch.int64, "weight": torch.float32}
OPTIONAL |= {"edge": torch.int64, "scale": torch.float32}


def _sum_spec(name: str, op: str, *given: str, mean: bool = False) -> KernelSpec:
    """The spec of `spmm_sum_kernel` with those of its optional arguments that are `given`."""

    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        optional = {name: (kind or dtype) if name in given else None for name, kind in OPTIONAL.items()}
        names = {"indptr": torch.int64, "indices": index, "table": dtype, **optional, "out": dtype}
        constexprs = ("HEADS", "WIDTH", "STRIDE", "REST_STRIDE", "MEAN", "PIECE", "ROWS", "EDGES", "BLOCK_D")
        constexprs = dict.fromkeys(constexprs, "constexpr")
        return {**pointers({**names, "scratch": wide_type(dtype)}), **SCALARS, **constexprs}

    def constants(width: int) -> dict[str, Any]:
        strides = {"STRIDE": width, "REST_STRIDE": width if "rest" in given else 0}
        absent = {name: None for name in OPTIONAL if name not in given}
        return {"HEADS": 1, "WIDTH": width, **strides, "MEAN": mean, "PIECE": PIECE, **absent}

    def configs(width: int) -> tuple[Config, ...]:
        return row_tile_configs(width, 8)

    return KernelSpec(name, op, spmm_sum_kernel, signature, constants, configs)


def _finish_signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    names = pointers({"indptr": torch.int64, "scratch": wide_type(dtype), "out": dtype})
    scalars = {"n_rows": "i32", "n_edges": "i32", "n_windows": "i32", "search_steps": "i32"}
    return {**names, **scalars, **dict.fromkeys(("WIDTH", "MEAN", "PIECE", "EDGES", "BLOCK_D"), "constexpr")}


def finish_configs(width: int) -> tuple[Config, ...]:
    """One program per long row and tile of columns; EDGES parts a step."""
    block_d = min(256, triton.next_power_of_2(max(1, width)))
    warps = max(1, block_d // 128)
    return tuple(Config({"EDGES": edges, "BLOCK_D": block_d}, warps, 1) for edges in (4, 8, 2))


FINISH = KernelSpec(
    "spmm_finish",
    "spmm",
    spmm_finish_kernel,
    _finish_signature,
    lambda width: {"WIDTH": width, "MEAN": False, "PIECE": PIECE},
    finish_configs,
)
# (optional arguments given, whether it is a mean) -> spec.
SUMS = {
    (frozenset(given), name.endswith("mean")): _sum_spec(name, op, *given, mean=name.endswith("mean"))
    for name, op, given in (
        ("spmm_sum", "spmm", ()),
        ("spmm_mean", "spmm", ()),
        ("spmm_sum_weighted", "spmm", ("weight",)),
        ("spmm_sum_weighted_backward", "spmm", ("weight", "edge")),
        ("spmm_mean_backward", "spmm", ("scale",)),
        ("gather_spmm", "gather_spmm", ("rows",)),
        ("gather_spmm_two_tier", "gather_spmm", ("rows", "rest")),
    )
}
SPECS = (*SUMS.values(), FINISH)


def spec_of(given: frozenset[str], mean: bool) -> KernelSpec:
    """The spec to look up for a launch: the like of it, or else of the sum with or without weights."""
    like = given & {"rows", "rest"} or given & {"weight"}
    return SUMS.get((given, mean)) or SUMS[(like, False)]
