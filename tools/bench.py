"""Measure tgnn: `kernels` times every op against a plain copy, the torch path and other libraries.

python tools/bench.py kernels
python tools/bench.py kernels --store papers.store --ops spmm,attention --out kernels.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import _bench_kernels

from tgnn.errors import run_command

# sub-command -> (what it measures, its options, what runs it and returns the exit status)
BENCHES: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {"kernels": (_bench_kernels.SUMMARY, _bench_kernels.add_options, _bench_kernels.run)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(BENCHES) + "}")
    for name, (summary, add_options, _) in BENCHES.items():
        add_options(commands.add_parser(name, help=summary, description=summary))
    args = parser.parse_args(argv)
    return BENCHES[args.command][2](args)


if __name__ == "__main__":
    sys.exit(run_command(main))
