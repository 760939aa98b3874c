"""A resumed run equals one that was never broken off: bit for bit on as many ranks, else within rounding."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.dist.training_runs import last, lines, same_training, small_dataset, store_of, trainer
from tgnn.parallel import current
from tgnn.partition.store import Store
from tgnn.training.trainer import Trainer

EPOCHS = 4


def stop_at(job: Trainer, epoch: int, step: int, rank: int) -> None:
    """Ask for an end, as a signal to one rank does, while that step runs."""
    real = job._step

    def step_and_ask(batch):
        if (job.state.epoch, job.state.step, job.comm.rank) == (epoch, step, rank):
            job.stop_signal = signal.SIGTERM
        return real(batch)

    job._step = step_and_ask


def train_on_two(store: Store, folder: Path) -> None:
    """Everything that runs on two ranks."""
    for dtype in ("float32", "float64"):
        trainer(store, folder / f"straight-{dtype}", epochs=EPOCHS, dtype=dtype).fit()
        trainer(store, folder / f"half-{dtype}", epochs=2, dtype=dtype).fit()
        job = trainer(store, folder / f"stopped-{dtype}", epochs=EPOCHS, dtype=dtype)
        stop_at(job, epoch=3, step=1, rank=1)
        summary = job.fit()
        assert current().rank != 0 or summary["stopped"]["why"] == "SIGTERM in epoch 3"
        if current().rank == 0:
            for start in ("half", "stopped"):
                for ranks in (1, 2):
                    shutil.copytree(folder / f"{start}-{dtype}", folder / f"{start}-{dtype}-on-{ranks}")
        current().barrier()
        for start in ("half", "stopped"):
            trainer(store, folder / f"{start}-{dtype}-on-2", epochs=EPOCHS, dtype=dtype, resume=True).fit()
        trainer(store, folder / f"one-{dtype}", epochs=EPOCHS, dtype=dtype, resume=True).fit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs: `straight`, and each of the others broken off and gone on with."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = (store_of(small_dataset(), parts, folder) for parts in (1, 2))
    for dtype in ("float32", "float64"):
        job = trainer(one, folder / f"one-{dtype}", epochs=EPOCHS, dtype=dtype)
        stop_at(job, epoch=2, step=2, rank=0)
        job.fit()
        assert (last(folder / f"one-{dtype}").epoch, last(folder / f"one-{dtype}").step) == (2, 3)
    run_ranks(train_on_two, 2, two, folder)
    for dtype in ("float32", "float64"):
        assert (last(folder / f"stopped-{dtype}").epoch, last(folder / f"stopped-{dtype}").step) == (3, 2)
        for start in ("half", "stopped"):
            trainer(one, folder / f"{start}-{dtype}-on-1", epochs=EPOCHS, dtype=dtype, resume=True).fit()
    return folder


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("start", ["half", "stopped"])
def test_a25_resumed_on_as_many_ranks_is_the_same_bit_for_bit(runs: Path, start: str, dtype: str):
    assert [line["epoch"] for line in lines(runs / f"straight-{dtype}")] == [1, 2, 3, 4]
    same_training(runs / f"straight-{dtype}", runs / f"{start}-{dtype}-on-2")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("run", ["half-{}-on-1", "stopped-{}-on-1", "one-{}"])
def test_resumed_on_another_number_of_ranks_is_the_same_within_rounding(runs: Path, run: str, dtype: str):
    straight, resumed = runs / f"straight-{dtype}", runs / run.format(dtype)
    expected, found = lines(straight), lines(resumed)
    assert [line["epoch"] for line in found] == [1, 2, 3, 4]
    assert len({line["ranks"] for line in found}) == 2
    tolerance = 1e-5 if dtype == "float32" else 1e-9
    for name in ("loss", "val_loss"):
        a, b = ([line[name] for line in run] for run in (found, expected))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
    for name in ("seeds", "edges", "feature_rows_loaded"):
        assert [x["work"][name] for x in found] == [x["work"][name] for x in expected]
    if dtype == "float64":
        for name, weight in last(straight).model.items():
            torch.testing.assert_close(last(resumed).model[name], weight, rtol=0, atol=1e-6)


def test_training_went_on(runs: Path):
    """The comparisons above are no comparisons of the initial weights."""
    losses = [line["loss"] for line in lines(runs / "straight-float64")]
    assert losses[3] < 0.8 * losses[0]


def test_a25_checkpoint_loads_with_torch_alone_in_another_process(runs: Path):
    program = (
        "import sys, torch; state = torch.load(sys.argv[1], weights_only=True)['state'];"
        "assert 'tgnn' not in sys.modules;"
        "print(state['epoch'], len(state['model']), len(state['optimizer']['state']))"
    )
    path = runs / "straight-float32" / "best.pt"
    command = [sys.executable, "-c", program, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(last(path.parent).best_epoch + 1), "6", "6"]
