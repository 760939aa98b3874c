"""Ranks that talk to each other: one `Comm` per process, over gloo on CPU and NCCL on GPU.

**One thread issues every collective, in the same order on every rank.** Collectives are matched by their
order and by nothing else: a rank that leaves one out, or issues two of them in another order, stops all the
others until the timeout. Overlap comes from `start_...` and from streams, never from a second thread.

Rows travel as plain bytes, so every dtype works, also those that gloo does not know (half, int16, bool); between CPU
ranks of one machine through memory that both map (shared_memory.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tgnn.errors import wrong
from tgnn.parallel.shared_memory import SharedMemory

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What gloo and NCCL both reduce as it is; anything else is reduced in a wider type (half types in float32).
_REDUCED_AS_IS = (torch.float32, torch.float64, torch.int32, torch.int64)


class CommError(RuntimeError):
    """A collective failed here; the cause is most often another rank that ended or is stuck."""


@contextlib.contextmanager
def _named(what: str, rank: int) -> Iterator[None]:
    """Turn a failure inside a collective into a `CommError` that names it."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise CommError(f"{what} failed on rank {rank}: {error}") from error


class Arriving:
    """Rows on their way here. What carries them is kept alive until `wait()`."""

    def __init__(
        self, rows: Callable[[], Tensor], what: str = "", rank: int = 0, handle: dist.Work | None = None
    ):
        self._rows, self._what, self._rank, self._handle = rows, what, rank, handle

    def wait(self) -> Tensor:
        """The rows [n, ...], once they may be read (on a GPU: once the current stream will wait for them)."""
        if self._rows is None:
            raise ValueError("rows that arrived: got a second wait(), expected one; keep what the first gave")
        with _named(self._what, self._rank):
            if self._handle is not None:
                self._handle.wait()
            rows, self._rows, self._handle = self._rows, None, None
            return rows()


