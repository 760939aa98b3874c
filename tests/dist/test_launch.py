"""Ranks start together and end together, whatever happens to one of them or to their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist import launch_job
from tests.dist.launch_job import read_pids
from tests.dist.ranks import run_ranks
from tgnn.errors import UserError, run_command
from tgnn.parallel import RankError, current, launch

ROOT = Path(__file__).resolve().parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, thread, file handle or temporary file outlives a launch; signal handlers are back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resource_tracker.ensure_running()  # Python's own; it stays
    before = handles()
    yield
    assert multiprocessing.active_children() == []
    assert handles() == before
    assert list(tmp_path.glob("tgnn-*")) == []


def handles() -> tuple:
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return files, threading.active_count(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not yet collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its parent"
        time.sleep(0.05)


def once_started(folder: Path, ranks: int, act: Callable[[list[int]], None]) -> threading.Thread:
    """Do something to the ranks, given their process ids, as soon as they run."""
    thread = threading.Thread(target=lambda: act(read_pids(folder, ranks)))
    thread.start()
    return thread


def describe(*args: object) -> dict:
    total = current().all_reduce(torch.ones(1))
    return {"args": args, "rank": current().rank, "total": total, "threads": torch.get_num_threads()}


def test_ranks_get_the_arguments_and_rank_0_gives_the_value():
    found = run_ranks(describe, 2, np.arange(3), torch.eye(2))
    assert (found["rank"], found["threads"]) == (0, 1)
    np.testing.assert_array_equal(found["args"][0], np.arange(3))
    torch.testing.assert_close(found["args"][1], torch.eye(2))
    torch.testing.assert_close(found["total"], torch.tensor([2.0]))
    assert current().ranks == 1


def mistake_on_rank_1() -> None:
    if current().rank == 1:
        raise UserError("--fanouts: got x, expected integers; write 10,10.")
    current().barrier()


def test_user_error_in_a_rank_is_one_sentence_and_status_2(capfd: pytest.CaptureFixture[str]):
    assert run_command(lambda argv: run_ranks(mistake_on_rank_1, 2)) == 2
    assert capfd.readouterr().err == "error: --fanouts: got x, expected integers; write 10,10.\n"


@linux
def test_killed_rank_ends_all(tmp_path: Path):
    killed_at = []

    def kill(pids: list[int]) -> None:
        killed_at.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    killer = once_started(tmp_path, 2, kill)
    with pytest.raises(RankError, match=r"rank 1 of 2 was ended by signal 9 \(SIGKILL\)") as error:
        launch(launch_job.work_until_stopped, tmp_path, ranks=2, device="cpu", threads=1)
    assert error.value.rank == 1
    assert time.monotonic() - killed_at[0] < 20
    killer.join()
    assert not any(alive(pid) for pid in read_pids(tmp_path, 2))


def stick_on_rank_1(folder: Path) -> None:
    launch_job.leave_pid(folder)
    if current().rank == 1:
        time.sleep(600)
    current().barrier()


def test_stuck_rank_ends_all_after_the_timeout(tmp_path: Path):
    with pytest.raises(RankError, match=r"rank 0 of 2 waited in vain .*timeout 3 s.*still running: 1"):
        run_ranks(stick_on_rank_1, 2, tmp_path, timeout=3.0)
    assert not any(alive(pid) for pid in read_pids(tmp_path, 2))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_passed_on_once_and_the_ranks_decide(tmp_path: Path, signum: int):
    sender = once_started(tmp_path, 2, lambda pids: os.kill(os.getpid(), signum))
    assert run_ranks(launch_job.work_until_stopped, 2, tmp_path) == "stopped after 1 signal"
    sender.join()


def job(mode: str, folder: Path) -> subprocess.Popen:
    """A parent of its own, in the background."""
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, launch_job.__file__, mode, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@linux
def test_two_jobs_at_once_one_fails_and_the_other_loses_its_parent(tmp_path: Path):
    failing, orphaned = job("error", tmp_path / "error"), job("wait", tmp_path / "wait")
    try:
        out, err = failing.communicate(timeout=120)
        assert failing.returncode == 1 and out == ""
        assert "rank 1 of 2 failed" in err
        assert err.rstrip().splitlines()[-1] == "ValueError: this is the cause"

        pids = read_pids(tmp_path / "wait", 2)
        assert all(alive(pid) for pid in [orphaned.pid, *pids])
        orphaned.kill()
        orphaned.communicate(timeout=60)
        wait_until_gone(pids, seconds=10)
    finally:
        for process in (failing, orphaned):
            process.kill()
            process.wait()


def test_torchrun_ranks_join_each_other(tmp_path: Path):
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, launch_job.__file__, "torchrun", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for turn in ("first", "second"):
        assert sorted(file.name for file in (tmp_path / turn).iterdir()) == ["rank-0-of-2", "rank-1-of-2"]
