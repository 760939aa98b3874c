"""`bench.py scale`: R-MAT graphs of growing size, from generating them to training, each stage in its own process.

Every finished stage is kept in the work folder: a run that was stopped goes on with the first one that is missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from _bench_common import Report, Table, add_output_options
from _options import listed
from _processes import run_stage

from tgnn.errors import wrong
from tgnn.training.metrics import write_json

SUMMARY = (
    "generate, partition, store and train R-MAT graphs of growing size: time, memory and disk of each stage"
)
STAGES = ("generate", "partition", "store", "train")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py scale`."""
    parser.add_argument("--scales", "--sizes", type=listed(int), default=[18, 20, 22, 24],
                        help="base-2 logarithms of the numbers of vertices (18,20,22,24)")  # fmt: skip
    parser.add_argument("--parts", type=int, default=8, help="parts, and ranks that train (8)")
    parser.add_argument("--partitioner", choices=("lp", "random", "metis"), default="lp", help="(lp)")
    parser.add_argument("--features", type=int, default=128, help="feature width (128)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (50)")
    parser.add_argument("--fanouts", type=listed(int), default=[5, 10, 15], help="seeds outward (5,10,15)")
    parser.add_argument("--batch-size", type=int, default=1024, help="global (1024)")
    parser.add_argument("--hidden", type=int, default=128, help="(128)")
    parser.add_argument("--parallel", choices=("split", "data"), default="split", help="(split)")
    parser.add_argument("--seed", type=int, default=0, help="of the graphs (0)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds that a rank may wait (3600)")
    parser.add_argument(
        "--work-dir", help="folder for data, stores and finished stages (default: a temporary one)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep a size's data and store after its last stage"
    )
    parser.add_argument("--most-disk", type=float, default=0.9,
                        help="share of the free disk that a size may take, refused before it starts (0.9)")  # fmt: skip
    add_output_options(parser)


def run(args: argparse.Namespace) -> Report:
    """Every size in turn; finished stages are read back."""
    if not args.scales or min(args.scales) < 1 or max(args.scales) > 30:
        raise wrong("--scales", args.scales, "numbers from 1 to 30", "correct the list")
    if not args.work_dir:
        with tempfile.TemporaryDirectory() as folder:
            return report(args, [measure(args, scale, Path(folder)) for scale in args.scales])
    return report(args, [measure(args, scale, Path(args.work_dir)) for scale in args.scales])


def measure(args: argparse.Namespace, scale: int, work: Path) -> dict[str, Any]:
    """One size: {stage: {"seconds", "peak_bytes", "result"}, "scale"}."""
    folder = work / f"scale-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    common = {"folder": str(folder), "parts": args.parts}
    sampling = {"fanouts": args.fanouts, "batch": args.batch_size}
    given = {
        "generate": {"folder": str(folder), "scale": scale, "features": args.features, "seed": args.seed},
        "partition": {**common, "partitioner": args.partitioner, **sampling},
        "store": {**common, "partitioner": args.partitioner},
        "train": {**common, "steps": args.steps, **sampling, "hidden": args.hidden, "parallel": args.parallel,
                  "timeout": args.timeout},
    }  # fmt: skip
    found: dict[str, Any] = {"scale": scale}
    before: dict[str, Any] = {}
    for stage in STAGES:
        record = folder / f"{stage}.json"
        # What an earlier stage was told counts too: its files are this one's input.
        before[stage] = {
            name: value for name, value in given[stage].items() if name not in ("folder", "timeout")
        }
        kept = json.loads(record.read_text()) if record.exists() else None
        if kept is None or kept["given"] != before:
            if stage == "generate":
                _check_disk(folder, scale, args)
            elif not (folder / "data" / "about.json").exists():
                what = f"{folder}: {stage} has yet to run"
                raise wrong("--work-dir", what, "the data it needs", "delete that folder, or use --keep")
            kept = {"given": before, **run_stage(f"_scale_stages:{stage}", given[stage])}
            write_json(record, json.loads(json.dumps(kept)))
        found[stage] = {name: kept[name] for name in ("seconds", "peak_bytes", "result")}
    if not args.keep:
        for name in ("data", "store"):
            shutil.rmtree(folder / name, ignore_errors=True)
    return found


