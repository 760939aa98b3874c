"""The layer protocol: what a layer is given, and how any module becomes a layer.

A layer reads a block and its rows. `before_exchange` runs on the rows' owner before they travel, so that a vertex is
projected once whoever asks for it; `forward` aggregates. A plain module with `forward(block, x)` is wrapped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.kernels.block import Block
from tgnn.kernels.room import is_plain
from tgnn.kernels.segment import HALF_TYPES
from tgnn.kernels.spmm import spmm
from tgnn.parallel.exchange import Halo
from tgnn.sampling.minibatch import Stage, no_stage


class Rows:
    """The source rows of a layer, some of them perhaps still on their way.

    own [n_local, F]: the layer's input rows that this rank owns or has copies of, as they were; the destinations are
    the first of them.
    local [n_local, D]: the same rows after `before_exchange`.
    dst, local_dst: the destinations' rows of `own` and of `local`, where they are at hand or not the first ones.
    attention_key: key of the layer's attention dropout in this step.
    """

    def __init__(
        self,
        own: Tensor,
        local: Tensor,
        halo: Halo | None = None,
        attention_key: int = 0,
        stage: Stage = no_stage,
        dst: Tensor | None = None,
        local_dst: Tensor | None = None,
    ) -> None:
        self.own = own
        self.dst, self.local_dst = dst, local_dst
        self.local = local
        self.attention_key = attention_key
        self._halo, self._stage = halo, stage
        self._all: Tensor | None = None

    def destinations(self, block: Block) -> Tensor:
        """The layer's input rows of the block's destinations: [n_dst, F]."""
        return self.own[: block.n_dst] if self.dst is None else self.dst

    def local_destinations(self, block: Block) -> Tensor:
        """The rows of the block's destinations after `before_exchange`: [n_dst, D]."""
        return self.local[: block.n_dst] if self.local_dst is None else self.local_dst

    def halo(self) -> Tensor | None:
        """The halo rows, [n_src - n_local, D]; None where there is no exchange. Waits for them."""
        if self._halo is None or not self._halo.exchanged:
            return None
        with self._stage("wait"):
            return self._halo.wait()

    def aggregate(self, block: Block, weight: Tensor | None = None, reduce: str = "sum") -> Tensor:
        """`spmm(block, self.all(), weight, reduce)` for `sum` and `mean`: local rows first, while the halo travels.

        A halo that is read out of shared memory does not travel: it joins the local rows. Half types wait for the halo:
        their sums are rounded once. Their mean on a CPU is that sum divided in float32, which spares a float32 copy of
        all rows; it stays so, unless products will be made in the rows' type.
        """
        halo = self._halo
        together = halo is None or not halo.exchanged or halo.is_shared or self._all is not None
        if self.local.dtype in HALF_TYPES and reduce == "mean" and not self.local.is_cuda:
            total = spmm(block, self.all(), weight)
            if torch.is_autocast_enabled("cpu"):
                return _DivideHalf.apply(total, block.degrees.clamp(min=1).float()[:, None])
            return _divided(total.float(), block)
        if together or self.local.dtype in HALF_TYPES:
            return spmm(block, self.all(), weight, reduce)
        near, far = block.halves(len(self.local))
        near_weight, far_weight = (None, None) if weight is None else (weight[near.edge], weight[far.edge])
        out = spmm(near.block, self.local, near_weight)
        out = out.add_(spmm(far.block, self.halo(), far_weight))
        return _divided(out, block) if reduce == "mean" else out

    def all(self) -> Tensor:
        """Local rows, then halo rows: [n_src, D]. Waits for the halo."""
        if self._all is None:
            halo = self.halo()
            # An empty halo joins too where it wants a gradient: the backward exchange waits for every rank.
            alone = halo is None or (len(halo) == 0 and not halo.requires_grad)
            self._all = self.local if alone else self._halo.behind(self.local)
        return self._all


def _divided(total: Tensor, block: Block) -> Tensor:
    """Sums over in-edges [n_dst, D] as means, in place."""
    return total.div_(block.degrees.clamp(min=1).to(total.dtype)[:, None])


class _DivideHalf(torch.autograd.Function):
    """Rows of a half type divided, in place, by float32 numbers: rounded once, without a float32 copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, divisor: Tensor) -> Tensor:
        ctx.mark_dirty(rows)
        narrow = divisor.to(rows.dtype)
        # The same quotients, in half the time, where all numbers (up to 256 edges in bfloat16) have that type.
        divisor = narrow if torch.equal(narrow.float(), divisor) else divisor
        ctx.save_for_backward(divisor)
        return rows.div_(divisor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (divisor,) = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_plain(grad, divisor):
            return (grad / divisor).to(grad.dtype), None
        return torch.div(grad, divisor, out=torch.empty_like(grad)), None


class Layer(nn.Module):
    """Base of layers that know the protocol.

    `layer(block, x)` with a plain tensor x [n_src, F] works as well: every row is then a local one.
    """

    reads_rows_in_place = False
    """Whether its work grows with the block's edges and destinations only, and it takes destinations that are not the
    first rows: it asks `Rows` for them and for the aggregate, and never for all rows."""

    @property
    def reads_features_in_place(self) -> bool:
        """Whether it aggregates straight from rows as they are, so that they may be a table of all vertices."""
        return self.reads_rows_in_place and type(self).before_exchange is Layer.before_exchange

    def before_exchange(self, x: Tensor) -> Tensor:
        """What travels of the owned rows x [n_local, F]: [n_local, D]; the identity unless a layer projects first."""
        return x

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the block's destinations, [n_dst, width]."""
        raise NotImplementedError

    def __call__(self, block: Block, rows: Rows | Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            if rows.dim() != 2 or rows.shape[0] != block.n_src:
                got, expected = tuple(rows.shape), f"({block.n_src}, width)"
                raise wrong(
                    f"{type(self).__name__} input", got, expected, "give one row per source of the block"
                )
            rows = Rows(rows, self.before_exchange(rows))
        return super().__call__(block, rows)


class PlainLayer(Layer):
    """Any module with `forward(block, x)`, x [n_src, F] with the destinations first, as a layer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """The module's output on all source rows, [n_dst, width]."""
        return self.module(block, rows.all())


def as_layer(module: nn.Module) -> Layer:
    """`module` itself if it is a `Layer`, else wrapped into one."""
    return module if isinstance(module, Layer) else PlainLayer(module)
