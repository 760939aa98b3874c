"""gather: chosen rows of a table, `out[i] = x[rows[i]]`.

The backward sums the gradients of a row's copies in their order, so it is deterministic; half types are
accumulated in float32.

Example: x = [[1], [2], [5]], rows = [2, 0, 2] gives [[5], [1], [5]]; ones as gradient give [[1], [0], [2]].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.kernels.backend import choose
from tgnn.kernels.block import transpose
from tgnn.kernels.segment import segment_sum


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table; differentiable in `x`.

    Args: x [n, ...] any dtype and strides; rows [m] int32 or int64 in [0, n). Returns [m, ...].
    """
    choose("gather", x, rows)
    return gather_torch(x, rows)


def gather_torch(x: Tensor, rows: Tensor) -> Tensor:
    """`gather` on torch's own operations; the reference of the Triton path."""
    return _Gather.apply(x, rows) if x.requires_grad else x.index_select(0, rows)


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
