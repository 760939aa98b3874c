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
from torch.autograd import forward_ad

from tgnn.kernels.room import first_rows, rows_with_room, with_room

# Multiplications below which MKL, in float32, is at least as fast as oneDNN: a new shape costs that some 0.3 ms.
LEAST_WORK = 1 << 25


class Linear(nn.Linear):
    """torch's linear layer with `linear` for its product."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], weight [out, in], bias [out]; [..., out]. Twice differentiable."""
    if _suits(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    if _is_small_bfloat16(x, weight):
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.float(), bias).to(torch.bfloat16)
    return F.linear(x, weight, bias)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total [n, out] + x [n, in] weight^T; total, which must be nobody else's, may be written to."""
    if _suits(x, weight, total) and total.shape == (len(x), len(weight)):
        return _AddLinear.apply(total, x, weight)
    if total.dtype == x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type):
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


def _vendor() -> str:
    """The CPU's maker as Linux tells it; MKL's own where nothing does."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "GenuineIntel"
    found = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("vendor_id")]
    return found[0] if found else "GenuineIntel"


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, with room behind it."""
    roomy = with_room(x)
    if roomy is None:
        roomy = with_room(rows_with_room(x, len(x)).copy_(x))
    out = torch.ops.mkldnn._linear_pointwise(roomy, weight.contiguous(), bias, "none", [], "")
    return first_rows(out, len(x))


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of weight from that of x weight^T, grad [n, out]."""
    # That of the weights by torch: oneDNN would copy both operands, which takes what it gains.
    of_matrix = grad.t() @ x if of_weight else None
    if not of_x:
        return None, of_matrix
    # Somebody may want the gradient of the gradient.
    again = torch.is_grad_enabled() or not _is_large(grad, weight.t())
    return grad @ weight if again else _multiplied(grad.contiguous(), weight.t()), of_matrix


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias = ctx.needs_input_grad
        found = _gradients(grad, *ctx.saved_tensors, of_x, of_weight)
        return *found, grad.sum(0) if of_bias else None


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mark_dirty(total)
        return total.add_(_multiplied(x, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_total, of_x, of_weight = ctx.needs_input_grad
        return grad if of_total else None, *_gradients(grad, *ctx.saved_tensors, of_x, of_weight)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    return x.numel() * len(weight) >= LEAST_WORK


def _suits(x: Tensor, weight: Tensor, other: Tensor | None) -> bool:
    """Whether x [n, in] and weight [out, in] (and bias or total) are plain float32 on a CPU, their product large."""
    tensors = (x, weight) if other is None else (x, weight, other)
    return (
        onednn_is_faster()
        and all(type(t) in (Tensor, nn.Parameter) for t in tensors)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and x.dim() == 2
        and _is_large(x, weight)
        and x.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._get_mkldnn_enabled()
        # These do not know our functions.
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
    )


def _is_small_bfloat16(x: Tensor, weight: Tensor) -> bool:
    """Whether torch would multiply these in bfloat16 on a CPU, and the product is small."""
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and all(t.dtype in (torch.float32, torch.bfloat16) for t in (x, weight))
        and not _is_large(x, weight)
    )
