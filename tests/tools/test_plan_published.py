"""`tools/plan_published.py`: its table on stand-ins too small to mean anything, and the scaling of counts."""

from __future__ import annotations

import dataclasses
import importlib
import re
from types import ModuleType

import numpy as np
import pytest

from tgnn.errors import UserError
from tgnn.training.cost import Work


@pytest.fixture
def tool() -> ModuleType:
    """`tools/plan_published.py`."""
    return importlib.import_module("plan_published")


def made_work() -> Work:
    """Two layers, two ranks; a quarter of the edges cross."""
    edges, one = np.array([[40.0, 40.0], [10.0, 10.0]]), np.ones((2, 2))
    return Work(seeds=one[0], edges=edges, dst=one * 5, rows=one * 20, received=one * 4, sent=one * 4,
                held=one[0] * 0, loaded=one[0] * 20, remote_edges=edges / 4)  # fmt: skip


def test_counts_are_multiplied_and_what_crosses_is_scaled(tool: ModuleType):
    work = tool.multiplied(made_work(), 10, 0.05)
    assert work.edges.sum() == 1000 and work.rows[0].sum() == 400
    assert work.remote_edges.sum() == pytest.approx(50)
    # A fifth of the cross edges: a fifth of the halo rows.
    assert work.received[0, 0] == pytest.approx(4 * 10 / 5)


def test_counts_as_published(tool: ModuleType):
    work = tool.as_published(made_work(), (2.0, 3.0))
    assert work.edges.sum() == pytest.approx(3 * 1024)
    assert work.rows[0].sum() == work.loaded.sum() == pytest.approx(2 * 1024)
    alone = made_work()
    assert tool.as_published(alone, None) is alone


def test_the_table(tool: ModuleType, capsys: pytest.CaptureFixture):
    assert tool.main(["--scale", "8", "--steps", "2", "--graphs", "orkut"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"\s+", line)[:3] for line in lines[2:]] == [
        ["orkut", model, mode] for model in ("sage", "gat") for mode in ("data", "split")
    ]
    assert "=   73.38" in lines[2] and "=   19.03" in lines[3]


def test_published_seconds_are_complete(tool: ModuleType):
    for load in tool.WORKLOADS:
        assert set(load.seconds) == {(model, mode) for model in ("sage", "gat") for mode in ("data", "split")}
        assert 0 < load.cross < 1 and dataclasses.asdict(load)["num_train"] < load.num_vertices


def test_an_unknown_graph_is_refused(tool: ModuleType):
    with pytest.raises(UserError, match="--graphs"):
        tool.main(["--graphs", "reddit"])
