"""What tests of training share: a small store, a run of given options, what a run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.dist.ranks import same
from tgnn.data.graph import Dataset
from tgnn.data.options import DataOptions
from tgnn.data.synthetic import sbm
from tgnn.partition.store import Store, write_store
from tgnn.training.checkpoint import CheckpointState
from tgnn.training.config import TrainConfig
from tgnn.training.metrics import RunLog
from tgnn.training.resolve import Resolved
from tgnn.training.trainer import Trainer

SMALL = {"hidden": 8, "fanouts": (3, 3), "batch_size": 64, "progress": "never"}


def small_dataset() -> Dataset:
    """300 vertices, 150 of them for training: three steps of 64, 64 and 22 seeds an epoch."""
    return sbm(300, seed=1)


def store_of(dataset: Dataset, parts: int, folder: Path) -> Store:
    """The dataset in parts of uneven size, vertex v in part v^2 mod parts."""
    part_of = (np.arange(dataset.num_vertices, dtype=np.int64) ** 2 % max(parts, 1)).astype(np.int32)
    return write_store(dataset, part_of, folder / f"store-{parts}", num_parts=parts)


def resolved(run_dir: Path | None, **train: Any) -> Resolved:
    """What a command line with these options and data of its own asks for."""
    place = None if run_dir is None else str(run_dir)
    return Resolved("small", TrainConfig(run_dir=place, **{**SMALL, **train}), DataOptions(), frozenset())


def trainer(store: Store, run_dir: Path | None = None, **train: Any) -> Trainer:
    """A rank's trainer; writes the run's config.json as the command does."""
    run = resolved(run_dir, **train)
    if run_dir is not None and not run.config.resume:
        run_dir.mkdir(parents=True, exist_ok=True)
        RunLog(run_dir).write_config(run.record())
    return Trainer(run, store, run_dir)


def lines(run_dir: Path, *without: str) -> list[dict[str, Any]]:
    """The run's metrics, without what no two runs share (times, memory) and the keys given."""
    found = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "memory", *without)}
        for line in found
    ]


def last(run_dir: Path) -> CheckpointState:
    """The run's last checkpoint."""
    return CheckpointState.load(run_dir / "last.pt")


def same_training(one: Path, other: Path) -> None:
    """Raise unless both runs ended with the same bits and logged the same figures."""
    a, b = last(one), last(other)
    for name, weight in a.model.items():
        same(b.model[name], weight)
    flat_a, flat_b = flat(a.optimizer), flat(b.optimizer)
    assert flat_a.keys() == flat_b.keys()
    for name, value in flat_a.items():
        if isinstance(value, torch.Tensor):
            same(flat_b[name], value)
        else:
            assert flat_b[name] == value, name
    assert lines(one) == lines(other)
    for field in ("epoch", "step", "best_metric", "best_loss", "best_epoch", "stale"):
        assert getattr(a, field) == getattr(b, field), field


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict of paths."""
    if not isinstance(value, (dict, list)):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, item in items for key, leaf in flat(item, f"{path}/{name}").items()}
