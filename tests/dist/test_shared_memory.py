"""Rows through memory that two ranks map: read in place, held as long as wanted, given back, left by nobody."""

from __future__ import annotations

import gc
import os
import time

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
    for number in (1, 2, 6):
        send(comm, number, fill=True)
    assert len(os.listdir("/proc/self/fd")) <= many - 20
    assert sum(one.capacity for one in comm._shared._mine) <= 200_000
    assert sum(one.capacity for one in comm._shared._met.values()) <= 200_000


def test_idle_segments_go_back_above_a_limit():
    run_ranks(check_large_ones_go_back, 2)


def check_many_held() -> None:
    comm = current()
    held = [send(comm, number % 7 + 1, fill=True) for number in range(5 * shared_memory.MOST_HELD)]
    for number, received in enumerate(held):
        same(received, rows_of(1 - comm.rank, number % 7 + 1))
    assert len(comm._shared._mine) <= shared_memory.MOST_HELD + 20


def test_ranks_that_hold_many_messages_get_copies():
    run_ranks(check_many_held, 2)


def check_unsent_rows() -> None:
    comm = current()
    for _ in range(50):
        rows = comm.new_rows((1000, 3), torch.float32)
        comm.new_rows((1000, 3), torch.float32).t()
    same(send(comm, 4, fill=True), rows_of(1 - comm.rank, 4))
    # A filling that is dropped late takes nothing from the next one in the same place.
    first = comm.new_rows((50,), torch.float32)
    counts = [0, 0]
    counts[1 - comm.rank] = 50
    comm.all_to_all_rows(first.fill_(1.0), counts, counts)
    comm.barrier()
    second = comm.new_rows((50,), torch.float32)
    assert second.data_ptr() == first.data_ptr()
    del first
    other = comm.new_rows((50,), torch.float32)
    assert other.data_ptr() != second.data_ptr()
    assert len(comm._shared._mine) <= 5 and len(comm._shared._filled) == 3
    del rows, second, other
    assert not comm._shared._filled


def test_rows_that_are_never_sent_leave_nothing_behind():
    run_ranks(check_unsent_rows, 2)


def check_leaves_early() -> None:
    """Rank 0 has long gone, but for its farewell, when rank 1 looks at the rows."""
    comm = current()
    mine = torch.full((5, 2), float(comm.rank))
    counts = [0, 0]
    counts[1 - comm.rank] = 5
    arriving = comm.start_all_to_all_rows(mine, counts, counts)
    if comm.rank == 1:
        time.sleep(5.0)
    same(arriving.wait(), torch.full((5, 2), 1.0 - comm.rank))


def test_a_rank_may_leave_before_the_others_have_looked():
    run_ranks(check_leaves_early, 2)


def check_forked_child() -> None:
    comm = current()
    received = send(comm, 3, fill=True)
    child = os.fork()
    if child == 0:
        del received
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    comm.barrier()
    for number in (3, 10, 17):
        send(comm, number, fill=True)
    same(received, rows_of(1 - comm.rank, 3))


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_lets_go_of_nothing():
    run_ranks(check_forked_child, 2)


def check_through_three() -> None:
    """Rows from two senders, started before any of them is waited for, in reverse."""
    comm = current()
    started = []
    for number in range(6):
        counts = [(number + comm.rank + q) % 3 for q in range(3)]
        value = [torch.full((n, 2), 100.0 * number + 10 * comm.rank + q) for q, n in enumerate(counts)]
        theirs = [(number + q + comm.rank) % 3 for q in range(3)]
        started.append((number, theirs, comm.start_all_to_all_rows(torch.cat(value), counts, theirs)))
    for number, theirs, arriving in reversed(started):
        expected = [torch.full((n, 2), 100.0 * number + 10 * q + comm.rank) for q, n in enumerate(theirs)]
        same(arriving.wait(), torch.cat(expected))


def test_several_senders_and_messages_at_once():
    run_ranks(check_through_three, 3)


def check_read_in_place() -> None:
    comm = current()
    received = send(comm, 3, fill=True)
    received.fill_(7.0)
    comm.barrier()
    size = rows_of(comm.rank, 3).numel()
    (segment,) = comm._shared._mine
    same(torch.from_numpy(segment.rows).view(torch.float32)[:size], torch.full((size,), 7.0))
    assert segment.state.tolist() == [shared_memory.READING * (rank != comm.rank) for rank in range(2)]
    comm.barrier()
    del received
    comm.barrier()
    assert not segment.state.any()


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
