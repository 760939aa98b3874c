"""Where feature rows and labels come from: the parts' memory-mapped files, gathered row by row.

In split mode a rank reads its own part only; in data mode it reads whatever its batch needs, from any part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tgnn.kernels.gather import gather
from tgnn.partition.store import Store


class PartColumn:
    """One array of the store (features or labels) over several parts, addressed by row.

    Rows count from 0 through the given parts, one after the other: local rows for one part, new ids for all of them.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._tables = [torch.from_numpy(np.asarray(array)) for array in arrays]
        self._starts = np.cumsum([0] + [len(table) for table in self._tables])

    def load(self, rows: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Copy of the given rows ([n] int64, on any device) on `device`: [n, ...]."""
        rows = rows.cpu()
        if len(self._tables) == 1:
            return gather(self._tables[0], rows).to(device, non_blocking=True)
        first = self._tables[0]
        out = first.new_empty(rows.numel(), *first.shape[1:])
        for start, end, table in zip(self._starts[:-1], self._starts[1:], self._tables, strict=True):
            here = torch.nonzero((rows >= int(start)) & (rows < int(end))).view(-1)
            out[here] = gather(table, rows[here] - int(start))
        return out.to(device, non_blocking=True)


def open_columns(store: Store, parts: Sequence[int]) -> tuple[PartColumn | None, PartColumn | None]:
    """(features, labels) of the given parts; None for what the store does not have."""
    opened = [store.part(part) for part in parts]
    features = None if opened[0].features is None else PartColumn([part.features for part in opened])
    labels = None if opened[0].labels is None else PartColumn([part.labels for part in opened])
    return features, labels
