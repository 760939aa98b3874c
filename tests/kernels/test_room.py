"""Room behind rows: found where there is some, left by the ops that allocate rows, and in nobody's way."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels.block import Block
from tgnn.kernels.gather import gather
from tgnn.kernels.room import first_rows, rounded_down, rounded_rows, rows_with_room, with_room
from tgnn.kernels.spmm import spmm

ROWS, ROUNDED = 1001, 1008


def test_rows_are_rounded_to_few_numbers():
    assert [rounded_rows(rows) for rows in range(512)] == list(range(512))
    numbers = [rounded_rows(rows) for rows in range(512, 1 << 15)]
    assert all(rows <= number < rows * 33 / 32 for rows, number in enumerate(numbers, start=512))
    # 32 of an octave.
    assert len(set(numbers)) <= 32 * 6 + 1
    assert rounded_rows(ROWS) == ROUNDED
    down = [rounded_down(rows) for rows in range(1, 1 << 15)]
    assert all(low <= rows for rows, low in enumerate(down, start=1))
    assert all(low == rows or rounded_rows(low + 1) >= rows for rows, low in enumerate(down, start=1))
    assert {low for low in down if low >= 512} <= {number for number in numbers}


def test_room_is_found_where_there_is_some():
    table = torch.arange(4002.0).view(2001, 2)
    assert with_room(table) is None  # 2016 rows
    assert with_room(table[1:1002]).shape == (ROUNDED, 2)
    assert torch.equal(with_room(table[993:1994]), table[993:])
    assert with_room(table[994:1995]) is None
    rows = rows_with_room(table, 1001)
    assert rows.shape == (1001, 2) and with_room(rows).shape == (ROUNDED, 2)
    assert not with_room(rows)[1001:].any()
    assert torch.equal(first_rows(table[7:], 3), table[7:10])
    assert torch.equal(first_rows(table[7:], 3).add_(1), table[7:10])


def test_gathered_and_summed_rows_have_room():
    table = torch.randn(1200, 8)
    rows = torch.randperm(1200)[:ROWS]
    picked = gather(table, rows)
    assert torch.equal(picked, table[rows])
    indptr = torch.cat(
        [torch.tensor([0]), torch.full((ROWS,), 3).index_fill(0, torch.tensor([1]), 0).cumsum(0)]
    )
    block = Block(indptr, torch.arange(3000), 3000)
    source = torch.randn(3000, 8, requires_grad=True)
    for reduce in ("sum", "mean"):
        summed = spmm(block, source, None, reduce)
        # In-place work on the result of a function whose rows were a view would be an error.
        summed = summed.mul_(2)
        right = source[:3].sum(0)
        torch.testing.assert_close(summed[0], 2 * right if reduce == "sum" else 2 / 3 * right)
        assert not summed[1].any() and len(summed) == ROWS
        for found in (picked, summed):
            assert with_room(found).shape == (ROUNDED, 8)
        summed.sum().backward()


def test_sums_have_gradients_of_gradients():
    block = Block(torch.tensor([0, 2, 2, 3]), torch.tensor([2, 1, 2]), 3)
    x = torch.randn(3, 4, requires_grad=True)
    for reduce in ("sum", "mean"):
        out = spmm(block, x, None, reduce)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(slope.square().sum(), x)
        matrix = torch.tensor([[0.0, 1, 1], [0, 0, 0], [0, 0, 1]])
        if reduce == "mean":
            matrix = matrix / torch.tensor([[2.0], [1], [1]])
        twice = matrix.t() @ matrix
        torch.testing.assert_close(found, 8 * twice @ twice @ x.detach())


@pytest.mark.parametrize("kind", ["sparse", "quantized", "vmap", "jvp", "strided"])
def test_gather_takes_what_index_select_takes(kind: str):
    x, rows = torch.randn(600, 4), torch.arange(599, -1, -1)
    if kind == "sparse":
        assert torch.equal(gather(x.to_sparse(), rows).to_dense(), x[rows])
    elif kind == "quantized":
        table = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
        assert torch.equal(gather(table, rows).int_repr(), table.int_repr()[rows])
    elif kind == "vmap":
        assert torch.equal(torch.func.vmap(lambda t: gather(t, rows))(x[None]), x[rows][None])
    elif kind == "jvp":
        assert torch.equal(torch.func.jvp(lambda t: gather(t, rows), (x,), (2 * x,))[1], 2 * x[rows])
    else:
        assert torch.equal(gather(x.t(), rows[596:]), x.t()[rows[596:]])
