"""What a training run is made of: `TrainConfig`, and how a command line becomes one.

`TrainConfig` is the only place where an option is declared; flags, TOML keys, `--help` and `config.json`
follow from it. `resolve` lays the sources over each other: the defaults, then `--config FILE.toml`, then the
flags; with `--resume` the run's own `config.json` takes the defaults' place. The TOML file has two tables,
both optional, keyed by flag names::

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
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tgnn.data.options import DataOptions
from tgnn.errors import warn_once, wrong
from tgnn.partition.store import Store
from tgnn.sampling.samplers import SAMPLERS, check_sampler
from tgnn.training import flags
from tgnn.training.flags import flag_of, option
from tgnn.training.prepare import is_store

BUILT_IN_DATA = "sbm"
RUN_FORMAT = 1
CONFIG_FILE, METRICS_FILE, SUMMARY_FILE = "config.json", "metrics.jsonl", "summary.json"
LAST_FILE, BEST_FILE = "last.pt", "best.pt"

_ATTENTION_MODELS = ("gat", "gatv2", "transformer")


def parse_fanouts(text: str) -> tuple[int, ...]:
    """`10,5`, `-1,-1` or `all,10` as hop-ordered fanouts, -1 for every in-edge; raises UserError."""
    words = [word.strip() for word in text.split(",")]
    try:
        return tuple(-1 if word == "all" else int(word) for word in words)
    except ValueError:
        raise wrong(
            "--fanouts",
            repr(text),
            "integers or 'all', separated by commas",
            "write for example --fanouts 10,10",
        ) from None


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Every option of a training run; checks itself, raising UserError that names the flag."""

    model: str = option("sage", "the layer", choices=("sage", "gcn", "gat", "gatv2", "gin", "transformer"))
    aggregator: str = option("mean", "how sage reduces neighbours", choices=("mean", "max", "pool", "gcn"))
    hidden: int = option(64, "width of the hidden layers; per head for attention models")
    heads: int = option(4, "attention heads of the hidden layers")
    output_heads: int = option(1, "attention heads of the last layer, averaged")
    dropout: float = option(0.5, "share of layer inputs dropped while training")
    attention_dropout: float = option(0.0, "share of attention weights dropped while training")
    activation: str = option(
        "relu", "between layers", choices=("relu", "elu", "gelu", "leaky_relu", "tanh", "none")
    )
    norm: str = option("none", "normalisation between layers", choices=("none", "layer", "batch"))
    residual: bool = option(False, "add each layer's input to its output")
    fanouts: tuple[int, ...] = option(
        (10, 10), "in-edges drawn per vertex, one number per layer, seeds outward; -1 or all: every in-edge",
        parse=parse_fanouts,
    )  # fmt: skip
    sampler: str = option(
        "uniform",
        "how in-edges are drawn; labor: rows share sources, fanouts are averages; labor-dependent: layers share too; "
        "weighted: by edge weight",
        choices=SAMPLERS,
    )  # fmt: skip
    replace: bool = option(False, "draw in-edges with replacement")
    batch_size: int = option(1024, "seeds per step over all ranks")
    epochs: int = option(20, "passes over the training vertices", resumable=True)
    optimizer: str = option("adam", "update rule", choices=("adam", "adamw", "sgd"))
    lr: float = option(0.01, "learning rate")
    weight_decay: float = option(5e-4, "weight decay")
    patience: int = option(
        0, "stop after this many epochs without a better validation metric; 0: never", resumable=True
    )
    eval_every: int = option(1, "evaluate every so many epochs", resumable=True)
    metric: str = option(
        "auto", "what is reported and chosen by; auto: accuracy, or f1 for multi-label data",
        choices=("auto", "accuracy", "f1", "auc"),
    )  # fmt: skip
    ranks: int | None = option(
        None,
        "ranks on this machine (default: a store's parts, else one per GPU, else 1; built-in graph: 2)",
        resumable=True,
    )
    parallel: str = option("split", "how ranks share a batch", choices=("split", "data"), resumable=True)
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"), resumable=True)
    backend: str = option("auto", "sparse kernels", choices=("auto", "torch", "triton"), resumable=True)
    dtype: str = option("float32", "number format of the model", choices=("float32", "float64", "bfloat16"))
    partitioner: str = option(
        "lp", "how DATA is partitioned", choices=("metis", "lp", "random"), resumable=True
    )
    store: str | None = option(
        None, "where the partition store is kept (default: a cache that is reused)", resumable=True
    )
    prefetch: int = option(1, "batches in flight", resumable=True)
    seed: int = option(0, "seed of the weights, the order, the samples and the dropout")
    timeout: float = option(600.0, "seconds after which a stuck rank ends the run", resumable=True)
    run_dir: str | None = option(
        None, "where the run is written (default: the next free runs/<data>-<model>-<number>)", resumable=True
    )
    checkpoint_every: int = option(
        0, "steps between checkpoints inside an epoch; 0: only at each epoch's end", resumable=True
    )
    progress: str = option(
        "auto", "progress bars; auto: on a terminal only", choices=("auto", "always", "never"), resumable=True
    )
    inference_edges: int = option(
        2_000_000, "most in-edges that exact inference holds at once", resumable=True
    )
    resume: bool = option(False, "continue the run in run_dir", flag=False)

    def __post_init__(self) -> None:
        flags.check_fields(self)
        for name, (holds, expected) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                shown = ",".join(map(str, value)) or "none" if isinstance(value, tuple) else value
                shown = repr(value) if value == "" else shown
                raise wrong(flag_of(name), shown, expected, f"write for example {_example(name)}")
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if value is not None and (max(value) if isinstance(value, tuple) else value) > limit:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise wrong(flag_of(name), shown, f"at most {limit}", f"write for example {_example(name)}")
        if self.is_attention:
            for name in ("heads", "output_heads"):
                if self.hidden * getattr(self, name) > MOST_WIDTH:
                    got = f"{getattr(self, name)} beside --hidden {self.hidden}"
                    raise wrong(
                        flag_of(name), got, f"at most {MOST_WIDTH} columns in all", "choose smaller ones"
                    )
        check_sampler(self.sampler, self.replace)
        if self.norm == "batch" and self.parallel == "data":
            raise wrong(
                "--norm",
                "batch together with --parallel data",
                "--parallel split, because ranks that sample alone repeat hidden vertices in the statistics",
                "use --parallel split or --norm layer",
            )

    @property
    def is_attention(self) -> bool:
        """Whether the model has attention heads."""
        return self.model in _ATTENTION_MODELS

    def as_dict(self) -> dict[str, Any]:
        """The options as JSON has them; `resume`, an act and not a property of the run, is left out."""
        return flags.as_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "in config.json") -> TrainConfig:
        """The inverse of `as_dict`; raises UserError for unknown keys and wrong values."""
        return flags.from_dict(cls, values, where)


