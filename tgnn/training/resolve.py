"""How a command line, a TOML file and a recorded run become one `TrainConfig`.

`resolve` lays the sources over each other: the defaults, then `--config FILE.toml`, then the flags; with
`--resume` the run's own `config.json` takes the defaults' place. The TOML file has two tables, both optional,
keyed by flag names::

    [data]
    source = "path or name"        # the DATA argument, relative to the current directory
    self_loops = true

    [train]
    model = "gcn"
    fanouts = [10, 10]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tgnn.data.options import DataOptions
from tgnn.errors import warn_once, wrong
from tgnn.partition.store import Store
from tgnn.training import flags
from tgnn.training.config import CONFIG_FILE, LAST_FILE, RUN_FORMAT, TrainConfig
from tgnn.training.flags import flag_of
from tgnn.training.prepare import is_store

BUILT_IN_DATA = "sbm"
NAMED_DATA = "a dataset's name (fetched into $TGNN_DATA, from $TGNN_DATA_URL where that is set)"


class Resolved(NamedTuple):
    """What a command line asks for."""

    data: str | None
    """The DATA argument; None stands for the built-in graph."""
    config: TrainConfig
    data_options: DataOptions
    given: frozenset[str]
    """Names of the options that a flag or the TOML file gave."""

    @property
    def source(self) -> str:
        """What to load: DATA, or the built-in graph's name."""
        return BUILT_IN_DATA if self.data is None else self.data

    def record(self) -> dict[str, Any]:
        """The content of `config.json`: the inverse of `read_run`."""
        return {
            "format": RUN_FORMAT,
            "data": {"source": self.data, **flags.as_dict(self.data_options)},
            "train": self.config.as_dict(),
        }

    def num_ranks(self) -> int:
        """The number of ranks to run on: torchrun's where it started us, else `--ranks`, else as many as a
        store has parts, else one per GPU, else 2 for the built-in graph and 1 for other data (parts and
        these times `--replicas`). Raises UserError where `--ranks` contradicts torchrun, where ranks do not form
        equal groups, and for a store that cannot be opened.
        """
        from tgnn.parallel.comm import torchrun_int, under_torchrun

        if under_torchrun():
            world = torchrun_int("WORLD_SIZE")
            if "ranks" in self.given and self.config.ranks != world:
                raise wrong(
                    "--ranks", self.config.ranks, f"{world}, the number torchrun started", "leave --ranks out"
                )
            self._check_groups(world)
            return world
        if self.config.ranks is not None:
            return self.config.ranks
        if is_store(self.source):
            return Store.open(self.source).num_parts * self.config.replicas
        gpus = _count_gpus() if self.config.device != "cpu" else 0
        if gpus:
            self._check_groups(gpus)
        return gpus or (2 if self.data is None else 1) * self.config.replicas

    def num_parts(self, ranks: int) -> int:
        """Parts of the store that `ranks` ranks train on: one for each rank of a group."""
        return ranks // self.config.replicas

    def _check_groups(self, ranks: int) -> None:
        replicas = self.config.replicas
        if ranks % replicas:
            do = f"use a multiple of {replicas} ranks"
            raise wrong("--replicas", f"{replicas} for {ranks} ranks", "groups of equal size", do)


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def make_parser() -> flags.Parser:
    """The parser of `python -m tgnn.train`."""
    parser = flags.Parser(
        prog="python -m tgnn.train",
        usage="%(prog)s [DATA] [options]",
        description="Train a graph neural network, split over ranks. Without DATA: a built-in graph.",
    )
    parser.add_argument("data", nargs="?", metavar="DATA", help=f"{NAMED_DATA}, a path, or a store")
    parser.add_argument("--config", metavar="FILE.toml", help="options from a file; flags override it")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="continue the run in RUN, or in --run-dir"
    )
    parser.add_argument("--print-config", action="store_true", help="print the resolved run as TOML and end")
    flags.add_flags(parser, TrainConfig, "training")
    flags.add_flags(parser, DataOptions, "data")
    return parser


def resolve(argv: Sequence[str] | None = None) -> Resolved:
    """The run that a command line asks for (`sys.argv` by default); raises UserError for any mistake in it.

    Warns about options that were given but have no effect on this model.
    """
    args = make_parser().parse_args(argv)
    source, train, data = (None, {}, {}) if args.config is None else read_toml(args.config)
    train |= flags.options_from_args(args, TrainConfig)
    data |= flags.options_from_args(args, DataOptions)
    source = source if args.data is None else args.data
    if source == "":
        raise wrong("DATA", "''", "a dataset's name or a path", "leave it out for the built-in graph")
    given = frozenset(train) | frozenset(data)
    if args.resume is None:
        resolved = Resolved(source, TrainConfig(**train), DataOptions(**data), given)
    else:
        run, source = _run_to_resume(args.resume, train.get("run_dir"), source)
        resolved = _resumed(run, source, train, data)
    if args.print_config:
        print(as_toml(resolved), end="")
        raise SystemExit(0)
    warn_without_effect(resolved.config, given)
    return resolved


