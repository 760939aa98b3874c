"""What tuning can do without a GPU: compile every configuration for it and drop those that cannot be fast."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _options import dtypes_of, widths_of
from tqdm import tqdm

from tgnn.errors import wrong
from tgnn.kernels import aot, tuning
from tgnn.kernels.backend import has_triton
from tgnn.kernels.tuning import Config, KernelSpec
from tgnn.training.metrics import provenance, write_json


def compile_all(args: argparse.Namespace) -> int:
    """`autotune.py --compile-only`: one file per architecture, printed and written; 0."""
    if not has_triton():
        raise wrong("--compile-only", "a Python without Triton", "the package triton", "install it")
    arches = args.arch or ["sm_90"]
    unknown = [arch for arch in arches if arch not in aot.TARGETS]
    if unknown or (args.out and len(arches) > 1):
        expected = f"one of {', '.join(aot.TARGETS)}" if unknown else "one architecture with --out"
        raise wrong("--arch", ", ".join(arches), expected, "correct it")
    specs = [s for s in aot.registered().values() if not args.ops or s.op in args.ops]
    if args.defaults:
        return _check_defaults(arches, specs, dtypes_of(args), widths_of(args))
    for arch in arches:
        path = Path(args.out) if args.out else tuning.cache_folder() / "tuning" / f"candidates_{arch}.json"
        kept = _compile_arch(arch, specs, dtypes_of(args), widths_of(args), path)
        print(f"{arch}: {kept} -> {path}")
    return 0


def _check_defaults(
    arches: Sequence[str], specs: Sequence[KernelSpec], dtypes: list[torch.dtype], widths: list[int]
) -> int:
    """Compile the default configurations alone, for both types of ids, and name those that do not do; 1 if any."""
    indices = (torch.int64, torch.int32)
    jobs = [(s, a, d, i, w) for a in arches for d in dtypes for w in widths for i in indices for s in specs]
    found = []
    for spec, arch, dtype, index, width in tqdm(jobs, unit="kernel", disable=None):
        config = spec.candidates(width, dtype)[0]
        if dropped := _verdict(spec, arch, dtype, width, config, index)["dropped"]:
            found.append(f"{arch} {spec.name} {dtype} {index} width {width}: {config}: {dropped}")
    print("\n".join([*found, f"{len(jobs) - len(found)} of {len(jobs)} default configurations are fit"]))
    return int(bool(found))


def _compile_arch(
    arch: str, specs: Sequence[KernelSpec], dtypes: list[torch.dtype], widths: list[int], path: Path
) -> str:  # fmt: skip
    """Compile for one architecture and write `path`; says how many candidates were kept."""
    jobs = [(s, d, w, c) for s in specs for d in dtypes for w in widths for c in s.candidates(w, d)]
    entries: dict[str, list[dict[str, Any]]] = {}
    # Reports are cached by source hash: a second run, or one that goes on, compiles only what is new.
    for spec, dtype, width, config in tqdm(jobs, unit="kernel", desc=arch, disable=None):
        key = f"{spec.name} {str(dtype).removeprefix('torch.')} width<={tuning.width_class(width)}"
        entries.setdefault(key, []).append(_verdict(spec, arch, dtype, width, config))
    of = {"format": tuning.FORMAT, "kind": "candidates", "arch": arch, "provenance": provenance("cpu")}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, of | {"entries": entries})
    all_of_them = [one for found in entries.values() for one in found]
    for key, found in entries.items():
        for one in found:
            if one["dropped"]:
                print(f"dropped {key}: {Config(**one['choice'])}: {one['dropped']}")
    return f"{sum(not one['dropped'] for one in all_of_them)} of {len(all_of_them)} candidates kept"


def _verdict(
    spec: KernelSpec, arch: str, dtype: torch.dtype, width: int, config: Config, index: torch.dtype = torch.int64
) -> dict[str, Any]:  # fmt: skip
    """A candidate, what the compiler made of it, and why it is dropped, if it is."""
    try:
        made = aot.compile_spec(spec, arch, dtype, index, width, config)
    except Exception as error:  # Triton raises many kinds, and each means that this candidate is none
        return {"choice": config.as_dict(), "dropped": f"does not compile ({type(error).__name__})"}
    report = {name: getattr(made, name) for name in ("registers", "spill_bytes", "shared_bytes", "load_bits")}
    spill = f"spills {made.spill_bytes} bytes a thread" if made.spill_bytes else None
    return {"choice": config.as_dict(), "dropped": spill, **report, "instructions": made.instructions}


def dropped_choices(path: str) -> dict[tuple[str, str], str]:
    """(kernel, configuration as text) -> why `--compile-only` dropped it, from its file."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != tuning.FORMAT or content["kind"] != "candidates":
            raise KeyError("kind")
        return {
            (key.split(" ", 1)[0], str(Config(**one["choice"]))): one["dropped"]
            for key, found in content["entries"].items()
            for one in found
            if one["dropped"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong("--candidates", f"{path} ({type(error).__name__})", "a file that --compile-only wrote",
                    "run tools/autotune.py --compile-only") from error  # fmt: skip
