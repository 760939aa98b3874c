"""What a run says of itself: stage clocks, work counters, memory, and the files of the run directory.

`StageClock` splits an epoch's wall time into disjoint stages, `WorkCounters` counts what was sampled, loaded
and sent, `epoch_line` makes one line of `metrics.jsonl` of both, `RunLog` writes the run directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tgnn.errors import UserError, wrong
from tgnn.kernels.tuning import device_name
from tgnn.parallel.comm import Comm
from tgnn.training.checkpoint import atomic_file
from tgnn.training.config import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE

STAGES = ("sample", "split", "load", "wait", "forward", "backward", "update", "eval")
DOMINANT_SHARE = 0.6
# Where runs go that are not told where.
RUNS = "runs"

_ADVICE = {
    "sample": "draw fewer in-edges with --fanouts, or hide sampling behind compute with a larger --prefetch",
    "split": "use a larger --batch-size, or fewer --ranks: ranks spend it telling each other what they need",
    "load": "keep the store on a faster disk or in memory, or use narrower features",
    "wait": "use a --partitioner that cuts fewer edges, a larger --prefetch, or fewer --ranks",
}


class StageClock:
    """Wall time of the issuing thread, by stage.

    A stage entered inside another pauses it, so stages are disjoint and add up to `total` but for the time
    outside all of them. It never waits for a device: on a GPU the stage that waits is the stage that pays.

    >>> clock = StageClock()
    >>> with clock.stage("forward"):
    ...     with clock.stage("wait"):
    ...         pass
    >>> list(clock.seconds())[:3]
    ['sample', 'split', 'load']
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.start()

    def start(self) -> None:
        """Begin a new epoch: all stages at zero. Not inside a stage."""
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._overlapped = 0.0
        self._open: list[str] = []
        self._start = self._mark = self._now()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` block to stage `name`, one of `STAGES`."""
        if name not in self._seconds:
            raise KeyError(f"stage {name!r} is none of {STAGES}")
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def add_overlapped(self, seconds: float) -> None:
        """Add time that was hidden behind other work; it is part of no stage and not of `total`."""
        self._overlapped += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds per stage, then `total` (wall time since `start`) and `overlapped`."""
        self._charge()
        return {**self._seconds, "total": self._mark - self._start, "overlapped": self._overlapped}

    def _charge(self) -> None:
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._mark
        self._mark = now


@dataclasses.dataclass(slots=True)
class WorkCounters:
    """What this rank did in an epoch, as plain counts. Add to the fields."""

    seeds: int = 0
    """Vertices whose loss was computed here."""
    edges: int = 0
    """In-edges sampled here, over all hops."""
    input_rows: int = 0
    """Vertices of the input layer that this rank owns a copy of, over all steps."""
    feature_rows_loaded: int = 0
    """Feature rows of its own vertices that this rank read, from the store or its cache."""
    feature_cache_rows: int = 0
    """Those of them that the cache held."""
    halo_rows: int = 0
    """Rows received from other ranks in the forward exchanges."""
    halo_cache_rows: int = 0
    """Halo rows that a local copy saved."""
    exchange_bytes: int = 0
    """Payload bytes sent to other ranks."""

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return dataclasses.asdict(self)

    def per_rank(
        self, comm: Comm, earlier: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, list[int]]:
        """Every rank's counts by name, in rank order. `earlier` are those of the same epoch from before a
        restart; where that had another number of ranks, they are dealt out evenly. Collective.
        """
        counts = self.as_dict()
        rows = comm.all_gather_ints(list(counts.values()))
        found = {name: [row[place] for row in rows] for place, name in enumerate(counts)}
        for name, before in (earlier or {}).items():
            if len(before) != len(rows):
                share, rest = divmod(sum(before), len(rows))
                before = [share + (rank < rest) for rank in range(len(rows))]
            found[name] = [a + b for a, b in zip(before, found[name], strict=True)]
        return found

    def sum_over_ranks(
        self, comm: Comm, earlier: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Any]:
        """The `work` entry of an epoch's line: sums over the ranks, and `balance`, the largest rank's edges
        over the mean. `earlier` as in `per_rank`. Collective.
        """
        counts = self.per_rank(comm, earlier)
        edges = counts["edges"]
        balance = max(edges) * len(edges) / sum(edges) if sum(edges) else 1.0
        sums = {name: sum(column) for name, column in counts.items()}
        loaded, cached = sums["feature_rows_loaded"], sums.pop("feature_cache_rows")
        hit = cached / loaded if loaded else None
        return {**sums, "cache_hit": hit, "balance": balance}


def memory(device: torch.device | str, comm: Comm) -> dict[str, int]:
    """The largest rank's resident memory now, and its peak of allocated GPU memory (0 on CPU), in bytes.
    Collective.
    """
    device = torch.device(device)
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    per_rank = comm.all_gather_ints([resident_bytes(), on_device])
    return {"rss_bytes": max(row[0] for row in per_rank), "device_bytes": max(row[1] for row in per_rank)}


def resident_bytes() -> int:
    """Resident memory of this process in bytes; where the system does not tell, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else peak * 1024


def epoch_line(
    *,
    epoch: int,
    loss: float,
    metric: str,
    train_acc: float | None,
    val_acc: float | None,
    test_acc: float | None,
    val_loss: float | None,
    ranks: int,
    parallel: str,
    seconds: Mapping[str, float],
    work: Mapping[str, Any],
    memory: Mapping[str, int],
) -> dict[str, Any]:
    """One line of `metrics.jsonl`, keys in their published order. The `_acc` keys hold whatever `metric`
    names.
    """
    return {
        "epoch": epoch,
        "loss": loss,
        "metric": metric,
        "train_acc": train_acc,
        "val_acc": val_acc,
        "test_acc": test_acc,
        "val_loss": val_loss,
        "ranks": ranks,
        "parallel": parallel,
        "seconds": dict(seconds),
        "work": dict(work),
        "memory": dict(memory),
        "energy_joules": None,
    }


class RunLog:
    """The text files of a run directory: `config.json`, `metrics.jsonl`, `summary.json`. For one process,
    rank 0.

    `config.json` and `summary.json` are written whole or not at all; a line of `metrics.jsonl` is on the disk
    when `append` returns.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)

    def write_config(self, record: Mapping[str, Any]) -> None:
        """Write `config.json`; `record` is what `Resolved.record()` gives."""
        write_json(self.run_dir / CONFIG_FILE, record)

    def append(self, line: Mapping[str, Any]) -> None:
        """Add one epoch's line to `metrics.jsonl`."""
        with open(self.run_dir / METRICS_FILE, "a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> list[dict[str, Any]]:
        """The lines written so far; one that a kill cut off is left out."""
        path = self.run_dir / METRICS_FILE
        if not path.exists():
            return []
        found = []
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
        return found

    def rewind(self, epoch: int) -> None:
        """Drop the lines of `epoch` and later ones, which a resumed run will write again."""
        kept = [line for line in self.lines() if line["epoch"] < epoch]
        with atomic_file(self.run_dir / METRICS_FILE) as file:
            file.write("".join(to_json(line) + "\n" for line in kept).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        write_json(self.run_dir / SUMMARY_FILE, summary)


def check_run_dir(run_dir: str | None, root: str | Path = RUNS) -> None:
    """Refuse, before any work, a place that a new run cannot have: UserError where `run_dir` holds a run
    already, or no directory can be made there.
    """
    if run_dir is not None and (Path(run_dir) / CONFIG_FILE).exists():
        raise wrong(
            "--run-dir",
            f"{run_dir}, which holds a run",
            "a new directory",
            "add --resume to continue that run",
        )
    path = Path(os.path.abspath(run_dir or root))
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    if not nearest.is_dir():
        raise _no_run_dir(path, f"{nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _no_run_dir(path, f"{nearest} is not writable")


def create_run_dir(run_dir: str | None, name: str, model: str, root: str | Path = RUNS) -> Path:
    """A new run directory: `run_dir`, or the next free `root/<name>-<model>-<number>`.

    Raises UserError as `check_run_dir` does. Two runs that start at once get two.
    """
    check_run_dir(run_dir, root)
    if run_dir is not None:
        _make_dir(Path(run_dir), exist_ok=True)
        return Path(run_dir)
    _make_dir(Path(root), exist_ok=True)
    stem = "".join(c if c.isalnum() or c in "._" else "-" for c in f"{name}-{model}").strip("-.")
    number = 1
    while True:
        path = Path(root) / f"{stem}-{number}"
        try:
            _make_dir(path, exist_ok=False)
            return path
        except FileExistsError:
            number += 1


def _make_dir(path: Path, exist_ok: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise _no_run_dir(path, error.strerror) from None


def _no_run_dir(path: Path, why: str | None) -> UserError:
    return wrong("--run-dir", f"{path} ({why})", "a directory that can be made", "choose another")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON text of plain values; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path`, whole or not at all."""
    with atomic_file(path) as file:
        file.write((to_json(value, indent=2) + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def provenance(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What produced a number: versions, the device's name, the checkout's commit (None outside one)."""
    packages = ("tgnn", "torch", "numpy", "triton")
    device = torch.device(device)
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in packages},
        },
        "device": device_name(device),
        "commit": _commit(Path(__file__).resolve().parents[2]),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    """The commit that `checkout` stands on, read from git's own files."""
    try:
        git = checkout / ".git"
        if git.is_file():
            git = checkout / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        ref = head.removeprefix("ref:").strip()
        # A worktree keeps its branches in the main checkout's folder.
        shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
        for folder in (git, shared):
            if (folder / ref).exists():
                return (folder / ref).read_text().strip()
        for line in (shared / "packed-refs").read_text().splitlines():
            if line.endswith(" " + ref):
                return line.split()[0]
    except OSError:
        pass
    return None


