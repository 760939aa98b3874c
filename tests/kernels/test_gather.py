"""gather: rows of a table and their gradient."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import gather, last_ran


def test_docstring_example():
    x = torch.tensor([[1.0], [2.0], [5.0]], requires_grad=True)
    out = gather(x, torch.tensor([2, 0, 2]))
    out.sum().backward()
    assert out.tolist() == [[5.0], [1.0], [5.0]]
    assert x.grad.tolist() == [[1.0], [0.0], [2.0]]
    assert last_ran("gather") == "torch"


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("tail", [(), (1,), (31,), (3, 5)])
def test_values_and_gradient_equal_loops(index, tail):
    x = torch.randn(6, *tail, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([5, 0, 0, 3, 5, 5, 1]).to(index)
    grad = torch.randn(7, *tail, dtype=torch.float64)
    out = gather(x, rows)
    out.backward(grad)
    expected = torch.zeros_like(x.detach())
    for i, row in enumerate(rows.tolist()):
        assert torch.equal(out[i], x[row])
        expected[row] += grad[i]
    torch.testing.assert_close(x.grad, expected, rtol=1e-14, atol=1e-14)


def test_integers_and_no_rows():
    ids = torch.arange(5) * 3
    assert gather(ids, torch.tensor([4, 4, 0])).tolist() == [12, 12, 0]
    x = torch.ones(4, 2, requires_grad=True)
    out = gather(x, torch.zeros(0, dtype=torch.int64))
    out.sum().backward()
    assert out.shape == (0, 2)
    assert x.grad.tolist() == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a09_gradient_of_a_row_read_4096_times(dtype):
    x = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    gather(x, torch.zeros(4096, dtype=torch.int64)).sum(dtype=torch.float32).backward()
    assert torch.equal(x.grad, torch.tensor([[4096.0] * 3, [0.0] * 3], dtype=dtype))


def test_a10_strided_table_and_expanded_gradient():
    base = torch.randn(5, 4, 2, dtype=torch.float64)
    rows = torch.tensor([2, 2, 0])
    for x in (base[:4, :, 1], base[:, :, 0].t(), torch.randn(1, 3).expand(4, 3)):
        leaf, plain = x.clone().requires_grad_(), x.contiguous().clone().requires_grad_()
        strided = leaf.t().contiguous().t()
        gather(strided, rows).sum().backward()
        gather(plain, rows).sum().backward()
        torch.testing.assert_close(gather(x, rows), x.contiguous()[rows], rtol=0, atol=0)
        torch.testing.assert_close(leaf.grad, plain.grad, rtol=0, atol=0)
