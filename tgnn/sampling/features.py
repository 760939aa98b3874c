"""Where feature rows and labels come from: the parts' memory-mapped files, and copies of their first rows.

In split mode a rank reads its own part only; in data mode it reads whatever its batch needs, from any part. Inside a
part vertices are ordered by how often they are needed, so the feature cache is a prefix of the file and a hit is
`row < cached rows`. On a GPU the cache lies in its memory, the next rows in pinned host memory, which it reads itself,
the rest in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from tgnn.kernels.backend import choose
from tgnn.kernels.gather import gather
from tgnn.partition.store import Store
from tgnn.sampling.placement import Budget


class Tiers:
    """Rows of one array, [n, ...]: the first `cached` in the device's memory, then `pinned`, then the file.

    Rows are given in `dtype`, and kept in it where that is narrower than the file's.
    """

    def __init__(self, array: np.ndarray, dtype: torch.dtype | None = None) -> None:
        self._file = torch.from_numpy(np.asarray(array))
        self.dtype = dtype or self._file.dtype
        narrower = self.dtype.itemsize < self._file.element_size()
        self._kept_dtype = self.dtype if narrower else self._file.dtype
        self._near = self._pinned = self._file[:0].to(self._kept_dtype)

    def __len__(self) -> int:
        return len(self._file)

    @property
    def cached(self) -> int:
        """Rows in the device's memory."""
        return len(self._near)

    @property
    def pinned(self) -> int:
        """Rows in pinned host memory, after the cached ones."""
        return len(self._pinned)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is kept."""
        return self._kept_dtype.itemsize * prod(self._file.shape[1:])

    def empty(self, rows: int, device: torch.device | str) -> Tensor:
        """Room for so many rows on `device`: [rows, ...]."""
        return torch.empty((rows, *self._file.shape[1:]), dtype=self.dtype, device=device)

    def place(self, cached: int, pinned: int, device: torch.device) -> None:
        """Copy the first `cached` rows to `device`, on a GPU the next `pinned` to pinned host memory."""
        kept = self._kept_dtype
        self._near = self._pinned = self._file[:0].to(kept)
        self._near = self._file[:cached].to(device, kept, copy=True)
        if device.type != "cpu":
            self._pinned = self._file[cached : cached + pinned].to(kept).pin_memory()

    def load(self, rows: Tensor, device: torch.device, out: Tensor | None = None) -> Tensor:
        """The given rows, int64 [m], on `device`; into `out` where that is given. Returns [m, ...]."""
        table = self.whole()
        # Written where it is wanted: a tensor that is made and copied costs more than the gather.
        direct = (
            table is not None and out is not None and table.dtype == self.dtype and table.device == out.device
        )
        if direct and choose("gather", table, rows) == "torch":
            return torch.index_select(table, 0, rows.to(table.device), out=out)
        if table is not None:
            found = _rows_of(table, rows, device)
        elif self.cached + self.pinned == len(self):
            found = gather(self._near, rows.to(device), self._pinned)
        else:
            found = self._of_all_tiers(rows.to(device), device)
        return found.to(self.dtype) if out is None else out.copy_(found)

    def whole(self) -> Tensor | None:
        """The only tier that has rows, if there is but one."""
        if self.cached == len(self):
            return self._near
        return self._file if not self.cached and not self.pinned else None

    def _of_all_tiers(self, rows: Tensor, device: torch.device) -> Tensor:
        is_kept = rows < self.cached + self.pinned
        kept, others = torch.nonzero(is_kept).view(-1), torch.nonzero(~is_kept).view(-1)
        found = self.empty(rows.numel(), device)
        pinned = self._pinned if self.pinned else None
        found.index_copy_(0, kept, gather(self._near, rows.index_select(0, kept), pinned).to(self.dtype))
        far = _rows_of(self._file, rows.index_select(0, others), device).to(self.dtype)
        return found.index_copy_(0, others, far)


def _rows_of(table: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Rows of one table on `device`; out of the host's memory to a GPU by way of pinned memory."""
    if table.device.type == device.type:
        return gather(table, rows.to(table.device))
    # No kernel reads pageable memory, whatever the backend.
    return table.index_select(0, rows.cpu()).pin_memory().to(device, non_blocking=True)


