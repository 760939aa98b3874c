"""Stages of a benchmark in processes of their own, so that each has a peak of memory of its own."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tgnn.errors import ReportedError
from tgnn.training.metrics import write_json

TOOLS = Path(__file__).resolve().parent


def peak_bytes() -> int:
    """The largest resident memory of this process so far.

    From /proc where it is there: what getrusage tells starts with the peak of the process that started this one.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_stage(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call `function` ("module:name", in this folder) with JSON-able `arguments` in a new process.

    Returns {"seconds", "peak_bytes", "result"}: wall time of the call itself, the process's peak of memory, and the
    JSON-able value that it returned. Raises ReportedError where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        paths = [str(TOOLS), str(TOOLS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        command = [sys.executable, __file__, function, json.dumps(arguments), str(out)]
        # Standard output is for the report alone: what libraries print goes to standard error.
        quiet = {"stdin": subprocess.DEVNULL, "stdout": 2}
        status = subprocess.run(command, env=environment, **quiet).returncode
        if status or not out.exists():
            raise ReportedError(f"{function} ended with status {status}; its own message stands above")
        return json.loads(out.read_text())


def main(function: str, arguments: str, out: str) -> None:
    """What the new process does."""
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    start = time.perf_counter()
    result = call(**json.loads(arguments))
    seconds = time.perf_counter() - start
    write_json(Path(out), {"seconds": seconds, "peak_bytes": peak_bytes(), "result": result})


if __name__ == "__main__":
    main(*sys.argv[1:])
