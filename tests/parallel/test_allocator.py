"""Freed memory is kept where that can be had, and the user's own setting wins."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from tgnn.parallel.allocator import keep_freed_memory
kept = keep_freed_memory()
import numpy as np
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.ones(8 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def faults(**environment: str) -> tuple[str, int]:
    """Whether memory is kept, and page faults of making 8 MiB five times again."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kept, count = ran.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose malloc is told")
def test_large_blocks_are_not_mapped_anew():
    kept, count = faults()
    assert kept == "True" and count < 2048  # five times 2,048 pages of 4 KiB otherwise


def test_the_environment_wins():
    assert faults(MALLOC_ARENA_MAX="2")[0] == "False"