def _check_disk(folder: Path, scale: int, args: argparse.Namespace) -> None:
    """UserError where the size would not fit: data and store, and the generator's pieces of 8 bytes a draw."""
    vertices = 1 << scale
    need = vertices * (2 * 4 * args.features + 80) + 30 * vertices * (8 + 2 * 4)
    free = shutil.disk_usage(folder).free
    if need > args.most_disk * free:
        raise wrong(f"--scales {scale}", f"{free / 1e9:.1f} GB of free disk", f"{need / args.most_disk / 1e9:.1f} GB",
                    "give another --work-dir, a smaller scale or fewer --features")  # fmt: skip


def report(args: argparse.Namespace, found: list[dict[str, Any]]) -> Report:
    """Tables of time and peak memory by stage, of growth, and of bytes per vertex and edge."""
    times, growth, sizes, bars = [], [], [], {}
    for one in found:
        n, edges = (one["generate"]["result"][name] for name in ("vertices", "edges"))
        train = one["train"]["result"]
        step = train["seconds"]["total"] / train["steps"]
        cells = [f"{one[stage]['seconds']:,.1f} s, {peak(one, stage) / 1e9:.2f} GB" for stage in STAGES]
        times.append([f"2^{one['scale']}", f"{n:,}", f"{edges:,}", *cells])
        per_edge = [f"{one[stage]['seconds'] / edges * 1e9:,.0f}" for stage in STAGES[:3]]
        growth.append([f"2^{one['scale']}", *per_edge, f"{edges / one['partition']['seconds'] / 1e6:.2f}",
                       f"{edges / one['partition']['result']['assign_seconds'] / 1e6:.2f}",
                       f"{one['partition']['peak_bytes'] / edges:.0f}", f"{step * 1e3:,.0f}",
                       f"{train['edges'] / train['steps']:,.0f}",
                       f"{train['edges'] / train['seconds']['total'] / 1e6:.2f}"])  # fmt: skip
        disk = one["store"]["result"]
        sizes.append([f"2^{one['scale']}", f"{disk['edges'] / edges:.1f}", f"{disk['vertices'] / n:.1f}",
                      f"{disk['features'] / n:.1f}", f"{train['graph_bytes'] / edges:.1f}",
                      *(f"{train[f'rank_{kind}_bytes'] / 1e6:,.0f}" for kind in ("anonymous", "base"))])  # fmt: skip
        bars[f"2^{one['scale']}"] = {stage: one[stage]["seconds"] / edges * 1e9 for stage in STAGES[:3]}
    growing = ["size", *(f"{stage} ns/edge" for stage in STAGES[:3]), "partition M edges/s",
               f"{args.partitioner} alone M edges/s", "partition peak B/edge", "ms a step",
               "edges a step", "M sampled edges/s"]  # fmt: skip
    held = ["size", "disk B/edge", "disk B/vertex", "disk features B/vertex", "graph in memory B/edge, all ranks",
            "largest rank's own MB", "of which before loading MB"]  # fmt: skip
    tables = [
        Table(["size", "vertices", "in-edges", *STAGES], times, "Wall time and peak memory of a process"),
        Table(growing, growth, "Cost against size"),
        Table(held, sizes, "Bytes on disk and in memory"),
    ]
    notes = [
        f"R-MAT, 15 draws a vertex, made symmetric; {args.features} features; {args.parts} parts by presampled "
        f"{args.partitioner}; {args.steps} steps of SAGE {len(args.fanouts)} x {args.hidden}, batch {args.batch_size}, "
        f"fanouts {','.join(map(str, args.fanouts))}, {args.parts} ranks ({args.parallel}).",
        f"Partitioning is all that `prepare` does: presampling, a random assignment for the "
        f"report, and the halo; {args.partitioner} alone is the one assignment that is kept.",
        "Peak memory counts pages of mapped files, which the system may drop; of training the largest rank's. "
        "A rank's own memory is what it may not drop.",
    ]
    title = f"Scale: R-MAT 2^{args.scales[0]} to 2^{args.scales[-1]}"
    return Report(title, tables, notes, found, bars, "ns per edge")


def peak(one: dict[str, Any], stage: str) -> float:
    """Peak memory of a stage's process; training's ranks are processes of their own."""
    return one[stage]["result"]["rank_peak_bytes"] if stage == "train" else one[stage]["peak_bytes"]
