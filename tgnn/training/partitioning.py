"""From a dataset to its parts: presample, assign, and report what a step would exchange.

The partition does not follow a run's seed, so the store is shared by runs; presampling has random numbers of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tgnn.data.graph import Dataset
from tgnn.partition.assign import assign
from tgnn.partition.hotness import Hotness
from tgnn.partition.report import report
from tgnn.sampling.presample import halo_requests, planned_steps, presample
from tgnn.sampling.replay import Steps, count_data, count_split

REPORTED_STEPS, REDUNDANCY_STEPS = 8, 2


@dataclass(frozen=True, kw_only=True)
class PresampleOptions:
    """What to presample: how the runs to come will sample, and for how many epochs."""

    fanouts: tuple[int, ...]
    batch_size: int = 1024
    sampler: str = "uniform"
    replace: bool = False
    epochs: int = 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self) | {"fanouts": list(self.fanouts)}


class Partitioned(NamedTuple):
    """Part of each vertex int32 [N]; the report; hotness where it was presampled."""

    part_of: np.ndarray
    report: dict[str, Any]
    hotness: Hotness | None


def partitioned(
    dataset: Dataset, parts: int, method: str = "lp", seed: int = 0, options: PresampleOptions | None = None,
    progress: bool = False, compare: bool = False,
) -> Partitioned:  # fmt: skip
    """Partition `dataset` by expected work where `options` are given and there are training vertices and several parts.

    Else by its in-edges. The report of a presampled partition has an entry "expected": see `expected_work`. It sets
    the partition beside a random one and, with `compare`, one by in-edges, which takes as long again to make.
    """
    if options is None or parts == 1 or len(dataset.train) == 0:
        part_of = assign(dataset, parts, method=method, seed=seed, progress=progress)
        return Partitioned(part_of, report(dataset, part_of, parts), None)
    graph, sampling = dataset.graph, options.as_dict()
    epochs = sampling.pop("epochs")
    used = presample(graph, dataset.train, **sampling, epochs=epochs, progress=progress)
    # Kept in one byte a vertex while the next is made.
    small = np.min_scalar_type(parts - 1)
    weights = {"vertex_weight": used.vertex_edges, "edge_weight": used.edge_factors(graph)}
    inputs, steps, how = used.inputs, used.steps, used.options
    del used
    candidates = {"random": assign(dataset, parts, method="random", seed=seed).astype(small)}
    if method == "random":
        part_of = candidates["random"].astype(np.int32)
    else:
        if compare:
            unweighted = assign(dataset, parts, method=method, seed=seed, progress=progress).astype(small)
            candidates[f"unweighted {method}"] = unweighted
        part_of = assign(dataset, parts, method=method, seed=seed, progress=progress, **weights)
        candidates[f"presampled {method}"] = part_of
    del weights
    found = report(dataset, part_of, parts)
    planned = planned_steps(graph, dataset.train, **sampling)
    found["expected"] = expected_work(planned, steps, candidates, parts)
    halo = halo_requests(planned, steps, part_of, parts)
    return Partitioned(part_of, found, Hotness(how, inputs, halo))


def expected_work(
    planned: Steps, after: int, candidates: dict[str, np.ndarray], parts: int
) -> dict[str, Any]:
    """What a step costs under each candidate (part of each vertex, [N]), from steps that no candidate was made with.

    Those are the ones that follow the first `after` of `planned`. Returns JSON-able: `steps` counted; `redundancy`,
    how many times the `input_rows` and `edges` of a step data-parallel ranks would load and aggregate (split: once);
    `partitions`, by name: `exchange_rows`, list by layer, input layer first, per step; `balance`, largest over mean
    of the parts' in-edges, all steps together.
    """
    counted: dict[str, Any] = dict.fromkeys(candidates, 0)
    alone = 0
    for number, (epoch, step, seeds) in enumerate(islice(planned.batches(), after, after + REPORTED_STEPS)):
        hops = planned.sample(seeds, epoch, step)
        for name, part_of in candidates.items():
            counted[name] += count_split(hops, part_of, parts)
        if number < REDUNDANCY_STEPS:
            shared = count_data(planned, epoch, step, seeds, parts)
            once = np.array([hops[0].block.n_src, sum(hop.block.n_edges for hop in hops)])
            alone += np.array([shared.rows[0].sum(), shared.edges.sum()]) / np.maximum(once, 1)
    return {
        "steps": REPORTED_STEPS,
        "redundancy": dict(zip(("input_rows", "edges"), (alone / REDUNDANCY_STEPS).tolist(), strict=True)),
        "partitions": {
            name: {"exchange_rows": (counts.exchanged / counts.steps).tolist(), "balance": counts.balance}
            for name, counts in counted.items()
        },
    }
