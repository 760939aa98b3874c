"""Launch configurations of Triton kernels, and strategies of torch paths, looked up by what a call looks
like.

A table holds what `tools/autotune.py` measured on one machine: device, torch and Triton versions, and for
every key (kernel or op, dtype, width class, degree class) the best choice. A lookup asks the table shipped
with tgnn, then the user's, and else takes the default; nothing is ever timed here. `$TGNN_TUNING` names one
table to use instead of both. A table is read once per process, so that a run keeps its choices, and all ranks
that see the same file make the same ones (`describe` tells which). A damaged table, or one of another device
or version, gives one warning and the defaults.

Example: a launch of `spmm_sum` on float32 rows of 100 elements, 9.5 edges each on average, has the key
`spmm_sum float32 width<=128 degree<=32`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tgnn.errors import warn_once

FORMAT = 1
TABLE_VARIABLE = "TGNN_TUNING"
SHIPPED = Path(__file__).parent / "tables"
# Mean degrees up to each of these are one class; the last class has no bound.
DEGREE_BOUNDS = (2, 8, 32)
# Packages that bring the module `triton`.
_TRITON_PACKAGES = ("triton", "pytorch-triton-rocm", "pytorch-triton", "triton-rocm")


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: its tile sizes (constexpr arguments by name), warps of 32 lanes, and pipeline
    stages.
    """

    tiles: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2

    def warps(self, lanes: int) -> int:
        """The warps of `lanes` lanes that are as many threads: a tile is spread over threads, so that loads stay
        as wide where a warp has 64 lanes.
        """
        return max(1, self.num_warps * 32 // lanes)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"tiles": dict(self.tiles), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __str__(self) -> str:
        tiles = [f"{name}={size}" for name, size in self.tiles.items()]
        return " ".join([*tiles, f"warps={self.num_warps}", f"stages={self.num_stages}"])


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """All that is needed to compile, tune and launch one kernel.

    name: of the kernel, e.g. `spmm_sum`; op: the public op it serves, e.g. `spmm`.
    kernel: the `triton.jit` function.
    signature: (dtype, index dtype) -> {argument: Triton type, `*fp32`, `*i32`, `i64`, ... or `constexpr`}.
    constants: width -> the constexpr arguments that are no tiles.
    configs: width -> candidates; the first is the default.
    doubled: types whose rows, as they fill twice the registers, take configurations of twice the width.
    """

    name: str
    op: str
    kernel: Any
    signature: Callable[[torch.dtype, torch.dtype], dict[str, str]]
    constants: Callable[[int], dict[str, Any]]
    configs: Callable[[int], tuple[Config, ...]]
    doubled: tuple[torch.dtype, ...] = ()

    def candidates(self, width: int, dtype: torch.dtype) -> tuple[Config, ...]:
        """Configurations for rows of `width` elements of `dtype`; the first is the default."""
        return self.configs(2 * width if dtype in self.doubled else width)


@dataclass(frozen=True)
class Asked:
    """One lookup: of a kernel's `spec`, or (None) of a strategy, and the candidates, the default first."""

    spec: KernelSpec | None
    dtype: torch.dtype
    width: int
    degree: float
    candidates: tuple[Config, ...] | tuple[str, ...]


def lookup(spec: KernelSpec, device: torch.device, dtype: torch.dtype, width: int, degree: float) -> Config:
    """The configuration for a launch on rows of `width` elements and `degree` edges a segment on average."""
    return _choice(spec.name, spec, device, dtype, width, degree, None)


def strategy(
    op: str, device: torch.device, dtype: torch.dtype, width: int, degree: float, choices: tuple[str, ...]
) -> str:
    """Which of `choices`, the default first, the torch path of `op` takes on such rows."""
    return _choice(op, None, device, dtype, width, degree, choices)


# (name, device, dtype, width, degree class) -> choice, for calls that were met before.
_known: dict[tuple, Any] = {}
# While something is measured: what to choose by name, and what was asked by key.
_trial: tuple[Mapping[str, Any], dict[str, Asked]] | None = None


def _choice(name, spec, device, dtype, width, degree, choices):
    if _trial is not None:
        forced, asked = _trial
        candidates = choices or spec.candidates(width, dtype)
        asked[key_of(name, dtype, width, degree)] = Asked(spec, dtype, width, degree, candidates)
        return forced.get(name, candidates[0])
    call = (name, device, dtype, width, degree_class(degree))
    found = _known.get(call)
    if found is None:
        found = _known[call] = _find(name, spec, device, dtype, width, degree, choices)
    return found


def _find(name, spec, device, dtype, width, degree, choices):
    candidates = choices or spec.candidates(width, dtype)
    key = key_of(name, dtype, width, degree)
    for table in tables(device):
        if key in table.entries:
            stored = table.entries[key]["choice"]
            for candidate in candidates:
                if stored == (candidate.as_dict() if isinstance(candidate, Config) else candidate):
                    return candidate
            what = f"{table.path}: {key} names {stored}, which is no choice any more"
            warn_once(
                f"tuning {table.path}", f"{what}; the default is used, tune again with tools/autotune.py"
            )
    return candidates[0]


@contextlib.contextmanager
def trial(forced: Mapping[str, Any]) -> Iterator[dict[str, Asked]]:
    """For measuring: lookups of the names in `forced` get what it says, all others their default, whatever
    the tables say. Yields a dictionary that fills with what is asked, by key.
    """
    global _trial
    before, _trial = _trial, (forced, {})
    try:
        yield _trial[1]
    finally:
        _trial = before


def width_class(width: int) -> int:
    """The power of two at or above `width`: what tile sizes depend on."""
    return 1 << (max(1, width) - 1).bit_length()


def degree_class(degree: float) -> int | None:
    """The bound of the class of mean degrees that holds `degree`; None for the class without a bound."""
    return next((bound for bound in DEGREE_BOUNDS if degree <= bound), None)


def key_of(name: str, dtype: torch.dtype, width: int, degree: float) -> str:
    """The key of a kernel's (or op's) choice in a table."""
    bound = degree_class(degree)
    degrees = f"degree>{DEGREE_BOUNDS[-1]}" if bound is None else f"degree<={bound}"
    return f"{name} {str(dtype).removeprefix('torch.')} width<={width_class(width)} {degrees}"


@dataclass(frozen=True)
class Table:
    """A table that was read: its file, the SHA-256 of its bytes, key -> entry with `choice` and times, and
    the workloads that the tuning tool is done with.
    """

    path: Path
    sha256: str
    entries: Mapping[str, Mapping[str, Any]]
    done: Mapping[str, str]


class BadTable(ValueError):
    """Why a table cannot be used."""


def machine(device: torch.device | str) -> dict[str, str | None]:
    """What a table is keyed by: the device's name, torch's and Triton's version (None without it)."""
    return {
        "device": device_name(torch.device(device)),
        "torch": torch.__version__,
        "triton": _triton_version(),
    }


@cache
def device_name(device: torch.device) -> str:
    """The name of a GPU, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def lanes_of(device: torch.device) -> int:
    """Lanes of a warp: 32, and 64 on AMD's data-centre GPUs (gfx9)."""
    if device.type != "cuda" or torch.version.hip is None:
        return 32
    return 64 if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx9") else 32


@cache
def _triton_version() -> str | None:
    for package in _TRITON_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def cache_folder() -> Path:
    """Where tgnn keeps what can be made again: `$TGNN_CACHE`, else `~/.cache/tgnn`."""
    return Path(os.environ.get("TGNN_CACHE") or Path.home() / ".cache" / "tgnn")


def table_name(device: torch.device | str) -> str:
    """The file name of a device's table, e.g. `nvidia-h200_torch-2.13.0_triton-3.9.0.json`."""
    of = machine(device)
    parts = [of["device"], f"torch-{of['torch']}", f"triton-{of['triton'] or 'none'}"]
    return "_".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-") for part in parts) + ".json"


def user_table(device: torch.device | str) -> Path:
    """Where the user's table of a device is looked for, and written by the tuning tool."""
    chosen = os.environ.get(TABLE_VARIABLE)
    return Path(chosen) if chosen else cache_folder() / "tuning" / table_name(device)


def tables(device: torch.device | str) -> tuple[Table, ...]:
    """The tables for `device` in the order they are asked, each read once per process."""
    return _tables(torch.device(device))


@cache
def _tables(device: torch.device) -> tuple[Table, ...]:
    shipped = () if os.environ.get(TABLE_VARIABLE) else (SHIPPED / table_name(device),)
    found = []
    for path in (*shipped, user_table(device)):
        try:
            found.append(read_table(path, machine(device)))
        except FileNotFoundError:
            if not os.environ.get(TABLE_VARIABLE):
                continue
            warn_once(
                f"tuning {path}", f"{path}: ${TABLE_VARIABLE} names no file; default configurations are used"
            )
        except (BadTable, OSError) as error:
            do = "default configurations are used; remove it, or tune again with tools/autotune.py"
            warn_once(f"tuning {path}", f"{path}: {error}; {do}")
    return tuple(found)


def read_table(path: Path, of: Mapping[str, str | None]) -> Table:
    """The table at `path` if it is whole and of the machine `of`; raises BadTable, or OSError."""
    data = path.read_bytes()
    try:
        content = json.loads(data)
    except ValueError as error:
        raise BadTable(f"damaged tuning table ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadTable(f"no tuning table of format {FORMAT}")
    other = [f"{name} {content.get(name)} where here is {value}" for name, value in of.items()
             if content.get(name) != value]  # fmt: skip
    if other:
        raise BadTable(f"tuning table of another machine ({', '.join(other)})")
    entries = content.get("entries")
    if not isinstance(entries, dict) or not all(
        isinstance(e, dict) and "choice" in e for e in entries.values()
    ):
        raise BadTable("damaged tuning table (entries without a choice)")
    return Table(path, hashlib.sha256(data).hexdigest(), entries, content.get("done", {}))


def describe(device: torch.device | str = "cpu") -> dict[str, str]:
    """Path -> SHA-256 of every table in use for `device`, so that ranks can tell that theirs are the same."""
    return {str(table.path): table.sha256 for table in tables(device)}


def forget_tables() -> None:
    """Read tables anew from here on: after one was written, and between tests."""
    _known.clear()
    _tables.cache_clear()
