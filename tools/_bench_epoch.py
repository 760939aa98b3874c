"""`bench.py epoch`: wall clock of training epochs over ranks and modes, as `python -m tgnn.train` runs them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from _bench_common import (
    Mismatch,
    Report,
    Spread,
    Table,
    add_output_options,
    add_peer_options,
    add_work_options,
    build_model,
    load_dataset,
    ratio,
)
from _bench_step import Ours, Theirs, checked
from _options import listed
from _peers import make_peer

from tgnn.errors import ReportedError, wrong
from tgnn.training.prepare import prepare

SUMMARY = "wall clock of epochs over ranks and modes, with the stage table"
SHOWN = ("sample", "split", "load", "wait", "forward", "backward", "update")
LOSS_TOLERANCE = 1e-3
"""Between modes after the same steps, of the loss: float32 sums differ in order and Adam amplifies that."""
UNCOUNTED = 2
"""First epochs of a run, in which memory is touched for the first time."""
ROOT = Path(__file__).resolve().parents[1]
MODES = ("split", "data")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py epoch`."""
    add_work_options(parser)
    add_peer_options(parser, rounds=3)
    parser.set_defaults(warmup=0)
    parser.add_argument("--ranks", type=listed(int), default=[1, 2], help="numbers of ranks (1,2)")
    parser.add_argument(
        "--modes", type=listed(str), default=list(MODES), help="of several ranks (split,data)"
    )
    parser.add_argument("--epochs", type=int, default=6, help="epochs of a run; two are not counted (6)")
    parser.add_argument("--train-options", default="", metavar="'--halo-cache 8MiB'",
                        help="further options of python -m tgnn.train for runs of several ranks")  # fmt: skip
    add_output_options(parser)


