"""`bench.py inference`: exact layer-wise inference over all vertices of a graph, against other systems."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from _bench_common import (
    CLOCKS,
    DTYPES,
    OURS,
    Report,
    Spread,
    add_clock_option,
    add_output_options,
    add_peer_options,
    add_work_options,
    build_model,
    compare,
    load_dataset,
    take_turns,
)
from _peers import make_peer
from _same_work import OUTPUT_TOLERANCE
from _same_work import compare as same

from tgnn.training.inference import LayerwiseInference
from tgnn.training.prepare import prepare

SUMMARY = "time exact layer-wise inference over the whole graph, against other systems"
HALF_TOLERANCE = 0.05


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench.py inference`."""
    add_work_options(parser)
    add_peer_options(parser, rounds=5)
    parser.set_defaults(warmup=1)
    parser.add_argument("--chunk-edges", type=int, default=2_000_000, help="most in-edges at once (2000000)")
    add_clock_option(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> Report:
    """Check that all logits agree, then time in turns."""
    dataset = load_dataset(args.data)
    model = build_model(args, dataset).eval()
    store = prepare(dataset, 1)
    inference = LayerwiseInference(store, chunk_edges=args.chunk_edges, dtype=DTYPES[args.dtype])
    calls: dict[str, Callable[[], Any]] = {OURS: lambda: inference(model)}
    for name in args.against:
        peer = make_peer(name, dataset, args.fanouts, model)
        peer.model.eval()
        calls[name] = peer.infer
    # One part without presampling keeps the vertices in their order.
    expected = calls[OURS]()
    tolerance = OUTPUT_TOLERANCE if args.dtype == "float32" else HALF_TOLERANCE
    for name in args.against:
        same(f"logits of {name}", calls[name](), expected, tolerance)
    systems = {name: lambda call=call: _timed(call, CLOCKS[args.clock]) for name, call in calls.items()}
    times = take_turns(systems, args.rounds, args.warmup)
    table, results, bars = compare(times, ("total",), Spread.seconds)
    bars = {stage: {name: value / 1e3 for name, value in found.items()} for stage, found in bars.items()}
    results["edges_per_second"] = {
        name: len(model.layers) * dataset.num_edges / Spread.of(rounds, "total").p50
        for name, rounds in times.items()
    }
    notes = [
        f"p50 (p20-p80) of {args.rounds} rounds in turn; {dataset.num_vertices:,} vertices, {dataset.num_edges:,} "
        f"in-edges, {len(model.layers)} layers.",
        f"{OURS} in chunks of {args.chunk_edges:,} in-edges; the others on the whole graph at once. Logits equal to "
        f"{tolerance:g}.",
    ]
    return Report(f"Inference of {args.model} over {args.data}", [table], notes, results, bars, "s")


@torch.no_grad()
def _timed(call: Callable[[], Any], now: Callable[[], float]) -> dict[str, float]:
    start = now()
    call()
    return {"total": now() - start}
