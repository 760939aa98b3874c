"""unique and DirectTable on Triton: the ids and numbers of the torch path."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import DirectTable, last_ran, unique, use_backend


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("n", "reach"), [(0, 1), (1, 1), (513, 1), (600, 40), (700, 2**31 - 1)])
def test_unique_equals_torch(n: int, reach: int, dtype: torch.dtype, device: str, triton_backend: None):
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(-reach, reach, (n,), generator=generator).to(dtype)
    found = unique(ids.to(device))
    assert last_ran("unique") == "triton"
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), torch.unique(ids))


def test_unique_of_strided_and_of_colliding_ids(device: str, triton_backend: None):
    ids = torch.arange(400).view(200, 2)[:, 0] * (1 << 40)
    assert torch.equal(unique(torch.cat([ids, ids]).to(device)).cpu(), ids)
    assert torch.equal(unique(ids.to(device)).cpu(), ids)


@pytest.mark.parametrize("size", [60, 40_000])  # found by scanning the flags, and by sorting the winners
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_direct_table_equals_torch_call_after_call(size: int, dtype: torch.dtype, device: str):
    expected, found = DirectTable(size), DirectTable(size, device)
    generator = torch.Generator().manual_seed(size)
    for m, n in ((2, 4), (0, 50), (40, 0), (0, 0), (30, 600)):
        first = torch.randperm(size, generator=generator)[:m]
        others = torch.randint(0, size, (n,), generator=generator).to(dtype)
        right = expected.number(first, others)
        with use_backend("triton"):
            ids = found.number(first.to(device), others.to(device))
        assert last_ran("relabel") == "triton"
        assert ids.dtype == torch.int64
        assert torch.equal(ids.cpu(), right)
        assert found.lookup(ids).tolist() == list(range(len(right)))


def test_docstring_example(device: str, triton_backend: None):
    table = DirectTable(10, device)
    ids = table.number(torch.tensor([7, 2], device=device), torch.tensor([2, 9, 4, 9], device=device))
    assert ids.tolist() == [7, 2, 4, 9]
    assert table.lookup(torch.tensor([9, 2], device=device)).tolist() == [3, 1]
