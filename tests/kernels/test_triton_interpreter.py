"""Runs the tests of the Triton paths under Triton's interpreter, each file in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = Path(__file__).resolve().parents[2]


def interpreter_fails() -> bool:
    """Triton 3.6 makes loop bounds of arrays of one element, which NumPy refuses from 2.4 on."""
    try:  # not imported: whether kernels are interpreted is settled then
        found = importlib.metadata.version("triton").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return False
    version = np.lib.NumpyVersion
    return version(found) < "3.7.0" and version(np.__version__) >= "2.4.0"


@pytest.mark.skipif(interpreter_fails(), reason="interpreting needs Triton 3.7 here, or NumPy below 2.4")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this run collects these tests itself")
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_under_the_interpreter(name: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(FOLDER / name)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
