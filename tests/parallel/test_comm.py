"""One rank needs no process group: every collective is the identity, and misuse is named."""

from __future__ import annotations

import pytest
import torch

from tgnn.parallel import Comm, current, initialise, shutdown


def test_one_rank_is_not_special():
    comm = current()
    assert (comm.rank, comm.ranks, comm.backend) == (0, 1, "single")
    assert comm.all_to_all_counts([3]) == [3]
    rows = torch.arange(6.0).view(2, 3).t()
    arriving = comm.start_all_to_all_rows(rows, [3], [3])
    for received in (comm.all_to_all_rows(rows, [3], [3]), arriving.wait()):
        torch.testing.assert_close(received, rows, rtol=0, atol=0)
    with pytest.raises(ValueError, match="second wait"):
        arriving.wait()
    assert comm.all_to_all_rows(torch.empty(0, 4), [0], [0]).shape == (0, 4)
    total = torch.ones(2)
    assert comm.all_reduce(total) is total and comm.broadcast(total) is total
    torch.testing.assert_close(total, torch.ones(2))
    assert comm.all_gather_ints([4, 5]) == [[4, 5]]
    comm.barrier()
    assert comm.bytes_sent == 0


def test_initialise_of_one_rank_is_current_until_shutdown():
    comm = initialise(device="cpu")
    assert current() is comm
    shutdown()
    assert current() is not comm


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda comm: comm.all_to_all_counts([1, 2]), "got 2 counts, expected one for each of 1 ranks"),
        (lambda comm: comm.all_to_all_rows(torch.ones(3), [2], [2]), "got 3 rows, expected the send counts'"),
        (lambda comm: comm.all_to_all_rows(torch.ones(3), [3], [2]), "3 rows to send to itself and 2 to"),
        (lambda comm: comm.all_to_all_rows(torch.ones(()), [1], [1]), "got a 0-D tensor"),
        (lambda comm: comm.all_to_all_rows(torch.ones(1, device="meta"), [1], [1]), "got a tensor on meta"),
        (lambda comm: comm.all_reduce(torch.ones(1), "mean"), "got op='mean', expected one of sum, max, min"),
        (lambda comm: comm.all_reduce(torch.ones(1, dtype=torch.complex64)), "got complex values"),
        (lambda comm: comm.broadcast(torch.ones(1), source=1), "got source 1, expected 0 to 0"),
    ],
)  # fmt: skip
def test_misuse_is_named(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(Comm())
