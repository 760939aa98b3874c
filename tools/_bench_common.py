"""What the benchmarks share: their options, systems that take turns, percentiles, and reports that are kept.

A report is Markdown on stdout and, with `--out`, JSON that `bench.py all` makes pages of. Times are p20, p50 and p80
over rounds in which the systems took turns; a ratio is the median of the rounds' own ratios, so that a busy minute of
the machine touches both sides of it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _options import listed
from _peers import require_peer
from _timing import percentiles

from tgnn.data.graph import Dataset
from tgnn.data.load import load
from tgnn.errors import UserError, wrong
from tgnn.nn.model import GNN
from tgnn.parallel.allocator import keep_freed_memory
from tgnn.training.metrics import provenance, write_json

MODELS = ("sage", "gcn", "gat")
PEERS = ("dgl", "pyg", "pyg-loader", "torch")
OURS = "tgnn"
GAT_HEADS = 4
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
BUSY = 1.5
"""Load per core above which the benchmark cannot have been alone: one before it leaves a load of 1 at most."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Mismatch(Exception):
    """Another system did not do the same work: what differs. Nothing is timed then."""


@dataclass
class Table:
    """A table of a report."""

    columns: Sequence[str]
    rows: list[list[str]]
    title: str = ""

    def markdown(self) -> str:
        """The table's lines, its title before it."""
        lines = ["| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(map(str, row)) + " |" for row in self.rows]
        return "\n".join(([f"**{self.title}**", ""] if self.title else []) + lines)


@dataclass
class Report:
    """What a benchmark found: tables to read, sentences on them, the numbers themselves, and bars to draw.

    `bars`: by group (a table's row) and name (a system or mode), the height of a bar in `unit`.
    """

    title: str
    tables: list[Table]
    notes: list[str]
    results: Any
    bars: dict[str, dict[str, float]] = field(default_factory=dict)
    unit: str = "ms"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where the numbers go, and how memory is handed back."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", metavar="FILE", help="JSON file for the tables and all numbers, with provenance"
    )
    group.add_argument("--plot", metavar="FILE.png", help="draw bars into this file (needs the `plot` extra)")
    parser.add_argument(
        "--allocator", choices=("kept", "default"), default="kept",
        help="freed memory of all systems: kept for the next step, as by tgnn's ranks, or as the system has it (kept)",
    )  # fmt: skip


def add_work_options(parser: argparse.ArgumentParser, *, model: bool = True, data: str = "rmat:18") -> None:
    """Which graph, samples and model to measure on, and against what."""
    parser.add_argument(
        "data", nargs="?", metavar="DATA", default=data, help=f"dataset's name or path ({data})"
    )
    group = parser.add_argument_group("work")
    group.add_argument("--fanouts", type=listed(int), default=[5, 10, 15],
                       help="in-edges per vertex and hop, seeds outward (5,10,15)")  # fmt: skip
    group.add_argument("--batch-size", type=int, default=1024, help="seeds per step (1024)")
    group.add_argument("--seed", type=int, default=0, help="of the weights, the order and the samples (0)")
    if model:
        group.add_argument("--model", choices=MODELS, default="sage", help="(sage)")
        group.add_argument(
            "--hidden",
            type=int,
            default=128,
            help=f"width of hidden layers; GAT: of its {GAT_HEADS} heads (128)",
        )
        group.add_argument("--dtype", choices=tuple(DTYPES), default="float32",
                           help="tgnn's number format; other systems stay in float32 (float32)")  # fmt: skip


def add_peer_options(parser: argparse.ArgumentParser, rounds: int) -> None:
    """What to compare with, and for how long."""
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--against", type=listed(str), default=[], help=f"systems to compare with: {','.join(PEERS)} (none)"
    )
    group.add_argument("--rounds", type=int, default=rounds, help=f"rounds, systems taking turns ({rounds})")
    group.add_argument("--warmup", type=int, default=2, help="rounds before the timed ones (2)")


def add_clock_option(parser: argparse.ArgumentParser) -> None:
    """What a second is."""
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall",
                        help="wall: what passes; cpu: what this process's threads use, all together, for a machine "
                             "that others use too (wall)")  # fmt: skip


