"""Every kernel compiled for four GPUs without one: spills, widths of loads, registers, bytes per edge."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import Block, aot, traffic
from tgnn.kernels.aot import Compiled, compile_spec, faults
from tgnn.kernels.backend import TRITON_MODULES
from tgnn.kernels.tuning import Config, KernelSpec

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="Triton interprets here")

# Ops whose kernels read rows of a table; all others read single numbers at random places.
ROW_OPS = ("attention", "dropout", "gather", "gather_spmm", "sddmm", "spmm")
# What `width` is: elements of a row; of one of 4 heads in attention; of sampling, the fanout.
WIDTHS = {"attention": 64, "sample_neighbors": 16}
# Default configurations that once spilled: (kernel, target, type, width).
NARROW_ESCAPES = [
    ("attention_backward_rows_dot_dropout", "sm_80", torch.float32, 16),
    ("sample_replace_weighted", "sm_80", torch.float32, 16),
    ("sample_replace_weighted", "sm_80", torch.float32, 256),
    ("sample_replace_weighted", "sm_80", torch.float32, 512),
    *(("attention_backward_rows_gatv2", target, torch.float64, 64) for target in aot.TARGETS),
]
# Kernels of row ops whose main loop has no 128-bit load, (kernel, target) -> why that will do.
_MERGE = "adds parts of a hub row, one head of 64 columns a warp: 8 bytes a lane fill it"
NARROW = {("attention_merge", target): _MERGE for target in aot.TARGETS}
_WAVE = "Triton gives a lane 64 bits there: a wave of 64 still reads 512 bytes at once"
for _name in ("spmm_extreme", "attention_backward_rows_gatv2", "attention_backward_rows_gatv2_dropout"):
    NARROW[_name, "gfx942"] = _WAVE


@pytest.fixture(scope="module", autouse=True)
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reports are kept between runs in pytest's own cache: they are keyed by the kernels' source."""
    store = getattr(request.config, "cache", None)
    folder = store.mkdir("tgnn-aot") if store else tmp_path_factory.mktemp("aot")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TGNN_CACHE", str(folder))
        yield


def compiled(spec: KernelSpec, target: str, dtype: torch.dtype = torch.float32, **given) -> Compiled:
    return compile_spec(spec, target, dtype, width=given.pop("width", WIDTHS.get(spec.op, 128)), **given)


def problems(spec: KernelSpec, made: Compiled) -> list[str]:
    """What keeps a default configuration from being one."""
    wide = 128 if spec.op in ROW_OPS and (spec.name, made.target) not in NARROW else 0
    registers = 128 if spec.op == "attention" and made.target != "gfx942" else None
    return faults(made, load_bits=wide, registers=registers)