_BEST = ("loss", "metric", "train_acc", "val_acc", "test_acc", "val_loss", "ranks", "parallel")


def best_figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary says of the best epoch, from that epoch's line."""
    return {name: line[name] for name in _BEST}


def summarise(
    lines: Sequence[Mapping[str, Any]],
    best_epoch: int | None,
    figures: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The content of `summary.json` from a run's lines: the best epoch and its figures, means per epoch, and
    `more` (the resolved config, provenance, why the run stopped).

    `figures` are the best epoch's as `best_figures` gives them, for a run whose line of that epoch is lost;
    without them the lost figures are None. Where no epoch is the best, the last one stands for it.
    """
    last = lines[-1]
    unknown = {name: last[name] if name in ("metric", "ranks", "parallel") else None for name in _BEST}
    best: Mapping[str, Any] = {"epoch": best_epoch, **unknown, **(figures or {})}
    if best_epoch is None:
        best = last
    best = next((line for line in lines if line["epoch"] == best_epoch), best)
    stages = (*STAGES, "total", "overlapped")
    seconds = {name: sum(line["seconds"][name] for line in lines) / len(lines) for name in stages}
    counts = [name for name in last["work"] if name != "cache_hit"]
    work = {name: sum(line["work"][name] for line in lines) / len(lines) for name in counts}
    training_seconds = seconds["total"] - seconds["eval"]
    return {
        "epochs": last["epoch"],
        "best_epoch": best["epoch"],
        **best_figures(best),
        "seconds_per_epoch": seconds,
        "seeds_per_second": work["seeds"] / training_seconds if training_seconds > 0 else None,
        "work_per_epoch": work,
        "memory": {name: max(line["memory"][name] for line in lines) for name in last["memory"]},
        **more,
    }


def format_summary(summary: Mapping[str, Any]) -> str:
    """The short table that ends a run, from what `summarise` gives, with advice where one stage dominates."""
    seconds, work = summary["seconds_per_epoch"], summary["work_per_epoch"]
    stages = {**{name: seconds[name] for name in STAGES}, "sum": sum(seconds[name] for name in STAGES)}
    stages["wall"] = seconds["total"]
    figures = "  ".join(f"{split} {_figure(summary[f'{split}_acc'])}" for split in ("train", "val", "test"))
    speed = f"{_count(summary['seeds_per_second'])} seeds/s"
    rows = [
        (summary["metric"], f"{figures}  (best epoch: {summary['best_epoch']} of {summary['epochs']})"),
        ("seconds per epoch", " ".join(f"{name:>8}" for name in stages)),
        ("", " ".join(f"{value:8.3f}" for value in stages.values())),
        ("training speed", f"{speed} on {_ranks(summary['ranks'])}, {summary['parallel']}"),
        (
            "work per epoch",
            f"{_count(work['edges'])} edges, {_count(work['feature_rows_loaded'])} rows loaded,",
        ),
        ("", f"{_count(work['halo_rows'])} halo rows, {_bytes(work['exchange_bytes'])} exchanged"),
        ("balance", f"{work['balance']:.2f} (largest rank's edges over the mean)"),
    ]
    lines = [f"{name:<18} {text}" for name, text in rows]
    advice = advise(seconds)
    return "\n".join(lines + ([advice] if advice else []))


def advise(seconds: Mapping[str, float]) -> str | None:
    """What to do where sampling, splitting, loading or waiting takes most of an epoch, else None."""
    for name, cure in _ADVICE.items():
        if seconds["total"] > 0 and seconds[name] > DOMINANT_SHARE * seconds["total"]:
            return f"{name} takes {seconds[name] / seconds['total']:.0%} of the epoch: {cure}."
    return None


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} TB"
