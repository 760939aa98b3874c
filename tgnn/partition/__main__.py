"""`python -m tgnn.partition DATA --parts P --out STORE`: partition a dataset, write its store, print its
table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgnn.data.load import load
from tgnn.data.options import DataOptions
from tgnn.errors import run_command, wrong
from tgnn.partition.assign import METHODS, estimated_bytes
from tgnn.partition.report import format_report
from tgnn.partition.store import check_target, store_bytes, write_store
from tgnn.partition.undirected import is_symmetric
from tgnn.sampling.samplers import SAMPLERS, check_sampler
from tgnn.training.config import parse_fanouts
from tgnn.training.flags import Parser, add_flags, option, options_from_args
from tgnn.training.partitioning import PresampleOptions, partitioned
from tgnn.training.resolve import NAMED_DATA

LARGE_BYTES = 1 << 30


@dataclass(kw_only=True)
class PartitionOptions:
    """Every option of the command beside those of the data."""

    parts: int | None = option(None, "number of parts, one for each rank that will train (required)")
    out: str | None = option(None, "folder of the store to write (required)")
    partitioner: str = option("lp", "how vertices are dealt to parts", choices=METHODS)
    seed: int = option(0, "seed of the partitioner")
    presample: int = option(
        1,
        "epochs sampled before, whose work is balanced and exchange kept low; 0, or no training vertices: in-edges",
    )
    fanouts: tuple[int, ...] = option(
        (10, 10), "fanouts of the runs to come, seeds outward; -1 or all: every in-edge", parse=parse_fanouts
    )
    batch_size: int = option(1024, "their seeds per step over all ranks")
    sampler: str = option("uniform", "how they draw in-edges", choices=SAMPLERS)
    replace: bool = option(False, "they draw in-edges with replacement")
    overwrite: bool = option(False, "replace an existing store at --out")

    def __post_init__(self) -> None:
        if self.parts is None or self.parts < 1:
            raise wrong(
                "--parts", self.parts or "no number", "at least 1", "give --parts P, one part per rank"
            )
        if not self.out:
            raise wrong("--out", "no folder", "a folder for the store", "give --out STORE")
        if self.presample < 0:
            raise wrong("--presample", self.presample, "0 or more epochs", "write 0 for none")
        if self.presample and (self.batch_size < 1 or not self.fanouts or min(self.fanouts) < -1):
            got = f"--fanouts {','.join(map(str, self.fanouts))} --batch-size {self.batch_size}"
            raise wrong(
                "presampling", got, "fanouts of -1 or more and a positive batch", "correct the number"
            )
        check_sampler(self.sampler, self.replace)

    def presampling(self) -> PresampleOptions | None:
        """What to presample, None for nothing."""
        if not self.presample:
            return None
        return PresampleOptions(
            fanouts=self.fanouts, batch_size=self.batch_size, sampler=self.sampler, replace=self.replace,
            epochs=self.presample,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; raises UserError for a user's mistake, before anything is written."""
    data, data_options, options = _parse(argv)
    path = Path(options.out)
    check_target(path, options.overwrite)
    dataset = load(data, data_options)
    graph = dataset.graph
    symmetric = options.partitioner == "lp" and is_symmetric(graph)
    _announce(graph.num_vertices, graph.num_edges, options.partitioner, store_bytes(dataset), symmetric)
    presampling = options.presampling()
    made = partitioned(
        dataset, options.parts, options.partitioner, options.seed, presampling, progress=True, compare=True
    )
    made_how = {
        "data": data,
        "partitioner": options.partitioner,
        "parts": options.parts,
        "seed": options.seed,
        "presample": None if made.hotness is None else presampling.as_dict(),
    }
    try:
        store = write_store(
            dataset,
            made.part_of,
            path,
            made_how,
            made.report,
            progress=True,
            presampled=made.hotness,
            num_parts=options.parts,
            overwrite=options.overwrite,
        )
    except OSError as error:
        raise wrong(
            "--out", f"{path} ({error.strerror})", "a folder that can be written", "choose another path"
        ) from error
    sizes = f"{graph.num_vertices:,} vertices, {graph.num_edges:,} in-edges"
    print(f"{dataset.name}: {sizes}, {options.parts} parts")
    print(format_report(made.report))
    print(f"store: {store.path}")


def _parse(argv: Sequence[str] | None) -> tuple[str, DataOptions, PartitionOptions]:
    parser = Parser(
        prog="python -m tgnn.partition",
        usage="%(prog)s DATA --parts P --out STORE [options]",
        description="Cut a dataset into parts, one for each rank, and write them as a store.",
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"{NAMED_DATA}, or a path")
    add_flags(parser, PartitionOptions, "partition")
    add_flags(parser, DataOptions, "data")
    args: Any = parser.parse_args(argv)
    if args.data is None:
        raise wrong("DATA", "nothing", "a dataset's name or path", "name one, for example sbm")
    options = PartitionOptions(**options_from_args(args, PartitionOptions))
    return args.data, DataOptions(**options_from_args(args, DataOptions)), options


def _announce(
    num_vertices: int, num_edges: int, partitioner: str, stored_bytes: int, symmetric: bool = False
) -> None:
    """Before long work: what it will take, on stderr."""
    needed = stored_bytes + estimated_bytes(num_vertices, num_edges, partitioner, symmetric)
    if needed >= LARGE_BYTES:
        print(
            f"partitioning {num_vertices:,} vertices and {num_edges:,} in-edges with {partitioner}: about "
            f"{needed / 2**30:.1f} GiB of memory (dataset included), {stored_bytes / 2**30:.1f} GiB on disk",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(run_command(main))
