"""Which implementation of an op runs: `auto`, `torch` or `triton`, chosen in one place and recorded.

`auto` takes Triton on GPU tensors (CUDA and ROCm) where Triton is there, and torch elsewhere. An explicit
choice that cannot run raises with the reasons: Triton on CPU tensors needs its interpreter, which is slow and
for tests (`TRITON_INTERPRET=1` in the environment before Triton is imported). Every op calls `choose` before
it runs, and `last_ran` tells afterwards which path that was, so that a test can prove the path it means to
test.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from tgnn.errors import UserError, warn_once, wrong

BACKENDS = ("auto", "torch", "triton")
INTERPRET_VARIABLE = "TRITON_INTERPRET"

# op -> module with its Triton launcher. Imported only when that path is taken, so that Triton may be absent.
TRITON_MODULES: dict[str, str] = {
    "attention": "tgnn.kernels.attention_triton",
    "edge_softmax": "tgnn.kernels.edge_softmax_triton",
    "dropout": "tgnn.kernels.dropout_triton",
    "gather": "tgnn.kernels.gather_triton",
    "gather_spmm": "tgnn.kernels.spmm_triton",
    "relabel": "tgnn.kernels.unique_triton",
    "sample_neighbors": "tgnn.kernels.sample_triton",
    "sddmm": "tgnn.kernels.sddmm_triton",
    "spmm": "tgnn.kernels.spmm_triton",
    "unique": "tgnn.kernels.unique_triton",
}

_selected = "auto"
_ran: dict[str, str] = {}


def set_backend(name: str) -> None:
    """Select the backend of every later call in this process; UserError for an unknown or unusable one."""
    global _selected
    if name not in BACKENDS:
        raise wrong("backend", repr(name), f"one of {', '.join(BACKENDS)}", "choose one of these")
    if name == "triton" and not has_triton():
        do = "install it, or choose 'auto' or 'torch'"
        raise wrong("backend", "'triton' in a Python without Triton", "the package triton", do)
    if name == "triton" and not torch.cuda.is_available() and not interprets():
        raise _cannot_interpret("backend", "'triton' on a machine without a GPU")
    _selected = name


def selected_backend() -> str:
    """The backend in force: `auto`, `torch` or `triton`."""
    return _selected


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """`with use_backend("torch"): ...` selects a backend for the block and restores the former one."""
    global _selected
    before = _selected
    set_backend(name)
    try:
        yield
    finally:
        _selected = before


@cache
def has_triton() -> bool:
    """Whether Triton can be imported here; it is not imported for that."""
    try:
        return "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        return False


def interprets() -> bool:
    """Whether kernels are interpreted, on the CPU, in this process: settled when Triton is imported."""
    language = sys.modules.get("triton.language")
    asked = os.environ.get(INTERPRET_VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")
    return asked and (language is None or type(language.sum).__name__ == "InterpretedFunction")


def _cannot_interpret(what: str, got: str) -> UserError:
    do = f"choose 'auto' or 'torch', or interpret kernels on the CPU (slow) with {INTERPRET_VARIABLE}=1"
    if os.environ.get(INTERPRET_VARIABLE) and "triton" in sys.modules:
        do = f"set {INTERPRET_VARIABLE}=1 before triton is imported: here it came afterwards"
    return wrong(what, got, "a GPU that torch can use, or Triton's interpreter", do)


def choose(op: str, *tensors: Tensor) -> str:
    """The path (`torch` or `triton`) that `op` takes on these tensors; records it for `last_ran`.

    Raises UserError when the selected backend has no way to run the op, with the reason.
    """
    path = "torch"
    if _selected != "torch":
        on_gpu = all(tensor.is_cuda for tensor in tensors)
        if _selected == "triton":
            _check_triton(op, tensors, on_gpu)
            path = "triton"
        elif on_gpu and op in TRITON_MODULES:
            if has_triton():
                path = "triton"
            else:
                warn_once(
                    "no triton", "Triton is not installed: sparse ops run on the GPU through torch, slower"
                )
    _ran[op] = path
    return path


def _check_triton(op: str, tensors: tuple[Tensor, ...], on_gpu: bool) -> None:
    """UserError, naming the tensors, unless a Triton kernel of `op` can run on them."""
    if op in TRITON_MODULES and (on_gpu or interprets()):
        return
    shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    what = f"backend of {op}({shapes})"
    if op not in TRITON_MODULES:
        raise wrong(what, "'triton'", "an op with a Triton kernel", "choose 'auto' or 'torch'")
    raise _cannot_interpret(what, "'triton' on CPU tensors")


def last_ran(op: str) -> str | None:
    """The path that the last call of `op` in this process took; None before its first call."""
    return _ran.get(op)


def all_ran() -> dict[str, str]:
    """op -> path of its last call, for every op that ran in this process."""
    return dict(sorted(_ran.items()))


def forget_ran() -> None:
    """Clear the record of what ran."""
    _ran.clear()
