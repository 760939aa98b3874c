"""`bench.py redundancy`: features loaded and edges computed by data-parallel and by split ranks, from counters.

Replayed without training for any number of parts; with `--run` also counted in a real run of two ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from itertools import count as count_up
from typing import Any

import torch
from _bench_common import Mismatch, Report, Table, add_output_options, add_work_options, load_dataset
from _bench_partition import assigned
from _options import listed
from _peers import make_peer

from tgnn.data.graph import Dataset
from tgnn.parallel.comm import current
from tgnn.parallel.launch import launch
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.sampling.replay import replay
from tgnn.training.partitioning import PresampleOptions
from tgnn.training.prepare import prepare

SUMMARY = "features loaded and edges computed, data parallel against split, from counters"
RUN_RANKS = 2
COUNTED = ("feature_rows_loaded", "edges", "halo_rows", "exchange_bytes")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py redundancy`."""
    add_work_options(parser, model=False)
    parser.add_argument("--parts", type=listed(int), default=[2, 4, 8], help="numbers of parts (2,4,8)")
    parser.add_argument("--steps", type=int, default=2, help="steps counted (2)")
    parser.add_argument("--batch", choices=("per-rank", "global"), default="per-rank",
                        help="whether --batch-size is each rank's share or the whole batch (per-rank)")  # fmt: skip
    parser.add_argument("--against", type=listed(str), default=[],
                        help="systems whose samplers count data-parallel ranks too: dgl,pyg,torch (none)")  # fmt: skip
    parser.add_argument("--run", action="store_true", help="count a real run of 2 ranks too, in both modes")
    add_output_options(parser)


def run(args: argparse.Namespace) -> Report:
    """Replay every number of parts, and check that split did everything once."""
    dataset = load_dataset(args.data)
    peers = [make_peer(name, dataset, args.fanouts, None) for name in args.against]
    rows, results, bars = [], {}, {}
    for parts in args.parts:
        batch = args.batch_size * (parts if args.batch == "per-rank" else 1)
        counted = count(dataset, args, parts, batch)
        for peer in peers:
            counted[f"data ({peer.name})"] = count_peer(peer, dataset, args, parts, batch)
        once = counted["split"]
        for mode, found in counted.items():
            repeats = [found[name] / max(1, once[name]) for name in ("rows", "edges")]
            rows.append([str(parts), f"{batch:,}", mode, f"{found['rows']:,.0f}", f"{repeats[0]:.2f}x",
                         f"{found['edges']:,.0f}", f"{repeats[1]:.2f}x", f"{found['exchanged']:,.0f}"])  # fmt: skip
            bars.setdefault(f"P = {parts}", {})[mode] = repeats[0]
        results[str(parts)] = {"batch": batch, **counted}
    tables = [Table(["P", "batch", "mode", "features loaded", "of unique", "edges computed", "of unique",
                     "rows exchanged"], rows, "Per step, all ranks together")]  # fmt: skip
    notes = [
        f"Fanouts {','.join(map(str, args.fanouts))} seeds outward, {args.steps} steps; parts by presampled lp.",
        "Split loads and computes what the batch needs exactly once: checked against one rank's counts.",
    ]
    if args.run:
        table, results["run"] = run_ranks(dataset, args)
        tables.append(table)
    return Report(f"Redundancy on {args.data}", tables, notes, results, bars, "times unique feature rows")


def count(dataset: Dataset, args: argparse.Namespace, parts: int, batch: int) -> dict[str, dict[str, float]]:
    """Per step, by mode: feature rows loaded, edges computed, rows exchanged over all layers."""
    part_of, _ = assigned("presampled lp", dataset, parts, args.fanouts, batch, 0)
    how = {"seed": args.seed, "steps": args.steps}
    split = replay(dataset, args.fanouts, batch, part_of, parts, mode="split", **how)
    data = replay(dataset, args.fanouts, batch, None, parts, mode="data", **how)
    alone = replay(dataset, args.fanouts, batch, None, 1, mode="data", **how)
    found = {
        "data": {"rows": int(data.rows[0].sum()), "edges": int(data.edges.sum()), "exchanged": 0},
        "split": {"rows": int(split.loaded.sum()), "edges": int(split.edges.sum()),
                  "exchanged": int(split.exchanged.sum())},
    }  # fmt: skip
    unique = {"rows": int(alone.rows[0].sum()), "edges": int(alone.edges.sum())}
    for name, expected in unique.items():
        if found["split"][name] != expected:
            raise Mismatch(f"split over {parts} parts has {found['split'][name]} {name}, one rank {expected}")
    return {
        mode: {name: value / args.steps for name, value in counts.items()} for mode, counts in found.items()
    }


def count_peer(
    peer: Any, dataset: Dataset, args: argparse.Namespace, parts: int, batch: int
) -> dict[str, float]:
    """What data-parallel ranks of another system load and compute: each samples its share of the batch alone."""
    loader = Loader(prepare(dataset, 1), args.fanouts, batch, seed=args.seed, prefetch=0)
    rows = edges = 0
    for step in first_steps(loader, args.steps):
        for share in step.seeds.tensor_split(parts):
            layers = peer.layers_of(peer.sample(share))
            rows += len(layers[0].rows)
            edges += sum(len(layer.source) for layer in layers)
    return {"rows": rows / args.steps, "edges": edges / args.steps, "exchanged": 0.0}


def first_steps(loader: Loader, steps: int) -> Iterator[MiniBatch]:
    """The first `steps` batches, of as many epochs as it takes."""
    return islice(chain.from_iterable(map(loader.iterate, count_up())), steps)


def run_ranks(dataset: Dataset, args: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Counters of a real run of two ranks, and that they are what was replayed."""
    batch = args.batch_size * (RUN_RANKS if args.batch == "per-rank" else 1)
    options = PresampleOptions(fanouts=tuple(args.fanouts), batch_size=batch)
    store = prepare(dataset, RUN_RANKS, presample=options)
    given = (store, args.fanouts, batch, args.seed, args.steps)
    rows, results = [], {}
    for mode in ("data", "split"):
        found = launch(rank_counts, *given, mode, ranks=RUN_RANKS, device="cpu")
        replayed = replay(
            store, args.fanouts, batch, None, RUN_RANKS, mode=mode, seed=args.seed, steps=args.steps
        )
        for name, expected in (
            ("feature_rows_loaded", replayed.rows[0].sum()),
            ("edges", replayed.edges.sum()),
        ):
            if found[name] != int(expected):
                raise Mismatch(f"{name} of the run in {mode} mode is {found[name]}, replayed {int(expected)}")
        rows.append([mode, *(f"{found[name] / args.steps:,.0f}" for name in COUNTED)])
        results[mode] = found
    return Table(["mode", *COUNTED], rows, f"A run of {RUN_RANKS} ranks, per step"), results


def rank_counts(
    store: Store, fanouts: Sequence[int], batch: int, seed: int, steps: int, mode: str
) -> dict[str, int]:
    """One rank's steps without a model; returns the counts summed over the ranks. Collective."""
    loader = Loader(store, fanouts, batch, parallel=mode, seed=seed, prefetch=0)
    counts = torch.zeros(len(COUNTED), dtype=torch.int64)
    for step in first_steps(loader, steps):
        counts += torch.tensor([step.work[name] for name in COUNTED])
    return dict(zip(COUNTED, current().all_reduce(counts).tolist(), strict=True))
