"""Figures that must not depend on the number of ranks: counts, metrics, predictions in the user's order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.ranks import run_ranks, same
from tests.dist.training_runs import last, lines, store_of, trainer
from tgnn import predict
from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.tgnn_npz import save_npz
from tgnn.parallel import current
from tgnn.partition.store import Store, write_store
from tgnn.training.checkpoint import CheckpointState
from tgnn.training.metrics import STAGES
from tgnn.training.trainer import Trainer


def random_dataset(name: str, num_vertices: int, num_train: int, seed: int = 0) -> Dataset:
    """The first `num_train` vertices for training, the next two for validation."""
    rng = np.random.default_rng(seed)
    graph = Graph.from_edge_index(rng.integers(0, num_vertices, (2, 4 * num_vertices)), num_vertices)
    x, y = rng.standard_normal((num_vertices, 4)), np.arange(num_vertices) % 3
    return Dataset(name, graph, x, y, range(num_train), range(num_train, num_train + 2))


def seeds_of_each_step(job: Trainer) -> list[list[int]]:
    """What this rank is given to train on, step by step."""
    return [batch.seeds.tolist() for batch in job.loader.iterate(epoch=0)]


def run_cases(stores: dict[str, Store], folder: Path) -> None:
    """Every case of these tests that fits the current number of ranks."""
    comm = current()
    for name, store in stores.items():
        batch_size = {"a05-17": 4, "a05-9": 2, "a06": 2, "a17": 2}[name]
        job = trainer(store, folder / f"{name}-{comm.ranks}", epochs=3, batch_size=batch_size, fanouts=(2, 2))
        mine = seeds_of_each_step(job)
        job.fit()
        everyone = [seed for step in mine for seed in step]
        counts = comm.all_gather_ints([len(mine), len(everyone), sum(everyone)])
        if comm.rank == 0:
            (folder / f"{name}-{comm.ranks}" / "seeds.json").write_text(json.dumps(counts))
        for weight in job.model.parameters():
            mean = weight.detach().double().clone()
            same(comm.all_reduce(mean, "max").float(), comm.all_reduce(-mean.neg(), "min").float())


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of `run_cases` on 1, 2 and 4 ranks, in folders `<case>-<ranks>`."""
    folder = tmp_path_factory.mktemp("metrics")
    seventeen, nine = random_dataset("a05-17", 20, 17), random_dataset("a05-9", 12, 9)
    unowned = random_dataset("a06", 10, 3)
    for ranks in (1, 2, 4):
        # The three training vertices all in part 0.
        part_of = np.array([0, 0, 0, *(np.arange(7) % ranks)], dtype=np.int32)
        stores = {"a06": write_store(unowned, part_of, folder / f"store-a06-{ranks}", num_parts=ranks)}
        stores["a05-17"] = store_of(seventeen, ranks, folder / "store-17")
        stores["a05-9"] = store_of(nine, ranks, folder / "store-9")
        if ranks == 1:
            run_cases(stores, folder)
        else:
            run_ranks(run_cases, ranks, stores, folder)
    return folder


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("case", "seeds", "steps"), [("a05-17", 17, 5), ("a05-9", 9, 5)])
def test_a05_unequal_batches(ran: Path, case: str, seeds: int, steps: int, ranks: int):
    """Every rank takes as many steps; every training vertex is used once an epoch."""
    per_rank = json.loads((ran / f"{case}-{ranks}" / "seeds.json").read_text())
    assert [row[0] for row in per_rank] == [steps] * ranks
    assert len({row[1] for row in per_rank}) > 1  # the case is one of unequal ranks
    assert sum(row[1] for row in per_rank) == seeds
    assert sum(row[2] for row in per_rank) == sum(range(seeds))
    assert [line["work"]["seeds"] for line in lines(ran / f"{case}-{ranks}")] == [seeds] * 3


@pytest.mark.parametrize("ranks", [2, 4])
def test_a06_a_rank_without_training_vertices(ran: Path, ranks: int):
    """It takes part and keeps the same weights (`run_cases` compares them); the result is that of one rank."""
    per_rank = json.loads((ran / f"a06-{ranks}" / "seeds.json").read_text())
    assert [row[1] for row in per_rank] == [3] + [0] * (ranks - 1)
    found, expected = lines(ran / f"a06-{ranks}"), lines(ran / "a06-1")
    np.testing.assert_allclose([x["loss"] for x in found], [x["loss"] for x in expected], rtol=0, atol=1e-5)
    assert [x["work"]["edges"] for x in found] == [x["work"]["edges"] for x in expected]


