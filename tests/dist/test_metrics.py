"""Figures that must not depend on the number of ranks: counts, metrics, predictions in the user's order."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.dist.ranks import run_ranks, same
from tests.dist.training_runs import lines, store_of, trainer
from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.tgnn_npz import save_npz
from tgnn.parallel import current
from tgnn.partition.store import Store, write_store
from tgnn.predict import main as predict
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
        run_dir = folder / f"{name}-{comm.ranks}"
        if name == "a17":
            identity_trainer(store, run_dir).fit()
            continue
        batch_size = {"a05-17": 4, "a05-9": 2, "a06": 2}[name]
        job = trainer(store, run_dir, epochs=3, batch_size=batch_size, fanouts=(2, 2))
        mine = seeds_of_each_step(job)
        job.fit()
        everyone = [seed for step in mine for seed in step]
        counts = comm.all_gather_ints([len(mine), len(everyone), sum(everyone)])
        if comm.rank == 0:
            (run_dir / "seeds.json").write_text(json.dumps(counts))
        for weight in job.model.parameters():
            largest, smallest = (comm.all_reduce(weight.detach().clone(), op) for op in ("max", "min"))
            same(largest, smallest)


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
        stores["a17"] = store_of(identity_dataset(), ranks, folder / "store-17-identity")
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
    """It takes part and keeps the same weights (`run_cases` compares them); the result is one rank's."""
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
    """Vertex v has the one-hot row v and label v, but in the test split vertex 2 alone has that label."""
    y = np.arange(N)
    y[3:7] = 0
    graph = Graph.from_edge_index(np.array([[0, 5, 3, 11, 8, 8], [7, 3, 5, 0, 2, 2]]), N)
    return Dataset("identity", graph, np.eye(N), y, [0, 7, 8, 9, 10, 11], [1], list(TEST), num_classes=N)


def identity_trainer(store: Store, run_dir: Path) -> Trainer:
    """A trainer whose model returns a vertex's own features, and that does not train."""
    still = {"optimizer": "sgd", "lr": 1e-30, "weight_decay": 0.0, "dropout": 0.0}
    job = trainer(store, run_dir, epochs=1, fanouts=(2,), batch_size=2, **still)
    for name, weight in job.model.named_parameters():
        weight.data.copy_(torch.eye(N) if name.endswith("fc_self.weight") else torch.zeros_like(weight))
    return job


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a17_trainer_counts_no_test_vertex_twice(ran: Path, ranks: int):
    (line,) = lines(ran / f"a17-{ranks}")
    assert (line["test_acc"], line["train_acc"], line["work"]["seeds"]) == (0.2, 1.0, 6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a17_a19_predictions_are_in_the_users_order_and_count_once(
    ran: Path, tmp_path: Path, ranks: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    save_npz(identity_dataset(), tmp_path / "small.npz")
    out, data = tmp_path / "scores.npy", tmp_path / "small.npz"
    assert predict([str(ran / "a17-1"), "--data", str(data), "--ranks", str(ranks), "--out", str(out)]) == 0
    np.testing.assert_allclose(np.load(out), np.eye(N, dtype=np.float32), rtol=0, atol=1e-20)
    printed = capfd.readouterr().out
    assert "test 0.2000" in printed and "train 1.0000" in printed
    (store,) = (tmp_path / "cache").iterdir()
    assert Store.open(store).num_parts == ranks
    if ranks > 1:
        assert Store.open(store).original_ids().tolist() != list(range(N))
