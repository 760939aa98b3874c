"""Work on the host's arrays that its threads share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

NAME = "tgnn-host"
Item, Result = TypeVar("Item"), TypeVar("Result")


def each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`work` of every item, in their order, on as many threads as PyTorch has.

    For pieces of milliseconds and more, in loops of NumPy and SciPy, which run without the interpreter's lock: to pass
    the lock on takes tenths of a millisecond.
    """
    threads = torch.get_num_threads()
    # Inside a piece of another call there is no thread left to wait for.
    alone = threads == 1 or threading.current_thread().name.startswith(NAME)
    return list(map(work, items) if alone else _pool(threads).map(work, items))


def share(size: int) -> int:
    """A thread's share of a bound on what is held at once."""
    return max(1, size // torch.get_num_threads())


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=NAME)


# A forked child has the pool, but none of its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
