"""Normalisation between layers: layer norm, and batch norm whose statistics are those of all ranks together.

Batch norm over split rows is the batch norm of one rank, since every row of a layer has one owner. Where ranks sample
alone (data mode) hidden vertices repeat, so it is refused there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.parallel.comm import Comm, current

NORMS = ("none", "layer", "batch")


def make_norm(kind: str, width: int) -> nn.Module:
    """A normalisation of [n, width] rows; raises UserError for an unknown kind."""
    if kind == "layer":
        return nn.LayerNorm(width)
    if kind == "batch":
        return SyncBatchNorm(width)
    if kind == "none":
        return nn.Identity()
    raise wrong("norm", repr(kind), f"one of {', '.join(NORMS)}", "choose one of these")


class SyncBatchNorm(nn.Module):
    """Batch norm (Ioffe, Szegedy 2015) over the rows of all ranks; same parameters and buffers as nn.BatchNorm1d.

    A training forward and its backward are collectives. With no row on any rank it leaves the statistics alone.
    """

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] -> [n, width]."""
        if not self.training:
            scale = (self.running_var + self.eps).rsqrt()
            return (((x - self.running_mean) * scale) * self.weight + self.bias).to(x.dtype)
        normalised, mean, variance, count = _Normalise.apply(x, self.eps, current())
        if count > 0:
            with torch.no_grad():
                unbiased = variance * count / max(count - 1, 1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
                self.num_batches_tracked += 1
        return (normalised * self.weight + self.bias).to(x.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) with the mean and the biased variance of all ranks' rows."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float, comm: Comm):
        wide = x if x.dtype == torch.float64 else x.float()
        total = torch.cat(
            [wide.sum(0).double(), torch.tensor([float(len(x))], device=x.device, dtype=torch.float64)]
        )
        comm.all_reduce(total)
        count = float(total[-1])
        mean = (total[:-1] / max(count, 1)).to(wide.dtype)
        # Two passes: the sum of squares alone would cancel.
        square = comm.all_reduce((wide - mean).square().sum(0).double())
        variance = (square / max(count, 1)).to(wide.dtype)
        scale = (variance + eps).rsqrt()
        out = (wide - mean) * scale
        ctx.save_for_backward(out, scale)
        ctx.comm, ctx.count, ctx.dtype = comm, count, x.dtype
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        out, scale = ctx.saved_tensors
        sums = torch.cat([grad.sum(0), (grad * out).sum(0)]).double()
        ctx.comm.all_reduce(sums)
        mean_grad, mean_product = (sums / max(ctx.count, 1)).to(grad.dtype).chunk(2)
        return ((grad - mean_grad - out * mean_product) * scale).to(ctx.dtype), None, None
