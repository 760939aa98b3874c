"""unique and relabel: number the distinct vertices of a frontier, in a deterministic order.

`unique` sorts. `DirectTable` numbers ids of a known range through a table with one slot per id: no hash.

Example: a table over 10 ids, first [7, 2], then [2, 9, 4, 9]: numbered [7, 2, 4, 9]; lookup([9, 2]): [3, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tgnn.kernels.backend import choose

# Up to this many slots per id the distinct ids are found by scanning the flags, above it by sorting the ids.
SCAN_SLOTS_PER_ID = 32


def unique(ids: Tensor) -> Tensor:
    """The distinct values of `ids` ([n], int32 or int64), ascending (one device sync)."""
    if choose("unique", ids) == "triton":
        from tgnn.kernels import unique_triton

        return unique_triton.unique_triton(ids)
    return torch.unique(ids)


def position_in(sorted_ids: Tensor, ids: Tensor) -> Tensor:
    """Where each of `ids` stands in `sorted_ids`, which is ascending and holds them all: int64 [n]."""
    return torch.searchsorted(sorted_ids, ids)


def true_places(flag: Tensor) -> Tensor:
    """Where `flag` ([n] bool) is true, ascending: int64."""
    if flag.device.type == "cpu":  # a quarter of the time of torch's nonzero
        return torch.from_numpy(np.flatnonzero(flag.numpy()))
    return torch.nonzero(flag).view(-1)


def put(table: Tensor, places: Tensor, value: Tensor | bool) -> None:
    """`table[places] = value` for 1-D tensors; places int64 in range."""
    if table.device.type == "cpu":  # a quarter of the time of torch's assignment
        table.numpy()[places.numpy()] = value.numpy() if isinstance(value, Tensor) else value
    else:
        table[places] = value


class DirectTable:
    """Numbers distinct ids out of [0, size) by direct address; reused call after call.

    Memory: five bytes per id of the range.
    """

    BYTES_PER_ID = 5

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self._slot = torch.empty(size, dtype=torch.int32, device=device)
        self._flag = torch.zeros(size, dtype=torch.bool, device=device)

    def number(self, first: Tensor, others: Tensor) -> Tensor:
        """Number `first` (distinct ids, kept in order) from 0, then the distinct rest of `others`, ascending.

        Args: first [m], others [n], integer ids in range. Returns: [k] int64, the ids by number; `lookup` is
        the inverse until the next call (one device sync).
        """
        flag = self._flag
        scans = flag.numel() <= SCAN_SLOTS_PER_ID * others.numel()
        if choose("relabel", first, others) == "triton":
            from tgnn.kernels import unique_triton

            return unique_triton.number_triton(self._slot, flag, first, others, scans)
        first, others = first.to(torch.int64), others.to(torch.int64)
        # Others first, then first: the rest is what stays flagged, whichever thread wrote last.
        put(flag, others, True)
        put(flag, first, False)
        if scans:
            rest = true_places(flag)
        else:
            distinct = torch.unique(others)
            rest = distinct[flag[distinct]]
        put(flag, rest, False)
        ids = torch.cat([first, rest])
        self.number_as(ids)
        return ids

    def distinct(self, ids: Tensor) -> Tensor:
        """The distinct values of `ids` ([n], in range), ascending: int64 (one device sync)."""
        if self._flag.numel() > SCAN_SLOTS_PER_ID * ids.numel():
            return unique(ids).to(torch.int64)
        put(self._flag, ids.to(torch.int64), True)
        found = true_places(self._flag)
        put(self._flag, found, False)
        return found

    def count(self, first: Tensor, others: Tensor) -> int:
        """How many distinct ids `first` [m] and `others` [n] have together (one device sync)."""
        flag, both = self._flag, (first.to(torch.int64), others.to(torch.int64))
        for places in both:
            put(flag, places, True)
        found = int(torch.count_nonzero(flag))
        if flag.numel() <= SCAN_SLOTS_PER_ID * others.numel():
            flag.zero_()
        else:
            for places in both:
                put(flag, places, False)
        return found

    def number_as(self, ids: Tensor) -> None:
        """Number distinct `ids` (int64 [k], in range) from 0 in the order given, for `lookup`."""
        put(self._slot, ids, torch.arange(ids.numel(), dtype=torch.int32, device=ids.device))

    def lookup(self, ids: Tensor) -> Tensor:
        """The numbers of `ids` ([n]) as the last `number` or `number_as` gave them: int32 [n]."""
        return self._slot.index_select(0, ids)
