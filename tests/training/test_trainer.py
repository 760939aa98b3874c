"""One rank's training: what is best, when it stops, what it leaves behind, that it stays the same size."""

from __future__ import annotations

import gc
import math
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.training_runs import last, lines, same_training, small_dataset, store_of, trainer
from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader
from tgnn.training.checkpoint import CheckpointState
from tgnn.training.metrics import resident_bytes
from tgnn.training.trainer import Trainer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return store_of(small_dataset(), 1, tmp_path_factory.mktemp("small"))


def scripted(monkeypatch: pytest.MonkeyPatch, script: list[tuple[float | None, float | None]]) -> None:
    """Make evaluations find these (validation metric, validation loss), one after the other."""
    left = iter(script)

    def evaluate(self: Trainer) -> dict[str, Any]:
        value, loss = next(left)
        return {"train_acc": 0.5, "val_acc": value, "test_acc": 0.5, "val_loss": loss}

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)


def best_epoch(run_dir: Path) -> int:
    """The epoch whose weights are in best.pt, from the file itself."""
    return CheckpointState.load(run_dir / "best.pt").epoch - 1


@pytest.mark.parametrize(
    ("script", "best"),
    [
        ([(0.5, 1.0), (0.7, 0.9), (0.7, 0.8), (0.6, 0.1)], 3),
        ([(0.5, 1.0), (0.7, 0.9), (0.7, 0.9), (0.7, 1.0)], 2),
        ([(0.5, 1.0), (0.4, 0.1), (0.4, 0.1), (0.4, 0.1)], 1),
        ([(0.9, math.nan), (0.1, 1.0), (math.nan, 0.9), (0.1, math.inf)], 2),
        ([(None, None)] * 4, 4),
    ],
    ids=["tie broken by loss", "a full tie keeps the first", "first", "nan is never best", "no validation"],
)
def test_best_is_the_best_validation_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, script: list, best: int
):
    scripted(monkeypatch, script)
    summary = trainer(store, tmp_path / "run", epochs=4).fit()
    assert summary["best_epoch"] == best_epoch(tmp_path / "run") == best
    assert last(tmp_path / "run").best_epoch == best
    assert last(tmp_path / "run").epoch == 5


def test_patience_counts_epochs_without_a_better_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
):
    scripted(monkeypatch, [(0.5, 1.0), (0.7, 0.9), *[(0.6, 0.9)] * 8])
    summary = trainer(store, tmp_path / "run", epochs=10, patience=3).fit()
    assert [line["epoch"] for line in lines(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert summary["stopped"] == {"why": "no better validation metric for 3 epochs", "signal": None}
    again = trainer(store, tmp_path / "run", epochs=10, patience=3, resume=True).fit()
    assert again["stopped"] == summary["stopped"] and again["epochs"] == 5
    further = trainer(store, tmp_path / "run", epochs=10, patience=4, resume=True).fit()
    assert further["epochs"] == 6


@pytest.mark.parametrize(("patience", "every", "ends"), [(1, 3, 6), (2, 5, 10), (4, 3, 9), (3, 1, 4)])
def test_patience_is_judged_at_evaluations_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store, patience: int, every: int, ends: int
):
    scripted(monkeypatch, [(0.7, 0.9), *[(0.6, 0.9)] * 12])
    options = {"epochs": 12, "patience": patience, "eval_every": every}
    assert trainer(store, tmp_path / "run", **options).fit()["epochs"] == ends
    assert last(tmp_path / "run").best_epoch == every
    assert lines(tmp_path / "run")[-1]["val_acc"] == 0.6


def test_the_best_epochs_figures_survive_a_lost_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Store
):
    scripted(monkeypatch, [(0.7, 0.9), *[(0.6, 0.8)] * 3])
    before = trainer(store, tmp_path / "run", epochs=3).fit()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    after = trainer(store, tmp_path / "run", epochs=4, resume=True).fit()
    assert (after["best_epoch"], after["val_acc"], after["loss"]) == (1, 0.7, before["loss"])


def test_evaluation_every_so_many_epochs_and_after_the_last(tmp_path: Path, store: Store):
    trainer(store, tmp_path / "run", epochs=5, eval_every=2).fit()
    evaluated = [line["epoch"] for line in lines(tmp_path / "run") if line["val_acc"] is not None]
    assert evaluated == [2, 4, 5]
    assert best_epoch(tmp_path / "run") in evaluated


