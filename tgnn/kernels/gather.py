"""gather: chosen rows of a table, `out[i] = x[rows[i]]`.

The table may lie in two memories: `x` holds its first rows, `rest` the others. On a GPU `rest` is pinned host
memory, of which the Triton kernel reads only the rows that are asked for.

The backward sums the gradients of a row's copies in their order, so it is deterministic; half types are
accumulated in float32.

Example: x = [[1], [2], [5]], rows = [2, 0, 2] gives [[5], [1], [5]]; ones as gradient give [[1], [0], [2]].
The same rows of x = [[1], [2]] with rest = [[5]] give the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels.backend import choose
from tgnn.kernels.block import transpose
from tgnn.kernels.room import is_plain, rows_with_room
from tgnn.kernels.segment import segment_sum


def gather(x: Tensor, rows: Tensor, rest: Tensor | None = None) -> Tensor:
    """Rows of a table; differentiable in `x` unless there is a `rest`.

    Args:
        x: [n, ...] any dtype and strides.
        rows: [m] int32 or int64 in [0, n), or in [0, n + n_rest).
        rest: [n_rest, ...] of x's dtype: the rows from n on; with x on a GPU in pinned host memory.

    Returns: [m, ...] on x's device. Raises: UserError for a rest that does not fit.
    """
    check_rest(x, rest)
    if choose("gather", x, rows) == "triton":
        from tgnn.kernels import gather_triton

        return gather_triton.gather_triton(x, rows, rest)
    return gather_torch(x, rows, rest)


def check_rest(x: Tensor, rest: Tensor | None) -> None:
    """UserError unless `rest` continues `x`: the same kind of rows, no gradient, readable from x's device."""
    if rest is None:
        return
    if rest.shape[1:] != x.shape[1:] or rest.dtype != x.dtype:
        got, expected = f"{tuple(rest.shape)} {rest.dtype}", f"rows of shape {tuple(x.shape[1:])}, {x.dtype}"
        raise wrong("rest of a table", got, expected, "give both parts the same kind of rows")
    if x.requires_grad or rest.requires_grad:
        do = "keep a table that is trained in one memory"
        raise wrong("rest of a table", "a table that requires a gradient", "one that does not", do)
    if x.is_cuda and not rest.is_cuda and not rest.is_pinned():
        expected = "pinned memory, which a GPU can read"
        raise wrong("rest of a table", "pageable host memory", expected, "call rest.pin_memory()")


def gather_torch(x: Tensor, rows: Tensor, rest: Tensor | None = None) -> Tensor:
    """`gather` on torch's own operations; the reference of the Triton path."""
    if rest is not None:
        return _two_tier(x, rows, rest)
    if x.requires_grad:
        return _Gather.apply(x, rows)
    if x.dim() != 2 or not is_plain(x, rows):
        return x.index_select(0, rows)
    return torch.index_select(x, 0, rows, out=rows_with_room(x, rows.numel()))


def _two_tier(x: Tensor, rows: Tensor, rest: Tensor) -> Tensor:
    """`gather` of a table in two memories (one device sync)."""
    near = rows < x.shape[0]
    out = x.new_empty(rows.numel(), *x.shape[1:])
    out[near] = x.index_select(0, rows[near])
    out[~near] = rest.index_select(0, (rows[~near] - x.shape[0]).to(rest.device)).to(x.device)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.n = x.shape[0]
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        back = transpose(torch.arange(rows.numel() + 1, device=rows.device), rows, ctx.n)
        return segment_sum(grad, back.indptr, back.edge), None