class PartColumn:
    """One array of the store (features or labels) over several parts, addressed by row.

    Rows count from 0 through the given parts, one after the other: local rows for one part, new ids for all of them.
    They are given in `dtype`, by default the files' own.
    """

    def __init__(self, arrays: Sequence[np.ndarray], dtype: torch.dtype | None = None) -> None:
        self._tiers = [Tiers(array, dtype) for array in arrays]
        self._starts = np.cumsum([0] + [len(tiers) for tiers in self._tiers])

    @property
    def cached_rows(self) -> int:
        """Rows in the device's memory, over all parts."""
        return sum(tiers.cached for tiers in self._tiers)

    @property
    def pinned_rows(self) -> int:
        """Rows in pinned host memory, over all parts."""
        return sum(tiers.pinned for tiers in self._tiers)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._tiers[0].row_bytes

    def place(self, budget: Budget, device: torch.device) -> None:
        """Copy all rows, or where that does not fit the first ones of every part, in equal shares of the budget."""
        if int(self._starts[-1]) * self.row_bytes <= budget.device_bytes:
            for tiers in self._tiers:
                tiers.place(len(tiers), 0, device)
            return
        if budget.whole:
            budget = Budget(0, budget.pinned_bytes)
        share = len(self._tiers) * max(1, self.row_bytes)
        for tiers in self._tiers:
            cached = min(len(tiers), budget.device_bytes // share)
            pinned = min(len(tiers) - cached, budget.pinned_bytes // share)
            tiers.place(cached, pinned, device)

    def whole(self, device: torch.device) -> Tensor | None:
        """All rows [n, ...] as they are kept, where that is one tensor in `dtype` in `device`'s memory."""
        table = self._tiers[0].whole() if len(self._tiers) == 1 else None
        fits = table is not None and table.dtype == self._tiers[0].dtype and table.device.type == device.type
        return table if fits else None

    def hits(self, rows: Tensor) -> int:
        """How many of `rows` are in the cache."""
        if self.cached_rows == int(self._starts[-1]):
            return rows.numel()
        if not self.cached_rows:
            return 0
        bounds = zip(self._starts, self._tiers, strict=False)
        return sum(int(((rows >= int(start)) & (rows < int(start) + t.cached)).sum()) for start, t in bounds)

    def load(self, rows: Tensor, device: torch.device | str = "cpu", out: Tensor | None = None) -> Tensor:
        """Copy of the given rows ([n] int64, on any device) on `device`, in `out` if given: [n, ...]."""
        device = torch.device(device)
        if len(self._tiers) == 1:
            return self._tiers[0].load(rows, device, out)
        if out is None:
            out = self.empty(rows.numel(), device)
        for start, end, tiers in zip(self._starts[:-1], self._starts[1:], self._tiers, strict=True):
            here = torch.nonzero((rows >= int(start)) & (rows < int(end))).view(-1)
            out.index_copy_(0, here.to(device), tiers.load(rows[here] - int(start), device))
        return out

    def empty(self, rows: int, device: torch.device | str) -> Tensor:
        """Room for so many rows on `device`: [rows, ...]."""
        return self._tiers[0].empty(rows, device)


class HaloCache:
    """Copies of other ranks' feature rows: those that this rank's input layer asks for most often.

    new_id: int64 [c], ascending; original_id: int64 [c]; rows: [c, F] of `dtype` on the device.
    """

    def __init__(
        self,
        store: Store,
        part: int,
        budget_bytes: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        wanted = hottest_remote(store, part)
        row_bytes = dtype.itemsize * store.num_features
        new_id = np.sort(wanted[: budget_bytes // max(1, row_bytes)])
        owner = store.ownership.owner(new_id)
        rows = torch.empty(len(new_id), store.num_features, dtype=dtype)
        original = np.empty(len(new_id), np.int64)
        for other in np.unique(owner):
            theirs, mine = store.part(int(other)), owner == other
            local = store.ownership.local(new_id[mine], int(other))
            original[mine] = theirs.original_id[local]
            gather_into = torch.from_numpy(np.flatnonzero(mine))
            rows[gather_into] = torch.from_numpy(np.asarray(theirs.features))[torch.from_numpy(local)].to(
                dtype
            )
        self.rows = rows.to(device)
        self.new_id = torch.from_numpy(new_id).to(device)
        self.original_id = torch.from_numpy(original).to(device)

    def __len__(self) -> int:
        return self.new_id.numel()

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of `ids` ([m] new ids) are here, bool [m], and the cache rows of those, int64, in their order."""
        if len(self) == 0:
            return torch.zeros_like(ids, dtype=torch.bool), ids.new_empty(0, dtype=torch.int64)
        place = torch.searchsorted(self.new_id, ids.to(torch.int64)).clamp_(max=len(self) - 1)
        is_here = self.new_id[place] == ids
        return is_here, place[is_here]


def hottest_remote(store: Store, part: int) -> np.ndarray:
    """New ids of remote vertices that `part` asks for as input rows, most often asked first, int64.

    As presampled; in a store without that, in descending number of in-edges that they have into this part.
    """
    mine = store.part(part)
    if mine.halo_id is not None:
        return mine.halo_id.astype(np.int64)
    owned = store.ownership.range(part)
    asked = np.bincount(mine.indices, minlength=store.num_vertices)
    asked[owned.start : owned.stop] = 0
    order = np.argsort(-asked, kind="stable")
    return order[: np.count_nonzero(asked)]


def open_columns(
    store: Store, parts: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[PartColumn | None, PartColumn | None]:
    """(features in `dtype`, labels) of the given parts; None for what the store does not have."""
    opened = [store.part(part) for part in parts]
    features = None if opened[0].features is None else PartColumn([part.features for part in opened], dtype)
    labels = None if opened[0].labels is None else PartColumn([part.labels for part in opened])
    return features, labels