def test_evaluation_has_no_part_in_the_training(tmp_path: Path, store: Store):
    for every in (1, 3):
        trainer(store, tmp_path / f"every-{every}", epochs=3, eval_every=every).fit()
    often, once = last(tmp_path / "every-1"), last(tmp_path / "every-3")
    for name, weight in often.model.items():
        torch.testing.assert_close(once.model[name], weight, rtol=0, atol=0)


def test_resuming_a_finished_run_changes_nothing_and_more_epochs_go_on(tmp_path: Path, store: Store):
    trainer(store, tmp_path / "run", epochs=2).fit()
    before = lines(tmp_path / "run")
    summary = trainer(store, tmp_path / "run", epochs=2, resume=True).fit()
    assert lines(tmp_path / "run") == before and summary["epochs"] == 2
    trainer(store, tmp_path / "run", epochs=3, resume=True).fit()
    trainer(store, tmp_path / "straight", epochs=3).fit()
    same_training(tmp_path / "straight", tmp_path / "run")


def test_a_line_whose_checkpoint_was_not_written_is_written_once(tmp_path: Path, store: Store):
    """As after a kill between the two: the epoch is trained again, and its line stands there once."""
    trainer(store, tmp_path / "run", epochs=2).fit()
    checkpoint = (tmp_path / "run" / "last.pt").read_bytes()
    trainer(store, tmp_path / "run", epochs=3, resume=True).fit()
    expected = lines(tmp_path / "run")
    (tmp_path / "run" / "last.pt").write_bytes(checkpoint)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "lo')
    trainer(store, tmp_path / "run", epochs=3, resume=True).fit()
    assert lines(tmp_path / "run") == expected


def test_a04_unlabelled_vertices_pass_messages_and_nothing_else(tmp_path: Path):
    edges = np.array([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])
    y = np.array([0, 1, np.nan, 1, -1, 0, 2, np.nan])
    x = np.random.default_rng(0).standard_normal((8, 3))
    data = Dataset("a04", Graph.from_edge_index(edges, 8), x, y, train=[0, 1, 6], val=[3], test=[5])
    assert data.num_classes == 3
    job = trainer(store_of(data, 1, tmp_path), tmp_path / "run", epochs=3)
    job.fit()
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path / "run"))
    assert [line["work"]["seeds"] for line in lines(tmp_path / "run")] == [3, 3, 3]


@pytest.mark.parametrize("metric", ["auto", "accuracy", "auc"])
def test_a04_multi_label(tmp_path: Path, metric: str):
    rng = np.random.default_rng(0)
    y = (rng.random((8, 3)) < 0.5).astype(np.float32)
    y[:2] = [[0, 0, 0], [1, 1, 1]]
    y[6, 1], y[7] = np.nan, np.nan
    graph = Graph.from_edge_index(np.array([[0, 1, 2, 7], [1, 2, 3, 4]]), 8)
    data = Dataset("multi", graph, rng.standard_normal((8, 3)), y, train=[0, 1, 2, 6], val=[3, 4], test=[5])
    trainer(store_of(data, 1, tmp_path), tmp_path / "run", epochs=2, metric=metric).fit()
    line = lines(tmp_path / "run")[-1]
    assert line["metric"] == ("f1" if metric == "auto" else metric)
    assert math.isfinite(line["loss"]) and 0 <= line["train_acc"] <= 1


def test_a14_same_seed_same_run_and_every_epoch_another_order(tmp_path: Path, store: Store):
    threads = torch.get_num_threads()
    for name, seed, prefetch, number in (("a", 5, 1, 1), ("b", 5, 0, 4), ("c", 5, 2, 1), ("d", 6, 1, 1)):
        torch.manual_seed(number)  # what the caller's generator says is no part of a run
        torch.set_num_threads(number)
        trainer(store, tmp_path / name, epochs=2, seed=seed, prefetch=prefetch).fit()
    torch.set_num_threads(threads)
    same_training(tmp_path / "a", tmp_path / "b")
    same_training(tmp_path / "a", tmp_path / "c")
    a, d = (lines(tmp_path / name)[0] for name in ("a", "d"))
    assert a["loss"] != d["loss"] and a["work"]["edges"] != d["work"]["edges"]
    loader = Loader(store, [3], 64, seed=5)
    first, second = (torch.cat([batch.seeds for batch in loader]) for _ in range(2))
    assert not torch.equal(first, second)
    torch.testing.assert_close(first.sort().values, second.sort().values)


