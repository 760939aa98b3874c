"""The examples run and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tgnn.training.resolve import resolve

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_own_graph_own_layer_own_loop(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "TGNN_CACHE": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "own_loop.py")], cwd=tmp_path, env=environment, timeout=300,
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    accuracy = re.fullmatch(r"accuracy on the other 1,000 vertices: (\d\.\d{3})\n", ran.stdout)
    assert accuracy is not None, ran.stdout
    assert float(accuracy[1]) > 0.85  # the features alone give less than 0.5


@pytest.mark.parametrize("recipe", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_recipes_resolve(recipe: Path):
    resolved = resolve(["karate", "--config", str(recipe)])
    assert resolved.config.model in recipe.stem
