"""Rows between ranks on one machine's CPU: written once where the receiver reads them, instead of through a socket.

A sender writes into a segment, memory without a name that every rank can map (Linux: memfd_create, opened by others
through /proc), and tells each receiver where its rows lie. What arrives is the segment itself; when the receiver lets
go of the tensor, it says so in the segment's header, and the sender uses the segment again. Only where to look
travels through the process group, so a rank that ends is noticed as ever, and nothing is left behind by one that is
killed.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT = 64
# Segments are kept for the next message up to this many bytes; what a larger one needs goes back when it is read.
MOST_KEPT_BYTES = 1 << 28
# Says no where it is 0 on any rank, e.g. to measure what this is worth.
VARIABLE = "TGNN_SHARED_MEMORY"
_TOKEN_BYTES = 16


class _Segment:
    """Memory that ranks share: a header of a flag for each receiver (1: still read), then rows."""

    def __init__(self, number: int, descriptor: int, capacity: int, ranks: int) -> None:
        self.number, self.descriptor, self.capacity = number, descriptor, capacity
        # A mapping needs no descriptor of its own, but gets one before Python 3.13.
        options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        memory = np.frombuffer(mmap.mmap(descriptor, header_bytes(ranks) + capacity, **options), np.uint8)
        self.in_use = memory[: 8 * ranks].view(np.int64)
        self.rows = memory[header_bytes(ranks) :]
        self.address = self.rows.ctypes.data


def header_bytes(ranks: int) -> int:
    """Bytes before a segment's rows."""
    return _aligned(8 * ranks)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


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
        self._filled: dict[int, _Segment] = {}
        self._met: dict[tuple[int, int], _Segment] = {}

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
        self._filled[segment.address] = segment
        return torch.from_numpy(segment.rows[:size]).view(dtype).view(tuple(shape))

    def send(self, send: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, dist.Work]:
        """Tell every rank where its rows of contiguous `send` lie: (what the others tell, when that is here)."""
        place, starts = [0, 0, 0], [0, *itertools.accumulate(send_counts)]
        row_bytes = send.element_size() * send.shape[1:].numel()
        if send.numel():
            if send.data_ptr() not in self._filled:
                send = self.new_rows(send.shape, send.dtype).copy_(send)
            segment = self._filled.pop(send.data_ptr())
            segment.in_use[:] = np.array(send_counts) > 0
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
                memory = segment.rows[offset : offset + count * row_bytes]
                # The tensor holds this array, and nothing else does.
                weakref.finalize(memory, _let_go, segment, self.rank).atexit = False
                found.append(torch.from_numpy(memory).view(dtype).view(count, *shape))
                del memory
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty((sum(self.counts(heard)), *shape), dtype=dtype)

    def counts(self, heard: Tensor) -> list[int]:
        """How many rows came from each rank."""
        return heard[:, -1].tolist()

    def _free_segment(self, size: int) -> _Segment:
        """A segment of `size` bytes or more that nobody reads: the smallest there is, or a new one."""
        idle = [one for one in self._mine if one.address not in self._filled and not one.in_use.any()]
        for one in idle:
            if one.capacity > MOST_KEPT_BYTES:
                self._mine.remove(one)
                os.close(one.descriptor)
        fitting = [one for one in idle if size <= one.capacity <= min(MOST_KEPT_BYTES, 8 * size + (1 << 16))]
        if fitting:
            return min(fitting, key=lambda one: one.capacity)
        capacity = _roomy(max(size, 1))
        descriptor = os.memfd_create("tgnn-rows")
        os.ftruncate(descriptor, header_bytes(self.ranks) + capacity)
        self._made += 1
        self._mine.append(_Segment(self._made, descriptor, capacity, self.ranks))
        return self._mine[-1]

    def _segment_of(self, rank: int, number: int, descriptor: int, capacity: int) -> _Segment:
        """Another rank's segment, mapped once."""
        if (rank, number) in self._met:
            return self._met[rank, number]
        opened = os.open(f"/proc/{self._pids[rank]}/fd/{descriptor}", os.O_RDWR)
        try:
            segment = _Segment(number, opened, capacity, self.ranks)
        finally:
            os.close(opened)
        if capacity <= MOST_KEPT_BYTES:
            self._met[rank, number] = segment
        return segment

    def close(self) -> None:
        """Give the segments up; tensors that are still held stay what they are."""
        for one in self._mine:
            os.close(one.descriptor)
        self._mine, self._met, self._filled = [], {}, {}


def _let_go(segment: _Segment, rank: int) -> None:
    segment.in_use[rank] = 0


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
