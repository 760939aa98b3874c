"""The dataset that a store was made of, put together again from its parts."""

from __future__ import annotations

import numpy as np

from tgnn.data.graph import Dataset, Graph
from tgnn.partition.store import SPLITS, Store


def dataset_of(store: Store) -> Dataset:
    """All parts of `store` as one Dataset, in original ids; it takes the whole dataset's memory.

    Edges have the order they had: an in-edge's position is the same in every partitioning.
    """
    parts = [store.part(number) for number in range(store.num_parts)]
    original = store.original_ids()
    place = np.argsort(original)  # new id of every original id
    degree = np.concatenate([np.diff(part.indptr) for part in parts])[place]
    indptr = np.concatenate([[0], np.cumsum(degree)])
    indices = np.empty(int(indptr[-1]), parts[0].indices.dtype)
    weight = np.empty(len(indices), np.float32) if store.has_edge_weight else None
    for part in parts:
        edges = _ranges(indptr[part.original_id], np.diff(part.indptr))
        indices[edges] = original[part.indices]
        if weight is not None:
            weight[edges] = part.edge_weight

    def column(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)[place]

    return Dataset(
        store.name, Graph.from_csr(indptr, indices, weight), column("features"), column("labels"),
        *(store.split_ids(split) for split in SPLITS), num_classes=store.num_classes or None,
        options=store.meta["options"].get("dataset", {}), original_names=store.original_names(),
    )  # fmt: skip


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers starts[i] .. starts[i] + lengths[i] - 1, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