@pytest.mark.parametrize("every", [0, 1])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, store: Store, every: int):
    """In one sentence that names the step; what was saved before stays good."""
    job = trainer(store, tmp_path / "run", epochs=3, lr=1e30, optimizer="sgd", checkpoint_every=every)
    with pytest.raises(UserError, match=r"^the loss in epoch 1, step 2: got nan, .*smaller --lr than 1e\+30"):
        job.fit()
    assert not (tmp_path / "run" / "best.pt").exists()
    assert (tmp_path / "run" / "last.pt").exists() == bool(every)
    for weight in last(tmp_path / "run").model.values() if every else ():
        assert bool(weight.isfinite().all())


def test_weights_spoilt_by_the_last_step_are_not_saved(tmp_path: Path, store: Store):
    job = trainer(store, tmp_path / "run", epochs=1)
    real = job._step

    def spoil(batch):
        result = real(batch)
        if job.state.step == len(job.loader) - 1:
            next(job.model.parameters()).data.view(-1)[0] = math.inf
        return result

    job._step = spoil
    with pytest.raises(UserError, match="^the weights in epoch 1, step 4: got NaN or infinity"):
        job.fit()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json"]


@contextmanager
def full_disk(room_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_in_a_sentence_and_the_last_checkpoint_stays(tmp_path: Path, store: Store):
    trainer(store, tmp_path / "run", epochs=1).fit()
    before = (tmp_path / "run" / "last.pt").read_bytes()
    for room_bytes in (0, 2000):
        with full_disk(room_bytes), pytest.raises(UserError, match=r"^writing to .*run: got File too large"):
            trainer(store, tmp_path / "run", epochs=2, resume=True).fit()
        assert (tmp_path / "run" / "last.pt").read_bytes() == before
        assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []
    trainer(store, tmp_path / "run", epochs=2, resume=True).fit()
    trainer(store, tmp_path / "straight", epochs=2).fit()
    same_training(tmp_path / "straight", tmp_path / "run")


@pytest.fixture
def quick_collection() -> Iterator[None]:
    """A garbage collection looks at what the test made only, not at all of torch: that takes a while."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def size_of_process() -> tuple[int, int]:
    """(open file handles, threads) of this process, garbage collected."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a21_thirty_epochs_stay_the_same_size(tmp_path: Path, quick_collection: None, prefetch: int):
    rng = np.random.default_rng(0)
    graph = Graph.from_edge_index(rng.integers(0, 20, (2, 80)), 20)
    data = Dataset("a21", graph, rng.standard_normal((20, 64)), np.arange(20) % 3, range(10), range(10, 15))
    job = trainer(
        store_of(data, 1, tmp_path), tmp_path / "run", epochs=30, batch_size=2, prefetch=prefetch, hidden=64
    )
    sizes, real = [], job._finish_epoch

    def finish(*args: Any) -> None:
        real(*args)
        sizes.append((*size_of_process(), resident_bytes()))

    job._finish_epoch = finish
    job.fit()
    assert len(sizes) == 30
    assert {size[:2] for size in sizes[2:]} == {sizes[2][:2]}
    assert sizes[-1][2] - sizes[2][2] < 8 << 20


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")
def test_a21_fifty_loaders_leave_nothing_open(store: Store, quick_collection: None):
    sizes = []
    for _ in range(50):
        loader = Loader(store, [3, 3], 64, prefetch=2)
        next(iter(loader))
        del loader
        sizes.append((*size_of_process(), resident_bytes()))
    assert {size[:2] for size in sizes[2:]} == {sizes[2][:2]}
    assert sizes[-1][2] - sizes[2][2] < 8 << 20


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gatv2", "gin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_model_learns(tmp_path: Path, store: Store, model: str, dtype: str):
    options = {"hidden": 16, "fanouts": (5, 5), "dropout": 0.1}
    summary = trainer(store, tmp_path / "run", model=model, dtype=dtype, epochs=12, **options).fit()
    assert summary["train_acc"] > 0.6
    assert set(summary["kernels"].values()) == {"torch"}
