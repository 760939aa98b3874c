"""Feature rows out of caches and files; copies of other ranks' rows; how much memory these may take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tgnn.data.synthetic import sbm
from tgnn.errors import UserError
from tgnn.partition.hotness import Hotness
from tgnn.partition.store import Store, write_store
from tgnn.sampling import placement
from tgnn.sampling.features import HaloCache, PartColumn, hottest_remote
from tgnn.sampling.loader import Loader
from tgnn.sampling.placement import Budget, feature_budget, free_bytes, halo_budget, placement_of_edges

CPU = torch.device("cpu")
WIDTH = 6
ROW = 4 * WIDTH


def arrays(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal((length, WIDTH)).astype(np.float32) for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("budget", [0, 5 * ROW, 10**6], ids=["none", "some", "all"])
@pytest.mark.parametrize("lengths", [(20,), (7, 0, 13)], ids=["one part", "three parts"])
def test_rows_are_the_same_wherever_they_lie(lengths: tuple[int, ...], budget: int, dtype: torch.dtype):
    tables = arrays(*lengths)
    column = PartColumn(tables, dtype)
    column.place(Budget(budget), CPU)
    rows = torch.tensor([19, 0, 3, 3, 11, 6, 7])
    expected = torch.from_numpy(np.concatenate(tables))[rows].to(dtype)
    torch.testing.assert_close(column.load(rows), expected, rtol=0, atol=0)
    out = column.empty(9, CPU).fill_(torch.nan)
    column.load(rows, CPU, out=out[2:])
    torch.testing.assert_close(out[2:], expected, rtol=0, atol=0)
    assert out[:2].isnan().all() and out.dtype == dtype
    assert column.load(rows[:0]).shape == (0, WIDTH)


def test_a_cache_holds_first_rows_and_counts_its_hits():
    column = PartColumn(arrays(10, 6))
    rows = torch.tensor([0, 2, 3, 9, 10, 12, 13])
    assert (column.cached_rows, column.hits(rows)) == (0, 0)
    column.place(Budget(6 * ROW), CPU)  # three rows of each part
    assert (column.cached_rows, column.hits(rows)) == (6, 4)
    column.place(Budget(16 * ROW - 1, whole=True), CPU)
    assert column.cached_rows == 0
    column.place(Budget(16 * ROW, whole=True), CPU)
    assert (column.cached_rows, column.hits(rows)) == (16, 7)


def test_narrower_rows_take_less_of_the_cache():
    column = PartColumn(arrays(10), torch.bfloat16)
    column.place(Budget(6 * ROW // 2), CPU)
    assert (column.cached_rows, column.row_bytes) == (6, ROW // 2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Three parts; part 0 asked most for original ids 40, 10 and 70, in this order."""
    dataset = sbm(90, seed=0)
    part_of = np.arange(90) // 30
    nothing = (np.empty(0, np.int64), np.empty(0, np.float32))
    asked = (np.array([40, 70, 35]), np.array([3.0, 2.0, 1.0], np.float32))
    hotness = Hotness({}, np.arange(90, dtype=np.float32), [asked, nothing, nothing])
    return write_store(dataset, part_of, tmp_path / "store", num_parts=3, presampled=hotness)


def test_a_halo_cache_has_the_rows_asked_for_most(store: Store):
    row = 4 * store.num_features
    cache = HaloCache(store, 0, 2 * row + 1, CPU)
    assert sorted(cache.original_id.tolist()) == [40, 70]
    assert cache.new_id.tolist() == sorted(cache.new_id.tolist())
    original = torch.from_numpy(store.original_ids())
    torch.testing.assert_close(original[cache.new_id], cache.original_id, rtol=0, atol=0)
    features = np.concatenate([store.part(part).features for part in range(3)])
    torch.testing.assert_close(cache.rows, torch.from_numpy(features)[cache.new_id], rtol=0, atol=0)
    asking = torch.arange(30, 90)
    is_here, rows = cache.find(asking)
    torch.testing.assert_close(asking[is_here], cache.new_id[rows], rtol=0, atol=0)
    assert int(is_here.sum()) == 2
    empty = HaloCache(store, 1, 10**6, CPU)
    assert len(empty) == 0 and not empty.find(asking)[0].any()


def test_a_store_without_presampling_is_judged_by_its_edges(tmp_path: Path):
    dataset = sbm(90, seed=0)
    store = write_store(dataset, np.arange(90) // 45, tmp_path / "plain", num_parts=2)
    found, part = hottest_remote(store, 0), store.part(0)
    counts = np.bincount(part.indices, minlength=90)
    assert (np.diff(counts[found]) <= 0).all() and (found >= 45).all()
    assert set(found) == set(np.unique(part.indices[part.indices >= 45]))


def test_budgets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "free_bytes", lambda: 1000)
    assert feature_budget(None, CPU, 2) == Budget(50, whole=True)
    assert feature_budget(70, CPU, 2) == Budget(70)
    assert halo_budget(None, CPU, 2) == 50 and halo_budget(7, CPU, 2) == 7
    gpu = torch.device("cuda")
    assert feature_budget(None, gpu, 2) == Budget(0, 250) and feature_budget(9, gpu, 1) == Budget(9, 500)
    assert halo_budget(None, gpu, 2) == 0
    assert placement_of_edges("auto", 10**12, CPU) == "device"
    assert placement_of_edges("pinned", 1, gpu) == "pinned"


def test_free_memory_is_less_than_there_is():
    assert 0 < free_bytes() < 2**50


def test_placement_of_a_loader_and_wrong_ones(store: Store, tmp_path: Path):
    whole = write_store(sbm(90, seed=0), np.zeros(90, np.int32), tmp_path / "whole")
    found = Loader(whole, [2], feature_cache=10**6).placement()
    assert found["graph"] == "cpu" and found["feature_cache_bytes"] == 90 * 4 * whole.num_features
    assert found["graph_bytes"] >= 4 * whole.num_edges
    with pytest.raises(
        UserError, match="^graph_placement: got pinned for ranks on the CPU, expected auto or device"
    ):
        Loader(whole, [2], graph_placement="pinned")
    with pytest.raises(UserError, match="^graph_placement: got 'disk', expected auto or device or pinned"):
        Loader(whole, [2], graph_placement="disk")
