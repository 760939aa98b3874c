"""`--verify`, and the example that serves an exported model: the framework in a process without tgnn, against
exact inference.
"""

from __future__ import annotations

import contextlib
import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.export.comparing import refused
from tests.export.conftest import Example, dataset_of
from tgnn.data import load
from tgnn.data.graph import Graph
from tgnn.errors import run_command
from tgnn.export import clean_run, verify
from tgnn.export import folder as folder_module
from tgnn.export.__main__ import main, trained_model
from tgnn.export.verify import judge, whole_graph
from tgnn.training.checkpoint import CheckpointState
from tgnn.training.prepare import prepare
from tgnn.training.resolve import read_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def in_this_process(monkeypatch):
    """`--verify` without a process of its own, which takes seconds to import the framework."""

    def run(framework, python, *paths: Path) -> dict[str, str]:
        if paths:
            sys.modules.pop("model", None)
            with contextlib.ExitStack() as restore:
                sys.path.insert(0, str(paths[0]))
                restore.callback(sys.path.remove, str(paths[0]))
                restore.callback(sys.modules.pop, "model", None)
                clean_run.score(framework.name, *map(str, paths[1:]))
        package = sys.modules[framework.package]
        return {"version": package.__version__, "torch": str(torch.__version__)}

    monkeypatch.setattr(verify, "_run", run)


def check_verified(run: Path, out: Path, to: str, printed: str, dtype: str) -> None:
    """Raise where an export was not found equal with a margin of ten."""
    assert "verified" in printed
    verified = json.loads((out / "config.json").read_text())["verified"]
    assert verified["allowed"] == (1e-9 if dtype == "float64" else 1e-4)
    assert verified["largest_difference"] <= verified["allowed"] / 10 * verified["largest_output"]
    assert set(verified["versions"]) == {"dgl" if to == "dgl" else "torch_geometric", "torch"}


@pytest.mark.parametrize(
    ("to", "model", "more"),
    [
        ("dgl", "gat", {"weighted": True, "ranks": 2}),
        ("pyg", "gcn", {"weighted": True, "dtype": "float64"}),
    ],
)
def test_verified_in_a_process_of_its_own(request, make_run, tmp_path, capsys, to: str, model: str, more):
    request.getfixturevalue(to)
    run, out = make_run(model, **more), tmp_path / "out"
    assert main([str(run), "--to", to, "--out", str(out), "--verify"]) == 0
    check_verified(run, out, to, capsys.readouterr().out, more.get("dtype", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("sage", {"aggregator": "mean", "weighted": True, "norm": "batch", "residual": True}),
        ("sage", {"aggregator": "max", "norm": "layer"}),
        ("sage", {"aggregator": "pool", "activation": "gelu"}),
        ("sage", {"aggregator": "gcn", "weighted": True}),
        ("gcn", {"weighted": True, "norm": "layer"}),
        ("gat", {"activation": "elu", "residual": True}),
        ("gatv2", {"norm": "batch", "heads": 3}),
        ("gin", {"weighted": True}),
        ("gin", {"norm": "layer", "residual": True}),
        ("transformer", {"norm": "layer", "residual": True, "heads": 3}),
        ("transformer", {"attention_dropout": 0.5, "activation": "tanh"}),
    ],
)
def test_verified(side, in_this_process, make_run, tmp_path, capsys, model: str, more, dtype: str):
    run, out = make_run(model, dtype=dtype, **more), tmp_path / "out"
    assert main([str(run), "--to", side.name, "--out", str(out), "--verify"]) == 0
    check_verified(run, out, side.name, capsys.readouterr().out, dtype)


