"""Who owns a vertex, and how the three kinds of vertex id turn into one another.

*original* ids are the user's. *new* ids number the vertices part by part: part p owns the new ids
`[offsets[p], offsets[p+1])`. A *local* row is a new id minus its part's offset. Inside a part vertices are in
descending hotness where that is known, else (and among equals) in ascending original id.

Owners are found by a binary search in P + 1 offsets, so no table of N entries travels to the ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgnn.errors import wrong


class Ownership:
    """Which part owns which new ids.

    Attributes: `offsets` int64 [P+1], ascending from 0 to N; equal neighbours are empty parts.
    The methods take numpy arrays, torch tensors (any device, int32 or int64) or plain integers, and answer in
    kind, as int64.

    >>> ownership = Ownership([0, 3, 3, 5])
    >>> ownership.owner(np.array([0, 2, 3, 4]))
    array([0, 0, 2, 2])
    >>> ownership.local(np.array([3, 4]), 2)
    array([0, 1])
    """

    def __init__(self, offsets: Any) -> None:
        offsets = np.array(offsets, dtype=np.int64)
        if offsets.ndim != 1 or len(offsets) < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise wrong(
                "ownership offsets",
                offsets.tolist(),
                "ascending integers that start at 0, one more than parts",
                "pass the offsets of a store",
            )
        offsets.flags.writeable = False
        self.offsets = offsets
        self._on_device: dict[tuple, Any] = {}

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_vertices(self) -> int:
        return int(self.offsets[-1])

    def size(self, part: int) -> int:
        """Number of vertices that `part` owns."""
        return int(self.offsets[part + 1] - self.offsets[part])

    def sizes(self) -> np.ndarray:
        """Vertices per part, int64 [P]."""
        return np.diff(self.offsets)

    def range(self, part: int) -> range:
        """The new ids that `part` owns."""
        return range(int(self.offsets[part]), int(self.offsets[part + 1]))

    def owner(self, new_ids: Any) -> Any:
        """Part of each new id, int64, shape of `new_ids`. Ids outside [0, N) are the caller's fault and give
        no part's number.
        """
        if _is_tensor(new_ids):
            import torch

            offsets = self._offsets_like(new_ids)
            return torch.searchsorted(offsets, new_ids.contiguous(), right=True) - 1
        return np.searchsorted(self.offsets, new_ids, side="right") - 1

    def local(self, new_ids: Any, part: Any) -> Any:
        """Rows inside their part, int64: `new_ids - offsets[part]`; `part` is one part or one per id."""
        if _is_tensor(new_ids):
            import torch

            offset = int(self.offsets[part]) if isinstance(part, int) else self._offsets_like(new_ids)[part]
            return new_ids.to(torch.int64) - offset
        return np.asarray(new_ids, dtype=np.int64) - self.offsets[part]

    def _offsets_like(self, ids: Any) -> Any:
        """The offsets on the tensor's device and in its dtype (searchsorted wants both alike), kept for the
        next call.
        """
        import torch

        key = (ids.device, ids.dtype)
        if key not in self._on_device:
            self._on_device[key] = torch.tensor(self.offsets, dtype=ids.dtype, device=ids.device)
        return self._on_device[key]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ownership) and np.array_equal(self.offsets, other.offsets)

    def __hash__(self) -> int:
        return hash(self.offsets.tobytes())

    def __repr__(self) -> str:
        return f"Ownership(offsets={self.offsets.tolist()})"

    def __reduce__(self) -> tuple:
        return Ownership, (self.offsets,)


def _is_tensor(ids: Any) -> bool:
    """Whether `ids` is a torch tensor; torch is imported only where one is met."""
    return not isinstance(ids, (np.ndarray, np.generic, int, list, tuple, range))


def ownership_from_assignment(
    part_of: np.ndarray, num_parts: int | None = None, hotness: np.ndarray | None = None
) -> tuple[Ownership, np.ndarray, np.ndarray]:
    """Number the vertices part by part, inside each part by descending `hotness`, then ascending original id.

    `part_of` integer [N]: part of each original id; `num_parts` counts empty last parts too (default: largest
    part + 1, at least 1); `hotness` [N], finite (default: all alike). Returns (ownership, original_of_new
    int64 [N], new_of_original int64 [N]). Raises UserError where a part is outside [0, num_parts).

    >>> ownership_from_assignment(np.array([1, 0, 1, 0]))
    (Ownership(offsets=[0, 2, 4]), array([1, 3, 0, 2]), array([2, 0, 3, 1]))
    >>> ownership_from_assignment(np.array([1, 0, 1, 0]), hotness=np.array([0.0, 2.0, 1.0, 3.0]))[1]
    array([3, 1, 2, 0])
    """
    part_of = np.asarray(part_of)
    if part_of.ndim != 1 or not (np.issubdtype(part_of.dtype, np.integer) or part_of.size == 0):
        raise wrong(
            "assignment",
            f"{part_of.dtype} {list(part_of.shape)}",
            "integers [N], a part for each vertex",
            "pass what assign() returns",
        )
    low, high = (int(part_of.min()), int(part_of.max())) if part_of.size else (0, 0)
    num_parts = high + 1 if num_parts is None else num_parts
    if low < 0 or high >= num_parts:
        raise wrong(
            "assignment",
            f"parts {low} to {high}",
            f"parts 0 to {num_parts - 1}",
            "pass what assign() returns for this number of parts",
        )
    # numpy sorts 16-bit integers by radix, so this stays linear for any sensible number of parts.
    keys = part_of.astype(np.int16 if num_parts <= 2**15 else np.int64)
    if hotness is None:
        original_of_new = np.argsort(keys, kind="stable")
    else:
        by_heat = np.argsort(-hotness, kind="stable")
        original_of_new = by_heat[np.argsort(keys[by_heat], kind="stable")]
    new_of_original = np.empty_like(original_of_new)
    new_of_original[original_of_new] = np.arange(len(part_of))
    offsets = np.zeros(num_parts + 1, dtype=np.int64)
    np.cumsum(np.bincount(keys, minlength=num_parts), out=offsets[1:])
    return Ownership(offsets), original_of_new, new_of_original
