"""Dense products of the layers, by the library that is fastest for them on this machine.

torch sends float32 products to MKL, which leaves AVX-512 aside on AMD's CPUs; oneDNN, which comes with torch too, uses
it, and makes them 2.4 times as fast on a Zen 5 (160 and 380 GFLOP/s on two cores, torch 2.13). oneDNN makes a program
for every shape that it meets, and mini-batches have other numbers of rows in every step: large products are made of
rows with room behind them (`tgnn.kernels.room`), so that few shapes occur, and small ones that would go to it, in
bfloat16, are made in float32 and then rounded.

All other types and devices are left to torch. Results are equal to torch's up to rounding.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgnn.kernels.room import first_rows, is_plain, rounded_down, rows_with_room, with_room

# Multiplications below which MKL, in float32, is at least as fast as oneDNN: a new shape costs that some 0.3 ms.
LEAST_WORK = 1 << 25
PIECE_ROWS = 2048


class Linear(nn.Linear):
    """torch's linear layer with `linear` for its product; for layers of your own too."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        if torch.jit.is_scripting():
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], weight [out, in], bias [out]; [..., out]. Twice differentiable."""
    dtype = _type_of_ours(x, weight, bias)
    if dtype is None or not _fits_bias(bias, weight):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        if _is_large(x, weight):
            return _Linear.apply(_in_type(x, dtype), weight, bias)
        wide = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide).to(dtype)


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """total [n, out] + x [n, in] weight^T; total, which must be nobody else's, may be written to.

    In the type of all three where they have one, else as torch.autocast has it.
    """
    dtype = _type_of_ours(x, weight, total)
    fits = dtype == total.dtype and total.is_contiguous() and total.shape == (len(x), len(weight))
    if fits and _is_large(x, weight):
        with torch.autocast("cpu", enabled=False):
            return _AddLinear.apply(total, _in_type(x, dtype), weight)
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


def _type_of_ours(x: Tensor, weight: Tensor, other: Tensor | None) -> torch.dtype | None:
    """The type in which we multiply x [n, in] and weight [out, in], and take bias or total; None: torch does it.

    float32 for plain float32 matrices with a large product, and bfloat16 where torch.autocast would take that.
    """
    tensors = (x, weight) if other is None else (x, weight, other)
    if not (is_plain(*tensors) and x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]):
        return None
    if not (x.is_contiguous() and torch._C._get_mkldnn_enabled()):
        return None
    if torch.is_autocast_enabled("cpu"):
        known = all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
        return torch.bfloat16 if known and torch.get_autocast_dtype("cpu") == torch.bfloat16 else None
    ours = onednn_is_faster() and _is_large(x, weight) and all(t.dtype == torch.float32 for t in tensors)
    return torch.float32 if ours else None


def _is_large(x: Tensor, weight: Tensor) -> bool:
    return x.numel() * len(weight) >= LEAST_WORK


def _fits_bias(bias: Tensor | None, weight: Tensor) -> bool:
    return bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in the type of x, with room behind it."""
    weight = weight.to(x.dtype).contiguous()
    bias = None if bias is None else bias.to(x.dtype)
    return first_rows(_by_onednn(_roomy(x), weight, bias), len(x))


def _roomy(x: Tensor) -> Tensor:
    """x and some rows behind it, copied if there is nothing there."""
    found = with_room(x)
    return with_room(rows_with_room(x, len(x)).copy_(x)) if found is None else found


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype == torch.bfloat16:
        return F.linear(x, weight, bias)
    # It takes the bias for contiguous numbers, one for each row of weight, whatever they are.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _gradients(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of weight (of type `dtype`) from that of x weight^T, grad [n, out] in the type of x: each
    if the other one is given. In these types, also where autocast is on in the backward pass.
    """
    with torch.autocast("cpu", enabled=False):
        return _gradients_in_type(grad, x, weight, dtype)


def _gradients_in_type(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    # Somebody may want the gradient of the gradient, or many at once.
    if torch.is_grad_enabled() or not is_plain(grad):
        of_x = None if weight is None else grad @ weight.to(grad.dtype)
        return of_x, None if x is None else (grad.t() @ x).to(dtype)
    grad = grad.contiguous()
    of_weight = None if x is None else _weight_gradient(grad, x).to(dtype)
    if weight is None:
        return None, of_weight
    is_ours = _is_large(grad, weight.t())
    return _multiplied(grad, weight.t()) if is_ours else grad @ weight.to(grad.dtype), of_weight


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in] of grad [n, out] and x [n, in]; of bfloat16 ones in float32."""
    if x.dtype == torch.float32:
        # oneDNN copies both operands first, which takes several threads what it gains.
        alone = torch.get_num_threads() == 1 and onednn_is_faster()
        return _weight_gradient_in_pieces(grad, x) if alone else grad.t() @ x
    # What lies behind the rows must not be added: the last ones are multiplied in float32, which meets no new shape.
    most = rounded_down(len(x))
    total = (grad[:most].t() @ x[:most]).float()
    return total.addmm_(grad[most:].float().t(), x[most:].float())


def _weight_gradient_in_pieces(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x by oneDNN, in pieces of one shape, whose copies stay in the cache; the last rows by MKL."""
    whole = len(x) - len(x) % PIECE_ROWS
    total = grad[whole:].t() @ x[whole:]
    for at in range(0, whole, PIECE_ROWS):
        rows = slice(at, at + PIECE_ROWS)
        operands = grad[rows].to_mkldnn(), x[rows].to_mkldnn()
        # Of the third it asks the shape.
        piece, _ = torch.ops.aten.mkldnn_linear_backward_weights(*operands, total, False)
        total.add_(piece.to_dense())
    return total


def _in_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else _Converted.apply(x, dtype)


class _Converted(torch.autograd.Function):
    """Rows in another type, with room behind them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return rows_with_room(x, len(x), dtype).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def _save(ctx: Any, x: Tensor, weight: Tensor, of_x: bool, of_weight: bool) -> None:
    """Keep only what the gradients that are wanted need: the rest may be changed, and its memory given back."""
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
    ctx.dtype = weight.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        _save(ctx, x, weight, *ctx.needs_input_grad[:2])
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _multiplied(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_bias = grad.sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return *_gradients(grad, *ctx.saved_tensors, ctx.dtype), of_bias


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        _save(ctx, x, weight, *ctx.needs_input_grad[1:])
        if x.dtype == torch.bfloat16:  # rounded once, as torch.addmm does
            found = torch.addmm(_roomy(total), _roomy(x), weight.to(x.dtype).t())
            return first_rows(found, len(x))
        ctx.mark_dirty(total)
        return total.add_(_multiplied(x, weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_total = grad if ctx.needs_input_grad[0] else None
        return of_total, *_gradients(grad, *ctx.saved_tensors, ctx.dtype)
