"""Fixtures that more than one test module uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Several ranks share few cores in the tests: one thread each keeps them from fighting. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def shared_data() -> Path:
    """The folder of real graphs beside the checkout; tests that need it skip where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real graphs are not at {folder}")
    return folder