def read_toml(path: str) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """DATA, the options of `[train]` and those of `[data]` that a TOML file gives; raises UserError."""
    tables = flags.load_toml(path)
    for key, table in tables.items():
        if key not in ("train", "data"):
            raise flags.unknown_key(key, ("train", "data"), f"in {path}, where [train] and [data] belong")
        if not isinstance(table, dict):
            raise wrong(f"{key} in {path}", repr(table), f"a table [{key}]", "see --help for the options")
    data = dict(tables.get("data", {}))
    source = data.pop("source", None)
    if source is not None and not isinstance(source, str):
        raise wrong(f"source in [data] of {path}", repr(source), "text", "write a dataset's name or path")
    train = flags.check_table(TrainConfig, tables.get("train", {}), f"in [train] of {path}")
    return source, train, flags.check_table(DataOptions, data, f"in [data] of {path}")


def as_toml(resolved: Resolved) -> str:
    """The resolved run as a TOML file that `--config` reads back; options that are None are left out."""
    record = resolved.record()
    lines = []
    for table in ("data", "train"):
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in record[table].items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and flat lists are all valid TOML.
    return json.dumps(value, ensure_ascii=False)


def read_run(run: str | Path) -> Resolved:
    """What `RUN/config.json` records; raises UserError when it is missing, damaged or of another version."""
    path = Path(run) / CONFIG_FILE
    remedy = "name the directory of a run that python -m tgnn.train has written"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise wrong(f"run {run}", f"no readable {CONFIG_FILE} in it", "a run directory", remedy) from None
    except ValueError:
        raise wrong(f"{path}", "a damaged file", "JSON", remedy) from None
    if not isinstance(record, dict) or record.get("format") != RUN_FORMAT:
        found = record.get("format") if isinstance(record, dict) else "none"
        raise wrong(f"{path}", f"format {found}", f"format {RUN_FORMAT}", "start a new run with this version")
    data = dict(record.get("data", {}))
    source = data.pop("source", None)
    options = flags.from_dict(DataOptions, data, f"in {path}")
    config = TrainConfig.from_dict(record.get("train", {}), f"in {path}")
    return Resolved(source, config, options, frozenset())


def _run_to_resume(value: str, run_dir: str | None, data: str | None) -> tuple[str, str | None]:
    """The run directory that `--resume [VALUE]` means, and DATA.

    argparse gives `--resume DATA` the word that was meant as DATA; where `--run-dir` names the run, it is.
    """
    if run_dir is not None and value and data is None and not (Path(value) / CONFIG_FILE).is_file():
        value, data = "", value
    if value and run_dir is not None and Path(value).resolve() != Path(run_dir).resolve():
        raise wrong(
            "--resume", f"{value} beside --run-dir {run_dir}", "one run directory", "leave --run-dir out"
        )
    run = value or run_dir
    if run is None:
        raise wrong(
            "--resume", "no run", "the directory of a run", "write --resume RUN, or add --run-dir RUN"
        )
    return run, data


def _resumed(run: str, source: str | None, train: dict[str, Any], data: dict[str, Any]) -> Resolved:
    """The run recorded in `run` with the given options laid over it, where those may change on resuming."""
    recorded = read_run(run)
    if not (Path(run) / LAST_FILE).is_file():
        raise wrong(
            "--resume",
            f"{run} without {LAST_FILE}",
            "a run that has written a checkpoint",
            "start it anew with another --run-dir",
        )
    resumable = {field.name for field in dataclasses.fields(TrainConfig) if field.metadata.get("resumable")}
    for before, now in ((recorded.config, train), (recorded.data_options, data)):
        for name in sorted(now.keys() - resumable):
            old = getattr(before, name)
            if now[name] != old:
                raise wrong(
                    flag_of(name),
                    f"{now[name]} while resuming",
                    f"{old} as in {run}/{CONFIG_FILE}, because another value trains another function",
                    f"leave {flag_of(name)} out, or start a new run",
                )
    config = dataclasses.replace(recorded.config, **train | {"run_dir": str(run), "resume": True})
    options = recorded.data_options
    if source is not None and is_store(source):
        # A store has its options, its place and its number of parts in itself.
        options = DataOptions(**data)
        config = dataclasses.replace(config, ranks=train.get("ranks"), store=train.get("store"))
    source = recorded.data if source is None else source
    return Resolved(source, config, options, frozenset(train) | frozenset(data))


def warn_without_effect(config: TrainConfig, given: Sequence[str] | frozenset[str]) -> None:
    """Warn once for each option that was given another value than its default, but changes nothing here."""
    defaults = TrainConfig()
    reasons = {}
    if not config.is_attention:
        for name in ("heads", "output_heads", "attention_dropout"):
            reasons[name] = f"--model {config.model} has no attention"
    if config.model != "sage":
        reasons["aggregator"] = f"only --model sage has an aggregator, not {config.model}"
    if all(fanout <= 0 for fanout in config.fanouts):
        reasons["replace"] = "no --fanouts entry draws a sample"
    if len(config.fanouts) == 1:
        reasons["hidden"] = "a model of one layer has no hidden layer"
        reasons["heads"] = "a model of one layer has no hidden layer"
    for name in given:
        if name in reasons and getattr(config, name) != getattr(defaults, name):
            warn_once(f"without effect: {name}", f"{flag_of(name)} has no effect: {reasons[name]}.")
