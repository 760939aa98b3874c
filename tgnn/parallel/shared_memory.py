"""Rows between ranks on one machine's CPU: written once where the receiver reads them, instead of through a socket.

A sender writes into a segment, memory without a name that every rank can map (Linux: memfd_create, opened by others
through /proc), and tells each receiver where its rows lie. What arrives is the segment itself; when the receiver lets
go of the tensor, it says so in the segment's header, and the sender uses the segment again. Only where to look
travels through the process group, so a rank that ends is noticed as ever, and nothing is left behind by one that is
killed.
"""

from __future__ import annotations

import atexit
import itertools
import math
import mmap
import os
import sys
import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64
# Idle segments are kept for the next message up to this many bytes together; larger ones go back when they are read.
MOST_KEPT_BYTES = 1 << 29
# A rank that holds on to more messages than this gets copies from then on: each takes a descriptor.
MOST_HELD = 64
# Says no where it is 0 on any rank, e.g. to measure what this is worth.
VARIABLE = "TGNN_SHARED_MEMORY"
_TOKEN_BYTES = 16
# What a receiver has made of its rows in a segment.
DONE, TOLD, READING = 0, 1, 2


class _Segment:
    """Memory that ranks share: a header, then rows.

    Header, int64: what each receiver has made of its rows; number and capacity; whether the owner has given it up.
    """

    def __init__(self, number: int, descriptor: int, capacity: int, ranks: int) -> None:
        self.number, self.descriptor, self.capacity = number, descriptor, capacity
        # A mapping needs no descriptor of its own, but gets one before Python 3.13.
        options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        memory = np.frombuffer(mmap.mmap(descriptor, header_bytes(ranks) + capacity, **options), np.uint8)
        header = memory[: 8 * (ranks + 3)].view(np.int64)
        self.state, self.label, self.closed = header[:ranks], header[ranks : ranks + 2], header[ranks + 2 :]
        self.rows = memory[header_bytes(ranks) :]
        self.address = self.rows.ctypes.data