@pytest.mark.parametrize("case", ["a05-17", "a05-9", "a06"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_metrics_are_those_of_one_rank(ran: Path, case: str, ranks: int):
    found, expected = lines(ran / f"{case}-{ranks}")[0], lines(ran / f"{case}-1")[0]
    for name in ("train_acc", "val_acc", "val_loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-5)


# Of 12 vertices, numbers 2 to 6 are the test split.
N, TEST = 12, range(2, 7)


def identity_dataset() -> Dataset:
    """Vertex v has the one-hot row v, and label v in the training split; of the test split vertex 2 alone has."""
    y = np.arange(N)
    y[3:7] = 0
    graph = Graph.from_edge_index(np.array([[0, 5, 3, 11, 8, 8], [7, 3, 5, 0, 2, 2]]), N)
    return Dataset("identity", graph, np.eye(N), y, [0, 7, 8, 9, 10, 11], [1], list(TEST), num_classes=N)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on that data whose model returns a vertex's own features; its DATA is a file."""
    folder = tmp_path_factory.mktemp("identity")
    save_npz(identity_dataset(), folder / "identity.npz")
    run = folder / "run"
    job = trainer(store_of(identity_dataset(), 1, folder), run, epochs=1, fanouts=(2,), batch_size=2, dropout=0.0,
                  optimizer="sgd", lr=1e-30, weight_decay=0.0)  # fmt: skip
    set_to_identity(job)
    job.fit()
    record = json.loads((run / "config.json").read_text())
    record["data"]["source"] = str(folder / "identity.npz")
    (run / "config.json").write_text(json.dumps(record))
    return run


def set_to_identity(job: Trainer) -> None:
    for name, weight in job.model.named_parameters():
        weight.data.copy_(torch.eye(N) if name.endswith("fc_self.weight") else torch.zeros_like(weight))


def test_a17_trainer_counts_no_test_vertex_twice(identity: Path):
    assert lines(identity)[0]["test_acc"] == 0.2
    assert lines(identity)[0]["train_acc"] == 1.0
    assert last(identity).best_epoch == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a17_a19_predictions_are_in_the_users_order_and_count_once(
    identity: Path, tmp_path: Path, ranks: int, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "scores.npy"
    options = ["--partitioner", "random"] if ranks == 3 else []
    assert predict.main([str(identity), "--ranks", str(ranks), "--out", str(out), *options[:0]]) == 0
    scores = np.load(out)
    np.testing.assert_array_equal(scores, np.eye(N, dtype=np.float32))
    printed = capfd.readouterr().out
    assert "test 0.2000" in printed and "train 1.0000" in printed
    (store,) = (tmp_path / "cache").iterdir()
    assert Store.open(store).num_parts == ranks
    if ranks > 1:
        assert Store.open(store).original_ids().tolist() != list(range(N))


def trainer_on_several(store: Store, run: Path, folder: Path) -> None:
    """One epoch of the identity's run on the current ranks, from its checkpoint."""
    job = trainer(store, folder / f"run-{current().ranks}", epochs=1, fanouts=(2,), batch_size=2, dropout=0.0,
                  optimizer="sgd", lr=1e-30, weight_decay=0.0)  # fmt: skip
    job.model.load_state_dict(CheckpointState.load(run / "last.pt").model)
    job.fit()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a17_trainer_on_ranks(identity: Path, tmp_path: Path, ranks: int):
    run_ranks(trainer_on_several, ranks, store_of(identity_dataset(), ranks, tmp_path), identity, tmp_path)
    assert lines(tmp_path / f"run-{ranks}")[0]["test_acc"] == 0.2


def stages_add_up(run_dir: Path) -> None:
    """For the command line's tests: stages of every epoch are disjoint and fill its wall time."""
    for text in (run_dir / "metrics.jsonl").read_text().splitlines():
        seconds = json.loads(text)["seconds"]
        total = sum(seconds[name] for name in STAGES)
        assert 0.9 * seconds["total"] <= total <= 1.0001 * seconds["total"], seconds