class Comm:
    """What one rank knows about the others, and the collectives it takes part in.

    Attributes:
        rank, ranks: this rank, and how many there are (P).
        device: where this rank computes and where tensors given to collectives live.
        backend: "single" (one rank, no process group), "gloo" or "nccl".
        bytes_sent: payload bytes handed to `all_to_all_rows` for *other* ranks since the start.

    Every method but `close` and `new_rows` is a collective: all ranks call it, in the same order.
    A failure in one raises `CommError`.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        backend: str = "single",
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        shared: SharedMemory | None = None,
    ):
        self.rank = rank
        self.ranks = ranks
        self.device = torch.device(device)
        self.backend = backend
        self.bytes_sent = 0
        self._group = group
        self._timeout = timeout
        self._shared = shared
        self._replicas: dict[int, Comm] = {}

    def __repr__(self) -> str:
        return f"Comm(rank={self.rank}, ranks={self.ranks}, device={self.device}, backend={self.backend})"

    def replica(self, replicas: int) -> Comm:
        """This rank's group where consecutive ranks form `replicas` groups of equal size; made once. Collective.

        Its `rank` and `ranks` count inside the group. Raises `UserError` where the groups would be uneven.
        """
        if replicas < 1 or self.ranks % replicas:
            do = f"use a multiple of {max(replicas, 1)} ranks"
            raise wrong("replicas", f"{replicas} for {self.ranks} ranks", "groups of equal size", do)
        if replicas == 1:
            return self
        if replicas not in self._replicas:
            size = self.ranks // replicas
            mine = self.rank // size
            # Every rank makes every group, in the same order.
            groups = [self._subgroup(range(first, first + size)) for first in range(0, self.ranks, size)]
            backend = self.backend if size > 1 else "single"
            rank, group = self.rank - mine * size, groups[mine]
            shares = self._shared is not None and size > 1
            shared = SharedMemory.among(rank, size, group) if shares else None
            self._replicas[replicas] = Comm(rank, size, self.device, backend, group, self._timeout, shared)
        return self._replicas[replicas]

    def duplicate(self) -> Comm:
        """The same ranks with queues of their own, so that two streams do not wait for each other. Collective.

        On one rank and on gloo, where collectives queue in any case, this very `Comm`.
        """
        if self.backend != "nccl":
            return self
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        group = dist.new_group(members, timeout=self._timeout, use_local_synchronization=True)
        return Comm(self.rank, self.ranks, self.device, self.backend, group, self._timeout)

    def _subgroup(self, members: range) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None
        with _named("making groups of ranks", self.rank):
            return dist.new_group(list(members), timeout=self._timeout)

    def all_to_all_counts(self, counts: Sequence[int]) -> list[int]:
        """Send `counts[q]` to every rank q; return the P ints sent here, in rank order. One device sync."""
        if len(counts) != self.ranks:
            raise ValueError(
                f"all_to_all_counts: got {len(counts)} counts, expected one for each of {self.ranks} ranks"
            )
        if self.ranks == 1:
            return [int(counts[0])]
        send = torch.tensor(counts, dtype=torch.int64, device=self.device)
        received = torch.empty_like(send)
        with _named("all-to-all of counts", self.rank):
            dist.all_to_all_single(received, send, group=self._group)
        return received.tolist()

    @property
    def shares_memory(self) -> bool:
        """Whether rows are read out of other ranks' memory instead of travelling."""
        return self._shared is not None

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[rows, ...] to fill and send: where ranks share memory, receivers read it without a copy."""
        if self._shared is None or 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._shared.new_rows(shape, dtype)

    def all_to_all_rows(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Send row groups to every rank and return theirs: `start_all_to_all_rows`, waited for."""
        return self.start_all_to_all_rows(send, send_counts, recv_counts).wait()

    def all_to_all_lists(self, send: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Rows of which no rank knows how many it gets: (rows [n, ...], how many came from each). One device sync.

        `send`, `send_counts` as for `start_all_to_all_rows`.
        """
        if self._shared is None:
            counts = self.all_to_all_counts(send_counts)
            return self.all_to_all_rows(send, send_counts, counts), counts
        self._check_rows(send, send_counts, send_counts)
        send = self._outgoing(send, send_counts)
        what = f"all-to-all of {len(send)} rows"
        with _named(what, self.rank):
            heard, handle = self._shared.send(send, send_counts)
            handle.wait()
            return self._shared.receive(heard, send.shape[1:], send.dtype), self._shared.counts(heard)

    def start_all_to_all_rows(
        self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Arriving:
        """Start sending row groups to every rank; `wait()` gives those that came.

        Args:
            send: [sum(send_counts), ...] any dtype and strides, grouped by receiver in rank order; not to be written
                to any more.
            send_counts: rows for each rank; zeros are ordinary.
            recv_counts: rows that come from each rank, as `all_to_all_counts(send_counts)` tells.

        Returns:
            [sum(recv_counts), ...] of send's dtype grouped by sender. One rank gets its own rows back, possibly the
            same memory.
        """
        self._check_rows(send, send_counts, recv_counts)
        send = self._outgoing(send, send_counts)
        if self.ranks == 1:
            return Arriving(lambda: send)
        dtype, shape, total = send.dtype, send.shape[1:], sum(recv_counts)
        row_bytes = send.element_size() * shape.numel()
        if row_bytes == 0:  # rows of width 0 are so on every rank: nobody has anything to say
            return Arriving(lambda: send.new_empty((total, *shape)))
        what, shared = f"all-to-all of {len(send)} rows of {row_bytes} bytes", self._shared
        with _named(what, self.rank):
            if shared is not None:
                heard, handle = shared.send(send, send_counts)
                return Arriving(lambda: shared.receive(heard, shape, dtype), what, self.rank, handle)
            received = send.new_empty((total, *shape))
            handle = dist.all_to_all_single(
                _as_bytes(received).view(-1, row_bytes),
                _as_bytes(send).view(-1, row_bytes),
                output_split_sizes=list(recv_counts),
                input_split_sizes=list(send_counts),
                group=self._group,
                async_op=True,
            )
        # The rows sent must outlive the call.
        return Arriving(lambda sent=send: received, what, self.rank, handle)

    def _outgoing(self, send: Tensor, send_counts: Sequence[int]) -> Tensor:
        """`send` contiguous, and counted."""
        send = send.detach().contiguous()
        row_bytes = send.element_size() * send.shape[1:].numel()
        self.bytes_sent += row_bytes * (sum(send_counts) - send_counts[self.rank])
        return send

    def all_reduce(self, t: Tensor, op: str = "sum") -> Tensor:
        """Reduce `t` (any shape, same on every rank) over the ranks, in place; op is "sum", "max" or "min".

        Half types are summed in float32 and rounded once. Every rank gets the same bits.
        """
        if op not in _REDUCE_OPS:
            raise ValueError(f"all_reduce: got op={op!r}, expected one of {', '.join(_REDUCE_OPS)}")
        if t.is_complex():
            raise ValueError(
                "all_reduce: got complex values, expected real ones; reduce torch.view_as_real(t)"
            )
        self._check_device(t)
        if self.ranks == 1 or t.numel() == 0:
            return t
        wide = t.dtype
        if wide not in _REDUCED_AS_IS:
            wide = torch.float32 if t.is_floating_point() else torch.int64
        buffer = t.detach().to(wide).contiguous()
        with _named(f"all-reduce of {t.numel()} values", self.rank):
            dist.all_reduce(buffer, op=_REDUCE_OPS[op], group=self._group)
        if buffer.data_ptr() != t.data_ptr():
            t.detach().copy_(buffer)
        return t

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's `values`, in rank order. The length is the same on every rank. One device sync."""
        if self.ranks == 1:
            return [[int(value) for value in values]]
        mine = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        if mine.numel() == 0:
            return [[] for _ in range(self.ranks)]
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        with _named("all-gather of integers", self.rank):
            dist.all_gather(every, mine, group=self._group)
        return [one.tolist() for one in every]

    def broadcast(self, t: Tensor, source: int = 0) -> Tensor:
        """Overwrite `t` (same shape and dtype on every rank) with rank `source`'s, in place; returns `t`."""
        if not 0 <= source < self.ranks:
            raise ValueError(f"broadcast: got source {source}, expected 0 to {self.ranks - 1}")
        self._check_device(t)
        if self.ranks == 1 or t.numel() == 0:
            return t
        buffer = t.detach().contiguous()
        with _named(f"broadcast of {t.numel()} values", self.rank):
            dist.broadcast(_as_bytes(buffer), group=self._group, group_src=source)
        if buffer.data_ptr() != t.data_ptr():
            t.detach().copy_(buffer)
        return t

    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.ranks == 1:
            return
        with _named("barrier", self.rank):
            dist.barrier(
                group=self._group, device_ids=[self.device.index] if self.backend == "nccl" else None
            )

    def close(self) -> None:
        """Leave the process group; only a new `initialise` gives another. Harmless on one rank."""
        for comm in (self, *self._replicas.values()):
            if comm._shared is not None:
                comm._shared.close()
                comm._shared = None
        if self.backend != "single" and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self.backend = "single"

    def _check_rows(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> None:
        if send.dim() == 0 or len(send_counts) != self.ranks or len(recv_counts) != self.ranks:
            raise ValueError(
                f"all_to_all_rows: got a {send.dim()}-D tensor, {len(send_counts)} send counts and "
                f"{len(recv_counts)} receive counts, expected rows and both counts for {self.ranks} ranks"
            )
        if sum(send_counts) != len(send):
            raise ValueError(
                f"all_to_all_rows: got {len(send)} rows, expected the send counts' sum {sum(send_counts)}"
            )
        if send_counts[self.rank] != recv_counts[self.rank]:
            raise ValueError(
                f"all_to_all_rows: rank {self.rank} got {send_counts[self.rank]} rows to send to itself and "
                f"{recv_counts[self.rank]} to receive from itself, expected the same number"
            )
        self._check_device(send)

    def _check_device(self, t: Tensor) -> None:
        if t.device.type != self.device.type:
            raise ValueError(
                f"collective: got a tensor on {t.device}, expected one on this rank's {self.device}"
            )


def _as_bytes(t: Tensor) -> Tensor:
    """[bytes] uint8 over the memory of contiguous `t`."""
    # Strided by hand: a tensor of none or one element is contiguous whatever its strides say, also stride 0.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


_current: Comm | None = None
_groups_joined = 0


def current() -> Comm:
    """This process's `Comm`; one rank on the CPU if none was initialised."""
    global _current
    if _current is None:
        _current = Comm()
    return _current


def initialise(
    rank: int = 0,
    ranks: int = 1,
    device: torch.device | str = "cpu",
    init_method: str | None = None,
    timeout_s: float = 600.0,
) -> Comm:
    """Join the other ranks and make the result `current()`. All ranks call it.

    Args:
        rank, ranks: this rank and how many there are. One rank needs no process group and no `init_method`.
        device: this rank's device; its type chooses the backend (cpu: gloo, cuda: NCCL).
        init_method: where ranks meet, as `torch.distributed.init_process_group` wants it ("file:///...",
            "env://").
        timeout_s: seconds after which a collective that some rank does not join fails.
    """
    global _current, _groups_joined
    if _current is not None and _current.ranks > 1:
        raise wrong(
            "ranks",
            f"a call inside rank {_current.rank} of {_current.ranks}",
            "one that starts outside any rank",
            "call tgnn.parallel.shutdown() first, or start ranks once",
        )
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if ranks == 1:
        _current = Comm(device=device)
        return _current
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    _groups_joined += 1
    with _named(f"meeting {ranks - 1} other ranks at {init_method}", rank):
        store, _, _ = next(dist.rendezvous(init_method, rank, ranks, timeout=timeout))
        store.set_timeout(timeout)
        dist.init_process_group(
            backend,
            # Torchrun's store outlives a group: a second one must not find the first one's addresses there.
            store=dist.PrefixStore(f"tgnn-{_groups_joined}", store),
            timeout=timeout,
            world_size=ranks,
            rank=rank,
            device_id=device if backend == "nccl" else None,
        )
    shared = SharedMemory.among(rank, ranks, None) if backend == "gloo" else None
    _current = Comm(rank, ranks, device, backend, timeout=timeout, shared=shared)
    return _current


def under_torchrun() -> bool:
    """Whether torchrun (or a launcher that speaks like it) started this process."""
    return all(name in os.environ for name in TORCHRUN_VARIABLES)


def torchrun_int(name: str) -> int:
    """One of torchrun's integer variables. Raises `UserError` if it is not an integer."""
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise wrong(name, repr(os.environ[name]), "an integer", "start the ranks with torchrun") from error


def initialise_from_env(device: str = "auto", timeout_s: float = 600.0) -> Comm:
    """Join the group torchrun describes in the environment; the rank uses cuda:LOCAL_RANK or the CPU.

    Raises `UserError` where these variables are missing or the machine has fewer GPUs than ranks with
    device="cuda".
    """
    if not under_torchrun():
        missing = ", ".join(name for name in TORCHRUN_VARIABLES if name not in os.environ)
        raise wrong(
            "torchrun", f"no {missing}", "its variables in the environment", "start the ranks with torchrun"
        )
    local_rank = torchrun_int("LOCAL_RANK")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    chosen = rank_device(device, local_rank, local_ranks)
    return initialise(torchrun_int("RANK"), torchrun_int("WORLD_SIZE"), chosen, "env://", timeout_s)


def rank_device(device: str, local_rank: int, local_ranks: int, what: str = "device") -> torch.device:
    """The device of one of `local_ranks` ranks on this machine.

    "auto" is one GPU per rank where there are enough, else the CPU; "cuda" insists on GPUs. Raises
    `UserError`, which calls the device `what`.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise wrong(what, repr(device), "auto, cpu or cuda", "choose one of these")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and gpus < local_ranks:
        raise wrong(
            what,
            f"cuda for {local_ranks} rank{'' if local_ranks == 1 else 's'}",
            f"no more ranks than this machine's {gpus} GPU{'' if gpus == 1 else 's'}",
            f"use {what} cpu" if gpus == 0 else f"use fewer ranks or {what} cpu",
        )
    if device == "cpu" or gpus < local_ranks:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def check_device(device: str, ranks: int) -> None:
    """Refuse, before any work, a `--device` that this machine does not have for its ranks: UserError."""
    if under_torchrun():
        here = "LOCAL_WORLD_SIZE"
        ranks = torchrun_int(here) if here in os.environ else torchrun_int("LOCAL_RANK") + 1
    rank_device(device, 0, ranks, what="--device")


def shutdown() -> None:
    """Leave the process group, if any; `current()` is one rank again."""
    global _current
    if _current is not None:
        _current.close()
    _current = None