def run(args: argparse.Namespace) -> Report:
    """Run every combination in turns, each in processes of its own; systems to compare with run in this one."""
    check(args)
    runs = {
        _name(ranks, mode): (ranks, mode)
        for ranks in args.ranks
        for mode in (args.modes if ranks > 1 else [MODES[0]])
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    peers = _peers(args)
    times |= {name: [] for name in peers}
    for _ in range(args.rounds):
        for name, (ranks, mode) in runs.items():
            found = train(args, ranks, mode)
            lines[name].append(found)
            times[name].append(found["seconds"])
        for name, epoch in peers.items():
            times[name].append(epoch())
    _same_losses(lines)
    return report(args, times, lines)


def check(args: argparse.Namespace) -> None:
    """UserError for options that cannot be run."""
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown or not args.modes:
        raise wrong("--modes", ", ".join(unknown) or "none", "some of split, data", "correct the list")
    if not args.ranks or min(args.ranks) < 1:
        raise wrong("--ranks", args.ranks, "numbers of at least 1", "correct the list")
    if args.epochs <= UNCOUNTED:
        raise wrong("--epochs", args.epochs, f"more than {UNCOUNTED}, which are not counted", "raise it")


def _name(ranks: int, mode: str) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks, {mode}"


def train(args: argparse.Namespace, ranks: int, mode: str) -> dict[str, Any]:
    """One run of `python -m tgnn.train`; its last epoch's stages (evaluation left out), work and loss."""
    options = {
        "model": args.model, "hidden": args.hidden // 4 if args.model == "gat" else args.hidden, "seed": args.seed,
        "fanouts": ",".join(map(str, args.fanouts)), "batch-size": args.batch_size, "dtype": args.dtype,
        "epochs": args.epochs, "eval-every": args.epochs, "ranks": ranks, "parallel": mode, "progress": "never",
        # As the other systems do it.
        "dropout": 0, "device": "cpu",
    }  # fmt: skip
    command = [sys.executable, "-m", "tgnn.train", args.data]
    command += [f"--{name}={value}" for name, value in options.items()]
    if ranks > 1:
        command += shlex.split(args.train_options)
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with tempfile.TemporaryDirectory() as folder:
        command.append(f"--run-dir={folder}/run")
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise ReportedError(
                f"{shlex.join(command)} ended with status {done.returncode}: {done.stderr.strip()}"
            )
        found = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    last, counted = found[-1], [line["seconds"] for line in found[UNCOUNTED:]]
    seconds = {name: statistics.median(line[name] for line in counted) for name in SHOWN}
    seconds["total"] = statistics.median(line["total"] - line["eval"] for line in counted)
    return {"seconds": seconds, "work": last["work"], "loss": last["loss"], "memory": last["memory"]}


def _peers(args: argparse.Namespace) -> dict[str, Any]:
    """What runs an epoch of each system to compare with, after the usual checks."""
    if not args.against:
        return {}
    dataset = load_dataset(args.data)
    model = build_model(args, dataset)
    store = prepare(dataset, 1)
    ours = Ours(args, store, model)
    peers = [make_peer(name, dataset, args.fanouts, model) for name in args.against]
    checked(peers, dataset, ours, args, store)
    seeds = [batch.seeds for batch in ours.loader.iterate(0)]
    return {peer.name: partial(_peer_epoch, Theirs(peer, ours), seeds) for peer in peers}


def _peer_epoch(other: Theirs, seeds: list[Any]) -> dict[str, float]:
    total = dict.fromkeys(SHOWN, 0.0)
    start = time.perf_counter()
    for some in seeds:
        for stage, seconds in other.step(some).items():
            if stage in total:
                total[stage] += seconds
    return {**total, "total": time.perf_counter() - start}


def _same_losses(lines: dict[str, list[dict[str, Any]]]) -> None:
    losses = {name: found[0]["loss"] for name, found in lines.items()}
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        if abs(loss - first) > LOSS_TOLERANCE * max(1.0, abs(first)):
            raise Mismatch(f"the loss of {name} is {loss}, that of {next(iter(losses))} {first}")


def report(args: argparse.Namespace, times: dict[str, Any], lines: dict[str, Any]) -> Report:
    """The tables: wall clock and speed-up, stages, and work."""
    first = next(iter(times))
    rows, stages, work, results, bars = [], [], [], {}, {}
    for name, rounds in times.items():
        total = Spread.of(rounds, "total")
        against = 1 / ratio(times[first], rounds)
        rows.append([name, total.seconds(), f"{against:.2f}x"])
        medians = {stage: Spread.of(rounds, stage).p50 for stage in SHOWN}
        stages.append([name, *(f"{medians[stage]:.3g}" for stage in SHOWN)])
        results[name] = {"seconds": asdict(total), "stages": medians, "speed": against}
        bars[name] = {"epoch": total.p50}
        if name in lines:
            last = lines[name][-1]
            counts = last["work"]
            results[name] |= {"work": counts, "loss": last["loss"], "memory": last["memory"]}
            work.append([name, f"{last['loss']:.6f}", *(f"{counts[key]:,}" for key in WORK),
                         f"{counts['exchange_bytes'] / 1e6:.1f}", f"{counts['balance']:.2f}"])  # fmt: skip
    tables = [
        Table(["run", "seconds per epoch", f"speed against {first}"], rows),
        Table(["run", *SHOWN], stages, "Seconds by stage (rank 0's issuing thread)"),
        Table(["run", "loss", *WORK, "exchanged MB", "balance"], work, "Work of an epoch"),
    ]
    notes = [
        f"p50 (p20-p80) of {args.rounds} runs in turn, of each the median epoch from {UNCOUNTED + 1} to {args.epochs}, "
        f"evaluation left out; losses equal to {LOSS_TOLERANCE:g}.",
        *_split_against_data(args, times, results),
    ]
    if args.train_options:
        notes.append(f"Several ranks with {args.train_options}.")
    return Report(f"An epoch of {args.model} on {args.data}", tables, notes, results, bars, "s")


def _split_against_data(
    args: argparse.Namespace, times: dict[str, Any], results: dict[str, Any]
) -> list[str]:
    """How much faster split is than data on as many ranks; what split waits for its halo counts as computing."""
    notes = []
    for ranks in args.ranks:
        split, data = (times.get(_name(ranks, mode)) for mode in MODES)
        if ranks == 1 or not split or not data:
            continue
        computed = [[{"total": sum(one[stage] for stage in ("forward", "backward", "wait"))} for one in rounds]
                    for rounds in (split, data)]  # fmt: skip
        whole, part = ratio(split, data), ratio(*computed)
        results[_name(ranks, MODES[0])] |= {"against_data": whole, "forward_backward_against_data": part}
        notes.append(
            f"{ranks} ranks: data takes {whole:.2f} times as long as split, its forward and backward {part:.2f} times "
            "as long, where split's wait for rows counts among them."
        )
    return notes


WORK = ("edges", "feature_rows_loaded", "halo_rows", "halo_cache_rows")
