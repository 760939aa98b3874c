"""`python -m tgnn.export`: what it writes, what it verifies, and what it refuses without leaving anything
behind.
"""

from __future__ import annotations

import ast
import json
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.export.conftest import LAYERS, Example
from tgnn.data import load, save_npz
from tgnn.data.graph import Dataset, Graph
from tgnn.data.options import DataOptions
from tgnn.errors import run_command
from tgnn.export import folder as folder_module
from tgnn.export.__main__ import main, trained_model
from tgnn.export.verify import judge, whole_graph
from tgnn.training import checkpoint
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint
from tgnn.training.config import Resolved, TrainConfig, read_run
from tgnn.training.metrics import RunLog
from tgnn.training.prepare import prepare
from tgnn.training.trainer import build_model

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = DataOptions(add_reverse=True, self_loops="add", feature_norm="row")
FILES = {"README.md", "config.json", "model.py", "weights.pt"}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def make_run(tmp_path, example):
    """A function that writes a run directory as training does, its weights random: (model, weighted, ...) ->
    path.
    """

    def make(
        model: str = "gcn", weighted: bool = False, options: DataOptions = OPTIONS, **more: object
    ) -> Path:
        data = tmp_path / "data.npz"
        save_npz(dataset_of(example, weighted), data)
        more = {"dropout": 0.5, "ranks": 1, "device": "cpu", **more}
        config = TrainConfig(model=model, hidden=6, heads=2, output_heads=2, fanouts=(-1, -1), **more)
        resolved = Resolved(str(data), config, options, frozenset())
        store = prepare(str(data), 1, data_options=options)
        trained = build_model(config, store)
        torch.manual_seed(4)
        with torch.no_grad():
            for value in trained.parameters():
                value.copy_(torch.randn_like(value))
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        log = RunLog(run)
        log.write_config(resolved.record())
        log.append(
            {"epoch": 3, "metric": "accuracy", "train_acc": 1.0, "val_acc": 0.5, "test_acc": 0.25, "ranks": 1}
        )
        state = CheckpointState(
            model=trained.state_dict(), optimizer={}, epoch=4, config=resolved.record(),
            dataset=dataset_fingerprint(store),
        )  # fmt: skip
        state.save(run / "best.pt")
        return run

    return make


def dataset_of(example: Example, weighted: bool) -> Dataset:
    graph = Graph.from_edge_index(example.edges, example.num_vertices, example.weight if weighted else None)
    rng = np.random.default_rng(1)
    n = example.num_vertices
    return Dataset(
        name="small", graph=graph, x=rng.random((n, 5), np.float32), y=rng.integers(0, 3, n), num_classes=3,
        train=np.arange(10), val=np.arange(10, 20), test=np.arange(20, n),
    )  # fmt: skip