def fullest(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Of the variants of each kernel the last, which has the most arguments."""
    return list({spec.kernel: spec for spec in specs}.values())


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("op", sorted(TRITON_MODULES))
def test_default_configurations_are_fit(op: str, target: str) -> None:
    """All variants on sm_90, and attention's on gfx942, else the fullest, at one width: in two minutes. All of them, by

        python tools/autotune.py --compile-only --defaults --arch sm_80,sm_90,sm_100,gfx942 \\
            --dtypes float32,bfloat16,float16,float64 --widths 1,3,16,31,32,64,100,128,256,512,1024

    take hours, and are to be run where a kernel, a default or Triton's version changes.
    """
    specs = [spec for spec in aot.registered().values() if spec.op == op]
    assert specs, f"{op} is registered without a kernel"
    found = []
    for spec in specs if (op, target) == ("attention", "gfx942") or target == "sm_90" else fullest(specs):
        found += problems(spec, compiled(spec, target))
    assert found == []


@pytest.mark.parametrize(("name", "target", "dtype", "width"), NARROW_ESCAPES)
def test_defaults_that_once_spilled_do_not(name: str, target: str, dtype: torch.dtype, width: int) -> None:
    assert faults(compiled(aot.registered()[name], target, dtype, width=width)) == []


def test_a_wave_of_64_lanes_makes_programs_of_as_many_threads() -> None:
    """What the compiler wrote for AMD: waves of 64 lanes, half as many as warps of 32, and nothing in scratch."""
    for spec in fullest(list(aot.registered().values())):
        made = compiled(spec, "gfx942")
        about = dict(re.findall(r"^\s*\.(\w+):\s+(\d+)$", Path(made.assembly).read_text(), re.MULTILINE))
        assert about["wavefront_size"] == "64", spec.name
        threads = max(64, 32 * made.config["num_warps"])
        assert about["max_flat_workgroup_size"] == str(threads), spec.name
        assert about["private_segment_fixed_size"] == about["vgpr_spill_count"] == "0", spec.name


@pytest.mark.parametrize(
    ("name", "width"),
    [("spmm_sum", 128), ("gather", 128), ("edge_dot", 128), ("attention_forward_gatv2", 64)],
)
def test_half_types_and_small_indices_load_as_wide(name: str, width: int) -> None:
    spec = aot.registered()[name]
    made = compiled(spec, "sm_90", torch.bfloat16, width=width, index_dtype=torch.int32)
    assert problems(spec, made) == []


def test_every_exception_is_a_kernel() -> None:
    assert {name for name, _ in NARROW} <= set(aot.registered())


def test_a_bad_configuration_is_rejected() -> None:
    """256 elements a thread cannot stay in registers; rows of 30 elements are not aligned to 128 bits."""
    spec = aot.registered()["spmm_sum"]
    config = Config({"ROWS": 8, "EDGES": 8, "BLOCK_D": 128}, num_warps=1, num_stages=1)
    made = compiled(spec, "sm_90", config=config)
    assert made.spill_bytes > 0
    assert any("spills" in fault for fault in problems(spec, made))
    narrow = compiled(spec, "sm_90", config=Config({"ROWS": 4, "EDGES": 8, "BLOCK_D": 32}, 4, 1), width=30)
    assert any("bits at a time" in fault for fault in problems(spec, narrow))


def test_faults_name_the_kernel_and_what_is_wrong() -> None:
    made = compiled(aot.registered()["gather"], "sm_90")
    assert faults(made, load_bits=128, registers=255) == []
    bad = replace(made, registers=200, spill_bytes=8, loads={32: 1})
    assert faults(bad, load_bits=128, registers=128) == [
        "gather float32 width 128 on sm_90: spills 8 bytes a thread",
        "gather float32 width 128 on sm_90: loads at most 32 bits at a time, expected 128",
        "gather float32 width 128 on sm_90: takes 200 registers a thread, expected at most 128",
    ]


@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_spmm_loads_the_bytes_per_edge_that_its_model_counts(index: torch.dtype) -> None:
    """The main loop's loads in PTX: rows with 128 bits a thread, every byte once; an index a tile element."""
    made = compiled(aot.registered()["spmm_sum"], "sm_90", index_dtype=index, width=128)
    config = Config(**made.config)
    edges = config.tiles["ROWS"] * config.tiles["EDGES"]
    threads = 32 * config.num_warps
    rows, others = made.loop_loads[128], {b: n for b, n in made.loop_loads.items() if b != 128}
    assert rows * 16 * threads % edges == 0
    # One instruction loads the tile's indices; the threads beyond its elements repeat addresses.
    assert others == {8 * index.itemsize: 1} and threads >= edges
    loaded = rows * 16 * threads // edges + index.itemsize
    none, one = (Block(torch.tensor([0, n]), torch.zeros(n, dtype=index), n_src=1) for n in (0, 1))
    model = traffic.spmm(one, 128, torch.float32).bytes - traffic.spmm(none, 128, torch.float32).bytes
    assert loaded == model == 128 * 4 + index.itemsize


def test_reports_are_cached_by_what_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = aot.registered()["gather"]
    first = compiled(spec, "sm_90")
    with monkeypatch.context() as patch:
        patch.setattr(aot, "_compile", lambda *_: pytest.fail("compiled again"))
        assert compiled(spec, "sm_90") == first
    other = compiled(spec, "sm_90", width=64)
    assert other.assembly != first.assembly
    # A damaged report, and one without its assembly, are made anew.
    report = Path(first.assembly).with_suffix(".json")
    report.write_text(report.read_text()[:50])
    assert compiled(spec, "sm_90").loads == first.loads
    Path(first.assembly).unlink()
    assert compiled(spec, "sm_90").loads == first.loads and Path(first.assembly).exists()


def test_an_interpreting_process_compiles_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = aot.registered()["gather"]
    here = compiled(spec, "sm_90")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compiled(spec, "sm_90") == here


def test_disassembly_comes_from_tritons_wheel() -> None:
    spec = aot.registered()["gather"]
    assert "LDG.E.128" in aot.disassemble(compiled(spec, "sm_90"))
    assert "global_load_dwordx4" in aot.disassemble(compiled(spec, "gfx942"))


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(UserError, match="one of sm_80, sm_90, sm_100, gfx942"):
        compile_spec(aot.registered()["gather"], "sm_70")


PTX = """
$L__BB0_1:
  ld.global.b64 { %rd1 }, [ %rd2 + 0 ];
  @%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];
  ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
  @%p2 bra $L__BB0_1;
  st.global.v2.b64 [ %rd4 + 0 ], { %rd5, %rd6 };
  ld.global.nc.v2.b32 {%r1, %r2}, [%rd1];
"""
AMD = """
.LBB0_1:
  global_load_dwordx4 v[0:3], v[4:5], off
  buffer_load_ushort v1, v2, s[0:3], 0 offen
  s_cbranch_vccnz .LBB0_1
  global_store_dwordx2 v[0:1], v[2:3], off
  global_load_ubyte v1, v[2:3], off
  flat_load_dword v1, v[2:3]
"""


def test_loads_and_stores_are_read_from_assembly() -> None:
    assert aot.accesses(PTX) == [("load", 64), ("load", 128), ("store", 128), ("load", 64)]
    assert aot._main_loop(PTX) == {64: 1, 128: 1}
    assert aot.accesses(AMD) == [("load", 128), ("load", 16), ("store", 64), ("load", 8), ("load", 32)]
    assert aot._main_loop(AMD) == {128: 1, 16: 1}
