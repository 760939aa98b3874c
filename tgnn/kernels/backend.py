"""Which implementation of an op runs: `auto`, `torch` or `triton`, chosen in one place and recorded.

`auto` may choose; an explicit choice that cannot run raises with the reasons. Every op calls `choose` before
it runs, and `last_ran` tells afterwards which path that was, so that a test can prove the path it means to
test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tgnn.errors import wrong

BACKENDS = ("auto", "torch", "triton")

# op -> module with its Triton launcher. Imported only when that path is taken, so that Triton may be absent.
TRITON_MODULES: dict[str, str] = {
    "attention": "tgnn.kernels.attention_triton",
    "gather": "tgnn.kernels.gather_triton",
    "gather_spmm": "tgnn.kernels.spmm_triton",
    "sddmm": "tgnn.kernels.sddmm_triton",
    "spmm": "tgnn.kernels.spmm_triton",
}

_selected = "auto"
_ran: dict[str, str] = {}


def set_backend(name: str) -> None:
    """Select the backend of every later call in this process; UserError for an unknown or unusable one."""
    global _selected
    if name not in BACKENDS:
        raise wrong("backend", repr(name), f"one of {', '.join(BACKENDS)}", "choose one of these")
    if name == "triton" and not TRITON_MODULES:
        do = "this version has no Triton kernels, choose one of these"
        raise wrong("backend", "'triton'", "'auto' or 'torch'", do)
    _selected = name


def selected_backend() -> str:
    """The backend in force: `auto`, `torch` or `triton`."""
    return _selected


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """`with use_backend("torch"): ...` selects a backend for the block and restores the former one."""
    before = _selected
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


def choose(op: str, *tensors: Tensor) -> str:
    """The path (`torch` or `triton`) that `op` takes on these tensors; records it for `last_ran`.

    Raises UserError when the selected backend has no way to run the op, with the reason.
    """
    has_kernel = op in TRITON_MODULES
    on_gpu = all(tensor.is_cuda for tensor in tensors)
    if _selected == "triton" and not has_kernel:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
        raise wrong(
            f"backend of {op}({shapes})", "'triton'", "an op with a Triton kernel", "choose 'auto' or 'torch'"
        )
    path = "triton" if _selected == "triton" or (_selected == "auto" and has_kernel and on_gpu) else "torch"
    _ran[op] = path
    return path


def last_ran(op: str) -> str | None:
    """The path that the last call of `op` in this process took; None before its first call."""
    return _ran.get(op)


def all_ran() -> dict[str, str]:
    """op -> path of its last call, for every op that ran in this process."""
    return dict(sorted(_ran.items()))


def forget_ran() -> None:
    """Clear the record of what ran."""
    _ran.clear()
