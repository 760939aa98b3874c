"""`python -m tgnn.export`: what it writes, what it verifies, and what it refuses without leaving anything
behind.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from tests.export.comparing import refused
from tgnn.export.__main__ import main, make_parser
from tgnn.training import checkpoint
from tgnn.training.checkpoint import CheckpointState

FILES = {"README.md", "config.json", "model.py", "weights.pt"}


@pytest.mark.parametrize("to", ["dgl", "pyg"])
@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gatv2", "gin", "transformer"])
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


def test_wrong_flags(make_run, tmp_path, capsys):
    run, out = make_run(), tmp_path / "out"
    assert "--to" in refused(capsys, run, "--to", "keras", "--out", out)
    assert "--verify" in refused(capsys, run, "--to", "dgl", "--out", out, "--python", "python3")
    absent = tmp_path / "none" / "python"
    assert "--python" in refused(capsys, run, "--to", "dgl", "--out", out, "--verify", "--python", absent)
    (tmp_path / "file").touch()
    assert "--out" in refused(capsys, run, "--to", "dgl", "--out", tmp_path / "file" / "out")
    assert not out.exists()


def test_help_says_where_names_are_fetched_from_and_what_ids_there_are():
    text = " ".join(make_parser().format_help().split())
    assert "$TGNN_DATA_URL" in text and "--ids {original,new}" in text and "new ones in a partition" in text


def test_other_data_are_refused(make_run, tmp_path, capsys):
    run = make_run()
    error = refused(capsys, run, "--to", "dgl", "--out", tmp_path / "out", "--data", "karate")
    assert "out" not in {path.name for path in tmp_path.iterdir()}, error
