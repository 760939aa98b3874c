"""`python -m tgnn.train` and `predict` as a new user meets them: real commands, what they print and leave."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist import faults
from tests.dist.training_runs import small_dataset, store_of, trainer
from tgnn import train
from tgnn.errors import run_command
from tgnn.partition.store import Store
from tgnn.predict import main as predict
from tgnn.training import trainer as trainer_module
from tgnn.training.metrics import STAGES
from tgnn.training.resolve import resolve
from tgnn.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--hidden", "8", "--fanouts", "3,3", "--batch-size", "64"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen:
    """A Python command in the background, in its own folder, with a cache of stores beside it."""
    folder.mkdir(exist_ok=True)
    known = {"PYTHONPATH": str(ROOT), "TGNN_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env={**os.environ, **known, **environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture(scope="module")
def built_in(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The main job, a few epochs of it: its run directory, stdout and stderr."""
    folder = tmp_path_factory.mktemp("built-in")
    status, out, err = finish(start(folder, "-m", "tgnn.train", "--epochs", "4"))
    assert status == 0, err
    return folder / "runs" / "sbm-sage-1", out, err


def test_main_job_leaves_a_whole_run_directory(built_in: tuple[Path, str, str]):
    run, _, _ = built_in
    assert sorted(path.name for path in run.iterdir()) == [
        "best.pt", "config.json", "last.pt", "metrics.jsonl", "summary.json",
    ]  # fmt: skip
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    assert [(line["epoch"], line["ranks"], line["parallel"]) for line in found] == [
        (epoch, 2, "split") for epoch in (1, 2, 3, 4)
    ]
    assert summary["test_acc"] > 0.8 and summary["stopped"] is None
    assert summary["best_epoch"] == max(found, key=lambda line: (line["val_acc"], -line["val_loss"]))["epoch"]
    assert set(summary["kernels"].values()) == {"torch"}
    assert summary["provenance"]["versions"]["torch"]


def test_a23_stage_times_add_up_to_the_wall_time(built_in: tuple[Path, str, str]):
    for text in (built_in[0] / "metrics.jsonl").read_text().splitlines():
        seconds = json.loads(text)["seconds"]
        total = sum(seconds[stage] for stage in STAGES)
        assert 0.9 * seconds["total"] <= total <= 1.0001 * seconds["total"], seconds
        assert all(seconds[stage] > 0 for stage in ("sample", "split", "load", "forward", "backward", "eval"))


def test_main_job_ends_with_a_short_table(built_in: tuple[Path, str, str]):
    _, out, err = built_in
    rows = out.splitlines()
    assert len(rows) <= 12 and max(map(len, rows)) <= 110, out
    figures = r"train 0\.\d{4}  val 0\.\d{4}  test 0\.\d{4}"
    assert re.fullmatch(rf"accuracy +{figures}  \(best epoch: \d of 4\)", rows[0])
    for words in ("seconds per epoch", "seeds/s on 2 ranks", " edges, ", "rows loaded", "halo rows"):
        assert words in out
    assert re.search(r"[\d.]+ [kM]B exchanged", out)
    assert re.fullmatch(r"run +runs/sbm-sage-1", rows[-1])
    opening, *progress = err.splitlines()
    assert re.match(r"training +sage, 2 layers of width 64, on sbm: .* 2 ranks \(split, cpu\)$", opening), err
    for text in progress:
        assert re.match(r"epoch \d/4  loss \d+\.\d{4}  val_acc 0\.\d{4}  test_acc 0\.\d{4}$", text), err


def test_predict_gives_the_runs_own_figures(
    built_in: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path))
    assert predict([str(built_in[0]), "--ranks", "1", "--out", str(tmp_path / "scores.npy")]) == 0
    out = capsys.readouterr().out
    summary = json.loads((built_in[0] / "summary.json").read_text())
    figures = "  ".join(f"{split} {summary[f'{split}_acc']:.4f}" for split in ("train", "val", "test"))
    assert re.match(rf"accuracy +{re.escape(figures)}\n", out), out
    assert f"scores       {tmp_path / 'scores.npy'}" in out
    assert np.load(tmp_path / "scores.npy").shape == (8000, 8)


HIDDEN_TRITON = """
import sys
sys.modules["triton"] = None
import tgnn, tgnn.train, tgnn.predict, tgnn.partition.__main__
from tgnn.errors import run_command
for command in (tgnn.train.main, tgnn.predict.main, tgnn.partition.__main__.main):
    try:
        command(["--help"])
    except SystemExit as end:
        assert end.code == 0
status = run_command(tgnn.train.main, ["ring:10", "--epochs", "1", "--ranks", "1", "--fanouts", "2,2"])
assert not [name for name in sys.modules if name.startswith("triton.")]
sys.exit(status)
"""


