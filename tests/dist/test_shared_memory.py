"""Rows through memory that two ranks map: read in place, held as long as wanted, given back, left by nobody."""

from __future__ import annotations

import os

import pytest
import torch

from tests.dist.ranks import run_ranks, same
from tgnn.parallel import Comm, current, shared_memory
from tgnn.parallel.shared_memory import SharedMemory, _roomy

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory on Linux")


def rows_of(sender: int, number: int) -> torch.Tensor:
    """The rows that rank `sender` sends in message `number`."""
    return torch.randn(
        number % 7 * 900, 3, generator=torch.Generator().manual_seed(100 * number + sender)
    )


def send(comm: Comm, number: int, fill: bool) -> torch.Tensor:
    """Exchange message `number` of both ranks; what the other one sent."""
    other = 1 - comm.rank
    mine, theirs = rows_of(comm.rank, number), len(rows_of(other, number))
    if fill:
        mine = comm.new_rows(mine.shape, mine.dtype).copy_(mine)
    counts, expected = [0, 0], [0, 0]
    counts[other], expected[other] = len(mine), theirs
    return comm.all_to_all_rows(mine, counts, expected)


def check_held_and_written_rows() -> None:
    comm = current()
    assert isinstance(comm._shared, SharedMemory)
    held = {}
    for number in range(60):
        received = send(comm, number, fill=number % 2 == 0)
        same(received, rows_of(1 - comm.rank, number))
        if number % 5 == 0:
            held[number] = received[1:]
        else:
            received.fill_(-1.0)
    for number, rows in held.items():
        same(rows, rows_of(1 - comm.rank, number)[1:])


def test_rows_stay_as_sent_for_as_long_as_they_are_held():
    run_ranks(check_held_and_written_rows, 2)


def check_segments_come_back() -> tuple[int, int]:
    comm = current()
    for number in range(14):
        send(comm, number, fill=True)
    before = len(comm._shared._mine), len(os.listdir("/proc/self/fd"))
    for number in range(14, 300):
        send(comm, number, fill=number % 3 > 0)
    assert (len(comm._shared._mine), len(os.listdir("/proc/self/fd"))) == before
    return before


def test_segments_are_used_again():
    segments, _ = run_ranks(check_segments_come_back, 2)
    assert 0 < segments <= 12


def check_large_ones_go_back() -> None:
    shared_memory.MOST_KEPT_BYTES = 20_000
    comm = current()
    held = [send(comm, number, fill=True) for number in range(40)]
    many = len(os.listdir("/proc/self/fd"))
    for number, received in enumerate(held):
        same(received, rows_of(1 - comm.rank, number))
    del held, received
    comm.barrier()
    send(comm, 1, fill=True)
    assert len(os.listdir("/proc/self/fd")) <= many - 20
    assert all(one.capacity <= 20_000 for one in comm._shared._met.values())


def test_large_segments_are_given_back_when_read():
    run_ranks(check_large_ones_go_back, 2)


def check_read_in_place() -> None:
    comm = current()
    received = send(comm, 3, fill=True)
    received.fill_(7.0)
    comm.barrier()
    size = rows_of(comm.rank, 3).numel()
    (segment,) = comm._shared._mine
    same(torch.from_numpy(segment.rows).view(torch.float32)[:size], torch.full((size,), 7.0))
    assert segment.in_use.tolist() == [int(rank != comm.rank) for rank in range(2)]
    comm.barrier()
    del received
    comm.barrier()
    assert not segment.in_use.any()


def test_rows_are_read_where_they_were_written():
    run_ranks(check_read_in_place, 2)


def check_refused_by_one() -> None:
    comm = current()
    if comm.rank == 1:
        os.environ[shared_memory.VARIABLE] = "0"
    assert SharedMemory.among(comm.rank, comm.ranks, None) is None
    os.environ.pop(shared_memory.VARIABLE, None)
    assert SharedMemory.among(comm.rank, comm.ranks, None) is not None


def test_all_ranks_share_memory_or_none_does():
    run_ranks(check_refused_by_one, 2)


def test_switched_off_rows_go_through_sockets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(shared_memory.VARIABLE, "0")
    run_ranks(check_switched_off, 2)


def check_switched_off() -> None:
    comm = current()
    assert comm._shared is None
    same(send(comm, 5, fill=True), rows_of(1 - comm.rank, 5))


@pytest.mark.parametrize("size", [1, 4096, 4097, 100_000, 2**20 + 1, 2**31])
def test_a_segment_has_room_for_a_quarter_more_at_most(size: int):
    assert size <= _roomy(size) <= max(1.25 * size, size + 4096)
