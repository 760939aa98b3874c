"""What a training run is made of: `TrainConfig`, the only place where an option is declared.

Flags, TOML keys, `--help` and `config.json` follow from it; `resolve.py` lays the sources over each other.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

from tgnn.errors import wrong
from tgnn.sampling.samplers import SAMPLERS, check_sampler
from tgnn.training import flags
from tgnn.training.flags import flag_of, option

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


def size_in_bytes(text: str, flag: str = "a cache's size") -> int | None:
    """Bytes that a size stands for, None for `auto`; raises UserError that names `flag`."""
    if text == "auto":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([kKMGT]?)(i?)B?", text.strip())
    if found is None or (found[3] and not found[2]):
        raise wrong(flag, repr(text), "bytes, a number with a unit, or auto", "write for example 4GiB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index(found[2].upper() or " "))


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
    replicas: int = option(
        1, "groups the ranks form: split inside a group, data parallel across groups", resumable=True
    )
    parallel: str = option(
        "split", "how ranks share a batch; auto: what the planner expects to be faster",
        choices=("split", "data", "auto"), resumable=True,
    )  # fmt: skip
    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"), resumable=True)
    backend: str = option("auto", "sparse kernels", choices=("auto", "torch", "triton"), resumable=True)
    dtype: str = option(
        "float32", "number format of rows; bfloat16: mixed precision over float32 weights",
        choices=("float32", "float64", "bfloat16"),
    )  # fmt: skip
    partitioner: str = option(
        "lp", "how DATA is partitioned", choices=("metis", "lp", "random"), resumable=True
    )
    store: str | None = option(
        None, "where the partition store is kept (default: a cache that is reused)", resumable=True
    )
    presample: int = option(
        1, "epochs sampled before partitioning, which weigh vertices and edges by their use; 0: none",
        resumable=True,
    )  # fmt: skip
    feature_cache: str = option(
        "auto", "memory a rank gives to copies of its own feature rows, for example 4GiB, 0 or auto",
        resumable=True,
    )  # fmt: skip
    halo_cache: str = option(
        "0", "memory a rank gives to copies of other ranks' feature rows, for example 1GiB, 0 or auto",
        resumable=True,
    )  # fmt: skip
    graph_placement: str = option(
        "auto", "where the in-edges lie: device memory, or pinned host memory that a GPU reads",
        choices=("auto", "device", "pinned"), resumable=True,
    )  # fmt: skip
    exchange_dtype: str = option(
        "float32", "number format of rows on their way between ranks; sums stay in the model's",
        choices=("float32", "bfloat16"),
    )  # fmt: skip
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
        for name in ("feature_cache", "halo_cache"):
            size_in_bytes(getattr(self, name), flag_of(name))
        self._check_layout()

    def _check_layout(self) -> None:
        """What does not go together of the ways that ranks can share the work."""
        if self.replicas > 1 and self.parallel != "split":
            got = f"{self.replicas} together with --parallel {self.parallel}"
            do = "leave one of the two out: data parallel ranks need no groups"
            raise wrong("--replicas", got, "--parallel split", do)
        if self.ranks is not None and self.ranks % self.replicas:
            do = f"use a multiple of {self.replicas} ranks"
            raise wrong("--replicas", f"{self.replicas} for {self.ranks} ranks", "groups of equal size", do)
        if self.norm == "batch" and self.replicas > 1:
            do = "use --norm layer, or --replicas 1"
            reason = "one group, because groups repeat hidden vertices in the statistics"
            raise wrong("--norm", f"batch together with --replicas {self.replicas}", reason, do)
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
    "presample": _at_least(0),
    "replicas": _at_least(1),
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
    "presample": 2**31 - 1,
    "ranks": 65_536,
    "replicas": 65_536,
    "timeout": 10**9,
}


def _example(name: str) -> str:
    return flags.specs(TrainConfig)[name].example
