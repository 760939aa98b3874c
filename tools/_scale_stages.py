"""The stages of `bench.py scale`, each called in a process of its own: generate, partition, store, train."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from _dataset_files import open_dataset, write_rmat
from _processes import peak_bytes

from tgnn.nn.model import GNN
from tgnn.parallel.comm import current
from tgnn.parallel.exchange import all_reduce_gradients
from tgnn.parallel.launch import launch
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.training import partitioning
from tgnn.training.loss import loss_sum
from tgnn.training.metrics import StageClock
from tgnn.training.partitioning import PresampleOptions


def generate(folder: str, scale: int, features: int, seed: int) -> dict[str, int]:
    """Write the graph's arrays; its sizes."""
    return write_rmat(Path(folder) / "data", scale, features, seed)


def partition(folder: str, parts: int, partitioner: str, fanouts: list[int], batch: int) -> dict[str, Any]:
    """Assign every vertex to a part; the report, and the time of what came before (mapping the arrays)."""
    start = time.perf_counter()
    dataset = open_dataset(Path(folder) / "data", features=False)
    opened = time.perf_counter() - start
    options = PresampleOptions(fanouts=tuple(fanouts), batch_size=batch)
    # The last of its assignments is the one that is kept; the others are for the report.
    with mock.patch.object(partitioning, "assign", side_effect=_timed(partitioning.assign, taken := [])):
        found = partitioning.partitioned(dataset, parts, partitioner, options=options)
    np.save(Path(folder) / "part_of.npy", found.part_of, allow_pickle=False)
    hotness = found.hotness
    if hotness is not None:
        arrays = {"inputs": hotness.inputs}
        for part, (ids, often) in enumerate(hotness.halo):
            arrays |= {f"id{part}": ids, f"often{part}": often}
        np.savez(Path(folder) / "hotness.npz", **arrays)
        (Path(folder) / "hotness.json").write_text(json.dumps(hotness.options))
    (Path(folder) / "report.json").write_text(json.dumps(found.report))
    expected = found.report.get("expected", {}).get("partitions", {})
    return {"opened_seconds": opened, "assign_seconds": taken[-1], "cut": found.report["cut_fraction"],
            "expected": expected, "balance": found.report["balance"]}  # fmt: skip


def _timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    """`call`, which adds its seconds to `taken`."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = call(*args, **kwargs)
        taken.append(time.perf_counter() - start)
        return result

    return timed


def store(folder: str, parts: int, partitioner: str) -> dict[str, Any]:
    """Write the partition store; bytes on disk that grow with vertices, with edges, and features apart."""
    from tgnn.partition.hotness import Hotness

    root = Path(folder)
    dataset = open_dataset(root / "data")
    part_of = np.load(root / "part_of.npy", allow_pickle=False)
    hotness = None
    if (root / "hotness.npz").exists():
        with np.load(root / "hotness.npz", allow_pickle=False) as arrays:
            halo = [(arrays[f"id{part}"], arrays[f"often{part}"]) for part in range(parts)]
            hotness = Hotness(json.loads((root / "hotness.json").read_text()), arrays["inputs"], halo)
    report = json.loads((root / "report.json").read_text())
    options = {"partitioner": partitioner, "parts": parts}
    write_store(
        dataset, part_of, root / "store", options, report, presampled=hotness, num_parts=parts, overwrite=True
    )
    sizes = {"features": 0, "edges": 0, "vertices": 0}
    for file in (root / "store").rglob("*"):
        if file.is_file():
            kind = {"features.npy": "features", "indices.npy": "edges"}.get(file.name, "vertices")
            sizes[kind] += file.stat().st_size
    return sizes


def train(
    folder: str,
    parts: int,
    steps: int,
    fanouts: list[int],
    batch: int,
    hidden: int,
    parallel: str,
    timeout: float,
) -> dict[str, Any]:
    """Train SAGE for `steps` steps on one rank per part; what the ranks say of themselves."""
    path = str(Path(folder) / "store")
    given = (path, steps, fanouts, batch, hidden, parallel)
    return launch(train_rank, *given, ranks=parts, device="cpu", timeout=timeout)


def train_rank(
    path: str, steps: int, fanouts: list[int], batch: int, hidden: int, parallel: str
) -> dict[str, Any]:
    """One rank's steps. Collective; the dict of rank 0 is returned by launch."""
    comm, clock = current(), StageClock()
    before = _anonymous_bytes()
    store = Store.open(path)
    loader = Loader(store, fanouts, batch, parallel=parallel, prefetch=1, stage=clock.stage)
    torch.manual_seed(0)
    model = GNN.build("sage", store.num_features, hidden, store.num_classes, len(fanouts))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
    opened = clock.seconds()["total"]
    clock.start()
    losses, edges, taken = [], 0, 0
    while taken < steps:
        for step in islice(loader, steps - taken):
            with clock.stage("forward"):
                total = loss_sum(model(step), step.y, store.task)
            with clock.stage("backward"):
                optimizer.zero_grad(set_to_none=True)
                (total / step.global_seeds).backward()
            with clock.stage("update"):
                losses.append(
                    float(all_reduce_gradients(model, extra=total.detach().double()[None]))
                    / step.global_seeds
                )
                optimizer.step()
            edges += step.work["edges"]
            taken += 1
    seconds = clock.seconds()
    counts = comm.all_gather_ints(
        [peak_bytes(), before, loader.topology.num_bytes, edges, _anonymous_bytes()]
    )
    peaks, bases, graphs, drawn, anonymous = zip(*counts, strict=True)
    return {
        "seconds": seconds, "opened_seconds": opened, "steps": taken, "losses": [losses[0], losses[-1]],
        "rank_peak_bytes": max(peaks), "rank_base_bytes": max(bases), "graph_bytes": sum(graphs), "edges": sum(drawn),
        "rank_anonymous_bytes": max(anonymous), "all_anonymous_bytes": sum(anonymous),
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
    }  # fmt: skip


def _anonymous_bytes() -> int:
    """Resident memory that is not a mapped file: what the system cannot drop (0 where it does not say)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
