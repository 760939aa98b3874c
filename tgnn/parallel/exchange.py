"""Rows that another rank owns: the plan of who sends which to whom, and the all-to-all with autograd.

Owned rows a rank was asked for travel forward; on the way back their gradients travel to the owner and are
summed into its rows. The sum runs over the requesting ranks in rank order: the same bits on every run.

Worked example, two ranks with 3 owned rows each. Rank 1 needs rows 0 and 2 of rank 0, which needs its row 1:

    rank 0: ExchangePlan(send_rows=[0, 2], send_counts=[0, 2], recv_counts=[0, 1], n_local=3)
    rank 1: ExchangePlan(send_rows=[1],    send_counts=[1, 0], recv_counts=[2, 0], n_local=3)

    x on rank 0 = [10, 11, 12], on rank 1 = [20, 21, 22]
    halo on rank 0 = [21], on rank 1 = [10, 12]
    gradient of the halo on rank 1 = [5, 7]: rank 0's x gets [5, 0, 7]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tgnn.errors import wrong
from tgnn.parallel.comm import Comm, Work, current


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Which owned rows go to which rank, and how many rows come from each.

    Attributes:
        send_rows: int64 [n_send] rows of the owned table, grouped by requesting rank in rank order. Inside
            one requester's group every row occurs once; several requesters may ask for the same row.
        send_counts: P counts, rows for each requester; they sum to n_send.
        recv_counts: P counts, rows that come from each owner; they sum to n_halo.
        n_local: rows of the owned table.
    """

    send_rows: Tensor
    send_counts: list[int]
    recv_counts: list[int]
    n_local: int

    def __post_init__(self) -> None:
        if self.send_rows.dtype != torch.int64 or self.send_rows.dim() != 1:
            raise ValueError(
                f"send_rows: got {self.send_rows.dtype} of shape {tuple(self.send_rows.shape)}, "
                "expected int64 [n_send]"
            )
        if sum(self.send_counts) != len(self.send_rows) or len(self.send_counts) != len(self.recv_counts):
            raise ValueError(
                f"plan: got {len(self.send_rows)} send rows, send counts {self.send_counts}, receive counts "
                f"{self.recv_counts}, expected both counts for every rank, the former summing to the rows"
            )

    @property
    def n_halo(self) -> int:
        """Rows that arrive here."""
        return sum(self.recv_counts)

    @classmethod
    def none(cls, n_local: int, ranks: int = 1) -> ExchangePlan:
        """The plan of a rank that sends and receives nothing (among others, it still takes part)."""
        return cls(torch.empty(0, dtype=torch.int64), [0] * ranks, [0] * ranks, n_local)


class Halo:
    """Rows on their way here; `wait()` gives them."""

    def __init__(self, received: Tensor, work: Work | None, dtype: torch.dtype):
        self._received = received
        self._work = work
        self._dtype = dtype

    def wait(self) -> Tensor:
        """[n_halo, ...] in x's dtype, grouped by owner in rank order; may be called again."""
        if self._work is not None:
            self._work.wait()
            self._received, self._work = self._received.to(self._dtype), None
        return self._received


def start_exchange(
    plan: ExchangePlan, x: Tensor, comm: Comm | None = None, dtype: torch.dtype | None = None
) -> Halo:
    """Start bringing halo rows in; a collective on more than one rank.

    Args:
        plan: who gets which rows.
        x: [n_local, ...] the owned rows. Whether it requires grad must be the same on every rank: if it does,
            backward is a collective too, and each rank's loss must depend on its halo (also on an empty one).
        comm: `current()` by default.
        dtype: floating type of the rows on the wire, both ways (e.g. bfloat16); x's own by default. Gradients
            are summed in x's dtype, half types in float32.

    Returns:
        A `Halo`: other work may be done before its `wait()`.
    """
    comm = comm or current()
    if len(x) != plan.n_local:
        raise ValueError(f"start_exchange: got {len(x)} rows, expected the plan's {plan.n_local}")
    wire = dtype or x.dtype
    if not wire.is_floating_point and wire != x.dtype:
        raise ValueError(f"start_exchange: got dtype {wire} for rows of {x.dtype}, expected a floating type")
    if comm.ranks == 1 and plan.n_halo == 0:
        return Halo(x.new_empty((0, *x.shape[1:])), None, x.dtype)
    started: list[Work] = []
    received = _Exchange.apply(x, plan, comm, wire, started)
    return Halo(received, started[0], x.dtype)


