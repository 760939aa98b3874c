"""The contributor's verbs: `python tools/check.py [lint] [layout] [test]`, all of them by default."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERBS = {
    "lint": [["ruff", "check", "."], ["ruff", "format", "--check", "."]],
    "layout": [["pytest", "-q", "tests/test_layout.py"]],
    "test": [["pytest"]],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verbs in order; the exit status of the first command that fails, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verbs", nargs="*", metavar="verb", help=f"{', '.join(VERBS)} (default: all)")
    chosen = parser.parse_args(argv).verbs or list(VERBS)
    unknown = [verb for verb in chosen if verb not in VERBS]
    if unknown:
        parser.error(f"got {', '.join(unknown)}, expected {', '.join(VERBS)}")
    for verb in chosen:
        for command in VERBS[verb]:
            print("+ python -m", *command, flush=True)
            status = subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
