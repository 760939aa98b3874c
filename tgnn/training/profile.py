"""Hardware profiles: what one device and its links do per second, from a datasheet or measured here.

A profile is what the planner divides work by. The built-in ones (`profile_table.py`) give every number with its
source; `measure.py` makes one of the machine at hand. Both are read by `load_profile`, and a file is JSON::

    {"kind": "tgnn-profile", "format": 1, "name": .., "device": "cpu", "link": "loopback", "memory_bytes": ..,
     "alone": {"copy": {"value": .., "source": ..}, ..}, "crowded": {..}, "crowded_ranks": 2, "provenance": {..}}

`alone` are the rates of one rank, `crowded` those of a rank while `crowded_ranks` ranks work at once: ranks on the
CPU share cores and memory, ranks on GPUs share nothing and have one set of rates only.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tgnn.errors import wrong
from tgnn.training.metrics import write_json
from tgnn.training.profile_table import TABLE

KIND, FORMAT = "tgnn-profile", 1


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one rank's device and links do. Per second unless a name ends in `_s`, which is seconds per call."""

    launch_s: float
    """The least an operation of torch takes."""
    copy: float
    """Bytes read plus bytes written by operations that stream through memory, their results newly allocated."""
    matmul_float32: float
    """Floating-point operations of float32 products of many rows with a small square matrix."""
    matmul_bfloat16: float
    matmul_float64: float
    gather: float
    """Bytes of rows read and written where rows are picked from a table in the device's memory."""
    gather_host: float
    """The same for a table in the host's memory: pinned and read by the GPU itself; on a CPU equal to `gather`."""
    scatter: float
    """Bytes of rows read and written where rows are added into a table at given places."""
    aggregate: float
    """Bytes, as kernels/traffic.py counts them, of sums and means over in-edges."""
    aggregate_backward: float
    extreme: float
    """The same of max and min."""
    extreme_backward: float
    attention: float
    """The same of attention."""
    attention_backward: float
    transpose: float
    """Edges of a block seen from its sources, as backward passes need it."""
    dropout: float
    """Elements of keyed dropout, forward."""
    sample_rows: float
    """Rows whose in-edges one hop draws; their edges are `sample_edges`."""
    sample_edges: float
    """Edges drawn and their sources numbered."""
    split_edges: float
    """Edges whose sources are told apart by owner."""
    split_remote: float
    """Edges from sources of another rank, numbered and asked for, the ids' journey not included."""
    all_to_all_s: float
    all_to_all: float
    """Bytes that a rank sends to others, all ranks sending and receiving at once."""
    all_reduce_s: float
    all_reduce: float
    """Bytes of the reduced array."""

    def scaled(self, factor: float) -> Rates:
        """These rates where everything takes `factor` times as long."""
        values = dataclasses.asdict(self)
        return Rates(**{n: v * factor if n.endswith("_s") else v / factor for n, v in values.items()})


NAMES = tuple(field.name for field in dataclasses.fields(Rates))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One kind of device, its links, and where each number comes from."""

    name: str
    device: str
    """"cpu" or "cuda"."""
    link: str
    """What ranks talk over: "NVLink", "PCIe", "loopback"."""
    memory_bytes: float
    """Memory of one device; on a CPU of the machine, for all ranks."""
    alone: Rates
    crowded: Rates
    crowded_ranks: int
    sources: Mapping[str, str]
    """Where a number comes from, by its name."""
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def rates(self, ranks: int) -> Rates:
        """The rates of a rank where `ranks` work at once on one machine."""
        if self.device != "cpu":
            return self.alone if ranks == 1 else self.crowded
        if ranks == 1:
            return self.alone
        return self.crowded.scaled(max(1.0, ranks / self.crowded_ranks))

    def memory_of_rank(self, ranks: int) -> float:
        """Bytes that one of `ranks` ranks may fill."""
        return self.memory_bytes / ranks if self.device == "cpu" else self.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        found: dict[str, Any] = {"kind": KIND, "format": FORMAT}
        found |= {n: getattr(self, n) for n in ("name", "device", "link", "memory_bytes", "crowded_ranks")}
        for name in ("alone", "crowded"):
            values = dataclasses.asdict(getattr(self, name))
            found[name] = {n: {"value": v, "source": self.sources[n]} for n, v in values.items()}
        return found | {"provenance": dict(self.provenance)}

    def save(self, path: str | Path) -> None:
        """Write the profile to `path`, whole or not at all; UserError where it cannot be written."""
        try:
            write_json(Path(path), self.as_dict())
        except OSError as error:
            do = "choose another path"
            raise wrong("--out", f"{path} ({error.strerror})", "a file that can be written", do) from None


def built_in() -> tuple[str, ...]:
    """The names of the built-in profiles."""
    return tuple(TABLE)


def load_profile(name: str) -> Profile:
    """A built-in profile by name, or the one in a file; UserError for neither, or a damaged or foreign file."""
    if name in TABLE:
        return _of_table(name)
    path = Path(name)
    if not path.is_file():
        close = difflib.get_close_matches(name, TABLE, n=1)
        do = (
            f"perhaps you meant {close[0]}" if close else "make one of this machine with --measure --out FILE"
        )
        raise wrong("--profile", name, f"one of {', '.join(TABLE)}, or a profile's file", do)
    do = "make one with python -m tgnn.plan --measure --out FILE"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong("--profile", f"{path} ({error.strerror})", "a readable file", "check the path") from None
    except ValueError:
        raise wrong("--profile", f"{path}, a damaged file", "a profile in JSON", do) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise wrong("--profile", f"{path}, a file of another kind", "a hardware profile", do)
    if content.get("format") != FORMAT:
        raise wrong("--profile", f"{path} of format {content.get('format')}", f"format {FORMAT}", do)
    try:
        return _of_dict(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise wrong("--profile", f"{path}, damaged at {error}", "a whole profile", do) from None


def _of_table(name: str) -> Profile:
    entry = TABLE[name]
    values = {n: value for n, (value, _) in entry["rates"].items()}
    rates = Rates(**values)
    sources = {n: source for n, (_, source) in entry["rates"].items()}
    crowded = Rates(**values | entry.get("crowded", {}))
    return Profile(
        name=name, device=entry["device"], link=entry["link"], memory_bytes=entry["memory_bytes"], alone=rates,
        crowded=crowded, crowded_ranks=entry.get("crowded_ranks", 1), sources=sources,
        provenance=entry.get("provenance", {}),
    )  # fmt: skip


def _of_dict(content: Mapping[str, Any]) -> Profile:
    """The inverse of `Profile.as_dict`; raises KeyError, TypeError or ValueError for what is not one."""
    rates = {}
    for name in ("alone", "crowded"):
        if set(content[name]) != set(NAMES):
            raise ValueError(f"{name}, which lacks or adds {min(set(content[name]) ^ set(NAMES))}")
        values = {n: _positive(n, content[name][n]["value"]) for n in NAMES}
        rates[name] = Rates(**values)
    if content["device"] not in ("cpu", "cuda"):
        raise ValueError(f"device {content['device']!r}")
    ranks = _positive("crowded_ranks", content["crowded_ranks"])
    return Profile(
        name=str(content["name"]), device=content["device"], link=str(content["link"]),
        memory_bytes=_positive("memory_bytes", content["memory_bytes"]), crowded_ranks=int(ranks),
        sources={n: str(content["alone"][n]["source"]) for n in NAMES},
        provenance=dict(content.get("provenance", {})), **rates,
    )  # fmt: skip


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{name} {value!r}, which is no positive number")
    return float(value)
