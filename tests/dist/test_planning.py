"""What the planner predicts of a run's work is what ranks then do, and every rate can be measured on ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.training_runs import lines, small_dataset, store_of, trainer
from tgnn.parallel import current
from tgnn.partition.store import Store
from tgnn.training import measure
from tgnn.training.config import TrainConfig
from tgnn.training.planner import Layout
from tgnn.training.profile import NAMES, load_profile

ROW = 4 * 8  # bytes of a feature row of the small graph
CASES: dict[str, dict[str, Any]] = {
    "sage": {"model": "sage"},
    "project-first": {"model": "sage", "hidden": 4},
    "pool": {"model": "sage", "aggregator": "pool", "residual": True, "norm": "layer"},
    "gcn": {"model": "gcn", "hidden": 4},
    "gat": {"model": "gat", "heads": 2},
    "gatv2": {"model": "gatv2", "heads": 2, "output_heads": 2},
    "gin": {"model": "gin", "dropout": 0.0},
    "transformer": {"model": "transformer", "heads": 2},
    "labor": {"sampler": "labor"},
    "data": {"parallel": "data"},
    "replicas": {"replicas": 2},
    "bfloat16-exchange": {"exchange_dtype": "bfloat16"},
    "halo-cache": {"halo_cache": str(20 * ROW)},
    "all-in-cache": {"halo_cache": "1MB", "hidden": 4},
}


def options(name: str) -> dict[str, Any]:
    """One epoch of a case."""
    return {"hidden": 16, "epochs": 1, "fanouts": (3, 3), "batch_size": 64, **CASES[name]}


def run_cases(stores: dict[int, Store], folder: Path) -> None:
    """Train every case that the current number of ranks fits."""
    comm = current()
    for name, case in CASES.items():
        replicas = case.get("replicas", 1)
        if comm.ranks == 2 * replicas:
            trainer(stores[2], folder / name, **options(name)).fit()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Store]:
    """The small graph in two parts."""
    return {2: store_of(small_dataset(), 2, tmp_path_factory.mktemp("stores"))}


@pytest.fixture(scope="module")
def ran(stores: dict[int, Store], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs, one folder for each case."""
    folder = tmp_path_factory.mktemp("runs")
    for ranks in (2, 4):
        run_ranks(run_cases, ranks, stores, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_predicted_work_is_the_work_done(name: str, stores: dict[int, Store], ran: Path):
    config = TrainConfig(**options(name))
    ranks = 2 * config.replicas
    layout = Layout(
        stores[2], config, load_profile("cpu"), 100, ranks, parallel=config.parallel, replicas=config.replicas
    )
    predicted, steps = layout.row(), 3
    done = lines(ran / name)[0]["work"]
    for key in ("seeds", "edges", "feature_rows_loaded", "halo_rows", "halo_cache_rows", "exchange_bytes"):
        assert round(predicted.work[key] * steps, 6) == done[key], key
    if config.replicas == 1:
        # Of sums over steps in both cases: the same ranks are the largest.
        assert math.isclose(predicted.balance, done["balance"], rel_tol=1e-12)
    assert (done["exchange_bytes"] > 0) == (name not in ("data",))


def measure_small() -> dict[str, float]:
    """All rates of this rank, from tiny calls: that they can be had, not what they are."""
    measure.ROUNDS, measure.ROWS, measure.SOURCES, measure.VERTICES = 2, 256, 800, 4096
    return measure.measure_rank()


def test_ranks_measure_every_rate():
    rates = run_ranks(measure_small, 2)
    assert set(rates) == set(NAMES)
    assert all(0 < value < math.inf for value in rates.values())
