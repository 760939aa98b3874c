"""What the tools' command lines share: parsing of lists, and the blocks and widths they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _blocks import feature_width, made_block, sampled_blocks

from tgnn.errors import wrong
from tgnn.kernels.block import Block

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type: values separated by commas."""

    def parse(text: str) -> list[Any]:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def add_workload_options(
    parser: argparse.ArgumentParser, *, widths: Sequence[int], degrees: Sequence[float]
) -> None:
    """The options that say what blocks and rows to measure on."""
    group = parser.add_argument_group("workload")
    group.add_argument("--store", help="partition store to sample blocks from (default: made blocks)")
    group.add_argument("--fanouts", type=listed(int), default=[10, 10], help="of the sampled blocks (10,10)")
    group.add_argument("--degrees", type=listed(float), default=list(degrees),
                       help=f"in-degrees of made blocks, means ({', '.join(map(str, degrees))})")  # fmt: skip
    group.add_argument(
        "--edges", type=int, default=None, help="edges of a made block (GPU 4000000, CPU 200000)"
    )
    group.add_argument("--widths", type=listed(int), default=None,
                       help=f"elements of a row, per head if an op has heads ({','.join(map(str, widths))}; "
                            "with --store also its feature width)")  # fmt: skip
    group.add_argument(
        "--dtypes", type=listed(str), default=["float32"], help=f"of {', '.join(DTYPES)} (float32)"
    )
    group.add_argument("--ops", type=listed(str), default=None, help="only these ops (all)")
    parser.set_defaults(default_widths=list(widths))


def widths_of(args: argparse.Namespace) -> list[int]:
    """The widths asked for."""
    found = list(args.widths or args.default_widths)
    if args.store and args.widths is None:
        found.append(feature_width(args.store))
    if not found or min(found) < 1:
        raise wrong("--widths", found, "numbers of at least 1", "correct the list")
    return sorted(set(found))


def dtypes_of(args: argparse.Namespace) -> list[torch.dtype]:
    """The types asked for."""
    unknown = [name for name in args.dtypes if name not in DTYPES]
    if unknown or not args.dtypes:
        raise wrong(
            "--dtypes", ", ".join(unknown) or "none", f"some of {', '.join(DTYPES)}", "correct the list"
        )
    return [DTYPES[name] for name in args.dtypes]


def blocks_of(args: argparse.Namespace, device: torch.device) -> list[Block]:
    """The blocks asked for, on `device`; ids are int64."""
    if args.store:
        blocks = sampled_blocks(args.store, args.fanouts)
    else:
        edges = args.edges or (4_000_000 if device.type == "cuda" else 200_000)
        if not args.degrees or min(args.degrees) <= 0 or edges < 1:
            raise wrong("--degrees and --edges", (args.degrees, edges), "numbers above 0", "correct them")
        blocks = [made_block(max(1, round(edges / degree)), degree) for degree in args.degrees]
    return [block.to(device) for block in blocks]


def check_ops(chosen: Sequence[str] | None, known: Sequence[str]) -> None:
    """UserError for an op that there is not."""
    unknown = [op for op in chosen or () if op not in known]
    if unknown:
        raise wrong(
            "--ops", ", ".join(unknown), f"some of {', '.join(sorted(set(known)))}", "correct the list"
        )
