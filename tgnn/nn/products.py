"""Dense products of the layers, by the library that is fastest for them on this machine.

torch sends float32 products to MKL, which uses half the width of the vector units of AMD's CPUs with AVX-512; oneDNN,
which comes with torch too, uses all of it. oneDNN makes a program for every shape that it meets, and mini-batches have
other numbers of rows in every step: large products are made of rows with room behind them (`tgnn.kernels.room`), so
that few shapes occur, and small ones that would go to it, in bfloat16, are made in float32 and then rounded.

All other types and devices are left to torch. Results are equal to torch's up to rounding.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgnn.kernels.room import first_rows, is_plain, rows_with_room, with_room

# Multiplications below which MKL, in float32, is at least as fast as oneDNN: a new shape costs that some 0.3 ms.
LEAST_WORK = 1 << 25


class Linear(nn.Linear):
    """torch's linear layer with `linear` for its product."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], weight [out, in], bias [out]; [..., out]. Twice differentiable."""
    if _suits(x, weight, bias) and _fits_bias(bias, weight):
        return _Linear.apply(x, weight, bias)
    if _is_small_bfloat16(x, weight, bias):
        with torch.autocast("cpu", enabled=False):
            wide = None if bias is None else bias.float()
            return F.linear(x.float(), weight.float(), wide).to(torch.bfloat16)
    return F.linear(x, weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total [n, out] + x [n, in] weight^T; total, which must be nobody else's, may be written to."""
    if _suits(x, weight, total) and total.shape == (len(x), len(weight)):
        return _AddLinear.apply(total, x, weight)
    if total.dtype == x.dtype == weight.dtype:
        return total.addmm_(x, weight.t())
    return torch.addmm(total, x, weight.t())


@functools.cache
def onednn_is_faster() -> bool:
    """Whether large float32 products are faster by oneDNN: on CPUs with AVX-512 that are not Intel's."""
    try:
        there = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._linear_pointwise)
    except (AttributeError, RuntimeError):
        return False
    return there and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() != "GenuineIntel"


def _vendor(about: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's maker as Linux tells it; MKL's own where nothing does."""
    try:
        text = about.read_text()
    except OSError:
        return "GenuineIntel"
    found = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("vendor_id")]
    return found[0] if found else "GenuineIntel"


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, with room behind it."""
    roomy = with_room(x)
    if roomy is None:
        roomy = with_room(rows_with_room(x, len(x)).copy_(x))
    return first_rows(_by_onednn(roomy, weight.contiguous(), bias), len(x))


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # It takes the bias for contiguous numbers, one for each row of weight, whatever they are.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _gradients(grad: Tensor, x: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of weight from that of x weight^T, grad [n, out]: of what the other one is given for."""
    # That of the weights by torch: oneDNN would copy both operands, which takes what it gains.
    of_weight = None if x is None else grad.t() @ x
    if weight is None:
        return None, of_weight
    # Somebody may want the gradient of the gradient, or many at once.
    if torch.is_grad_enabled() or not _suits(grad, weight.t()):
        return grad @ weight, of_weight
    return _multiplied(grad.contiguous(), weight.t()), of_weight


def _save(ctx: Any, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> None:
    """Keep only what the gradients that are wanted need: the rest may be changed, and its memory given back."""
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, x, weight, *ctx.needs_input_grad[:2])
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, *ctx.saved_tensors), grad.sum(0) if ctx.needs_input_grad[2] else None


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        _save(ctx, x, weight, *ctx.needs_input_grad[1:])
        ctx.mark_dirty(total)
        return total.add_(_multiplied(x, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.needs_input_grad[0] else None, *_gradients(grad, *ctx.saved_tensors)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    return x.numel() * len(weight) >= LEAST_WORK


def _suits(x: Tensor, weight: Tensor, other: Tensor | None = None) -> bool:
    """Whether x [n, in] and weight [out, in] (and bias or total) are plain float32 on a CPU, their product large."""
    tensors = (x, weight) if other is None else (x, weight, other)
    return (
        is_plain(*tensors)
        and onednn_is_faster()
        and all(t.dtype == torch.float32 for t in tensors)
        and x.dim() == weight.dim() == 2
        and x.shape[1] == weight.shape[1]
        and _is_large(x, weight)
        and x.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_mkldnn_enabled()
    )


def _fits_bias(bias: Tensor | None, weight: Tensor) -> bool:
    return bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())


def _is_small_bfloat16(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether torch would multiply these in bfloat16 on a CPU, and the product is small."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return (
        is_plain(*tensors)
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
        and not _is_large(x, weight)
    )
