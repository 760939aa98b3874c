"""gather_spmm, and the two-tier table of gather, on torch's own operations."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import Block, gather, gather_spmm, last_ran, spmm

BLOCK = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3)
ROWS = torch.tensor([2, 3, 0])


def test_docstring_example():
    table = torch.tensor([[5.0], [7.0], [1.0], [2.0]])
    expected = {"sum": [[7], [0]], "mean": [[3.5], [0]], "max": [[5], [0]], "min": [[2], [0]]}
    for reduce, values in expected.items():
        assert gather_spmm(BLOCK, table, ROWS, reduce=reduce).tolist() == values
        assert gather_spmm(BLOCK, table[:2], ROWS, reduce=reduce, rest=table[2:]).tolist() == values
    assert last_ran("gather_spmm") == "torch"


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("tail", [(5,), (2, 3)])
def test_values_and_gradients_equal_gather_then_spmm(random_block, reduce, tail):
    block = random_block()
    rows = torch.randint(0, 20, (block.n_src,))
    ours = [torch.randn(20, *tail).requires_grad_(), torch.randn(block.n_edges, *tail[:-1]).requires_grad_()]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    out = gather_spmm(block, ours[0], rows, ours[1], reduce)
    expected = spmm(block, theirs[0][rows], theirs[1], reduce)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape)
    out.backward(grad)
    expected.backward(grad)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_two_tiers(index):
    table = torch.arange(18).view(6, 3)
    rows = torch.tensor([5, 0, 0, 3, 2], dtype=index)
    for prefix in (0, 2, 6):
        assert torch.equal(gather(table[:prefix], rows, table[prefix:]), table[rows.long()])


def test_refusals():
    table = torch.ones(4, 3)
    for call, word in (
        (lambda: gather_spmm(BLOCK, table, ROWS, reduce="median"), "median"),
        (lambda: gather_spmm(BLOCK, table, ROWS[:2]), "rows"),
        (lambda: gather_spmm(BLOCK, table.long(), ROWS), "floating"),
        (lambda: gather_spmm(BLOCK, table, ROWS, torch.ones(3)), "weight"),
        (lambda: gather_spmm(BLOCK, table, ROWS, rest=torch.ones(2, 4)), "rest"),
        (lambda: gather(table.clone().requires_grad_(), ROWS, table), "gradient"),
        (lambda: gather(table, ROWS, table.double()), "float64"),
    ):
        with pytest.raises(UserError, match=word):
            call()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_a01_empty_blocks(empty_blocks, reduce):
    for block in empty_blocks:
        out = gather_spmm(block, torch.randn(9, 2), torch.arange(block.n_src), reduce=reduce)
        assert torch.equal(out, torch.zeros(block.n_dst, 2))
