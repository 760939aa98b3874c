"""What users of such systems report, on ranks: unequal batches, no seeds, sends of nothing, no edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.dist.test_laws import Adam, near, once_per_ranks
from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import ring
from tgnn.nn import GNN
from tgnn.parallel import all_reduce_gradients, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.training.loss import loss_sum

RUNS = (("split", 0), ("split", 2), ("data", 1))  # mode and prefetch
MODELS = ("sage", "gcn", "gat", "gatv2", "gin")


def random_graph(num_vertices: int, num_edges: int, train: list[int]) -> Dataset:
    rng = np.random.default_rng(num_vertices)
    graph = Graph.from_edge_index(rng.integers(0, num_vertices, (2, num_edges)), num_vertices)
    x, y = rng.standard_normal((num_vertices, 4)), rng.integers(0, 2, num_vertices)
    return Dataset("pitfalls", graph, x, y, train, [], [], num_classes=2)


def rings(train: list[int]) -> Dataset:
    """Two rings of five vertices, no edge between them."""
    dataset = ring(10, 2)
    return Dataset("rings", dataset.graph, dataset.x, dataset.y, train, [], [], num_classes=2)


# name -> (dataset, number of parts -> part of every vertex, batch size)
SETTINGS: dict[str, Any] = {
    # 17 seeds over 4 ranks in batches of 4 (the last one of 1), 9 over 2 in batches of 2.
    "a05 17": (random_graph(20, 60, [*range(3, 20)]), lambda parts: np.arange(20) % parts, 4),
    "a05 9": (random_graph(9, 30, [*range(9)]), lambda parts: np.arange(9) * parts // 9, 2),
    # 3 seeds, all of part 0.
    "a06": (random_graph(10, 40, [0, 1, 2]), lambda parts: np.maximum(0, np.arange(10) - 2) % parts, 2),
    "a07": (rings([*range(0, 10, 3)]), lambda parts: np.arange(10) // 5 % parts, 3),
    "a07 seeds on rank 0": (rings([0, 2, 3]), lambda parts: np.arange(10) // 5 % parts, 3),
    "no edges": (random_graph(8, 0, [*range(8)]), lambda parts: np.arange(8) % parts, 3),
}


def run_settings(folder: Path) -> None:
    """Every setting in every mode as one of the current ranks; saves what this rank saw."""
    comm, seen = current(), {}
    for name in SETTINGS:
        store = Store.open(folder / f"{name} {comm.ranks}")
        for mode, prefetch in RUNS:
            seen[name, mode, prefetch] = train(store, "sage", mode, prefetch, SETTINGS[name][2])
    store = Store.open(folder / f"no edges {comm.ranks}")
    for model in MODELS:
        seen[model] = train(store, model, "split", 1, 3)
    torch.save(seen, folder / f"seen-{comm.ranks}-{comm.rank}.pt")


def train(store: Store, kind: str, mode: str, prefetch: int, batch_size: int) -> dict[str, Any]:
    """Three epochs of Adam on the settings of few steps, else two."""
    torch.manual_seed(1)
    model = GNN.build(kind, 4, 6, 2, 2, dropout=0.2, attention_dropout=0.2, heads=2).double()
    adam, losses, seeds = Adam(model), [], []
    loader = Loader(store, [2, 2], batch_size, parallel=mode, prefetch=prefetch, seed=4)
    for _ in range(3 if len(loader) < 3 else 2):
        seeds.append([])
        for batch in loader:
            batch.x = batch.x.double()
            model.zero_grad(set_to_none=True)
            loss = loss_sum(model(batch), batch.y, store.task) / batch.global_seeds
            loss.backward()
            losses.append(all_reduce_gradients(model, extra=loss.detach().view(1)))
            seeds[-1].append(batch.seeds.tolist())
            adam.step()
    return {"losses": torch.cat(losses), "seeds": seeds, "weights": dict(model.state_dict())}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`seen(P)`: for each rank of P what it saw."""
    folder = tmp_path_factory.mktemp("pitfalls")

    @once_per_ranks
    def load(ranks: int) -> list[dict[Any, Any]]:
        for name, (dataset, part_of, _) in SETTINGS.items():
            write_store(dataset, part_of(ranks), folder / f"{name} {ranks}", num_parts=ranks)
        run_ranks(run_settings, ranks, folder, timeout=240.0)
        return [torch.load(folder / f"seen-{ranks}-{rank}.pt") for rank in range(ranks)]

    return load


def every_case(*names: str) -> Any:
    return pytest.mark.parametrize("key", [(name, *run) for name in names for run in RUNS], ids=str)


@every_case("a05 17", "a05 9")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a05_unequal_batches(seen: Any, ranks: int, key: tuple):
    """Every rank makes the same steps, and every training vertex is a seed once per epoch."""
    dataset, _, batch_size = SETTINGS[key[0]]
    steps = -(-len(dataset.train) // batch_size)
    for epoch in range(2):
        of_ranks = [one[key]["seeds"][epoch] for one in seen(ranks)]
        assert [len(batches) for batches in of_ranks] == [steps] * ranks
        used = [seed for batches in of_ranks for batch in batches for seed in batch]
        assert sorted(used) == dataset.train.tolist()
    # Some step gives some rank no seed at all.
    assert (
        key[0] == "a05 9"
        or ranks == 2
        or [] in [batch for one in seen(ranks) for batch in one[key]["seeds"][0]]
    )


@every_case("a06")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a06_rank_without_training_vertices(seen: Any, ranks: int, key: tuple):
    """It serves the others and ends with the same weights, bit for bit; they are one rank's weights."""
    first = seen(ranks)[0][key]
    for number, one in enumerate(seen(ranks)):
        for name, weight in first["weights"].items():
            torch.testing.assert_close(one[key]["weights"][name], weight, rtol=0, atol=0)
        if key[1] == "split" and number:
            assert one[key]["seeds"] == [[[], []]] * 3
    for name, weight in seen(1)[0][key]["weights"].items():
        near(first["weights"][name], weight, 1e-6, name)


@every_case(*SETTINGS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a07_sends_of_nothing_give_one_process_loss(seen: Any, ranks: int, key: tuple):
    """No edge between the rings, seeds on one of them only, no edge at all: the single process's losses."""
    for one in seen(ranks):
        near(one[key]["losses"], seen(1)[0][key]["losses"], 1e-9, "losses")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a01_no_edges_on_ranks(seen: Any, ranks: int, model: str):
    for one in seen(ranks):
        near(one[model]["losses"], seen(1)[0][model]["losses"], 1e-9, "losses")
        assert one[model]["losses"].isfinite().all()
        assert all(weight.isfinite().all() for weight in one[model]["weights"].values())