class _Exchange(torch.autograd.Function):
    """Forward starts the all-to-all, leaves its `Work` in `started`: to be waited for before a read."""

    @staticmethod
    def forward(
        ctx, x: Tensor, plan: ExchangePlan, comm: Comm, wire: torch.dtype, started: list[Work]
    ) -> Tensor:
        rows = x.index_select(0, plan.send_rows.to(x.device)).to(wire)
        received, work = comm.all_to_all_rows(rows, plan.send_counts, plan.recv_counts, async_op=True)
        started.append(work)
        ctx.plan, ctx.comm, ctx.shape, ctx.dtype = plan, comm, x.shape, x.dtype
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        plan, comm = ctx.plan, ctx.comm
        returned, work = comm.all_to_all_rows(grad, plan.recv_counts, plan.send_counts, async_op=True)
        # Zeroing the table hides behind the exchange.
        wide = torch.float32 if ctx.dtype in (torch.float16, torch.bfloat16) else ctx.dtype
        total = torch.zeros(ctx.shape, dtype=wide, device=grad.device)
        rows = plan.send_rows.to(grad.device)
        work.wait()
        first = 0
        for count in plan.send_counts:
            # Rows are unique inside one requester's group: no two additions meet, so the order of sums is
            # fixed.
            if count:
                total.index_add_(0, rows[first : first + count], returned[first : first + count].to(wide))
            first += count
        return total.to(ctx.dtype), None, None, None, None


def all_reduce_gradients(
    model: nn.Module | Iterable[nn.Parameter], comm: Comm | None = None, extra: Tensor | None = None
) -> Tensor | None:
    """Sum every parameter's gradient over the ranks, in place, one flat all-reduce per dtype.

    A gradient that is None counts as zeros and becomes a tensor, on one rank as on many, so that a rank
    without seeds takes part and every optimizer does the same everywhere. Parameters that do not require grad
    are left alone.

    Args:
        model: a module or its parameters, in the same order on every rank.
        comm: `current()` by default.
        extra: float64 [n] more numbers to sum, e.g. losses or a stop flag; travels with the gradients.

    Returns:
        The summed `extra` (a new tensor), or None without one.
    """
    comm = comm or current()
    params = model.parameters() if isinstance(model, nn.Module) else model
    tensors = [_gradient(param) for param in params if param.requires_grad]
    if extra is not None:
        if extra.dtype != torch.float64 or extra.dim() != 1:
            raise ValueError(f"extra: got {extra.dtype} of shape {tuple(extra.shape)}, expected float64 [n]")
        extra = extra.detach().to(comm.device, copy=True)
        tensors.append(extra)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    if comm.ranks > 1:
        for bucket in by_dtype.values():
            _reduce_bucket(bucket, comm)
    return extra


def _gradient(param: nn.Parameter) -> Tensor:
    """The parameter's gradient, made of zeros where there is none. Raises `UserError` for a sparse one."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    if param.grad.is_sparse:
        raise wrong("gradient", "a sparse one", "a dense one", "build the embedding with sparse=False")
    return param.grad


def _reduce_bucket(bucket: Sequence[Tensor], comm: Comm) -> None:
    """Sum tensors of one dtype over the ranks through one flat copy."""
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    comm.all_reduce(flat)
    for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(summed.view(tensor.shape))
