"""`python -m tgnn.plan STORE|DATA --gpus 1,2,4,8 --profile NAME|FILE`: predict step time and memory, and recommend.

The options of training say what is planned; a command line of `python -m tgnn.train` works here too.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgnn.data.graph import Dataset
from tgnn.data.options import DataOptions
from tgnn.errors import run_command, wrong
from tgnn.partition.restore import dataset_of
from tgnn.partition.store import Store
from tgnn.training.config import TrainConfig
from tgnn.training.flags import Parser, add_flags, option, options_from_args
from tgnn.training.measure import measure
from tgnn.training.metrics import write_json
from tgnn.training.planner import DEFAULT_STEPS, Row, measured_path, plan, profile_of, recommend
from tgnn.training.prepare import is_store, prepare, prepare_for_ranks, presampling
from tgnn.training.profile import Profile, built_in, load_profile
from tgnn.training.resolve import NAMED_DATA, Resolved, read_toml
from tgnn.training.trainer import check_draw_weights, check_run

MOST_GPUS = 4096


def parse_gpus(text: str) -> tuple[int, ...]:
    """`1,2,4,8` as numbers; raises UserError."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > MOST_GPUS:
        expected = f"numbers from 1 to {MOST_GPUS}, separated by commas"
        raise wrong("--gpus", repr(text), expected, "write for example --gpus 1,2,4")
    return tuple(dict.fromkeys(found))


@dataclass(kw_only=True)
class PlanOptions:
    """Every option of the command beside those of training and of the data."""

    gpus: tuple[int, ...] | None = option(
        None, "numbers of ranks to plan for (default: 1,2,4,8; of a store its parts)", parse=parse_gpus
    )
    profile: str | None = option(
        None, f"hardware: {', '.join(built_in())}, or a file (default: this machine's)"
    )
    measure: bool = option(False, "measure this machine first and keep its profile, in --out or the cache")
    steps: int = option(DEFAULT_STEPS, "steps of an epoch that are sampled, at most")
    out: str | None = option(None, "write the table as JSON here, or with --measure the profile")

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise wrong("--steps", self.steps, "at least 1", f"write for example --steps {DEFAULT_STEPS}")
        if self.measure and self.profile is not None:
            do = "leave one of the two out"
            raise wrong("--measure", f"--profile {self.profile} beside it", "one profile", do)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; raises UserError for a user's mistake."""
    resolved, options = _parse(argv)
    profile = _profile(resolved, options)
    if resolved.data is None and options.measure:
        return
    store_of, gpus = _stores(resolved, options)
    rows = plan(store_of, resolved.config, gpus, profile, options.steps)
    name = store_of(1 if 1 in gpus else gpus[0]).name
    print(f"{name}: {resolved.config.model}, batch {resolved.config.batch_size}, profile {profile.name}")
    print(format_table(rows))
    print(recommend(rows))
    if options.out and not options.measure:
        _write(options.out, rows, profile, resolved)


def _parse(argv: Sequence[str] | None) -> tuple[Resolved, PlanOptions]:
    parser = Parser(
        prog="python -m tgnn.plan",
        usage="%(prog)s [STORE|DATA] [options]",
        description="Predict step time and memory of training on several ranks, without training.",
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"{NAMED_DATA}, a path, or a store")
    parser.add_argument("--config", metavar="FILE.toml", help="options of training; flags override it")
    for cls, title in ((PlanOptions, "plan"), (TrainConfig, "training"), (DataOptions, "data")):
        add_flags(parser, cls, title)
    args: Any = parser.parse_args(argv)
    source, train, data = (None, {}, {}) if args.config is None else read_toml(args.config)
    train |= options_from_args(args, TrainConfig)
    data |= options_from_args(args, DataOptions)
    options = PlanOptions(**options_from_args(args, PlanOptions))
    source = source if args.data is None else args.data
    # Layouts are what is planned: which one a run would take says nothing here.
    train = {name: value for name, value in train.items() if name not in ("parallel", "ranks")}
    given = frozenset(train) | frozenset(data)
    return Resolved(source, TrainConfig(**train), DataOptions(**data), given), options


def _profile(resolved: Resolved, options: PlanOptions) -> Profile:
    if not options.measure:
        if options.profile is not None:
            return load_profile(options.profile)
        return profile_of(_device(resolved.config.device))
    device = _device(resolved.config.device)
    profile = measure(device, name=Path(options.out).stem if options.out else "measured")
    path = options.out or str(measured_path(device))
    profile.save(path)
    print(f"profile of this machine: {path}")
    return profile


def _device(name: str) -> str:
    """cpu or cuda, for auto as this machine has it; UserError for cuda where there is no GPU."""
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise wrong("--device", "cuda", "cpu on a machine without a GPU", "name a built-in --profile")
    return "cuda" if has_gpu and name != "cpu" else "cpu"


def _stores(resolved: Resolved, options: PlanOptions) -> tuple[Callable[[int], Store], Sequence[int]]:
    """parts -> a store of so many, made or found once each; and the numbers of ranks to plan for."""
    config = resolved.config

    def check(data: Store | Dataset) -> None:
        check_run(data, config)
        check_draw_weights(data, config)

    if is_store(resolved.source):
        store = Store.open(resolved.source)
        check(store)

        @functools.cache
        def other(parts: int) -> Store:
            # Any store has the whole graph: one rank can be planned from each, other numbers are partitioned anew.
            if parts in (1, store.num_parts):
                return store
            return prepare(
                dataset_of(store),
                parts,
                partitioner=config.partitioner,
                presample=presampling(config),
                check=check,
            )

        return other, options.gpus or (store.num_parts * config.replicas,)
    gpus = options.gpus or (1, 2, 4, 8)
    # A store is one group's, whatever the number of groups.
    group = resolved._replace(config=dataclasses.replace(config, replicas=1))
    return functools.cache(lambda parts: prepare_for_ranks(group, parts, check)), gpus


def format_table(rows: Sequence[Row]) -> str:
    """The predictions as an aligned table."""
    titles = ("ranks", "layout", "step ms", "epoch s", "GiB/rank", "edges", "rows read", "halo rows", "MB sent",
              "balance", "limited by")  # fmt: skip
    cells = [titles]
    for row in rows:
        work = row.work
        cells.append((
            str(row.gpus), row.layout, f"{row.step_s * 1e3:.3g}", f"{row.epoch_s:.3g}",
            f"{row.memory_bytes / 2**30:.2f}{'' if row.fits else ' !'}", f"{work['edges']:,.0f}",
            f"{work['feature_rows_loaded']:,.0f}", f"{work['halo_rows']:,.0f}",
            f"{work['exchange_bytes'] / 1e6:,.1f}", f"{row.balance:.2f}", row.limit,
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    lines = []
    for line in cells:
        # Words to the left, numbers to the right.
        parts = [
            text.ljust(width) if number in (1, 10) else text.rjust(width)
            for number, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    note = [] if all(row.fits for row in rows) else ["! does not fit into a rank's memory"]
    return "\n".join(lines + note)


def _write(out: str, rows: Sequence[Row], profile: Profile, resolved: Resolved) -> None:
    content = {
        "profile": profile.as_dict(), "config": resolved.record(), "rows": [row.as_dict() for row in rows],
        "recommendation": recommend(rows),
    }  # fmt: skip
    try:
        write_json(Path(out), content)
    except OSError as error:
        do = "choose another path"
        raise wrong("--out", f"{out} ({error.strerror})", "a file that can be written", do) from None


if __name__ == "__main__":
    sys.exit(run_command(main))
