"""A store's parts put together are the dataset they were cut from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tgnn.data.synthetic import hand_drawn, sbm
from tgnn.partition.hotness import Hotness
from tgnn.partition.restore import dataset_of
from tgnn.partition.store import write_store


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["weighted multigraph", "sbm", "by hotness"])
def test_a_store_gives_its_dataset_back(tmp_path: Path, kind: str, parts: int):
    dataset = sbm(200, seed=3) if kind != "weighted multigraph" else hand_drawn(with_weights=True)
    n = dataset.num_vertices
    part_of = np.random.default_rng(0).integers(0, parts, n)
    hotness = None
    if kind == "by hotness":
        nothing = [(np.empty(0, np.int64), np.empty(0, np.float32))] * parts
        hotness = Hotness({}, np.random.default_rng(1).random(n).astype(np.float32), nothing)
    store = write_store(dataset, part_of, tmp_path / "store", num_parts=parts, presampled=hotness)
    found = dataset_of(store)
    for name in ("indptr", "indices", "edge_weight"):
        expected = getattr(dataset.graph, name)
        if expected is None:
            assert getattr(found.graph, name) is None
        else:
            np.testing.assert_array_equal(getattr(found.graph, name), expected)
    for name in ("x", "y", "train", "val", "test"):
        np.testing.assert_array_equal(getattr(found, name), getattr(dataset, name))
    assert (found.name, found.num_classes, found.options) == (
        dataset.name,
        dataset.num_classes,
        dataset.options,
    )
