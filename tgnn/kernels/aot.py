"""Compile kernels for a named GPU without one, and report what the compiler made of them.

    spec = registered()["spmm_sum"]
    made = compile_spec(spec, "sm_90", torch.float32, torch.int64, width=128)
    print(made.registers, made.spill_bytes, made.load_bits, faults(made, load_bits=128))

Pointers are taken to be 16-byte aligned, as torch's own tensors are. Reports are kept in a cache folder under
a hash of the kernel's source (and what it calls), Triton's version and everything that the result depends on.
A process in which Triton interprets kernels cannot compile: the work is then done in a process of its own.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tgnn.errors import wrong
from tgnn.kernels.backend import INTERPRET_VARIABLE
from tgnn.kernels.tuning import Config, KernelSpec, cache_folder

# Target -> arguments of Triton's GPUTarget.
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
FORMAT = 1  # of the cached reports


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel. Loads and stores are of global memory, as {bits a thread moves:
    instructions}.

    registers: per thread. spill_bytes: local memory per thread (stack included). shared_bytes: per program.
    instructions: of the machine code. loop_loads: loads of the loop that loads most. assembly: PTX or AMD
    assembly, a file beside binary. seconds: what compiling took.
    """

    kernel: str
    target: str
    dtype: str
    index_dtype: str
    width: int
    config: dict[str, Any]
    registers: int
    spill_bytes: int
    shared_bytes: int
    instructions: int
    loads: dict[int, int]
    stores: dict[int, int]
    loop_loads: dict[int, int]
    assembly: str
    binary: str
    seconds: float

    @property
    def load_bits(self) -> int:
        """The widest load of the main loop; of the whole kernel if nothing loops."""
        return max(self.loop_loads or self.loads, default=0)

    @property
    def store_bits(self) -> int:
        """The widest store."""
        return max(self.stores, default=0)

    @property
    def loop_load_bytes(self) -> int:
        """Bytes that one thread loads in one turn of its main loop."""
        return sum(bits // 8 * count for bits, count in self.loop_loads.items())


def registered() -> dict[str, KernelSpec]:
    """Name -> specification of every kernel of this package. Imports Triton."""
    specs: dict[str, KernelSpec] = {}
    package = importlib.import_module("tgnn.kernels")
    for module in pkgutil.iter_modules(package.__path__, "tgnn.kernels."):
        if module.name.endswith("_triton"):
            for spec in getattr(importlib.import_module(module.name), "SPECS", ()):
                if specs.setdefault(spec.name, spec) is not spec:
                    raise AssertionError(f"two kernels are named {spec.name}")
    return specs


def compile_spec(
    spec: KernelSpec, target: str, dtype: torch.dtype = torch.float32, index_dtype: torch.dtype = torch.int64,
    width: int = 128, config: Config | None = None,
) -> Compiled:  # fmt: skip
    """Compile `spec` for `target`; by default in its default configuration. Cached.

    Raises: UserError for an unknown target; Triton's own errors where the kernel does not compile.
    """
    if target not in TARGETS:
        raise wrong("target", target, f"one of {', '.join(TARGETS)}", "choose one of these")
    config = config or spec.candidates(width, dtype)[0]
    if os.environ.get(INTERPRET_VARIABLE):
        return _elsewhere(spec, target, dtype, index_dtype, width, config)
    source, options = _source(spec, dtype, index_dtype, width, config, TARGETS[target][2])
    folder = cache_folder() / "aot"
    stem = f"{spec.name}-{target}-{_key(source, target, options)}"
    report = folder / f"{stem}.json"
    about = {"kernel": spec.name, "target": target, "dtype": _name(dtype), "index_dtype": _name(index_dtype)}
    about |= {"width": width, "config": config.as_dict()}
    found = _read(report, about)
    if found is None:
        found = _compile(source, target, options, folder / stem, about)
        _write(report, json.dumps(asdict(found) | {"format": FORMAT}).encode())
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _source(spec, dtype, index_dtype, width, config, lanes):
    """Triton's ASTSource of a kernel, and the options it is compiled with."""
    from triton.compiler import ASTSource

    signature = spec.signature(dtype, index_dtype)
    pointers = [at for at, name in enumerate(spec.kernel.arg_names) if signature[name].startswith("*")]
    attrs = {(at,): [["tt.divisibility", 16]] for at in pointers}
    constants = {**spec.constants(width), **config.tiles}
    # As kernels are launched: see `segment_triton.launch`.
    options = {"num_warps": config.warps(lanes), "num_stages": config.num_stages, "enable_fp_fusion": True}
    source = ASTSource(fn=spec.kernel, signature=signature, constexprs=constants, attrs=attrs)
    return source, options


def _key(source, target: str, options: Mapping[str, Any]) -> str:
    import triton

    # Triton's own hash covers the kernel's source, what it calls, signature, constants and attributes.
    text = json.dumps([FORMAT, triton.__version__, source.hash(), target, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(report: Path, about: Mapping[str, Any]) -> Compiled | None:
    """The cached report, if it is there, whole, and its assembly too."""
    try:
        fields = json.loads(report.read_text())
        # The folder may have been moved.
        fields |= {name: str(report.with_name(Path(fields[name]).name)) for name in ("assembly", "binary")}
        if fields.pop("format") != FORMAT or not Path(fields["assembly"]).is_file():
            return None
        for name in ("loads", "stores", "loop_loads"):
            fields[name] = {int(bits): count for bits, count in fields[name].items()}
        return Compiled(**{**fields, **about})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _compile(source, target: str, options, stem: Path, about: Mapping[str, Any]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    start = time.perf_counter()
    made = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    seconds = time.perf_counter() - start
    nvidia = TARGETS[target][0] == "cuda"
    text, binary = ("ptx", "cubin") if nvidia else ("amdgcn", "hsaco")
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in (text, binary)]
    _write(paths[0], made.asm[text].encode())
    _write(paths[1], made.asm[binary])
    resources = _nvidia_resources(paths[1]) if nvidia else _amd_resources(made.asm[text])
    access = accesses(made.asm[text])
    counts = {
        kind: dict(Counter(bits for what, bits in access if what == kind)) for kind in ("load", "store")
    }
    return Compiled(
        **about, **resources, shared_bytes=made.metadata.shared, loads=counts["load"], stores=counts["store"],
        loop_loads=_main_loop(made.asm[text]), assembly=str(paths[0]), binary=str(paths[1]),
        seconds=round(seconds, 3),
    )  # fmt: skip


def _tool(name: str) -> str:
    """A program of CUDA's toolkit that Triton's wheel brings."""
    return str(Path(importlib.import_module("triton").__file__).parent / "backends" / "nvidia" / "bin" / name)


def _run_tool(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout


def disassemble(made: Compiled) -> str:
    """The machine code of a compiled kernel as text: SASS, or AMD assembly."""
    if made.assembly.endswith(".ptx"):
        return _run_tool(_tool("nvdisasm"), "-c", made.binary)
    return Path(made.assembly).read_text()


def _nvidia_resources(cubin: Path) -> dict[str, int]:
    usage = _run_tool(_tool("cuobjdump"), "--dump-resource-usage", str(cubin))
    registers, stack, local = (int(re.search(rf"\b{k}:(\d+)", usage)[1]) for k in ("REG", "STACK", "LOCAL"))
    code = _run_tool(_tool("nvdisasm"), "-c", str(cubin))
    instructions = len(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+[^/\s]", code, re.MULTILINE))
    return {"registers": registers, "spill_bytes": stack + local, "instructions": instructions}


def _amd_resources(assembly: str) -> dict[str, int]:
    registers, private = (
        int(re.search(rf"^\s*\.{k}:\s+(\d+)", assembly, re.MULTILINE)[1])
        for k in ("vgpr_count", "private_segment_fixed_size")
    )
    instructions = len(re.findall(r"^\s+(?:s|v|ds|global|buffer|flat|scratch)_\w+", assembly, re.MULTILINE))
    return {"registers": registers, "spill_bytes": private, "instructions": instructions}


_PTX_ACCESS = re.compile(r"\b(ld|st)\.(?:\w+\.)*?global(?:\.(?:L\w+::)?\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_BITS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}


def accesses(assembly: str) -> list[tuple[str, int]]:
    """Loads and stores of global memory in PTX or AMD assembly, in order: (`load` or `store`, its bits)."""
    found = []
    for line in assembly.splitlines():
        if match := _PTX_ACCESS.search(line):
            kind, lanes, bits = match.groups()
            found.append(("load" if kind == "ld" else "store", int(lanes or 1) * int(bits)))
        elif match := _AMD_ACCESS.search(line):
            kind, size = match.groups()
            bits = _AMD_BITS.get(size) or (8 if "byte" in size else 16)
            found.append((kind, bits))
    return found


def _main_loop(assembly: str) -> dict[int, int]:
    """The loads, by bits, of the loop without an inner loop that loads most bytes; {} if nothing loops."""
    lines = assembly.splitlines()
    labels = {m[1]: at for at, line in enumerate(lines) if (m := re.match(r"(\$?\.?L\w+):", line))}
    loops = []
    for at, line in enumerate(lines):
        jump = re.search(r"\b(?:bra(?:\.uni)?|s_c?branch\w*)\s+(\$?\.?L\w+)", line)
        if jump and labels.get(jump[1], at) < at:
            loops.append((labels[jump[1]], at))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [[bits for kind, bits in accesses("\n".join(lines[a:b])) if kind == "load"] for a, b in inner]
    return dict(Counter(max(bodies, key=sum, default=[])))


def faults(made: Compiled, *, load_bits: int = 0, registers: int | None = None) -> list[str]:
    """What is wrong with a compiled kernel, in words; empty if it is fit for its GPU.

    load_bits: the least that the widest load must move; registers: the most a thread may take.
    """
    found = []
    if made.spill_bytes:
        found.append(f"spills {made.spill_bytes} bytes a thread")
    if made.load_bits < load_bits:
        found.append(f"loads at most {made.load_bits} bits at a time, expected {load_bits}")
    if registers is not None and made.registers > registers:
        found.append(f"takes {made.registers} registers a thread, expected at most {registers}")
    where = f"{made.kernel} {made.dtype} width {made.width} on {made.target}"
    return [f"{where}: {fault}" for fault in found]


def _elsewhere(spec, target, dtype, index_dtype, width, config) -> Compiled:
    """`compile_spec` of a registered kernel in a process that does not interpret."""
    job = [spec.name, target, _name(dtype), _name(index_dtype), width, config.as_dict()]
    root = str(Path(__file__).resolve().parents[2])
    env = {name: value for name, value in os.environ.items() if name != INTERPRET_VARIABLE}
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    code = "from tgnn.kernels.aot import serve; serve()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(job), capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise RuntimeError(f"compiling {spec.name} for {target} failed:\n{done.stderr}")
    return _read(Path(done.stdout.splitlines()[-1]), {})


def serve() -> None:
    """Compile the job on stdin and write where its report is to stdout: the other end of `_elsewhere`."""
    name, target, dtype, index_dtype, width, config = json.load(sys.stdin)
    types = (getattr(torch, dtype), getattr(torch, index_dtype))
    made = compile_spec(registered()[name], target, *types, width, Config(**config))
    print(Path(made.assembly).with_suffix(".json"))


def format_report(made: Iterable[Compiled]) -> str:
    """A Markdown table of compiled kernels."""
    lines = [
        "| kernel | target | dtype | width | config | registers | spill B | shared B | load bits | length |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in made:
        cells = [one.kernel, one.target, one.dtype, one.width, Config(**one.config), one.registers]
        cells += [one.spill_bytes, one.shared_bytes, one.load_bits, one.instructions]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
