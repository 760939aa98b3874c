"""dropout: keyed by row id and column, so that the same vertex drops the same columns on any rank.

    out[i, c] = x[i, c] / (1 - p) where the number of (key, ids[i], c) says keep, else 0

The numbers have 16 bits, so p is rounded to a multiple of 2^-16 (and to 1 - 2^-16 at most) and the scale uses
the rounded p: the mean is exact.

Example: p = 0.5, x of ones: every element of the result is 0 or 2; rows of equal id are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.backend import choose
from tgnn.kernels.segment import chunk_limit


def threshold(p: float) -> int:
    """How many of the 2^16 equally likely numbers drop an element. Raises UserError unless 0 <= p < 1."""
    if not 0 <= p < 1:
        raise wrong("dropout probability", p, "a number in [0, 1)", "choose a smaller one")
    return min(round(p * 65536), 65535)


def keep_mask(state: Tensor, width: int, p: float) -> Tensor:
    """Which of `width` columns are kept for each random state: bool [n, width] from int64 [n]."""
    keep = torch.empty(state.numel(), width, dtype=torch.bool, device=state.device)
    for rows in _runs(state, width):
        torch.ge(rng.lanes(state[rows], width), threshold(p) - 32768, out=keep[rows])
    return keep


def _runs(rows: Tensor, width: int) -> list[slice]:
    """Runs of rows whose [rows, width] temporaries stay within the bound."""
    limit = chunk_limit(rows.device, width)
    return [slice(first, first + limit) for first in range(0, len(rows), limit)]


def dropout(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """Keyed dropout; differentiable in `x`.

    Args: x [n, D] floating; p in [0, 1); key from `rng.stream`; ids [n] integer, the rows' original ids.
    Returns: [n, D] in x's dtype; x itself where p rounds to 0.
    Raises: UserError for a p outside [0, 1) or shapes that do not fit.
    """
    if x.dim() != 2 or ids.shape != x.shape[:1]:
        got = f"x {tuple(x.shape)}, ids {tuple(ids.shape)}"
        raise wrong("dropout", got, "x [n, D], ids [n]", "give every row its id")
    if threshold(p) == 0:
        return x
    if choose("dropout", x, ids) == "triton":
        from tgnn.kernels import dropout_triton

        return dropout_triton.dropout_triton(x, p, key, ids)
    return dropout_torch(x, p, key, ids)


def dropout_torch(x: Tensor, p: float, key: int, ids: Tensor) -> Tensor:
    """`dropout` on torch's own operations; the reference of the Triton path."""
    return _Dropout.apply(x, keep_mask(rng.keyed(key, ids), x.shape[1], p), p)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep, p):
        ctx.save_for_backward(keep)
        ctx.scale = 65536 / (65536 - threshold(p))
        return _masked(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return _masked(grad, keep, ctx.scale), None, None


def _masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """x * scale where `keep` says so, else 0."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in _runs(x, x.shape[1]):
        torch.mul(x[rows], keep[rows], out=out[rows]).mul_(scale)
    return out
