"""unique and DirectTable against sorted sets."""

from __future__ import annotations

import sys

import pytest
import torch

from tgnn.kernels import DirectTable, last_ran, unique
from tgnn.kernels.unique import position_in

MODULE = sys.modules["tgnn.kernels.unique"]


def test_docstring_example():
    table = DirectTable(10)
    assert table.number(torch.tensor([7, 2]), torch.tensor([2, 9, 4, 9])).tolist() == [7, 2, 4, 9]
    assert table.lookup(torch.tensor([9, 2])).tolist() == [3, 1]
    assert last_ran("relabel") == "torch"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unique_is_sorted_and_keeps_the_type(dtype):
    ids = torch.tensor([5, 3, 5, 0, 2**31 - 1, 3], dtype=dtype)
    assert unique(ids).tolist() == [0, 3, 5, 2**31 - 1]
    assert unique(ids).dtype == dtype
    assert unique(ids[:0]).tolist() == []
    assert last_ran("unique") == "torch"


def test_position_in_inverts_unique():
    ids = torch.randint(0, 50, (200,), generator=torch.Generator().manual_seed(0))
    distinct = unique(ids)
    assert torch.equal(distinct[position_in(distinct, ids)], ids)


@pytest.mark.parametrize("slots_per_id", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scan_and_sort_give_the_same_numbers_call_after_call(monkeypatch, slots_per_id, dtype):
    monkeypatch.setattr(MODULE, "SCAN_SLOTS_PER_ID", slots_per_id)
    generator = torch.Generator().manual_seed(1)
    table = DirectTable(300)
    for n_first, n_others in [(5, 50), (0, 7), (40, 0), (0, 0), (300, 1000), (1, 1), (20, 600)]:
        first = torch.randperm(300, generator=generator)[:n_first].to(dtype)
        others = torch.randint(0, 300, (n_others,), generator=generator).to(dtype)
        expected = first.tolist() + sorted(set(others.tolist()) - set(first.tolist()))
        ids = table.number(first, others)
        assert ids.dtype == torch.int64
        assert ids.tolist() == expected
        every = torch.cat([first, others])
        numbers = table.lookup(every)
        assert numbers.dtype == torch.int32
        assert torch.equal(ids[numbers.long()], every.long())


def test_a14_numbering_does_not_depend_on_threads():
    generator = torch.Generator().manual_seed(2)
    first = torch.randperm(100_000, generator=generator)[:20_000]
    others = torch.randint(0, 100_000, (200_000,), generator=generator)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            table = DirectTable(100_000)
            found.append((table.number(first, others), table.lookup(others)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("slots_per_id", [0, 10**9], ids=["sorted", "scanned"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_distinct_and_number_as(monkeypatch, slots_per_id, dtype):
    monkeypatch.setattr(MODULE, "SCAN_SLOTS_PER_ID", slots_per_id)
    table = DirectTable(60)
    for seed in range(3):  # a table is clean after each call
        ids = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(seed)).to(dtype)
        found = table.distinct(ids)
        assert found.dtype == torch.int64 and found.tolist() == sorted(set(ids.tolist()))
        order = found.flip(0)
        table.number_as(order)
        assert torch.equal(order[table.lookup(ids).long()], ids.long())
    assert table.distinct(ids[:0]).tolist() == []
