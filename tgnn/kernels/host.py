"""Work on the host's arrays that its threads share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item, Result = TypeVar("Item"), TypeVar("Result")


def each(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`work` of every item, in their order, on as many threads as PyTorch has.

    For pieces of milliseconds and more, in loops of NumPy and SciPy, which run without the interpreter's lock: to pass
    the lock on takes tenths of a millisecond.
    """
    threads = torch.get_num_threads()
    return list(map(work, items) if threads == 1 else _pool(threads).map(work, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tgnn-host")
