"""gather by Triton kernels: any type and width, one memory or two, and the gradient."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import gather, last_ran, segment_triton

pytestmark = pytest.mark.usefixtures("triton_backend")
TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8,
         torch.bool, torch.complex128]  # fmt: skip


def table_of(n, tail, dtype):
    """Distinct rows of any type."""
    values = torch.randint(-100, 100, (n, *tail), generator=torch.Generator().manual_seed(n))
    return values > 0 if dtype == torch.bool else values.to(dtype)


def test_docstring_example(device):
    x = torch.tensor([[1.0], [2.0], [5.0]], device=device, requires_grad=True)
    rows = torch.tensor([2, 0, 2], device=device)
    out = gather(x, rows)
    out.sum().backward()
    assert out.tolist() == [[5.0], [1.0], [5.0]]
    assert x.grad.tolist() == [[1.0], [0.0], [2.0]]
    assert last_ran("gather") == "triton"
    x = x.detach()
    rest = x[2:].cpu() if device == "cpu" else x[2:].cpu().pin_memory()
    assert gather(x[:2], rows, rest).tolist() == [[5.0], [1.0], [5.0]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copies_rows(device, dtype, index):
    rows = torch.tensor([5, 0, 0, 3, 5, 5, 1], device=device).to(index)
    for tail in ((), (1,), (3,), (31,), (64,), (100,), (3, 5), (300,), (0,)):
        x = table_of(6, tail, dtype).to(device)
        out = gather(x, rows)
        assert out.dtype == dtype and torch.equal(out, x[rows.long()])
    assert last_ran("gather") == "triton"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_two_tiers(device, dtype, index):
    rows = torch.tensor([5, 0, 0, 3, 4, 2, 1], device=device).to(index)
    for tail in ((), (1,), (31,), (64,), (2, 3)):
        x = table_of(6, tail, dtype)
        for prefix in (0, 2, 6):
            rest = x[prefix:].clone() if device == "cpu" else x[prefix:].pin_memory()
            assert torch.equal(gather(x[:prefix].to(device), rows, rest).cpu(), x[rows.cpu().long()])


def test_two_tiers_refuse_what_does_not_fit(device):
    x, rows = torch.ones(2, 3, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for near, rest, word in (
        (x, torch.ones(2, 4), "shape"),
        (x, torch.ones(2, 3, dtype=torch.float64), "float64"),
        (x.clone().requires_grad_(), torch.ones(2, 3), "gradient"),
    ):
        with pytest.raises(UserError, match=word):
            gather(near, rows, rest)


@pytest.mark.parametrize("piece", [4, 512])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "dtype, tail",
    [(torch.float32, (1,)), (torch.float16, (31,)), (torch.bfloat16, (64,)), (torch.float32, (3, 5)),
     (torch.float64, ())],
)  # fmt: skip
def test_gradient(assert_near, monkeypatch, device, piece, index, dtype, tail):
    monkeypatch.setattr(segment_triton, "PIECE", piece)
    x = torch.randn(6, *tail, device=device).to(dtype).requires_grad_()
    rows = torch.tensor([5, 0, 0, 3, 5, 5, 1, 5, 5, 5, 0, 5, 5], device=device).to(index)
    grad = torch.randn(len(rows), *tail, device=device).to(dtype)
    gather(x, rows).backward(grad)
    expected = torch.zeros(6, *tail, dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        expected[row] += grad[i].cpu().double()
    assert_near(x.grad, expected)
    assert last_ran("gather") == "triton"


def test_a07_no_rows(device):
    for n in (4, 0):
        x = torch.ones(n, 2, device=device, requires_grad=True)
        out = gather(x, torch.zeros(0, dtype=torch.int64, device=device))
        out.sum().backward()
        assert out.shape == (0, 2)
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a09_gradient_of_a_row_read_4096_times(device, dtype):
    x = torch.ones(2, 3, dtype=dtype, device=device, requires_grad=True)
    gather(x, torch.zeros(4096, dtype=torch.int64, device=device)).sum(dtype=torch.float32).backward()
    assert x.grad.tolist() == [[4096.0] * 3, [0.0] * 3]


def test_a10_strided_table_rows_and_expanded_gradient(device):
    base = torch.randn(5, 4, 2, device=device)
    rows = torch.tensor([[2, 9], [2, 9], [0, 9]], device=device)[:, 0]
    row = torch.randn(1, 3, device=device)
    for x in (base[:4, :, 1], base[:, :, 0].t(), row.expand(4, 3), base[..., 0][:, 1:3]):
        strided = x.detach().requires_grad_()
        out = gather(strided, rows)
        out.sum().backward()
        assert torch.equal(out, x[rows])
        expected = torch.zeros_like(x.contiguous())
        expected[0], expected[2] = 1, 2
        assert torch.equal(strided.grad, expected)