def test_a13_no_gpu_and_no_triton(tmp_path: Path):
    status, out, err = finish(start(tmp_path / "x", "-c", HIDDEN_TRITON))
    assert status == 0, err
    assert out.count("usage: python -m tgnn") == 3
    assert re.search(r"accuracy +train [01]\.\d{4}", out)
    assert len((tmp_path / "x" / "runs" / "ring-sage-1" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """(status, stdout, stderr) of a good run, a user's mistake and a fault under torchrun, and the folder."""
    folder = tmp_path_factory.mktemp("torchrun")
    store = store_of(small_dataset(), 2, folder).path
    good = start(folder / "good", *TORCHRUN, "-m", "tgnn.train", "sbm:300", *SMALL, "--epochs", "2")
    mistake = start(folder / "mistake", *TORCHRUN, "-m", "tgnn.train", "nowhere")
    told = {faults.VARIABLE: "raise:1:2:1"}
    fault = start(folder / "fault", *TORCHRUN, faults.__file__, str(store), *SMALL, **told)
    before = time.monotonic()
    found = {"good": finish(good), "mistake": finish(mistake), "fault": finish(fault), "folder": folder}
    found["seconds"] = time.monotonic() - before
    return found


def test_torchrun_trains_and_prints_one_table(under_torchrun: dict[str, Any]):
    status, out, err = under_torchrun["good"]
    assert status == 0, err
    assert out.count("seeds/s on 2 ranks") == 1
    run = under_torchrun["folder"] / "good" / "runs" / "sbm-sage-1"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(list((under_torchrun["folder"] / "good" / "cache").iterdir())) == 1


def test_torchrun_tells_a_mistake_once(under_torchrun: dict[str, Any]):
    status, out, err = under_torchrun["mistake"]
    assert status != 0 and out == ""
    assert err.count("error: DATA: got 'nowhere'") == 1, err
    assert list((under_torchrun["folder"] / "mistake").glob("runs/*")) == []


def test_torchrun_ends_all_on_a_fault(under_torchrun: dict[str, Any]):
    status, _, err = under_torchrun["fault"]
    assert status != 0
    assert "ZeroDivisionError: this is the cause" in err
    assert under_torchrun["seconds"] < 180


def test_a_store_says_how_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for parts in (1, 3):
        path = str(store_of(small_dataset(), parts, tmp_path).path)
        assert resolve([path]).num_ranks() == parts
        assert resolve([path, "--ranks", "2"]).num_ranks() == 2
    run = tmp_path / "run"
    trainer(Store.open(tmp_path / "store-1"), run, epochs=1, ranks=1).fit()
    assert resolve([str(tmp_path / "store-3"), "--resume", str(run)]).num_ranks() == 3
    monkeypatch.chdir(tmp_path)
    assert run_command(train.main, ["store-1", *SMALL, "--epochs", "1", "--progress", "never"]) == 0


def test_resuming_a_finished_run_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    store = store_of(small_dataset(), 1, tmp_path)
    trainer(store, tmp_path / "run", epochs=2, ranks=1).fit()
    again = [str(store.path), "--resume", str(tmp_path / "run")]
    assert run_command(train.main, again) == 0
    out = capsys.readouterr().out
    assert out.startswith("nothing was trained: the run has done 2 of 2 epochs; go on with --epochs 12\n")
    assert "seeds/s on 1 rank, split" in out
    assert run_command(train.main, [*again, "--epochs", "3"]) == 0
    assert "nothing was trained" not in capsys.readouterr().out


def test_an_option_without_effect_is_warned_of_in_a_line(capsys: pytest.CaptureFixture[str]):
    def main(argv: Any) -> None:
        resolve(["karate", "--heads", "8"])

    with pytest.warns(UserWarning, match="^--heads has no effect: --model sage has no attention.$"):
        assert run_command(main) == 0
    program = (
        "from tgnn.errors import run_command; from tgnn.training.resolve import resolve;"
        "run_command(lambda argv: resolve(['karate', '--heads', '8']) and None)"
    )
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stderr == "warning: --heads has no effect: --model sage has no attention.\n"


class Clock:
    """Time that passes only when told; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every step takes 0.4 seconds of the trainer's clock: an epoch of three steps 1.2."""
    clock, real = Clock(), Trainer._step
    monkeypatch.setattr(trainer_module, "time", clock)

    def step(self: Trainer, batch: Any) -> tuple[float, bool]:
        clock.now += 0.4
        return real(self, batch)

    monkeypatch.setattr(Trainer, "_step", step)
    return clock


def test_progress_without_a_terminal(tmp_path: Path, slow: Clock, capsys: pytest.CaptureFixture[str]):
    """At most a line every two seconds; with `never` none."""
    store = store_of(small_dataset(), 1, tmp_path)
    trainer(store, None, epochs=6, progress="auto").fit()
    told = capsys.readouterr().err.splitlines()
    assert [text.split()[1] for text in told] == ["2/6", "4/6", "6/6"]
    assert re.fullmatch(r"epoch 2/6  loss \d\.\d{4}  val_acc 0\.\d{4}  test_acc 0\.\d{4}", told[0])
    trainer(store, None, epochs=6, progress="never").fit()
    assert capsys.readouterr().err == ""


def test_progress_inside_a_long_epoch(
    tmp_path: Path, slow: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer_module, "STEP_LINE_SECONDS", 0.7)
    trainer(store_of(small_dataset(), 1, tmp_path), None, epochs=1, progress="auto").fit()
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"epoch 1/1  step 2/3  loss \d\.\d{4}", told[0]), told


def test_progress_bar_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    real = Trainer._step
    monkeypatch.setattr(Trainer, "_step", lambda self, batch: (time.sleep(0.4), real(self, batch))[1])
    trainer(store_of(small_dataset(), 1, tmp_path), None, epochs=3, progress="always").fit()
    err = capsys.readouterr().err
    assert "epoch 3/3: 100%" in err and "9/9" in err and "val_acc=0." in err