def _at_least(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value >= least), f"at least {least}"


def _share() -> tuple[Callable[[Any], bool], str]:
    return (lambda value: 0 <= value < 1), "a share in [0, 1)"


def _positive() -> tuple[Callable[[Any], bool], str]:
    return (lambda value: 0 < value < math.inf), "a positive finite number"


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden": _at_least(1),
    "heads": _at_least(1),
    "output_heads": _at_least(1),
    "dropout": _share(),
    "attention_dropout": _share(),
    "fanouts": (
        lambda value: len(value) > 0 and min(value) >= -1,
        "one number per layer, each -1 (every in-edge), 0 or positive",
    ),
    "batch_size": _at_least(1),
    "epochs": _at_least(1),
    "lr": _positive(),
    "weight_decay": (lambda value: 0 <= value < math.inf, "a finite number, at least 0"),
    "patience": _at_least(0),
    "eval_every": _at_least(1),
    "ranks": _at_least(1),
    "prefetch": _at_least(0),
    "seed": (lambda value: 0 <= value < 2**63, "an integer in [0, 2^63)"),
    "timeout": _positive(),
    "checkpoint_every": _at_least(0),
    "inference_edges": _at_least(1),
    "store": (lambda value: value != "", "a path"),
    "run_dir": (lambda value: value != "", "a path"),
}


MOST_WIDTH = 1_000_000
# Beyond these a number is a slip of the keyboard, and no machine integer or memory holds what follows from it.
_LIMITS: dict[str, int] = {
    "hidden": MOST_WIDTH,
    "heads": MOST_WIDTH,
    "output_heads": MOST_WIDTH,
    "fanouts": 2**31 - 1,
    "batch_size": 2**62,
    "epochs": 2**31 - 1,
    "patience": 2**31 - 1,
    "eval_every": 2**31 - 1,
    "checkpoint_every": 2**62,
    "inference_edges": 2**62,
    "prefetch": 2**31 - 1,
    "ranks": 65_536,
    "timeout": 10**9,
}


def _example(name: str) -> str:
    return flags.specs(TrainConfig)[name].example


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
        store has parts, else one per GPU, else 2 for the built-in graph and 1 for other data. Raises
        UserError where `--ranks` contradicts torchrun, or for a store that cannot be opened.
        """
        from tgnn.parallel.comm import torchrun_int, under_torchrun

        if under_torchrun():
            world = torchrun_int("WORLD_SIZE")
            if "ranks" in self.given and self.config.ranks != world:
                raise wrong(
                    "--ranks", self.config.ranks, f"{world}, the number torchrun started", "leave --ranks out"
                )
            return world
        if self.config.ranks is not None:
            return self.config.ranks
        if is_store(self.source):
            return Store.open(self.source).num_parts
        gpus = _count_gpus() if self.config.device != "cpu" else 0
        return gpus or (2 if self.data is None else 1)


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
    parser.add_argument("data", nargs="?", metavar="DATA", help="a dataset's name, a path, or a store")
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
