"""`bench.py partition`: time, memory, cut, balance and expected exchange of every way to partition a graph."""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _bench_common import Report, Table, add_output_options, add_work_options, load_dataset
from _dataset_files import open_dataset, save_dataset
from _options import listed
from _processes import peak_bytes, run_stage

from tgnn.data.graph import Dataset
from tgnn.errors import UserError, wrong
from tgnn.export.frameworks import DGL, import_framework
from tgnn.partition.assign import assign
from tgnn.partition.report import report as measured
from tgnn.sampling.presample import planned_steps, presample
from tgnn.sampling.replay import count_split
from tgnn.training.metrics import resident_bytes

SUMMARY = "time, memory, cut, balance and expected exchange rows of every partitioner"
METHODS = ("random", "lp", "presampled lp", "metis", "presampled metis")
DGL_METHOD = "DGL's metis"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py partition`."""
    add_work_options(parser, model=False, data="community")
    parser.set_defaults(fanouts=[10, 10, 10])
    parser.add_argument("--parts", type=int, default=4, help="number of parts (4)")
    parser.add_argument("--steps", type=int, default=8, help="steps that expected work is counted on (8)")
    parser.add_argument(
        "--methods", type=listed(str), default=None, help=f"some of {', '.join(METHODS)} (all)"
    )
    parser.add_argument("--against", type=listed(str), default=[], help="dgl: its own METIS (none)")
    add_output_options(parser)


def run(args: argparse.Namespace) -> Report:
    """Every method in a process of its own, on the same graph and the same steps."""
    methods, notes = chosen(args)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dataset = load_dataset(args.data)
        # No partitioner reads features; the processes are to hold the graph alone.
        save_dataset(dataclasses.replace(dataset, x=dataset.x[:, :1]), Path(folder))
        size = (dataset.num_vertices, dataset.num_edges)
        del dataset
        given = {"folder": folder, "parts": args.parts, "fanouts": args.fanouts, "batch": args.batch_size,
                 "seed": args.seed, "steps": args.steps}  # fmt: skip
        for method in methods:
            results[method] = run_stage("_bench_partition:measure", {"method": method, **given})["result"]
    rows = [_row(method, found) for method, found in results.items()]
    layers = [f"layer {number}" for number in range(len(args.fanouts))]
    columns = ["method", "seconds", "M edges/s", "peak MB", "over graph", "cut", "balance of work", *layers,
               "all rows", "partial aggregates", "balance of vertices, edges, train"]  # fmt: skip
    notes += [
        f"{size[0]:,} vertices, {size[1]:,} in-edges; each in its own process. Seconds include presampling.",
        f"Rows expected to travel per step (distinct sources), by layer, input layer first, over {args.steps} steps "
        f"that no partition was made with: {args.batch_size} seeds, fanouts {','.join(map(str, args.fanouts))}.",
        "Partial aggregates: rows that would travel if owners summed their part of a destination's in-edges first.",
    ]
    bars = {method: {"rows": sum(found["exchange_rows"])} for method, found in results.items()}
    title = f"Partitioning {args.data} into {args.parts}"
    return Report(title, [Table(columns, rows)], notes, results, bars, "rows per step")


def chosen(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """(methods to run, what is said of those that cannot be)."""
    methods, notes = list(args.methods or METHODS), []
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise wrong("--methods", ", ".join(unknown), f"some of {', '.join(METHODS)}", "correct the list")
    if [name for name in args.against if name != "dgl"]:
        raise wrong("--against", ", ".join(args.against), "dgl, which has a partitioner", "correct the list")
    try:
        import pymetis  # noqa: F401
    except ImportError:
        left = [method for method in methods if "metis" in method]
        if left and args.methods:
            raise wrong(
                "--methods", ", ".join(left), "pymetis installed", "pip install 'tgnn[metis]'"
            ) from None
        if left:
            notes.append("METIS is left out: pip install 'tgnn[metis]' for it.")
        methods = [method for method in methods if method not in left]
    if args.against:
        import_framework(DGL)
        methods.append(DGL_METHOD)
    return methods, notes


def measure(
    method: str, folder: str, parts: int, fanouts: list[int], batch: int, seed: int, steps: int
) -> dict[str, Any]:
    """One method, in the process it has for itself: what it took and what it is worth."""
    dataset = open_dataset(Path(folder))
    graph_bytes = resident_bytes()
    start = time.perf_counter()
    part_of, presampling = assigned(method, dataset, parts, fanouts, batch, seed)
    seconds, peak = time.perf_counter() - start, peak_bytes()
    found = measured(dataset, part_of, parts)
    planned = planned_steps(dataset.graph, dataset.train, fanouts, batch)
    # Presampling takes the first 64 at most.
    taken = islice(planned.batches(), 64, 64 + steps)
    counts = sum(count_split(planned.sample(seeds, *when), part_of, parts) for *when, seeds in taken)
    return {
        "seconds": seconds, "presampling_seconds": presampling, "edges_per_second": dataset.num_edges / seconds,
        "peak_bytes": peak, "over_graph_bytes": peak - graph_bytes, "cut": found["cut_fraction"],
        "exchange_rows": (counts.exchanged / steps).tolist(), "work_balance": counts.balance,
        "partial_rows": (counts.partial.sum(axis=(1, 2)) / steps).tolist(), "balance": found["balance"],
    }  # fmt: skip


def assigned(
    method: str, dataset: Dataset, parts: int, fanouts: list[int], batch: int, seed: int
) -> tuple[np.ndarray, float]:
    """(part of each vertex by one of METHODS, seconds of presampling)."""
    if method == DGL_METHOD:
        return _dgl_metis(dataset, parts), 0.0
    if not method.startswith("presampled "):
        return assign(dataset, parts, method=method, seed=seed), 0.0
    start = time.perf_counter()
    used = presample(dataset.graph, dataset.train, fanouts, batch)
    weights = {"vertex_weight": used.vertex_edges, "edge_weight": used.edge_factors(dataset.graph)}
    seconds = time.perf_counter() - start
    return assign(dataset, parts, method=method.removeprefix("presampled "), seed=seed, **weights), seconds


def _dgl_metis(dataset: Dataset, parts: int) -> np.ndarray:
    dgl = import_framework(DGL)
    arrays = [
        torch.from_numpy(np.ascontiguousarray(array))
        for array in (dataset.graph.indptr, dataset.graph.indices)
    ]
    graph = dgl.graph(("csc", (arrays[0], arrays[1].long(), torch.empty(0, dtype=torch.int64))))
    is_train = torch.zeros(dataset.num_vertices, dtype=torch.int64)
    is_train[torch.from_numpy(dataset.train)] = 1
    try:
        found = dgl.metis_partition_assignment(graph, parts, balance_ntypes=is_train, balance_edges=True)
    except Exception as error:
        raise UserError(f"{DGL_METHOD}: got {error}, expected a partition; leave --against out.") from None
    return found.numpy().astype(np.int32)


def _row(method: str, found: dict[str, Any]) -> list[str]:
    rows, balance = found["exchange_rows"], found["balance"]
    return [
        method, f"{found['seconds']:.2f}", f"{found['edges_per_second'] / 1e6:.2f}",
        f"{found['peak_bytes'] / 1e6:,.0f}", f"{found['over_graph_bytes'] / 1e6:,.0f}", f"{found['cut']:.3f}",
        f"{found['work_balance']:.2f}",
        *(f"{value:,.0f}" for value in rows), f"{sum(rows):,.0f}", f"{sum(found['partial_rows']):,.0f}",
        ", ".join(f"{balance[what]:.2f}" for what in ("vertices", "edges", "train")),
    ]  # fmt: skip
