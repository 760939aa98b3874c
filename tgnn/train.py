"""`python -m tgnn.train [DATA] [options]`: train a graph neural network, split over ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgnn.data.graph import Dataset
from tgnn.errors import run_command, wrong
from tgnn.parallel.comm import check_device, rank_device, torchrun_int, under_torchrun
from tgnn.parallel.launch import launch
from tgnn.partition.store import Store
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint
from tgnn.training.config import LAST_FILE, TrainConfig
from tgnn.training.metrics import RunLog, check_run_dir, create_run_dir, format_summary
from tgnn.training.planner import choose
from tgnn.training.prepare import prepare_for_ranks
from tgnn.training.resolve import Resolved, resolve
from tgnn.training.trainer import check_draw_weights, check_run, train_rank, writing

# As a shell reports a process that a signal ended.
STOPPED_STATUS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    resolved = resolve(argv)
    config, ranks = resolved.config, resolved.num_ranks()
    check_device(config.device, ranks)
    device = rank_device(config.device, 0, ranks).type
    if config.graph_placement == "pinned" and device == "cpu":
        do = "leave it out, or run on GPUs"
        raise wrong("--graph-placement", "pinned for ranks on the CPU", "auto or device", do)
    if config.resume:
        trained_on = CheckpointState.load(Path(config.run_dir) / LAST_FILE)
    else:
        check_run_dir(config.run_dir)

    def check(data: Store | Dataset) -> None:
        check_run(data, config)
        check_draw_weights(data, config)
        if config.resume:
            trained_on.check_dataset(dataset_fingerprint(data))

    store = prepare_for_ranks(resolved, ranks, check)
    says = config.progress != "never" and (not under_torchrun() or torchrun_int("RANK") == 0)
    if config.parallel == "auto":
        mode, reason = choose(store, config, ranks, device)
        resolved = resolved._replace(config=dataclasses.replace(config, parallel=mode))
        config = resolved.config
        if says:
            print(reason, file=sys.stderr)
    run_dir = _run_dir(resolved, store.name)
    if says:
        print(_opening(config, store, ranks, device), file=sys.stderr, flush=True)
    how = {"ranks": ranks, "device": config.device, "timeout": config.timeout}
    summary = launch(train_rank, resolved, store, run_dir, **how)
    if summary is None:
        return 0
    if config.resume and trained_on.epoch > config.epochs:
        done = trained_on.epoch - 1
        print(f"nothing was trained: the run has done {done} of {config.epochs} epochs; ", end="")
        print(f"go on with --epochs {done + 10}")
    elif config.resume and 0 < config.patience <= trained_on.stale:
        more = f"--patience {trained_on.stale + 10}, or with --patience 0"
        print(f"nothing was trained: the run is out of --patience {config.patience}; go on with {more}")
    return _report(summary, run_dir)


def _opening(config: TrainConfig, store: Store, ranks: int, device: str) -> str:
    """One line that says what is trained on what, where."""
    train = len(store.split_ids("train"))
    graph = (
        f"{store.name}: {store.num_vertices:,} vertices, {store.num_edges:,} in-edges, {train:,} for training"
    )
    groups = "" if config.replicas == 1 else f" in {config.replicas} groups"
    where = f"{ranks} rank{'' if ranks == 1 else 's'}{groups} ({config.parallel}, {device})"
    model = f"{config.model}, {len(config.fanouts)} layers of width {config.hidden}"
    return f"training           {model}, on {graph}; {where}"


def _run_dir(resolved: Resolved, name: str) -> Path | None:
    """The run's directory, made unless it is resumed; None on torchrun's other ranks, which write nothing."""
    config = resolved.config
    if config.resume:
        return Path(config.run_dir)
    if under_torchrun() and torchrun_int("RANK") != 0:
        return None
    run_dir = create_run_dir(config.run_dir, name, config.model)
    with writing(run_dir):
        RunLog(run_dir).write_config(resolved.record())
    return run_dir


def _report(summary: dict[str, Any], run_dir: Path | None) -> int:
    if "seconds_per_epoch" in summary:
        print(format_summary(summary))
    stopped = summary["stopped"]
    print(f"run                {run_dir}" + (f"  (stopped: {stopped['why']})" if stopped else ""))
    if stopped and stopped["signal"]:
        print(f"continue with: python -m tgnn.train --resume {run_dir}", file=sys.stderr)
        return STOPPED_STATUS + stopped["signal"]
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
