"""The Triton paths: on CPU tensors under Triton's interpreter, on a GPU where there is one.

The interpreter has to be chosen before Triton is imported, so without a GPU this folder is collected only
where TRITON_INTERPRET=1 is set; `tests/kernels/test_triton_interpreter.py` runs it that way. The fixtures of
`tests/kernels/conftest.py` (poisoned buffers, blocks, the record of what ran) hold here too.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tgnn.kernels import use_backend

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if HAS_TRITON and (INTERPRETED or torch.cuda.is_available()) else ["test_*.py"]

# Relative to the largest output: a few roundings of the type.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where these tests run on a GPU, `pytest -m gpu` selects them."""
    for item in items:
        if not INTERPRETED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:
    """Where the tensors of these tests live."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def triton_backend() -> Iterator[None]:
    """The test runs the Triton paths (and asserts so with `last_ran`)."""
    with use_backend("triton"):
        yield


@pytest.fixture
def assert_near() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`assert_near(got, expected)`: got within its type's tolerance of the float64 `expected`.

    bf16 within one of its ulps, as the interpreter truncates where a GPU rounds.
    """

    def check(got: torch.Tensor, expected: torch.Tensor) -> None:
        dtype, got, expected = got.dtype, got.detach().cpu().double(), expected.detach().cpu().double()
        assert got.shape == expected.shape
        scale = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
        if dtype != torch.bfloat16:
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES[dtype] * scale)
            return
        ulp = torch.ldexp(torch.ones_like(expected), torch.frexp(expected).exponent - 8)
        error = (got - expected).abs()
        assert bool((error <= ulp + TOLERANCES[torch.float32] * scale).all()), (error / ulp).max()

    return check
