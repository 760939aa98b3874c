"""How tests start ranks: one place that keeps them on the CPU, on one thread each, with a short timeout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tgnn.parallel import launch


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60.0) -> Any:
    """Run `fn(*args)`, a function at the top of a test module, on `ranks` CPU ranks; rank 0's return value.

    A failed assertion in a rank fails the test with that rank's traceback. Starting ranks takes seconds (each
    imports torch), so group several checks into one call.
    """
    return launch(fn, *args, ranks=ranks, device="cpu", timeout=timeout, threads=1)
