"""Measure tgnn: by step, epoch, partition, inference, scale and kernel, against DGL, PyG and plain PyTorch.

python tools/bench.py step rmat:18 --against dgl,pyg,torch
python tools/bench.py epoch community --ranks 1,2 --modes split,data
python tools/bench.py scale --scales 18,20,22,24 --work-dir scale
python tools/bench.py kernels --store papers.store --ops spmm,attention --out kernels.json
python tools/bench.py all --write examples/benchmarks.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import _bench_all
import _bench_epoch
import _bench_inference
import _bench_kernels
import _bench_partition
import _bench_redundancy
import _bench_scale
import _bench_step
from _bench_common import as_run

from tgnn.errors import run_command

# sub-command -> (what it measures, its options, what runs it and returns the exit status)
BENCHES: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "step": (_bench_step.SUMMARY, _bench_step.add_options, as_run(_bench_step.run)),
    "sampling": (
        _bench_step.SAMPLING_SUMMARY,
        _bench_step.add_sampling_options,
        as_run(_bench_step.run_sampling),
    ),
    "epoch": (_bench_epoch.SUMMARY, _bench_epoch.add_options, as_run(_bench_epoch.run)),
    "redundancy": (_bench_redundancy.SUMMARY, _bench_redundancy.add_options, as_run(_bench_redundancy.run)),
    "partition": (_bench_partition.SUMMARY, _bench_partition.add_options, as_run(_bench_partition.run)),
    "inference": (_bench_inference.SUMMARY, _bench_inference.add_options, as_run(_bench_inference.run)),
    "scale": (_bench_scale.SUMMARY, _bench_scale.add_options, as_run(_bench_scale.run)),
    "kernels": (_bench_kernels.SUMMARY, _bench_kernels.add_options, _bench_kernels.run),
    "all": (_bench_all.SUMMARY, _bench_all.add_options, _bench_all.run),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(BENCHES) + "}")
    for name, (summary, add_options, _) in BENCHES.items():
        add_options(commands.add_parser(name, help=summary, description=summary))
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(words)
    args.argv = words
    return BENCHES[args.command][2](args)


if __name__ == "__main__":
    sys.exit(run_command(main))
