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
from tgnn.parallel.comm import Arriving, Comm, current


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
    """Rows on their way here, and the rows they come beside.

    local [n, ...]: the rows that were given, and `head` the first of them. Whoever uses these instead of the tensor
    given leaves one sum of gradients to do instead of one a use.
    """

    def __init__(
        self, journey: _Journey, local: Tensor, head: Tensor, ticket: Tensor | None, room: Tensor | None
    ) -> None:
        self.local, self.head = local, head
        self.is_shared = journey.comm.shares_memory
        """Whether the rows are read out of other ranks' memory, as soon as those have written them."""
        self.exchanged = journey.exchanged
        """Whether there are other ranks, whose backward waits for this one's (also where no row comes from them)."""
        self._journey, self._ticket, self._room = journey, ticket, room
        self._rows: Tensor | None = None

    def wait(self) -> Tensor:
        """[n_halo, ...] in x's dtype, grouped by owner in rank order; may be called again."""
        if self._rows is None:
            journey, ticket = self._journey, self._ticket
            self._rows = journey.arrive() if ticket is None else _Receive.apply(ticket, journey)
        return self._rows

    def behind(self, rows: Tensor) -> Tensor:
        """`rows` [n, ...], then the halo rows: in the room that was given, where `rows` are its first."""
        room = self._room
        if room is None or rows.data_ptr() != room.data_ptr():
            return torch.cat([rows, self.wait()])
        # `.data`: a second use of the batch writes the same rows, which is no change to autograd.
        room.data[len(rows) :] = self.wait()
        return room


def start_exchange(
    plan: ExchangePlan,
    x: Tensor,
    comm: Comm | None = None,
    dtype: torch.dtype | None = None,
    *,
    head: int = 0,
    room: Tensor | None = None,
) -> Halo:
    """Start bringing halo rows in; a collective on more than one rank.

    Args:
        plan: who gets which rows.
        x: [n, ...] with the plan's n_local owned rows first; further rows stay here. Whether it requires grad must be
            the same on every rank: if it does, backward is a collective too, and each rank's loss must depend on
            its rows.
        comm: `current()` by default.
        dtype: floating type of the rows on the wire, both ways (e.g. bfloat16); x's own by default. Gradients
            are summed in x's dtype, half types in float32.
        head: first rows of x that `Halo.head` gives.
        room: [n + n_halo, ...] whose first rows are x, which does not require grad: where `Halo.behind` puts the
            others.

    Returns:
        A `Halo`: other work may be done before its `wait()`.
    """
    comm = comm or current()
    if len(x) < plan.n_local:
        raise ValueError(f"start_exchange: got {len(x)} rows, expected the plan's {plan.n_local}")
    wire = dtype or x.dtype
    if not wire.is_floating_point and wire != x.dtype:
        raise ValueError(f"start_exchange: got dtype {wire} for rows of {x.dtype}, expected a floating type")
    journey = _Journey(plan, comm, wire, x)
    if x.requires_grad and torch.is_grad_enabled():
        return Halo(journey, *_Gather.apply(x, journey, head), None)
    return Halo(journey, x, x[:head], None, room)


class _Journey:
    """Rows that travel to their requesters, and later their gradients that travel back."""

    def __init__(self, plan: ExchangePlan, comm: Comm, wire: torch.dtype, x: Tensor) -> None:
        self.plan, self.comm, self.wire = plan, comm, wire
        self.dtype, self.shape = x.dtype, x.shape[1:]
        self.exchanged = comm.ranks > 1 or plan.n_halo > 0
        self._halo: Arriving | None = None
        self._returning: Arriving | None = None
        if self.exchanged:
            rows, places = x.detach(), plan.send_rows.to(x.device)
            out = comm.new_rows((len(places), *self.shape), wire)
            if wire == x.dtype:
                torch.index_select(rows, 0, places, out=out)
            else:
                out.copy_(rows.index_select(0, places))
            self._halo = comm.start_all_to_all_rows(out, plan.send_counts, plan.recv_counts)

    def arrive(self) -> Tensor:
        """The rows, once they are here."""
        if self._halo is None:
            return torch.empty((0, *self.shape), dtype=self.dtype, device=self.comm.device)
        halo, self._halo = self._halo, None
        return halo.wait().to(self.dtype)

    def send_back(self, grad: Tensor | None) -> None:
        """Start the gradients' way back; None stands for zeros."""
        if grad is None:
            grad = torch.zeros((self.plan.n_halo, *self.shape), dtype=self.wire, device=self.comm.device)
        self._returning = self.comm.start_all_to_all_rows(
            grad.to(self.wire), self.plan.recv_counts, self.plan.send_counts
        )

    def add_returned(self, total: Tensor) -> None:
        """Add what came back to the owned rows' gradient, requester by requester in rank order."""
        if not self.exchanged:
            return
        if self._returning is None:  # this rank's loss did not need its halo, but others wait
            self.send_back(None)
        rows, returned, first = (
            self.plan.send_rows.to(total.device),
            self._returning.wait().to(total.dtype),
            0,
        )
        self._returning = None
        for count in self.plan.send_counts:
            # Rows are unique inside one requester's group: no two additions meet, so the order of sums is
            # fixed.
            if count:
                total.index_add_(0, rows[first : first + count], returned[first : first + count])
            first += count


class _Gather(torch.autograd.Function):
    """All uses of the given rows: as local rows, as the first of them, as what travels (the ticket).

    Its backward comes after that of all of them, so the reverse exchange hides behind the local rows' backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, journey: _Journey, head: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.journey, ctx.head, ctx.shape = journey, head, x.shape
        ctx.set_materialize_grads(False)
        return x.view_as(x), x[:head], x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_local: Tensor | None, grad_head: Tensor | None, ticket: Tensor | None):
        journey = ctx.journey
        wide = torch.float32 if journey.dtype in (torch.float16, torch.bfloat16) else journey.dtype
        if grad_local is None:
            total = torch.zeros(ctx.shape, dtype=wide, device=journey.comm.device)
        else:  # it may belong to another node as well
            total = grad_local.to(wide, copy=True)
        if grad_head is not None:
            total[: ctx.head] += grad_head
        journey.add_returned(total)
        return total.to(journey.dtype), None, None


class _Receive(torch.autograd.Function):
    """What arrives; the backward starts the gradients' way back and leaves the wait to `_Gather`."""

    @staticmethod
    def forward(ctx, ticket: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        journey = ctx.journey
        if journey.exchanged:
            journey.send_back(grad)
        return torch.empty(0, dtype=journey.dtype, device=grad.device), None


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