def check_options(args: argparse.Namespace) -> None:
    """UserError for what cannot run, before any work."""
    unknown = [name for name in getattr(args, "against", ()) if name not in PEERS]
    if unknown:
        raise wrong("--against", ", ".join(unknown), f"some of {', '.join(PEERS)}", "correct the list")
    for name in getattr(args, "against", ()):
        require_peer(name)
    for name in ("rounds", "batch_size", "hidden", "steps", "epochs", "parts"):
        value = getattr(args, name, None)
        if value is not None and min(value if isinstance(value, list) else [value], default=0) < 1:
            raise wrong(f"--{name.replace('_', '-')}", value, "at least 1", "give a positive number")
    fanouts = getattr(args, "fanouts", [1])
    if not fanouts or min(fanouts) < -1 or 0 in fanouts:
        raise wrong("--fanouts", fanouts, "one number per layer, each -1 or at least 1", "correct the list")
    if getattr(args, "model", None) == "gat" and args.hidden % GAT_HEADS:
        raise wrong("--hidden", args.hidden, f"a multiple of GAT's {GAT_HEADS} heads", "round it")
    for name in ("out", "plot"):
        path = getattr(args, name, None)
        if path and not Path(path).absolute().parent.is_dir():
            raise wrong(f"--{name}", path, "a file in a folder that is there", "make the folder first")
    if getattr(args, "plot", None):
        pyplot()


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        do = "pip install 'tgnn[plot]', or leave --plot out"
        raise wrong("--plot", "no matplotlib that can be imported", "matplotlib", do) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def load_dataset(data: str) -> Dataset:
    """The dataset, refused where there is nothing to train on it."""
    dataset = load(data)
    if dataset.x is None or not len(dataset.train) or dataset.task != "single-label":
        raise wrong("DATA", data, "features, one label per vertex and training vertices", "choose another")
    return dataset


def build_model(args: argparse.Namespace, dataset: Dataset) -> GNN:
    """The model of the options: one layer per fanout, weights drawn from the seed."""
    torch.manual_seed(args.seed)
    hidden = args.hidden // GAT_HEADS if args.model == "gat" else args.hidden
    sizes = (dataset.num_features, hidden, dataset.num_classes, len(args.fanouts))
    return GNN.build(args.model, *sizes, heads=GAT_HEADS, activation="relu")


def take_turns(
    systems: Mapping[str, Callable[[], dict[str, float]]], rounds: int, warmup: int
) -> dict[str, list[dict[str, float]]]:
    """What every system tells of its stages' seconds in each of `rounds` rounds; the first of a round changes."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    order = list(systems)
    for number in range(warmup + rounds):
        for name in order:
            seconds = systems[name]()
            if number >= warmup:
                found[name].append(seconds)
        order = [*order[1:], order[0]]
    return found


@dataclass
class Spread:
    """Seconds of one stage of one system: percentiles over the rounds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, rounds: Sequence[Mapping[str, float]], stage: str) -> Spread:
        """Of the rounds' seconds of `stage`."""
        return cls(**percentiles([seconds[stage] for seconds in rounds]))

    def ms(self) -> str:
        """`p50 (p20-p80)` in milliseconds."""
        return f"{self.p50 * 1e3:.1f} ({self.p20 * 1e3:.1f}-{self.p80 * 1e3:.1f})"

    def seconds(self) -> str:
        """`p50 (p20-p80)` in seconds."""
        return f"{self.p50:.3g} ({self.p20:.3g}-{self.p80:.3g})"


def ratio(
    ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]], stage: str = "total"
) -> float | None:
    """How many times longer they took: the median of the rounds' ratios; None where we took no time."""
    pairs = [(own[stage], other[stage]) for own, other in zip(ours, theirs, strict=True)]
    return statistics.median(other / own for own, other in pairs) if all(own for own, _ in pairs) else None


def compare(
    times: Mapping[str, list[dict[str, float]]],
    stages: Sequence[str],
    shown: Callable[[Spread], str] = Spread.ms,
) -> tuple[Table, dict[str, Any], dict[str, dict[str, float]]]:
    """(table of stages by system with ratios, the same as JSON, bars of the medians in ms)."""
    others = [name for name in times if name != OURS]
    rows, results, bars = [], {}, {}
    for stage in stages:
        spreads = {name: Spread.of(rounds, stage) for name, rounds in times.items()}
        ratios = {name: ratio(times[OURS], times[name], stage) for name in others}
        cells = ["-" if found is None else f"{found:.2f}x" for found in ratios.values()]
        rows.append([stage, *(shown(spread) for spread in spreads.values()), *cells])
        results[stage] = {
            "seconds": {name: asdict(spread) for name, spread in spreads.items()},
            "ratio": ratios,
        }
        bars[stage] = {name: spread.p50 * 1e3 for name, spread in spreads.items()}
    unit = "ms" if shown is Spread.ms else "s"
    columns = ["stage", *(f"{name} {unit}" for name in times), *(f"{name} / {OURS}" for name in others)]
    return Table(columns, rows), results, bars


def machine(allocator: str, peers: Mapping[str, str | None]) -> dict[str, Any]:
    """What produced the numbers: versions, device, commit, load, threads, and how freed memory was handled."""
    about = provenance("cpu")
    about["versions"] |= peers
    load = os.getloadavg() if hasattr(os, "getloadavg") else (0.0, 0.0, 0.0)
    return about | {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(value, 2) for value in load],
        "allocator": allocator,
    }