def header_bytes(ranks: int) -> int:
    """Bytes before a segment's rows."""
    return -(-8 * (ranks + 3) // ALIGNMENT) * ALIGNMENT


def _roomy(count: int) -> int:
    """`count` bytes rounded up by a quarter at most, so that messages of similar sizes share segments."""
    step = max(1 << 12, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


class SharedMemory:
    """One rank's segments, and those of others that it has met."""

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None, pids: Sequence[int]) -> None:
        self.rank, self.ranks = rank, ranks
        self._group, self._pids = group, list(pids)
        self._mine: list[_Segment] = []
        self._made = 0
        # By address: the segment, and which filling of it this is.
        self._filled: dict[int, tuple[_Segment, int]] = {}
        self._fillings = itertools.count()
        self._met: dict[tuple[int, int], _Segment] = {}
        self._held = _Count()
        # A process that ends without a word takes its memory along.
        atexit.register(self.close)

    @classmethod
    def among(cls, rank: int, ranks: int, group: dist.ProcessGroup | None) -> SharedMemory | None:
        """What this rank of a CPU group has, None where some rank cannot map another's memory. Collective."""
        descriptor, token = -1, os.urandom(_TOKEN_BYTES)
        if hasattr(os, "memfd_create") and os.environ.get(VARIABLE) != "0":
            descriptor = os.memfd_create("tgnn-probe")
            os.write(descriptor, token)
        try:
            mine = [os.getpid(), descriptor, *np.frombuffer(token, np.int64).tolist()]
            every = [torch.empty(len(mine), dtype=torch.int64) for _ in range(ranks)]
            dist.all_gather(every, torch.tensor(mine), group=group)
            reached = torch.tensor([all(_can_read(*one.tolist()) for one in every)], dtype=torch.int32)
            # Others have read this rank's token once they say so.
            dist.all_reduce(reached, dist.ReduceOp.MIN, group=group)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return cls(rank, ranks, group, [int(one[0]) for one in every]) if int(reached) else None

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[rows, ...] (not empty) to fill and send: the memory that receivers will read."""
        size = math.prod(shape) * dtype.itemsize
        segment = self._free_segment(size)
        memory, filling = segment.rows[:size], next(self._fillings)
        self._filled[segment.address] = segment, filling
        # Rows that are dropped without being sent leave the segment to others.
        weakref.finalize(memory, _forget, self._filled, segment.address, filling).atexit = False
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def send(self, send: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, dist.Work]:
        """Tell every rank where its rows of contiguous `send` lie: (what the others tell, when that is here)."""
        place, starts = [0, 0, 0], [0, *itertools.accumulate(send_counts)]
        row_bytes = send.element_size() * send.shape[1:].numel()
        if send.numel():
            if send.data_ptr() not in self._filled:
                send = self.new_rows(send.shape, send.dtype).copy_(send)
            segment, _ = self._filled.pop(send.data_ptr())
            segment.state[:] = np.where(np.array(send_counts) > 0, TOLD, DONE)
            place = [segment.number, segment.descriptor, segment.capacity]
        told = [
            [*place, start * row_bytes, count] for start, count in zip(starts[:-1], send_counts, strict=True)
        ]
        mine = torch.tensor(told)
        heard = torch.empty_like(mine)
        return heard, dist.all_to_all_single(heard, mine, group=self._group, async_op=True)

    def receive(self, heard: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The rows [n, *shape] that the others told of, which `heard` says once its work is done."""
        found, row_bytes = [], dtype.itemsize * shape.numel()
        for rank, (number, descriptor, capacity, offset, count) in enumerate(heard.tolist()):
            if count and row_bytes:
                segment = self._segment_of(rank, number, descriptor, capacity)
                segment.state[self.rank] = READING
                memory = segment.rows[offset : offset + count * row_bytes]
                self._held.number += 1
                # The tensor holds this array, and nothing else does.
                letting_go = (segment, self.rank, self._held, os.getpid())
                weakref.finalize(memory, _let_go, *letting_go).atexit = False
                found.append(torch.from_numpy(memory).view(dtype).view(count, *shape))
                del memory
        if len(found) == 1:
            return found[0].clone() if self._held.number > MOST_HELD else found[0]
        return torch.cat(found) if found else torch.empty((sum(self.counts(heard)), *shape), dtype=dtype)

    def counts(self, heard: Tensor) -> list[int]:
        """How many rows came from each rank."""
        return heard[:, -1].tolist()

    def _free_segment(self, size: int) -> _Segment:
        """A segment of `size` bytes or more that nobody reads: the smallest there is, or a new one."""
        idle = [one for one in self._mine if one.address not in self._filled and not one.state.any()]
        idle.sort(key=lambda one: one.capacity)
        while sum(one.capacity for one in idle) > MOST_KEPT_BYTES:
            self._give_up(idle.pop())
        for one in idle:
            if size <= one.capacity <= 8 * size + (1 << 16):
                return one
        capacity = _roomy(size)
        descriptor = os.memfd_create("tgnn-rows")
        os.ftruncate(descriptor, header_bytes(self.ranks) + capacity)
        self._made += 1
        segment = _Segment(self._made, descriptor, capacity, self.ranks)
        segment.label[:] = self._made, capacity
        self._mine.append(segment)
        return segment

    def _give_up(self, segment: _Segment) -> None:
        segment.closed[0] = 1
        os.close(segment.descriptor)
        self._mine.remove(segment)

    def _segment_of(self, rank: int, number: int, descriptor: int, capacity: int) -> _Segment:
        """Another rank's segment, mapped once; those that their owners gave up are let go."""
        if (rank, number) in self._met:
            return self._met[rank, number]
        self._met = {key: one for key, one in self._met.items() if not one.closed[0]}
        opened = os.open(f"/proc/{self._pids[rank]}/fd/{descriptor}", os.O_RDWR)
        try:
            if os.fstat(opened).st_size != header_bytes(self.ranks) + capacity:
                raise OSError(f"rank {rank} has no segment {number} of {capacity} bytes any more")
            segment = _Segment(number, opened, capacity, self.ranks)
        finally:
            os.close(opened)
        if segment.label.tolist() != [number, capacity]:
            raise OSError(f"rank {rank} has no segment {number} any more")
        self._met[rank, number] = segment
        return segment

    def close(self, patience_s: float = 10.0) -> None:
        """Give the segments up once every receiver that lives has mapped its rows; what is held stays what it is.

        Waits `patience_s` seconds at most, for one that was told of rows and never asks for them.
        """
        atexit.unregister(self.close)
        end = time.monotonic() + patience_s
        while time.monotonic() < end and any(self._is_awaited(one) for one in self._mine):
            time.sleep(0.005)
        for one in list(self._mine):
            self._give_up(one)
        self._met, self._filled = {}, {}

    def _is_awaited(self, segment: _Segment) -> bool:
        return any(_is_alive(self._pids[rank]) for rank in np.flatnonzero(segment.state == TOLD))


class _Count:
    """A number that others change."""

    number = 0


def _let_go(segment: _Segment, rank: int, held: _Count, pid: int) -> None:
    # A forked child has the tensor as well, but the parent still reads.
    if os.getpid() == pid:
        segment.state[rank] = DONE
        held.number -= 1


def _forget(filled: dict[int, tuple[_Segment, int]], address: int, filling: int) -> None:
    # What was sent is no longer there, and the segment may have been filled again since.
    if filled.get(address, (None, -1))[1] == filling:
        del filled[address]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _can_read(pid: int, descriptor: int, *token: int) -> bool:
    """Whether this process may map that descriptor of process `pid`, and it is the one that was meant."""
    if descriptor < 0:
        return False
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return False
    try:
        return os.pread(opened, _TOKEN_BYTES, 0) == np.array(token, np.int64).tobytes()
    finally:
        os.close(opened)
