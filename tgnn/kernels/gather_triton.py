"""Triton kernel of gather: rows of a table in one memory, or in two.

Launch: each program copies ROWS rows x BLOCK_D columns; every thread has several independent 128-bit loads in
flight. Elements are copied as integers of their size, whatever their type. Of a two-tier table the rows
beyond the prefix are read where they lie: on a GPU the rest is pinned host memory, which its threads read
over the bus. The backward is a sum over sorted rows (`spmm_triton.sum_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.block import transpose
from tgnn.kernels.segment_triton import Source, config_of, dense_rows, launch, pointers
from tgnn.kernels.spmm_triton import SIZES, sum_rows
from tgnn.kernels.tuning import Config, KernelSpec

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@triton.jit(do_not_specialize=SIZES)
def gather_kernel(
    table, rest, rows, out, n_rows, n_prefix,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, REST_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[i] = table[rows[i]], or rest[rows[i] - n_prefix] from row n_prefix on.

    Example: table = [[1], [2]], rest = [[5]], rows = [2, 0, 2], n_prefix = 2: out = [[5], [1], [5]].
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = i < n_rows
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    place = (table + row * STRIDE)[:, None] + column[None, :]
    if rest is not None:
        # Chosen element by element: a choice between row starts would hide that columns lie side by side.
        beyond = (rest + (row - n_prefix) * REST_STRIDE)[:, None] + column[None, :]
        place = tl.where((row < n_prefix)[:, None], place, beyond)
    if WIDTH % BLOCK_D == 0:
        mask = live[:, None]
    else:
        mask = live[:, None] & (column < WIDTH)[None, :]
    value = tl.load(place, mask=mask)
    tl.store(out + (i * WIDTH)[:, None] + column[None, :], value, mask=mask)


def gather_triton(x: Tensor, rows: Tensor, rest: Tensor | None = None) -> Tensor:
    """`gather` by Triton kernels."""
    return _Gather.apply(x, rows) if rest is None else _rows_of(x, rows, rest)


def _rows_of(x: Tensor, rows: Tensor, rest: Tensor | None) -> Tensor:
    """Launch `gather_kernel`: [m, ...] of x's dtype."""
    out = torch.empty(rows.numel(), *x.shape[1:], dtype=x.dtype, device=x.device)
    kind = INTEGERS[x.element_size()]
    source = Source(dense_rows(x).view(kind), None if rest is None else dense_rows(rest).view(kind))
    width = source.table.shape[1]
    spec = GATHER if rest is None else GATHER_TWO_TIER
    config = config_of(spec, source.table, width)
    tiles = config.tiles
    launch(
        spec, config,
        (-(-rows.numel() // tiles["ROWS"]), -(-width // tiles["BLOCK_D"])),
        source.table, source.rest, rows.contiguous(), dense_rows(out).view(kind),
        rows.numel(), source.n_prefix, WIDTH=width, **source.strides,
    )  # fmt: skip
    return out


class _Gather(torch.autograd.Function):
    """The gradient of a row is the sum over its copies, in their order."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return _rows_of(x, rows, None)

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        back = transpose(torch.arange(rows.numel() + 1, device=rows.device), rows, ctx.shape[0])
        grad_x = sum_rows(back.indptr, back.edge, rows.numel(), Source(dense_rows(grad)), 1, grad.dtype)
        return grad_x.view(ctx.shape), None


def _configs(width: int) -> tuple[Config, ...]:
    block_d = min(256, triton.next_power_of_2(max(1, width)))
    choices = ((2048, 4), (1024, 4), (4096, 4), (1024, 1))
    return tuple(
        Config({"ROWS": max(1, min(256, n // block_d)), "BLOCK_D": block_d}, warps, 1) for n, warps in choices
    )


def _spec(name: str, two_tier: bool) -> KernelSpec:
    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        kind = INTEGERS[dtype.itemsize]
        names = {"table": kind, "rest": kind if two_tier else None, "rows": index, "out": kind}
        constexprs = ("WIDTH", "STRIDE", "REST_STRIDE", "ROWS", "BLOCK_D")
        scalars = {"n_rows": "i32", "n_prefix": "i32"}
        return {**pointers(names), **scalars, **dict.fromkeys(constexprs, "constexpr")}

    def constants(width: int) -> dict[str, Any]:
        absent = {} if two_tier else {"rest": None}
        return {"WIDTH": width, "STRIDE": width, "REST_STRIDE": width if two_tier else 0, **absent}

    return KernelSpec(name, "gather", gather_kernel, signature, constants, _configs)


GATHER = _spec("gather", two_tier=False)
GATHER_TWO_TIER = _spec("gather_two_tier", two_tier=True)
SPECS = (GATHER, GATHER_TWO_TIER)
