"""`bench.py all`: run the published list of benchmarks, each in a process of its own, and write a page of them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _bench_common import Report, Table, draw_bars, machine_line
from _options import listed

from tgnn.errors import wrong
from tgnn.training.checkpoint import atomic_file

SUMMARY = "run the published list, and write its tables as a page"
BENCH = Path(__file__).resolve().parent / "bench.py"
# name -> (command line, that of a quick run); {all}, {dgl}, {others}: --against with those of them that are installed,
# {others} without DGL and with PyG's own loader too
LIST: dict[str, tuple[str, str]] = {
    "step-sage": ("step rmat:18 {dgl}", "step rmat:14 --batch-size 256 --rounds 5 {dgl}"),
    "step-sage-others": ("step rmat:18 {others}", "step rmat:14 --batch-size 256 --rounds 5 {others}"),
    "step-sage-bfloat16": (
        "step rmat:18 --dtype bfloat16 {dgl}", "step rmat:14 --dtype bfloat16 --batch-size 256 --rounds 5 {dgl}",
    ),
    "step-gcn": ("step rmat:18 --model gcn {all}", "step rmat:14 --model gcn --batch-size 256 --rounds 5 {all}"),
    "step-gat": ("step rmat:18 --model gat {all}", "step rmat:14 --model gat --batch-size 256 --rounds 5 {all}"),
    "sampling": ("sampling rmat:18 {all}", "sampling rmat:14 --batch-size 256 --rounds 5 {all}"),
    "inference-sage": ("inference rmat:18 {all}", "inference rmat:14 --rounds 3 {all}"),
    "inference-gcn": ("inference rmat:18 --model gcn {dgl}", "inference rmat:14 --model gcn --rounds 3 {dgl}"),
    "inference-gat": ("inference rmat:18 --model gat {dgl}", "inference rmat:14 --model gat --rounds 3 {dgl}"),
    "epoch-community": (
        "epoch community --fanouts 10,10,10 --batch-size 4096 --ranks 1,2 --rounds 5",
        "epoch community:20000 --fanouts 10,10,10 --batch-size 256 --rounds 1",
    ),
    "epoch-community-cache": (
        "epoch community --fanouts 10,10,10 --batch-size 4096 --ranks 2 "
        "--train-options='--halo-cache 20MiB --exchange-dtype bfloat16'",
        "epoch community:20000 --fanouts 10,10,10 --batch-size 256 --rounds 1 --ranks 2 "
        "--train-options='--halo-cache 2MiB --exchange-dtype bfloat16'",
    ),
    "epoch-rmat": (
        "epoch rmat:18 --fanouts 10,10,10 --batch-size 4096 --ranks 1,2 --rounds 5",
        "epoch rmat:14 --batch-size 256 --rounds 1",
    ),
    "epoch-rmat-cache": (
        "epoch rmat:18 --fanouts 10,10,10 --batch-size 4096 --ranks 2 --train-options='--halo-cache auto'",
        "epoch rmat:14 --batch-size 256 --rounds 1 --ranks 2 --train-options='--halo-cache auto'",
    ),
    "redundancy-rmat": ("redundancy rmat:18 --run {dgl}", "redundancy rmat:14 --batch-size 128 --run {dgl}"),
    "redundancy-community": (
        "redundancy community --fanouts 10,10,10 --run",
        "redundancy community:20000 --fanouts 10,10,10 --batch-size 128 --run",
    ),
    "partition-community": (
        "partition community --batch-size 4096 {dgl}", "partition community:20000 --batch-size 512 {dgl}",
    ),
    "partition-rmat": (
        "partition rmat:18 --fanouts 5,10,15 --batch-size 4096 {dgl}",
        "partition rmat:14 --fanouts 5,10,15 --batch-size 512 {dgl}",
    ),
    "scale": ("scale --scales 18,20,22,24 --features 32", "scale --scales 12,14,16 --steps 10"),
}  # fmt: skip

# Entries whose bars are drawn beside the page.
PICTURES = ("scale",)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py all`."""
    parser.add_argument("--write", metavar="FILE.md", help="write the page into this file")
    parser.add_argument("--quick", action="store_true", help="small graphs, minutes instead of hours")
    parser.add_argument("--only", type=listed(str), default=None, help=f"some of {', '.join(LIST)} (all)")
    parser.add_argument("--results", metavar="DIR", default="build/bench",
                        help="folder for the JSON of each (build/bench)")  # fmt: skip
    parser.add_argument("--reuse", action="store_true", help="do not run again what --results has")


