"""Which path runs: selection, scope, record, and life without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from tgnn import errors
from tgnn.errors import UserError
from tgnn.kernels import backend, last_ran, set_backend, unique, use_backend

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TRITON = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Blocker())
import torch
import tgnn.kernels as kernels
from tgnn.kernels import rng

indptr, indices = torch.tensor([0, 2, 2]), torch.tensor([1, 0])
sample = kernels.sample_neighbors(indptr, indices, torch.arange(2), torch.arange(2), 1, rng.stream(0))
block = kernels.Block(sample.indptr, sample.src, 2)
x = torch.ones(2, 3, requires_grad=True)
kernels.spmm(block, x, reduce="mean").sum().backward()
assert x.grad.sum() == 3
assert kernels.last_ran("spmm") == "torch"
assert "triton" not in sys.modules
print("trained")
"""


@pytest.fixture
def interpreted(monkeypatch):
    """As in a process that interprets kernels."""
    monkeypatch.setattr(backend, "interprets", lambda: True)
    monkeypatch.setattr(backend, "has_triton", lambda: True)


class GpuTensor:
    """Stands for a tensor on a GPU: all that `choose` asks of one."""

    is_cuda, shape, dtype, device = True, (2, 3), torch.float32, "cuda:0"


def test_unknown_backends_are_refused():
    with pytest.raises(UserError, match="one of auto, torch, triton"):
        set_backend("cuda")
    assert backend.selected_backend() == "auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU can run Triton")
def test_explicit_triton_without_gpu_and_interpreter_is_refused_when_it_is_selected(monkeypatch):
    monkeypatch.delenv(backend.INTERPRET_VARIABLE, raising=False)
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    with pytest.raises(UserError, match="without a GPU.*TRITON_INTERPRET=1"):
        set_backend("triton")
    assert backend.selected_backend() == "auto"


def test_explicit_triton_without_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    with pytest.raises(UserError, match="Python without Triton"):
        set_backend("triton")


def test_triton_selected_for_a_gpu_refuses_cpu_tensors_and_names_them(monkeypatch):
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(backend.INTERPRET_VARIABLE, raising=False)
    with use_backend("triton"), pytest.raises(UserError, match=r"spmm\(\(2, 3\) torch.float32 on cpu\)"):
        backend.choose("spmm", torch.ones(2, 3))
    assert last_ran("spmm") is None
    with use_backend("triton"):
        assert backend.choose("spmm", GpuTensor()) == "triton"


def test_the_variable_counts_only_if_triton_was_imported_after_it(monkeypatch):
    compiled = types.ModuleType("triton.language")
    compiled.sum = len
    monkeypatch.setenv(backend.INTERPRET_VARIABLE, "1")
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.language", compiled)
    assert not backend.interprets()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="before triton is imported"):
        set_backend("triton")
    monkeypatch.delitem(sys.modules, "triton.language")
    assert backend.interprets()


def test_an_op_without_a_kernel_refuses_triton_and_names_its_tensors(monkeypatch, interpreted):
    monkeypatch.delitem(backend.TRITON_MODULES, "unique", raising=False)
    with use_backend("triton"), pytest.raises(UserError, match=r"unique\(\(2,\) torch.int64 on cpu\)"):
        unique(torch.tensor([1, 1]))
    assert last_ran("unique") is None


def test_auto_takes_the_kernel_only_on_a_gpu(interpreted):
    assert backend.choose("spmm", torch.ones(1)) == "torch"
    assert backend.choose("spmm", GpuTensor()) == "triton"
    assert backend.choose("spmm", GpuTensor(), torch.ones(1)) == "torch"
    assert backend.choose("no such op", GpuTensor()) == "torch"
    with use_backend("triton"):
        assert backend.choose("spmm", torch.ones(1)) == "triton"
    assert last_ran("spmm") == "triton"


def test_auto_on_a_gpu_without_triton_warns_once_and_takes_torch(monkeypatch):
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    monkeypatch.setattr(errors, "_warned", set())
    with pytest.warns(UserWarning, match="Triton is not installed") as warned:
        assert backend.choose("spmm", GpuTensor()) == backend.choose("spmm", GpuTensor()) == "torch"
    assert len(warned) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here a GPU can run Triton")
def test_the_command_line_ends_with_one_sentence_before_it_trains(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != backend.INTERPRET_VARIABLE}
    command = [sys.executable, "-m", "tgnn.train", "karate", "--backend", "triton", "--ranks", "1"]
    done = subprocess.run(
        [*command, "--run-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=120,
        cwd=ROOT, env=env | {"TGNN_CACHE": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --backend: got 'triton' on a machine without a GPU"), line
    assert not (tmp_path / "run").exists()


def test_use_backend_restores_also_after_an_error():
    with use_backend("torch"):
        assert backend.selected_backend() == "torch"
        with pytest.raises(RuntimeError), use_backend("auto"):
            raise RuntimeError
        assert backend.selected_backend() == "torch"
    assert backend.selected_backend() == "auto"


def test_last_ran_records_and_forgets():
    assert last_ran("unique") is None
    unique(torch.tensor([3, 1]))
    assert last_ran("unique") == "torch"
    assert backend.all_ran() == {"unique": "torch"}
    backend.forget_ran()
    assert backend.all_ran() == {}


def test_a13_kernels_work_with_triton_hidden():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
