"""Mean test accuracy of a recipe over several seeds or splits.

    python examples/accuracy.py examples/cora_gcn.toml PATH/planetoid/cora --seeds 10
    python examples/accuracy.py examples/minesweeper_sage.toml PATH/minesweeper.npz --seeds 3 --vary split

Every run is an ordinary `python -m tgnn.train DATA --config RECIPE --seed S`; what follows `--` goes to it as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tgnn.errors import run_command
from tgnn.train import main as train


def run_once(recipe: str, data: str, varied: list[str], more: list[str]) -> float:
    """Test figure, in percent, of the epoch with the best validation metric."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run_dir = f"{folder}/run"
        status = run_command(train, [data, "--config", recipe, "--run-dir", run_dir, *varied, *more])
        if status:
            sys.exit(status)
        summary = json.loads((Path(run_dir) / "summary.json").read_text())
    return 100 * summary["test_acc"]


def main() -> None:
    """Run the recipe once per seed and print every figure, the mean and the standard deviation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--vary", choices=("seed", "split-seed", "split"), default="seed", help="what follows the seed"
    )
    parser.epilog = "What follows -- goes to tgnn.train as it is."
    mine, more = sys.argv[1:], []
    if "--" in mine:
        mine, more = mine[: mine.index("--")], mine[mine.index("--") + 1 :]
    args = parser.parse_args(mine)
    figures = []
    for seed in range(args.seeds):
        varied = ["--seed", str(seed)] + ([] if args.vary == "seed" else [f"--{args.vary}", str(seed)])
        figures.append(run_once(args.recipe, args.data, varied, more))
        print(f"seed {seed}: {figures[-1]:.2f}", flush=True)
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    print(f"mean {statistics.mean(figures):.2f} +- {spread:.2f} over {len(figures)} runs")


if __name__ == "__main__":
    main()