def doubled(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with every bias doubled."""
    return {name: 2 * value if name.endswith("bias") else value for name, value in state.items()}


def swapped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the attention vectors of sources and destinations swapped."""
    swap = {"attn_l": "attn_r", "att_src": "att_dst"}
    swap |= {other: one for one, other in swap.items()}
    named = {name: ".".join(swap.get(word, word) for word in name.split(".")) for name in state}
    return {name: state[other] for name, other in named.items()}


@pytest.mark.parametrize("fault", [doubled, swapped])
def test_a_wrong_export_is_noticed(side, in_this_process, make_run, tmp_path, capsys, monkeypatch, fault):
    bridge = type(folder_module.BRIDGES[side.name])
    right = bridge.weights
    monkeypatch.setattr(bridge, "weights", lambda self, stack: fault(right(self, stack)))
    run = make_run("gat")
    before = sorted(tmp_path.iterdir())
    assert run_command(main, [str(run), "--to", side.name, "--out", str(tmp_path / "out"), "--verify"]) == 1
    said = capsys.readouterr()
    assert "not equal" in said.out and "nothing was written" in said.err
    assert sorted(tmp_path.iterdir()) == before


def fake_python(path: Path, answer: dict[str, str]) -> Path:
    """A stand-in for a Python whose clean process says `answer`."""
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"absent": "ModuleNotFoundError: no dgl"}, "no dgl"),
        ({"version": "0.9.1", "torch": "1.13"}, "version 0.9.1, expected version 1.1 to 2.4"),
        ({"version": "2.10.0", "torch": "2.4"}, "version 2.10.0"),
    ],
)
def test_verify_without_a_supported_dgl(make_run, tmp_path, capsys, answer, says: str):
    run, python = make_run(), fake_python(tmp_path / "python", answer)
    before = sorted(tmp_path.iterdir())
    error = refused(capsys, run, "--to", "dgl", "--out", tmp_path / "out", "--verify", "--python", python)
    assert says in error and "pip install dgl==1.1.3, whose wheels end at Python 3.11" in error
    assert ("--python" in error) == ("absent" in answer)
    assert sorted(tmp_path.iterdir()) == before


def test_judge():
    versions = {"dgl": "1.1.3"}
    ours = np.array([[1.0, -4.0]], np.float32)
    assert judge(ours, ours + np.float32(3e-4), versions).good
    assert not judge(ours, ours + np.float32(5e-4), versions).good
    assert not judge(ours.astype(np.float64), ours.astype(np.float64) + 1e-8, versions).good
    assert not judge(ours, np.full_like(ours, np.nan), versions).good


def test_the_whole_graph_of_a_store(tmp_path, example):
    dataset = dataset_of(example, weighted=True)
    arrays = whole_graph(prepare(dataset, 3))
    graph = Graph.from_edge_index(arrays["edge_index"], example.num_vertices, arrays["edge_weight"])
    for name in ("indptr", "indices", "edge_weight"):
        np.testing.assert_array_equal(getattr(graph, name), getattr(dataset.graph, name))
    np.testing.assert_array_equal(arrays["x"], dataset.x)


def test_setuptools_extern():
    pytest.importorskip("packaging")
    pytest.importorskip("setuptools")
    code = (
        "import runpy, sys; add = runpy.run_path(sys.argv[1])['add_setuptools_extern']; add(); add(); "
        "from setuptools.extern import packaging; from setuptools.extern.packaging import version; "
        "print(packaging.version is version, version.parse('1.10') > version.parse('1.9'))"
    )
    done = subprocess.run([sys.executable, "-c", code, clean_run.__file__], capture_output=True, text=True)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


SERVE = """
import runpy, sys
sys.modules["tgnn"] = None
script, *arguments = sys.argv[1:]
for folder, data in zip(arguments[::2], arguments[1::2]):
    sys.modules.pop("model", None)
    sys.argv = [script, folder, data]
    runpy.run_path(script)
"""


def test_serving_without_tgnn(dgl, make_run, tmp_path):
    arguments, expected = [], []
    for model in ("gcn", "gat", "transformer"):
        run, out = make_run(model), tmp_path / model
        assert main([str(run), "--to", "dgl", "--out", str(out)]) == 0
        arguments += [str(out), str(tmp_path / "data.npz")]
        resolved, state = read_run(run), CheckpointState.load(run / "best.pt")
        data = load(resolved.source, resolved.data_options)
        edges = torch.from_numpy(data.graph.edge_index())
        graph = Example(edges, torch.ones(data.graph.num_edges), len(data.x))
        logits = graph.ours(trained_model(resolved, state, run), torch.from_numpy(data.x))
        right = (logits.argmax(1).numpy() == data.y)[data.test].mean()
        expected.append(f"test accuracy {right:.4f}")
    script = ROOT / "examples" / "serve_with_dgl.py"
    command = [sys.executable, "-c", SERVE, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip().splitlines() == expected, done.stderr
