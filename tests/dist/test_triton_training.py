"""A training run on the Triton kernels gives the torch run's losses: every model, on Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tgnn.train import main

pytest.importorskip("triton")

MODELS = ("sage", "gcn", "gat", "gatv2", "gin", "transformer")
EPOCHS = 2
# The interpreter must be on before Triton is imported, so the runs share a process of their own.
SCRIPT = """
import json, sys
from tgnn.train import main
if __name__ == "__main__":
    for argv in json.loads(sys.argv[1]):
        assert main(argv) == 0, argv
"""


def command(model: str, ranks: int, backend: str, folder: Path) -> list[str]:
    """Small enough for the interpreter; the fanouts really sample, both dropouts are on."""
    attention = ["--attention-dropout", "0.2"] if model in ("gat", "gatv2", "transformer") else []
    return [
        "karate", "--model", model, "--ranks", str(ranks), "--backend", backend, "--fanouts", "4,3", "--hidden", "4",
        "--epochs", str(EPOCHS), "--eval-every", str(EPOCHS), "--seed", "3", "--run-dir",
        str(folder / f"{model}-{ranks}-{backend}"), *attention,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the runs on Triton, of every model on 1 and 2 ranks."""
    where = tmp_path_factory.mktemp("triton-runs")
    os.environ.setdefault("TGNN_CACHE", str(where / "cache"))
    script = where / "runs.py"
    script.write_text(SCRIPT)
    runs = [command(model, ranks, "triton", where) for model in MODELS for ranks in (1, 2)]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(runs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return where


def summary_and_losses(run: Path) -> tuple[dict, list[float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / "summary.json").read_text()), [line["loss"] for line in lines] + [
        lines[-1]["val_loss"]
    ]


@pytest.mark.parametrize("model", MODELS)
def test_same_losses_as_torch(folder: Path, model: str):
    assert main(command(model, 1, "torch", folder)) == 0
    reference, expected = summary_and_losses(folder / f"{model}-1-torch")
    assert len(expected) == EPOCHS + 1 and set(reference["kernels"].values()) == {"torch"}
    for ranks in (1, 2):
        summary, losses = summary_and_losses(folder / f"{model}-{ranks}-triton")
        ran = summary["kernels"]
        assert ran["sample_neighbors"] == "triton" and "triton" in (ran.get("spmm"), ran.get("attention"))
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5 * max(1, max(expected)))
