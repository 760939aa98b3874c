"""How tests start ranks: one place that keeps them on the CPU, on one thread each, with a short timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tgnn.parallel import launch


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> Any:
    """Run `fn(*args)`, a function at the top of a test module, on `ranks` CPU ranks; rank 0's return value.

    A failed assertion in a rank fails the test with that rank's traceback. Starting ranks takes seconds (each
    imports torch), so group several checks into one call.
    """
    return launch(fn, *args, ranks=ranks, device="cpu", timeout=timeout, threads=1)


def same(actual: Tensor, expected: Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Raise unless both have the same shape, dtype and values; exactly so by default.

    For use inside a rank: where a process group exists, `torch.testing.assert_close` first spends seconds of
    every rank on importing distributed tensors.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    wide = torch.float64 if actual.is_floating_point() else torch.int64
    actual, expected = (t.detach().cpu().to(wide).numpy() for t in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)
