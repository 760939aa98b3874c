"""Which path runs: selection, scope, record, and life without Triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import backend, last_ran, set_backend, unique, use_backend

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


def test_explicit_triton_raises_while_there_is_no_kernel():
    with pytest.raises(UserError, match="no Triton kernels"):
        set_backend("triton")
    with pytest.raises(UserError, match="one of auto, torch, triton"):
        set_backend("cuda")
    assert backend.selected_backend() == "auto"


def test_an_op_without_a_kernel_refuses_triton_and_names_its_tensors(monkeypatch):
    monkeypatch.setitem(backend.TRITON_MODULES, "spmm", "tgnn.kernels.spmm_triton")
    with use_backend("triton"), pytest.raises(UserError, match=r"unique\(\(2,\) torch.int64 on cpu\)"):
        unique(torch.tensor([1, 1]))
    assert last_ran("unique") is None


def test_auto_takes_the_kernel_only_on_a_gpu(monkeypatch):
    monkeypatch.setitem(backend.TRITON_MODULES, "spmm", "tgnn.kernels.spmm_triton")
    assert backend.choose("spmm", torch.ones(1)) == "torch"
    with use_backend("triton"):
        assert backend.choose("spmm", torch.ones(1)) == "triton"
    assert last_ran("spmm") == "triton"


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
        cwd=__file__.rsplit("tests", 1)[0],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
