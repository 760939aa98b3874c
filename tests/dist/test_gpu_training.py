"""Training on a GPU gives the losses of the same run on the CPU: the same batches, the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tgnn.train import main

MODELS = ("sage", "gcn", "gat", "gatv2", "gin", "transformer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none here"),
]


def run(folder: Path, model: str, device: str, *options: str) -> tuple[dict, list[float]]:
    """(summary, losses) of three epochs on karate; the fanouts really sample, both dropouts are on."""
    where = folder / f"{model}-{device}-{'-'.join(options).replace('-', '')}"
    attention = ["--attention-dropout", "0.2"] if model in ("gat", "gatv2", "transformer") else []
    command = [
        "karate", "--model", model, "--ranks", "1", "--device", device, "--fanouts", "4,3", "--hidden", "8",
        "--epochs", "3", "--eval-every", "3", "--seed", "3", "--run-dir", str(where), *attention, *options,
    ]  # fmt: skip
    assert main(command) == 0
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines] + [lines[-1]["val_loss"]]
    return json.loads((where / "summary.json").read_text()), losses


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_cpu(tmp_path: Path, model: str):
    reference, expected = run(tmp_path, model, "cpu")
    assert set(reference["kernels"].values()) == {"torch"} and len(expected) == 4
    summary, losses = run(tmp_path, model, "cuda")
    ran = summary["kernels"]
    assert ran["sample_neighbors"] == "triton" and "triton" in (ran.get("spmm"), ran.get("attention"))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4 * max(1, max(expected)))


@pytest.mark.parametrize(
    "option", ["--backend=triton", "--backend=torch", "--graph-placement=pinned", "--dtype=bfloat16"]
)
def test_options_of_a_gpu(tmp_path: Path, option: str):
    """The kernels by name, edges in pinned memory, and half types: the losses stay, as near as the type lets them."""
    _, expected = run(tmp_path, "sage", "cpu")
    _, losses = run(tmp_path, "sage", "cuda", option)
    tolerance = 3e-2 if "bfloat16" in option else 1e-4
    np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance * max(1, max(expected)))
