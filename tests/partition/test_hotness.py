"""What presampling leaves in a store: the order of the vertices, their hotness, the rows that others ask for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tgnn.data.synthetic import hand_drawn
from tgnn.errors import UserError
from tgnn.partition import Hotness, Store, write_store

OPTIONS = {"fanouts": [3, 2], "batch_size": 4}
PARTS = np.arange(12) % 3


def hotness() -> Hotness:
    inputs = np.array([1, 5, 0, 2, 9, 0, 4, 4, 0, 0, 3, 1], np.float32)
    halo = [
        (np.array([4, 1, 7]), np.array([3.0, 1.0, 1.0], np.float32)),
        *[(np.zeros(0, int), np.zeros(0))] * 2,
    ]
    return Hotness(OPTIONS, inputs, halo)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_store(hand_drawn(with_weights=True), PARTS, tmp_path / "store", presampled=hotness())


def test_rows_are_hottest_first_and_hold_what_the_dataset_says(store: Store) -> None:
    dataset, original = hand_drawn(with_weights=True), store.original_ids()
    # Part 0 owns 0, 3, 6, 9 with hotness 1, 2, 4, 0; part 2 owns 2, 5, 8, 11 with 0, 0, 0, 1.
    assert store.part(0).original_id.tolist() == [6, 3, 0, 9]
    assert store.part(2).original_id.tolist() == [11, 2, 5, 8]
    for number in range(3):
        part = store.part(number)
        assert (np.diff(part.hotness) <= 0).all() and part.hotness.dtype == np.float32
        np.testing.assert_array_equal(part.hotness, hotness().inputs[part.original_id])
        np.testing.assert_array_equal(part.features, dataset.x[part.original_id])
        for row, vertex in enumerate(part.original_id):
            stored = slice(part.indptr[row], part.indptr[row + 1])
            given = slice(dataset.graph.indptr[vertex], dataset.graph.indptr[vertex + 1])
            # In-edges keep their order by original source id, whatever the order of the vertices.
            np.testing.assert_array_equal(original[part.indices[stored]], dataset.graph.indices[given])
            np.testing.assert_array_equal(part.edge_weight[stored], dataset.graph.edge_weight[given])


def test_splits_are_ascending_local_rows(store: Store) -> None:
    for split in ("train", "val", "test"):
        for number in range(3):
            assert (np.diff(getattr(store.part(number), split)) > 0).all()
        np.testing.assert_array_equal(store.split_ids(split), getattr(hand_drawn(), split))


def test_the_halo_is_kept_in_new_ids_most_requests_first(store: Store) -> None:
    part = store.part(0)
    assert part.halo_id.dtype == part.indices.dtype
    assert store.original_ids()[part.halo_id].tolist() == [4, 1, 7]
    assert part.halo_hotness.tolist() == [3.0, 1.0, 1.0]
    assert len(store.part(1).halo_id) == len(store.part(2).halo_hotness) == 0


def test_the_options_are_recorded_and_the_files_are_checked(store: Store) -> None:
    assert store.presampled == store.meta["presampled"] == OPTIONS
    victim = store.path / "part-0001" / "halo_id.npy"
    victim.unlink()
    with pytest.raises(UserError, match=r"part-0001/halo_id\.npy"):
        Store.open(store.path)


def test_a_store_that_was_not_presampled_has_no_hotness(tmp_path: Path) -> None:
    store = write_store(hand_drawn(), PARTS, tmp_path / "plain")
    part = store.part(0)
    assert store.presampled is part.hotness is part.halo_id is part.halo_hotness is None


def test_a_store_of_the_first_format_version_is_read_as_it_is(tmp_path: Path) -> None:
    store = write_store(hand_drawn(), PARTS, tmp_path / "old")
    meta = {key: value for key, value in store.meta.items() if key != "presampled"}
    (store.path / "store.json").write_text(json.dumps(meta | {"format_version": 1}))
    again = Store.open(store.path, verify=True)
    assert again.presampled is None
    np.testing.assert_array_equal(again.part(1).original_id, store.part(1).original_id)


@pytest.mark.parametrize(("vertices", "parts"), [(11, 3), (12, 2)])
def test_hotness_of_another_graph_or_partition_is_refused(tmp_path: Path, vertices: int, parts: int) -> None:
    full = hotness()
    other = Hotness(OPTIONS, full.inputs[:vertices], full.halo[:parts])
    with pytest.raises(UserError, match="presampled hotness"):
        write_store(hand_drawn(), PARTS, tmp_path / "store", presampled=other)
    assert list(tmp_path.iterdir()) == []
