"""A script that starts ranks, for tests that need a parent of their own: `launch_job.py MODE DIR`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tgnn.parallel import current, launch


def leave_pid(folder: Path) -> None:
    """Tell the test this rank's process id; the file appears with its content."""
    unfinished = folder / f"pid-{current().rank}.part"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"pid-{current().rank}")


def read_pids(folder: Path, ranks: int, seconds: float = 60.0) -> list[int]:
    """The process ids of all ranks, once they run."""
    files = [folder / f"pid-{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def fail_on_rank_1(folder: Path) -> None:
    """Rank 1 fails; the others wait for it in a collective."""
    leave_pid(folder)
    if current().rank == 1:
        raise ValueError("this is the cause")
    current().barrier()


def work_until_stopped(folder: Path) -> str:
    """What a trainer does: on SIGTERM it finishes what it is at, then all ranks stop together."""
    stop = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.append(signum))
    leave_pid(folder)
    comm = current()
    while sum(flag for (flag,) in comm.all_gather_ints([len(stop)])) == 0:
        time.sleep(0.02)
    return f"stopped after {len(stop)} signal"


def tell_all(folder: Path) -> None:
    """Every rank's own account of how many there are."""
    (folder / f"rank-{current().rank}-of-{current().ranks}").touch()
    current().barrier()


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        # Twice in one process: the second group must not meet at the first one's addresses.
        for turn in ("first", "second"):
            launch(tell_all, Path(sys.argv[2]) / turn, device="cpu", threads=1)
        sys.exit()
    job = {"error": fail_on_rank_1, "wait": work_until_stopped}[sys.argv[1]]
    print(launch(job, Path(sys.argv[2]), ranks=2, device="cpu", threads=1))