def refused(capsys, *argv: object) -> str:
    """The one sentence with which a command is refused."""
    assert run_command(main, [str(word) for word in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def fake_python(path: Path, answer: dict[str, str]) -> Path:
    """A stand-in for a Python whose clean process says `answer`."""
    path.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("to", ["dgl", "pyg"])
@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gatv2", "gin"])
def test_the_folder(make_run, tmp_path, to: str, model: str):
    run, out = make_run(model), tmp_path / "deep" / "out"
    assert main([str(run), "--to", to, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == FILES
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    weights = torch.load(out / "weights.pt", weights_only=True)
    trained = CheckpointState.load(run / "best.pt").model
    assert sorted(value.numel() for value in weights.values()) == sorted(
        value.numel() for value in trained.values()
    )
    config = json.loads((out / "config.json").read_text())
    assert (
        config["framework"]
        == {
            "dgl": {"name": "dgl", "versions": "1.1 to 2.4"},
            "pyg": {"name": "torch_geometric", "versions": "2.5 to 2.8"},
        }[to]
    )
    assert config["input"] == {"features": 5, "edge_weight": False}
    assert config["output"]["classes"] == 3
    assert config["graph"]["prepare"] == ["add_reverse_edges", "add_self_loops", "normalise_rows"]
    assert config["training"]["test_acc"] == 0.25 and config["training"]["epoch"] == 3
    assert config["dataset"]["name"] == "data" and config["versions"]["torch"] is not None
    readme = (out / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 5 and "test 0.2500" in readme
    ast.parse(code)
    source = (out / "model.py").read_text()
    assert "tgnn" not in {name.split(".")[0] for name in imports(source)}
    assert max(map(len, source.splitlines())) <= 120


def imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    return found


def test_an_existing_folder(make_run, tmp_path, capsys):
    run, out = make_run(), tmp_path / "out"
    out.mkdir()
    assert main([str(run), "--to", "dgl", "--out", str(out)]) == 0
    assert "a new or empty directory" in refused(capsys, run, "--to", "dgl", "--out", out)
    assert {path.name for path in out.iterdir()} == FILES


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: (run / "best.pt").unlink(), "no file"),
        (lambda run: (run / "best.pt").write_bytes((run / "best.pt").read_bytes()[:500]), "a damaged file"),
        (lambda run: torch.save({"weights": torch.ones(2)}, run / "best.pt"), "of another kind"),
        (
            lambda run: torch.save({"kind": checkpoint.KIND, "format": 0, "state": {}}, run / "best.pt"),
            "format 0",
        ),
        (lambda run: rewrite(run, dataset={"num_features": 5}), "no num_classes"),
        (lambda run: rewrite(run, dataset={"num_features": 9, "num_classes": 3}), "weights of another model"),
        (lambda run: (run / "config.json").unlink(), "no readable config.json"),
        (lambda run: (run / "config.json").write_text('{"format": 0}'), "format 0"),
    ],
)
def test_what_is_no_good_run_is_refused(make_run, tmp_path, capsys, damage, says: str):
    run = make_run()
    damage(run)
    before = sorted(tmp_path.iterdir())
    assert says in refused(capsys, run, "--to", "dgl", "--out", tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def rewrite(run: Path, **changes: object) -> None:
    state = CheckpointState.load(run / "best.pt")
    for name, value in changes.items():
        setattr(state, name, value)
    state.save(run / "best.pt")


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
    assert says in error and "pip install dgl" in error
    assert sorted(tmp_path.iterdir()) == before


def test_wrong_flags(make_run, tmp_path, capsys):
    run, out = make_run(), tmp_path / "out"
    assert "--to" in refused(capsys, run, "--to", "keras", "--out", out)
    assert "--verify" in refused(capsys, run, "--to", "dgl", "--out", out, "--python", "python3")
    absent = tmp_path / "none" / "python"
    assert "--python" in refused(capsys, run, "--to", "dgl", "--out", out, "--verify", "--python", absent)
    (tmp_path / "file").touch()
    assert "--out" in refused(capsys, run, "--to", "dgl", "--out", tmp_path / "file" / "out")
    assert not out.exists()


def test_other_data_are_refused(make_run, tmp_path, capsys):
    run = make_run()
    error = refused(capsys, run, "--to", "dgl", "--out", tmp_path / "out", "--data", "karate")
    assert "out" not in {path.name for path in tmp_path.iterdir()}, error


@pytest.mark.parametrize("to", ["dgl", "pyg"])
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("gcn", {"weighted": True, "dtype": "float64"}),
        ("sage", {"aggregator": "mean", "weighted": True, "norm": "batch", "residual": True}),
        ("gat", {"weighted": True, "ranks": 2}),
    ],
)
def test_verified(request, make_run, tmp_path, capsys, to: str, model: str, more):
    request.getfixturevalue(to)
    run, out = make_run(model, **more), tmp_path / "out"
    assert main([str(run), "--to", to, "--out", str(out), "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    verified = json.loads((out / "config.json").read_text())["verified"]
    assert verified["allowed"] == (1e-9 if more.get("dtype") == "float64" else 1e-4)
    assert verified["largest_difference"] <= verified["allowed"] / 10 * verified["largest_output"]


@pytest.mark.parametrize("to", ["dgl", "pyg"])
def test_a_wrong_export_is_noticed(request, make_run, tmp_path, capsys, monkeypatch, to: str):
    request.getfixturevalue(to)

    def doubled(stack, kinds):
        state = right(stack, kinds)
        return {name: 2 * value if name.endswith("bias") else value for name, value in state.items()}

    right = folder_module.weights_to_theirs
    monkeypatch.setattr(folder_module, "weights_to_theirs", doubled)
    run, before = make_run("gat"), None
    before = sorted(tmp_path.iterdir())
    assert run_command(main, [str(run), "--to", to, "--out", str(tmp_path / "out"), "--verify"]) == 1
    said = capsys.readouterr()
    assert "not equal" in said.out and "nothing was written" in said.err
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
        "from tgnn.export.clean_run import add_setuptools_extern as add; add(); add(); "
        "from setuptools.extern import packaging; from setuptools.extern.packaging import version; "
        "print(packaging.version is version, version.parse('1.10') > version.parse('1.9'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_serving_without_tgnn(dgl, make_run, tmp_path, model: str):
    run, out = make_run(model), tmp_path / "out"
    assert main([str(run), "--to", "dgl", "--out", str(out)]) == 0
    code = (
        "import sys, runpy; sys.modules['tgnn'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
    )
    script = ROOT / "examples" / "serve_with_dgl.py"
    done = subprocess.run(
        [sys.executable, "-c", code, str(script), str(out), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
    )
    resolved, state = read_run(run), CheckpointState.load(run / "best.pt")
    dataset = load(resolved.source, resolved.data_options)
    example = Example(
        torch.from_numpy(dataset.graph.edge_index()), torch.ones(dataset.graph.num_edges), len(dataset.x)
    )
    logits = example.ours(trained_model(resolved, state, run), torch.from_numpy(dataset.x))
    right = (logits.argmax(1).numpy() == dataset.y)[dataset.test].mean()
    assert done.stdout.strip().splitlines()[-1:] == [f"test accuracy {right:.4f}"], done.stderr


def test_every_layer_has_an_entry_in_both_tables():
    from tgnn.export import dgl, pyg

    kinds = {type(make(3, 3, False)) for make in LAYERS.values()}
    assert kinds == set(dgl.KINDS) == set(pyg.KINDS)
