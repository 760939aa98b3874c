"""`bench.py kernels`: every op and direction, against a copy's bandwidth, the torch path, torch.sparse and
PyG.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _options
import torch
from _cases import CASES, Call, Case, Workload, difference, jobs_of
from _timing import Clock, device_of, percentiles
from tqdm import tqdm

from tgnn.errors import wrong
from tgnn.kernels import backend, tuning
from tgnn.training.metrics import provenance, write_json

SUMMARY = "time every op: achieved GB/s and percent of a copy's bandwidth, against peers, checked first"
COLUMNS = (
    "case",
    "dtype",
    "width",
    "degree",
    "edges",
    "by",
    "p20 us",
    "p50 us",
    "p80 us",
    "GB/s",
    "% of copy",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py kernels`."""
    _options.add_workload_options(parser, widths=(64, 128), degrees=(10,))
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu (auto)")
    parser.add_argument("--rounds", type=int, default=20, help="timed calls of each, taking turns (20)")
    parser.add_argument("--no-peers", action="store_true", help="time tgnn only")
    parser.add_argument("--out", help="JSON file for all numbers, with provenance")


def run(args: argparse.Namespace) -> int:
    """Check, then time; print a Markdown table and write JSON. 1 if a result is wrong, else 0."""
    _options.check_ops(args.ops, [case.op for case in CASES])
    if args.rounds < 1:
        raise wrong("--rounds", args.rounds, "at least 1", "give a positive number")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise wrong("--out", args.out, "a file in a folder that is there", "make the folder first")
    device = device_of(args.device)
    blocks = _options.blocks_of(args, device)
    jobs = jobs_of(blocks, _options.dtypes_of(args), _options.widths_of(args), device, args.ops)
    bench = KernelBench(device, args.rounds, peers=not args.no_peers)
    with tqdm(jobs, unit="case", disable=None) as bar:
        for case, work in bar:
            bar.set_postfix_str(case.name)
            bench.measure(case, work)
    copy_after = bench.clock.copy_bandwidth()
    print(bench.report(copy_after))
    if args.out:
        about = {"provenance": provenance(device), "tuning": tuning.describe(device), "rounds": args.rounds}
        about |= {"copy_bytes_per_second": [bench.copy, copy_after], "wrong": bench.wrong, "rows": bench.rows}
        write_json(Path(args.out), about)
    return 1 if bench.wrong else 0


class KernelBench:
    """Collects one row for every case, workload and way to compute it."""

    def __init__(self, device: torch.device, rounds: int, peers: bool) -> None:
        self.clock, self.rounds, self.peers = Clock(device), rounds, peers
        self.copy = self.clock.copy_bandwidth()
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def measure(self, case: Case, work: Workload) -> None:
        """Check and time one case; a way whose result is wrong is named and not timed."""
        expected = case.reference(work)
        calls: dict[str, Call] = {}
        for name, make in self._ways(case, work).items():
            try:
                call = make()
                fault = difference(call(), expected, work.dtype)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                # Another library may lack a type or be short of memory; ours must not.
                fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if fault is None:
                calls[name] = call
            else:
                where = f"{case.name} {work.dtype} width {work.width} by {name}"
                self._note(f"{where}: {fault}", ours=name.startswith("tgnn"))
        traffic = case.traffic(work)
        for name, times in self.clock.measure(calls, self.rounds).items():
            seconds = percentiles(times)
            rate = traffic.bytes / seconds["p50"]
            self.rows.append({
                "case": case.name, "dtype": str(work.dtype).removeprefix("torch."), "width": work.width,
                "destinations": work.block.n_dst, "sources": work.block.n_src, "edges": work.block.n_edges,
                "by": name, "seconds": seconds,
                "model_bytes": traffic.bytes, "model_flops": traffic.flops,
                "bytes_per_second": rate, "share_of_copy": rate / self.copy,
            })  # fmt: skip

    def _ways(self, case: Case, work: Workload) -> dict[str, Callable[[], Call]]:
        """Name -> what makes the call: tgnn's Triton path where it can run, its torch path, and peers."""
        ways: dict[str, Callable[[], Call]] = {}
        if work.device.type == "cuda" and case.op in backend.TRITON_MODULES and backend.has_triton():
            ways["tgnn triton"] = lambda: case.prepare(work, "triton")
        ways["tgnn torch"] = lambda: case.prepare(work, "torch")
        for name, make in case.peers.items() if self.peers else ():
            if name != "pyg" or importlib.util.find_spec("torch_geometric") is not None:
                ways[name] = lambda make=make: make(work, case.inputs(work))
        return ways

    def _note(self, fault: str, ours: bool) -> None:
        tqdm.write(f"{'wrong' if ours else 'left out'}: {fault}")
        if ours:
            self.wrong.append(fault)

    def report(self, copy_after: float) -> str:
        """The Markdown table, and the copy bandwidth before and after it."""
        lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        for row in self.rows:
            micro = [f"{seconds * 1e6:.1f}" for seconds in row["seconds"].values()]
            degree = f"{row['edges'] / max(1, row['destinations']):.1f}"
            cells = [row["case"], row["dtype"], row["width"], degree, row["edges"], row["by"], *micro]
            cells += [f"{row['bytes_per_second'] / 1e9:.2f}", f"{100 * row['share_of_copy']:.0f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        both = f"{self.copy / 1e9:.2f} GB/s before, {copy_after / 1e9:.2f} GB/s after"
        return "\n".join([*lines, "", f"copy bandwidth (read + written): {both}"])
