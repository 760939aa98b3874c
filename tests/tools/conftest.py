"""The command lines of `tools/` as modules, and a cache folder of the test's own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tgnn import errors
from tgnn.kernels import tuning

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The tools import each other by name; tables are the test's own."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(tuning.TABLE_VARIABLE, raising=False)
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(errors, "_warned", set())
    timing = importlib.import_module("_timing")
    monkeypatch.setitem(timing.FLUSH_BYTES, "cpu", 1 << 10)
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    tuning.forget_tables()
    yield
    tuning.forget_tables()


@pytest.fixture
def autotune():
    """`tools/autotune.py`."""
    return importlib.import_module("autotune")


@pytest.fixture
def bench():
    """`tools/bench.py`."""
    return importlib.import_module("bench")
