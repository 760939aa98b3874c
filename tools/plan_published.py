"""Print the planner's seconds per epoch beside those that GSplit's authors measured on four V100.

python tools/plan_published.py
python tools/plan_published.py --graphs orkut --models sage --steps 4

Each graph is stood in for by an R-MAT graph of the same mean degree and fewer vertices. The batch shrinks with the
vertices, so that a step meets the same share of the graph, and its counts are multiplied back. An R-MAT graph has no
good partition: its vertices are dealt out at random, and what crosses between GPUs is scaled to the published share of
cross edges. Where the work per seed is published (papers100M, whose citations are far from R-MAT), counts are scaled to
it. So counts are estimates here; the built-in profile's rates are nowhere fitted to these seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from itertools import islice

import numpy as np
from _options import listed
from _published import BATCH, CACHE_BYTES, FANOUTS, GPUS, HEADS, HIDDEN, WORKLOADS, Workload

from tgnn.data.synthetic import rmat
from tgnn.errors import run_command, wrong
from tgnn.sampling.replay import Steps
from tgnn.sampling.topology import Topology
from tgnn.training.config import TrainConfig
from tgnn.training.cost import StepCost, Work, mean_work, model_spec
from tgnn.training.planner import data_work, split_work
from tgnn.training.profile import Profile, load_profile

MODES = ("data", "split")


def config_of(model: str) -> TrainConfig:
    """The published recipe."""
    width = HIDDEN // HEADS if model == "gat" else HIDDEN
    return TrainConfig(
        model=model, hidden=width, heads=HEADS, fanouts=FANOUTS, batch_size=BATCH, dropout=0.0, prefetch=0
    )


def counted(load: Workload, scale: int, steps: int) -> dict[str, Work]:
    """The work of a step in each mode on the stand-in, multiplied to the graph's own size."""
    n = 1 << scale
    dataset = rmat(scale, max(1, round(load.num_edges / load.num_vertices / 2)), num_features=0)
    # What merging parallel edges takes away lowers the degree: said in the output.
    print(f"{load.name}: stand-in of {n:,} vertices, mean degree {dataset.graph.num_edges / n:.0f}")
    # A seed for every GPU at least.
    batch = max(GPUS, round(BATCH * n / load.num_vertices))
    planned = Steps(Topology.of_graph(dataset.graph), dataset.train, dataset.train, FANOUTS, batch)
    owner = np.random.default_rng(0).integers(GPUS, size=n)
    found: dict[str, list[Work]] = {mode: [] for mode in MODES}
    for epoch, step, seeds in islice(planned.batches(), steps):
        found["data"].append(data_work(planned, epoch, step, seeds, GPUS))
        found["split"].append(split_work(planned.sample(seeds, epoch, step), owner, GPUS))
    means = {mode: mean_work(works) for mode, works in found.items()}
    return {
        mode: as_published(multiplied(work, BATCH / batch, load.cross), load.per_seed.get(mode))
        for mode, work in means.items()
    }


def as_published(work: Work, per_seed: tuple[float, float] | None) -> Work:
    """The work with as many input rows and edges per seed as published, if they are."""
    if per_seed is None:
        return work
    rows, edges = (number * BATCH for number in per_seed)
    of_edges = edges / work.edges.sum()
    factors = np.full((len(work.edges), 1), of_edges)
    factors[0] = rows / work.rows[0].sum()
    return dataclasses.replace(
        work, edges=work.edges * of_edges, remote_edges=work.remote_edges * of_edges, dst=work.dst * of_edges,
        rows=work.rows * factors, received=work.received * factors, sent=work.sent * factors,
        loaded=work.loaded * factors[0],
    )  # fmt: skip


def multiplied(work: Work, factor: float, cross: float) -> Work:
    """All counts times `factor`; what crosses as for a `cross` share of cross edges instead of the work's own."""
    names = [field.name for field in dataclasses.fields(Work)]
    bigger = {name: getattr(work, name) * factor for name in names}
    if work.remote_edges.any():
        share = cross * work.edges.sum() / work.remote_edges.sum()
        bigger |= {name: bigger[name] * share for name in ("received", "sent", "remote_edges")}
    return Work(**bigger)


def predicted(
    load: Workload, model: str, mode: str, work: Work, profile: Profile
) -> tuple[float, float, float]:
    """Seconds per epoch: (sample, load, train), in-edges in the host's memory as in the published runs."""
    spec = model_spec(config_of(model), load.num_features, load.num_classes)
    cost = StepCost(spec, profile, GPUS)
    cached = GPUS * CACHE_BYTES / (4 * load.num_features * load.num_vertices) if mode == "split" else 0.0
    hit = np.full(GPUS, min(1.0, cached))
    stages = cost.stages(work, cost.load(work, load.num_features, hit, 1), pinned_graph=True)
    steps = load.num_train / BATCH
    train = sum(stages[name] for name in ("forward", "backward", "wait", "update"))
    return (steps * (stages["sample"] + stages["split"]), steps * stages["load"], steps * train)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--graphs", type=listed(str), default=[load.name for load in WORKLOADS])
    parser.add_argument("--models", type=listed(str), default=["sage", "gat"])
    parser.add_argument("--profile", default="v100-nvlink", help="hardware (v100-nvlink)")
    parser.add_argument("--steps", type=int, default=8, help="steps sampled (8)")
    parser.add_argument("--scale", type=int, default=None, help="vertices of every stand-in, as a power of 2")
    args = parser.parse_args(argv)
    known = {load.name: load for load in WORKLOADS}
    unknown = [name for name in args.graphs if name not in known] + list(set(args.models) - {"sage", "gat"})
    if unknown or not args.graphs or not args.models:
        do = "correct the list"
        expected = f"some of {', '.join(known)}; some of sage, gat"
        raise wrong("--graphs and --models", ", ".join(unknown) or "none", expected, do)
    profile = load_profile(args.profile)
    print("seconds per epoch, sample + load + train = total; DGL is data parallel, GSplit is split")
    for name in args.graphs:
        load = known[name]
        work = counted(load, args.scale or load.scale, args.steps)
        for model in args.models:
            for mode in MODES:
                print(line(name, model, mode, load.seconds[model, mode],
                           predicted(load, model, mode, work[mode], profile)))  # fmt: skip
    return 0


def line(
    graph: str, model: str, mode: str, published: tuple[float, ...], planned: tuple[float, ...]
) -> str:  # fmt: skip
    """One line of the table."""

    def shown(parts: tuple[float, ...]) -> str:
        return " + ".join(f"{part:7.2f}" for part in parts) + f" = {sum(parts):7.2f}"

    ratio = sum(planned) / sum(published)
    return f"{graph:<11}{model:<5}{mode:<6} published {shown(published)}   planned {shown(planned)}   {ratio:5.2f}x"


if __name__ == "__main__":
    sys.exit(run_command(main))
