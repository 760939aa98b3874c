"""Keep memory that was freed for the next step, instead of handing it back to the system.

A training step allocates and frees the same large tensors again and again. glibc maps each of them anew, and the
system then clears every page at its first touch, which takes longer than the work on it: on a CPU this is most of the
time of gathering or joining rows.
"""

from __future__ import annotations

import ctypes
import os
import sys

# mallopt's names for them, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
# Free memory at the top of the heap up to this much is kept, in bytes.
KEPT_BYTES = 2**31 - 1
GROWTH_BYTES = 16 << 20


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve large blocks out of its heap; returns whether it does so.

    For a process that trains: its memory stays near its peak. Nothing happens on systems without glibc, and where
    the environment sets malloc's options (MALLOC_..., GLIBC_TUNABLES).
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, GROWTH_BYTES))
    return all(mallopt(name, value) == 1 for name, value in settings)