def machine_line(about: Mapping[str, Any]) -> str:
    """`machine` as one line of a page."""
    versions = ", ".join(f"{name} {value}" for name, value in about["versions"].items() if value)
    memory = {"kept": "freed memory kept", "default": "the system's handling of freed memory"}[
        about["allocator"]
    ]
    load = f"load average {about['load_average'][0]} before, {about['load_average_after'][0]} after"
    if about["clock"] == "wall" and about["load_average"][0] > BUSY * about["cores"]:
        load += " (**others used the machine: the counts hold, the times do not**)"
    clock = "; seconds are CPU time of all threads" if about["clock"] == "cpu" else ""
    return (
        f"{about['device']}, {about['cores']} cores, {about['threads']} threads, {load}{clock}; {memory}; "
        f"{versions}; commit {(about['commit'] or 'unknown')[:12]}"
    )


def as_run(
    make: Callable[[argparse.Namespace], Report],
) -> Callable[[argparse.Namespace], int]:
    """A benchmark's `run` from what makes its report; returns its exit status, 1 where systems disagree."""

    @functools.wraps(make)
    def run(args: argparse.Namespace) -> int:
        check_options(args)
        if args.allocator == "kept" and not keep_freed_memory():
            args.allocator = "default"
        started = machine(args.allocator, {})
        try:
            with _ranks_allocator(args.allocator):
                report = make(args)
        except Mismatch as error:
            print(f"wrong: {error}")
            return 1
        about = machine(args.allocator, versions_of(getattr(args, "against", ())))
        about |= {"load_average": started["load_average"], "load_average_after": about["load_average"]}
        about["clock"] = getattr(args, "clock", "wall")
        publish(report, args, about)
        return 0

    return run


@contextlib.contextmanager
def _ranks_allocator(allocator: str) -> Iterator[None]:
    """Ranks keep freed memory, unless the environment has an option of malloc: here one that changes nothing."""
    with contextlib.ExitStack() as stack:
        if allocator == "default":
            stack.enter_context(mock.patch.dict(os.environ, {"MALLOC_PERTURB_": "0"}))
        yield


def versions_of(peers: Sequence[str]) -> dict[str, str | None]:
    """The peers' versions, as imported."""
    pyg = ["torch_geometric", "torch_sparse", "torch_scatter"]
    packages = {"dgl": ["dgl"], "pyg": pyg, "pyg-loader": pyg, "torch": []}
    names = [package for peer in peers for package in packages[peer]]
    return {name: getattr(sys.modules.get(name), "__version__", None) for name in names}


def publish(report: Report, args: argparse.Namespace, about: Mapping[str, Any]) -> None:
    """Print the report, and write the files that were asked for."""
    print(page(report.title, report.tables, report.notes, about))
    if args.out:
        content = {"title": report.title, "command": command_of(args), "provenance": about, "notes": report.notes,
                   "tables": [asdict(table) for table in report.tables], "results": report.results,
                   "bars": report.bars, "unit": report.unit}  # fmt: skip
        write_json(Path(args.out), content)
    if args.plot:
        draw_bars(report, Path(args.plot))


def page(title: str, tables: Sequence[Table], notes: Sequence[str], about: Mapping[str, Any]) -> str:
    """A report as Markdown."""
    parts = [f"### {title}", machine_line(about), *(table.markdown() for table in tables)]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def command_of(args: argparse.Namespace) -> str:
    """The command line that a reader types for the same numbers: without the files it wrote."""
    words, skipped = [], False
    for word in args.argv:
        if skipped or word in ("--out", "--plot", "--work-dir"):
            skipped = not skipped
        elif not word.startswith(("--out=", "--plot=", "--work-dir=")):
            words.append(word)
    return f"python tools/bench.py {shlex.join(words)}"


def draw_bars(report: Report, path: Path) -> None:
    """Draw the report's bars, a group for each stage, into `path`."""
    plot = pyplot()
    groups = list(report.bars)
    names = list(dict.fromkeys(name for bars in report.bars.values() for name in bars))
    figure, axes = plot.subplots(figsize=(max(6.0, 1.2 * len(groups)), 4.0))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        places = [place for place, group in enumerate(groups) if name in report.bars[group]]
        heights = [report.bars[groups[place]][name] for place in places]
        axes.bar([place + number * width for place in places], heights, width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups, rotation=20)
    axes.set_ylabel(report.unit)
    axes.set_title(report.title, fontsize=10)
    # Beside the bars: over them it hides some.
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot: got {path} ({error}), expected a picture file; name it FILE.png.") from None
    plot.close(figure)
