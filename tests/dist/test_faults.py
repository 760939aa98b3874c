"""What happens to one rank of `python -m tgnn.train` ends the command, soon and tidily; resuming goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist import faults
from tests.dist.ranks import run_ranks
from tests.dist.training_runs import last, lines, same_training, small_dataset, store_of, trainer
from tgnn.partition.store import Store

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "--hidden 8 --fanouts 3,3 --batch-size 64 --epochs 3 --progress never --checkpoint-every 1".split()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def processes_with(mark: str) -> list[int]:
    """Ids of the running processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def command(folder: Path, store: Store, fault: str) -> subprocess.Popen:
    """The command in the background, on two ranks, with a fault to come."""
    told = {faults.VARIABLE: fault, "TGNN_TEST_MARK": str(folder)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **told}
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, faults.__file__, str(store.path), *OPTIONS, "--run-dir", str(folder / "run")],
        cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def resume(store: Store, folder: Path) -> None:
    """Go on with each interrupted run, and train one that nothing happens to."""
    trainer(store, folder / "straight" / "run", epochs=3, checkpoint_every=1).fit()
    for name in ("kill", "signal", "raise"):
        trainer(store, folder / name / "run", epochs=3, checkpoint_every=1, resume=True).fit()


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str, tuple[int, int]]]:
    """Per kind of fault: exit status, stdout, stderr, and (epoch, step) of the checkpoint it left."""
    folder = tmp_path_factory.mktemp("faults")
    store = store_of(small_dataset(), 2, folder)
    # All in the middle of epoch 2, which has three steps; on either rank.
    at = {"kill": "kill:1:2:1", "signal": "signal:0:2:1", "raise": "raise:1:2:2"}
    running = {kind: command(folder / kind, store, fault) for kind, fault in at.items()}
    found: dict = {"folder": folder, "store": store}
    try:
        for kind, process in running.items():
            out, err = process.communicate(timeout=200)
            state = last(folder / kind / "run")
            found[kind] = (process.returncode, out, err, (state.epoch, state.step))
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    deadline = time.monotonic() + 5
    while (left := processes_with(f"TGNN_TEST_MARK={folder}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    found["left"] = left
    return found


def test_no_process_is_left(faulted: dict):
    assert faulted["left"] == []
    assert processes_with(f"TGNN_TEST_MARK={faulted['folder']}") == []


def test_killed_rank_ends_the_command(faulted: dict):
    status, out, err, checkpoint = faulted["kill"]
    assert (status, out) == (1, "")
    assert err.startswith("error: rank 1 of 2 was ended by signal 9 (SIGKILL)")
    assert err.count("\n") == 1
    assert checkpoint == (2, 1)


def test_error_in_a_rank_is_shown_last_and_once(faulted: dict):
    status, out, err, checkpoint = faulted["raise"]
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == "ZeroDivisionError: this is the cause"
    assert err.count("Traceback") == 1 and err.startswith("error: rank 1 of 2 failed")
    assert checkpoint == (2, 2)


def test_sigterm_writes_a_checkpoint_and_ends(faulted: dict):
    status, out, err, checkpoint = faulted["signal"]
    run = faulted["folder"] / "signal" / "run"
    assert status == 143
    assert "(stopped: SIGTERM in epoch 2)" in out
    assert err == f"continue with: python -m tgnn.train --resume {run}\n"
    assert checkpoint[0] == 2 and checkpoint[1] >= 2


def test_resumed_runs_equal_an_uninterrupted_one_bit_for_bit(faulted: dict):
    folder = faulted["folder"]
    for kind in ("kill", "signal", "raise"):
        assert len(lines(folder / kind / "run")) == 1
    run_ranks(resume, 2, faulted["store"], folder)
    for kind in ("kill", "signal", "raise"):
        same_training(folder / "straight" / "run", folder / kind / "run")
