"""Triton kernel of keyed dropout, forward and backward: the mask is computed anew from the key, never stored.

A program takes ROWS rows by BLOCK_D columns. One 64-bit number serves four columns, so a tile of numbers is a quarter
as wide as a tile of elements and is spread out by a reshape.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.dropout import threshold
from tgnn.kernels.rng_triton import draw, keyed, lane
from tgnn.kernels.segment_triton import TYPE_NAMES, dense_rows, launch, pointers
from tgnn.kernels.tuning import Config, KernelSpec, lookup


@triton.jit(do_not_specialize=("n_rows", "dropped", "key"))
def dropout_kernel(
    x, ids, out, n_rows, dropped, key, scale,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[i, c] = x[i, c] * scale where 16 bits of (key, ids[i], c), counted from -32768, are `dropped` or more.

    x has rows STRIDE elements apart, out is contiguous. For float64 the scale is 65536 / (65536 - number of dropped
    values), computed here, as an argument would have 32 bits.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = i < n_rows
    state = keyed(key, tl.load(ids + i, mask=live, other=0))
    word = tl.program_id(1) * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
    bits = draw(state[:, None], word[None, :])
    number = lane(bits[:, :, None], tl.arange(0, 4)[None, None, :])
    keep = tl.reshape(number, [ROWS, BLOCK_D]) >= dropped
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if WIDTH % BLOCK_D == 0:
        inside = live[:, None]
    else:
        inside = live[:, None] & (column < WIDTH)[None, :]
    value = tl.load(x + (i * STRIDE)[:, None] + column[None, :], mask=inside, other=0.0)
    if value.dtype == tl.float64:
        value = value * (65536.0 / (32768 - dropped).to(tl.float64))
    else:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + (i * WIDTH)[:, None] + column[None, :], tl.where(keep, value, 0.0), mask=inside)


def dropout_triton(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """`dropout` by a Triton kernel."""
    return _Dropout.apply(x, p, key, ids)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, key, ids):
        ctx.p, ctx.key = p, key
        ctx.save_for_backward(ids)
        return _dropped(x, p, key, ids)

    @staticmethod
    def backward(ctx, grad):
        return _dropped(grad, ctx.p, ctx.key, *ctx.saved_tensors), None, None, None


def _dropped(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Launch `dropout_kernel`; strided columns are copied first."""
    x, ids, (n, width), drop = dense_rows(x), ids.contiguous(), x.shape, threshold(p)
    out = torch.empty(n, width, dtype=x.dtype, device=x.device)
    if out.numel():
        config = lookup(DROPOUT, x.device, x.dtype, width, 0)
        grid = (triton.cdiv(n, config.tiles["ROWS"]), triton.cdiv(width, config.tiles["BLOCK_D"]))
        launch(
            DROPOUT, config, grid, x, ids, out, n, drop - 32768, key, 65536 / (65536 - drop), WIDTH=width,
            STRIDE=x.stride(0),
        )  # fmt: skip
    return out


def _signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
    types = pointers({"x": dtype, "ids": torch.int64, "out": dtype})
    scalars = {"n_rows": "i64", "dropped": "i32", "key": TYPE_NAMES[torch.int64], "scale": "fp32"}
    return {**types, **scalars, **dict.fromkeys(("WIDTH", "STRIDE", "ROWS", "BLOCK_D"), "constexpr")}


def _constants(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "STRIDE": width}


def _configs(width: int) -> tuple[Config, ...]:
    block_d = min(256, max(4, triton.next_power_of_2(max(1, width))))
    choices = ((2048, 4), (1024, 4), (4096, 4))
    return tuple(
        Config({"ROWS": max(1, min(256, size // block_d)), "BLOCK_D": block_d}, warps, 1)
        for size, warps in choices
    )


DROPOUT = KernelSpec("dropout", "dropout", dropout_kernel, _signature, _constants, _configs)
SPECS = (DROPOUT,)
