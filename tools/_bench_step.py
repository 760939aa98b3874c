"""`bench.py step` and `bench.py sampling`: a training step by stage, against other systems and the machine's floor."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from _bench_common import (
    CLOCKS,
    DTYPES,
    OURS,
    Report,
    Spread,
    Table,
    add_clock_option,
    add_output_options,
    add_peer_options,
    add_work_options,
    build_model,
    compare,
    load_dataset,
    ratio,
    take_turns,
)
from _floor import Rates, work_of
from _peers import Peer, make_peer
from _same_work import DEVIATIONS, OUTPUT_TOLERANCE, REPEATS, same_outputs, same_samples
from _same_work import compare as same

from tgnn.data.graph import Dataset
from tgnn.nn.model import GNN
from tgnn.nn.precision import cpu_has_bfloat16, mixed_precision
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.training.loss import loss_sum
from tgnn.training.metrics import StageClock
from tgnn.training.prepare import prepare

SUMMARY = "time a training step by stage, against other systems and the machine's floor"
SAMPLING_SUMMARY = "time neighbour sampling alone, against other systems"
STAGES = ("sample", "load", "forward", "backward", "update", "total")
CHECKED_BATCHES = 4
# bfloat16 keeps 8 bits: three layers of it differ from float32 by some percent of the largest logit.
HALF_TOLERANCE = 0.05


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py step`."""
    add_work_options(parser)
    add_peer_options(parser, rounds=30)
    add_clock_option(parser)
    add_output_options(parser)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py sampling`."""
    add_work_options(parser, model=False)
    add_peer_options(parser, rounds=30)
    add_clock_option(parser)
    add_output_options(parser)


class Ours:
    """tgnn's training loop, one step at a time, with what other systems are given of it."""

    def __init__(
        self, args: argparse.Namespace, store: Store, model: GNN | None, in_place: bool = True
    ) -> None:
        """`in_place`: let a model that can do so aggregate straight from the table of features."""
        self.dtype = DTYPES[getattr(args, "dtype", "float32")]
        self.now = CLOCKS[getattr(args, "clock", "wall")]
        self.clock = StageClock(self.now)
        self.loader = Loader(
            store,
            args.fanouts,
            args.batch_size,
            seed=args.seed,
            prefetch=0,
            stage=self.clock.stage,
            dtype=self.dtype,
            in_place=in_place and model is not None and model.reads_in_place,
        )
        self.model, self.task = model, store.task
        if model is not None:
            self.optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
        self._batches = self._endless()

    def _endless(self) -> Iterator[MiniBatch]:
        """Batches of all epochs, leaving out an epoch's smaller last one where there are others."""
        while True:
            batches = self.loader.iterate(self.loader.epoch)
            self.loader.epoch += 1
            whole = self.loader.num_seeds // self.loader.batch_size
            for number, batch in enumerate(batches):
                if number < max(1, whole):
                    yield batch

    def next(self) -> MiniBatch:
        """The next batch."""
        return next(self._batches)

    def sample(self) -> dict[str, float]:
        """Seconds of sampling one batch, features aside."""
        self.clock.start()
        self.batch = self.next()
        seconds = self.clock.seconds()
        return {"sample": seconds["sample"] + seconds["split"]}

    def step(self) -> dict[str, float]:
        """Seconds of one training step by stage."""
        clock, dtype = self.clock, self.dtype
        clock.start()
        batch = self.batch = self.next()
        with clock.stage("forward"), mixed_precision(dtype, "cpu"):
            total = loss_sum(self.model(batch), batch.y, self.task)
        with clock.stage("backward"):
            self.optimizer.zero_grad(set_to_none=True)
            (total / batch.global_seeds).backward()
        with clock.stage("update"):
            self.optimizer.step()
        return _staged(clock)


class Theirs:
    """A peer's training loop on the seeds of our batches."""

    def __init__(self, peer: Peer, ours: Ours) -> None:
        self.peer, self.ours, self.clock = peer, ours, StageClock(ours.now)

    def sample(self) -> dict[str, float]:
        """Seconds of sampling for the seeds of our last batch."""
        self.clock.start()
        with self.clock.stage("sample"):
            self.peer.sample(self.ours.batch.seeds)
        return {"sample": self.clock.seconds()["sample"]}

    def step(self, seeds: torch.Tensor | None = None) -> dict[str, float]:
        """Seconds of one training step by stage, on other seeds than our last batch's where given."""
        clock, peer = self.clock, self.peer
        seeds = self.ours.batch.seeds if seeds is None else seeds
        clock.start()
        with clock.stage("sample"):
            sampled = peer.sample(seeds)
        with clock.stage("load"):
            x, y = peer.load(sampled)
        with clock.stage("forward"):
            loss = torch.nn.functional.cross_entropy(peer.forward(sampled, x), y)
        with clock.stage("backward"):
            peer.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        with clock.stage("update"):
            peer.optimizer.step()
        return _staged(clock)


def _staged(clock: StageClock) -> dict[str, float]:
    seconds = clock.seconds()
    return {**seconds, "sample": seconds["sample"] + seconds["split"]}


def checked(
    peers: Sequence[Peer], dataset: Dataset, ours: Ours, args: argparse.Namespace, store: Store
) -> None:
    """Mismatch where a peer does other work; of tgnn in bfloat16, where its logits are far from float32's."""
    copies = Ours(args, store, ours.model, in_place=False)
    batches = [copies.next() for _ in range(CHECKED_BATCHES)]
    ours.batch = ours.next()
    if ours.batch.dst_rows is not None:
        with torch.no_grad(), mixed_precision(ours.dtype, "cpu"):
            same("logits of rows in place", ours.model(ours.batch), ours.model(batches[0]), 0.0)
    for peer in peers:
        same_samples(peer, dataset, args.fanouts, batches)
        if ours.model is not None:
            same_outputs(peer, ours.model, batches[0])
    if ours.model is not None and ours.dtype != torch.float32:
        with torch.no_grad(), mixed_precision(ours.dtype, "cpu"):
            half = ours.model(batches[0])
        with torch.no_grad():
            rows = torch.from_numpy(dataset.x)[batches[0].ids[0]]
            whole = ours.model(dataclasses.replace(batches[0], x=rows))
        same("bfloat16 logits of tgnn", half, whole, HALF_TOLERANCE)


def run(args: argparse.Namespace) -> Report:
    """Check that all do the same, then time steps in turns."""
    dataset = load_dataset(args.data)
    model = build_model(args, dataset)
    peers = [make_peer(name, dataset, args.fanouts, model) for name in args.against]
    store = prepare(dataset, 1)
    ours = Ours(args, store, model)
    checked(peers, dataset, ours, args, store)
    systems: dict[str, Any] = {OURS: ours.step}
    systems |= {peer.name: Theirs(peer, ours).step for peer in peers}
    work = work_of(model, ours.batch, ours.dtype)
    # A CPU without bfloat16 instructions multiplies faster in float32.
    products = ours.dtype if cpu_has_bfloat16() else torch.float32
    table = torch.from_numpy(dataset.x).to(ours.dtype)
    rates = Rates(table, ours.batch.blocks[0].n_dst, args.hidden, products, CLOCKS[args.clock])
    times = take_turns(systems | {"rates": rates.once}, args.rounds, args.warmup)
    del times["rates"]
    floor = rates.floor(work, args.rounds)
    table, results, bars = compare(times, STAGES)
    floor_table, above = _floor_table(floor, times[OURS])
    bars["total"]["floor"] = Spread.of(floor, "total").p50 * 1e3
    results |= {
        "floor": {name: dataclasses.asdict(Spread.of(floor, name)) for name in ("products", "bytes", "total")},
        "floor_work": dataclasses.asdict(work), "above_floor": above, "edges": ours.batch.work["edges"],
        "input_rows": ours.batch.work["input_rows"], "rates": _median_rates(rates.rounds[-args.rounds :]),
    }  # fmt: skip
    title = (
        f"A training step of {args.model}, {len(args.fanouts)} x {args.hidden}, {args.dtype}, on {args.data}"
    )
    return Report(title, [table, floor_table], _notes(args, ours, results["rates"]), results, bars)


def _median_rates(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(rates[name] for rates in rounds) for name in ("flops", "bytes")}


def _floor_table(floor: list[dict[str, float]], ours: list[dict[str, float]]) -> tuple[Table, float]:
    """(the floor in parts, how many times longer we took)."""
    above = ratio(floor, ours)
    rows = [[name, Spread.of(floor, name).ms()] for name in ("products", "bytes", "total")]
    rows.append([f"{OURS} / floor", f"{above:.2f}x"])
    return Table(["floor of this step", "ms"], rows), above


def _notes(args: argparse.Namespace, ours: Ours, rates: dict[str, float]) -> list[str]:
    work = ours.batch.work
    notes = [
        f"p50 (p20-p80) of {args.rounds} rounds, systems in turn; a ratio is the median of the rounds' ratios.",
        f"{args.batch_size} seeds, fanouts {','.join(map(str, args.fanouts))} seeds outward: some {work['edges']:,} "
        f"edges and {work['input_rows']:,} input rows a step.",
        f"The floor is the step's matrix products at {rates['flops'] / 1e9:.0f} GFLOP/s and its rows at "
        f"{rates['bytes'] / 1e9:.1f} GB/s (gathered at random, read and written), measured in the same rounds.",
    ]
    if args.against:
        notes.append(
            f"Before timing: logits, and input gradients in float64, equal to {OUTPUT_TOLERANCE:g} on the same blocks."
        )
    notes += _sampling_notes(args)
    if args.against and args.dtype != "float32":
        notes.append("tgnn has rows in bfloat16 over float32 weights; the others stay in float32.")
    if args.model == "gcn" and "dgl" in args.against:
        notes.append(
            "DGL's GCN normalises by the degrees within a block, as its users get it; it was checked as such."
        )
    return notes


def _sampling_notes(args: argparse.Namespace) -> list[str]:
    """What was checked of the others' samples."""
    notes = []
    if set(args.against) - {"pyg-loader"}:
        notes.append(
            "Their samples: every destination's number of in-edges equal to ours, edges and rows of a layer within 1 % "
            f"of the mean of {REPEATS} samples of ours, or {DEVIATIONS} of their standard deviations if that is more."
        )
    if "pyg-loader" in args.against:
        notes.append(
            "pyg-loader draws for a vertex once, in the hop that meets it first, so its sample is smaller than ours, "
            "and computes every layer on all of it; of its sample it was checked that its edges are the graph's."
        )
    return notes


def run_sampling(args: argparse.Namespace) -> Report:
    """Check that all sample alike, then time sampling in turns."""
    dataset = load_dataset(args.data)
    peers = [make_peer(name, dataset, args.fanouts, None) for name in args.against]
    store = prepare(dataset, 1)
    ours = Ours(args, store, None)
    checked(peers, dataset, ours, args, store)
    systems: dict[str, Any] = {OURS: ours.sample}
    systems |= {peer.name: Theirs(peer, ours).sample for peer in peers}
    times = take_turns(systems, args.rounds, args.warmup)
    table, results, bars = compare(times, ("sample",))
    work = ours.batch.work
    results["edges_per_second"] = {
        name: work["edges"] / Spread.of(rounds, "sample").p50 for name, rounds in times.items()
    }
    notes = [
        f"p50 (p20-p80) of {args.rounds} rounds, systems in turn; a ratio is the median of the rounds' ratios.",
        f"{args.batch_size} seeds, fanouts {','.join(map(str, args.fanouts))}: {work['edges']:,} edges in the last "
        "step. Blocks with compact ids, features not loaded.",
        *_sampling_notes(args),
    ]
    return Report(f"Sampling on {args.data}", [table], notes, results, bars)