def run(args: argparse.Namespace) -> int:
    """Run what is to be run, then write the page; 1 where something failed, else 0."""
    names = list(args.only or LIST)
    unknown = [name for name in names if name not in LIST]
    if unknown:
        raise wrong("--only", ", ".join(unknown), f"some of {', '.join(LIST)}", "correct the list")
    if args.write and not Path(args.write).absolute().parent.is_dir():
        raise wrong("--write", args.write, "a file in a folder that is there", "make the folder first")
    results = Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        out = results / f"{name}.json"
        if args.reuse and out.exists():
            continue
        status, seconds = _run(name, args.quick, results)
        print(f"{name}: {'done' if status == 0 else f'status {status}'} in {seconds:.0f} s", file=sys.stderr)
        failed += [name] if status else []
    # The page holds everything there are results of, not only what ran now.
    found = {
        name: json.loads(path.read_text()) for name in LIST if (path := results / f"{name}.json").exists()
    }
    if args.write and found:
        with atomic_file(Path(args.write)) as file:
            file.write(page_of(found, args.quick, _pictures(found, Path(args.write))).encode())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, quick: bool, results: Path) -> tuple[int, float]:
    words = command_line(name, quick)
    if words[0] == "scale":
        words += ["--work-dir", str(results / "scale")]
    command = [sys.executable, str(BENCH), *words, "--out", str(results / f"{name}.json")]
    start = time.monotonic()
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode, time.monotonic() - start


def command_line(name: str, quick: bool) -> list[str]:
    """The words of one entry of the list, against what is installed here."""
    has_pyg = importlib.util.find_spec("torch_geometric") and importlib.util.find_spec("torch_sparse")
    pyg, loader = (["pyg"], ["pyg-loader"]) if has_pyg else ([], [])
    dgl = ["dgl"] if importlib.util.find_spec("dgl") else []
    against = {"all": [*dgl, *pyg, "torch"], "dgl": dgl, "others": [*pyg, *loader, "torch"]}
    chosen = {kind: f"--against {','.join(peers)}" if peers else "" for kind, peers in against.items()}
    return shlex.split(LIST[name][1 if quick else 0].format(**chosen))


def _pictures(found: dict[str, dict[str, Any]], page: Path) -> dict[str, str]:
    """Draw what is to be seen at a glance beside the page, where matplotlib is installed: {entry: file's name}."""
    if not importlib.util.find_spec("matplotlib"):
        return {}
    drawn = {}
    for name in [name for name in PICTURES if name in found]:
        content, file = found[name], page.with_name(f"{name}.svg")
        draw_bars(Report(content["title"], [], [], None, content["bars"], content["unit"]), file)
        drawn[name] = file.name
    return drawn


def page_of(found: dict[str, dict[str, Any]], quick: bool, pictures: Mapping[str, str]) -> str:
    """The page: every benchmark's command, machine, tables and notes, and its picture where there is one."""
    parts = [
        "# Benchmarks",
        "Written by `python tools/bench.py all --write examples/benchmarks.md`"
        + (" with `--quick`" if quick else "")
        + "; every table stands under the command that makes it, and what it was measured on. Other systems run in the "
        "same process, in turn with tgnn, and nothing is timed before the results were found equal.",
    ]
    for name, content in found.items():
        parts += [
            f"## {content['title']}",
            f"```\n{content['command']}\n```",
            machine_line(content["provenance"]),
        ]
        parts += [Table(**table).markdown() for table in content["tables"]]
        if name in pictures:
            parts.append(f"![{content['title']}, {content['unit']}]({pictures[name]})")
        if content["notes"]:
            parts.append("\n".join(f"- {note}" for note in content["notes"]))
    return "\n\n".join(parts) + "\n"
