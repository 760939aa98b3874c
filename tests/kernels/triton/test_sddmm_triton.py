"""sddmm by Triton kernels against float64: values and both gradients."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import Block, last_ran, sddmm, segment_triton

pytestmark = pytest.mark.usefixtures("triton_backend")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64
DOT_CASES = [
    (F32, I32, (1, 1)), (F32, I64, (3, 3)), (F16, I32, (1, 31)), (BF16, I64, (3, 64)), (F32, I32, (1, 100)),
    (F64, I64, (3, 31)), (F16, I64, (3, 1)), (BF16, I32, (1, 3)), (F32, I64, (2, 300)),
]  # fmt: skip
ADD_CASES = [
    (F32, I32, (1,)), (F32, I64, (3,)), (F16, I32, (3,)), (BF16, I64, (1,)), (F64, I32, (31,)),
    (F32, I64, (64,)), (BF16, I32, (100,)),
]  # fmt: skip


def reference(block, dst, src, op):
    ends = dst[block.dst_rows], src[block.indices.long()]
    return (ends[0] * ends[1]).sum(-1) if op == "dot" else ends[0] + ends[1]


def check(block, dst, src, op, assert_near, device):
    ours = [t.detach().to(device).requires_grad_() for t in (dst, src)]
    wide = [t.detach().double().requires_grad_() for t in (dst, src)]
    out, expected = sddmm(block.to(device), *ours, op), reference(block, *wide, op)
    assert out.dtype == src.dtype and last_ran("sddmm") == "triton"
    grad = torch.randn(out.shape, dtype=F64).to(out.dtype)
    out.backward(grad.to(device))
    expected.backward(grad.double())
    assert_near(out, expected)
    for got, wanted in zip(ours, wide, strict=True):
        assert_near(got.grad, wanted.grad)


def test_docstring_examples(device):
    block = Block(indptr=torch.tensor([0, 2]), indices=torch.tensor([1, 2]), n_src=3).to(device)
    dst, src = torch.tensor([[10.0]], device=device), torch.tensor([[1.0], [2.0], [5.0]], device=device)
    assert sddmm(block, dst, src, "add").tolist() == [[12.0], [15.0]]
    assert sddmm(block, dst[:, None], src[:, None], "dot").tolist() == [[20.0], [50.0]]
    assert last_ran("sddmm") == "triton"


@pytest.mark.parametrize("piece", [4, 512])
@pytest.mark.parametrize(
    "op, dtype, index, tail", [("dot", *case) for case in DOT_CASES] + [("add", *case) for case in ADD_CASES]
)
def test_values_and_gradients(random_block, assert_near, monkeypatch, device, op, dtype, index, tail, piece):
    monkeypatch.setattr(segment_triton, "PIECE", piece)
    block = random_block(dtype=index, seed=tail[-1])
    dst, src = torch.randn(block.n_dst, *tail).to(dtype), torch.randn(block.n_src, *tail).to(dtype)
    check(block, dst, src, op, assert_near, device)


@pytest.mark.parametrize("op, tail", [("dot", (2, 3)), ("add", (2,))])
def test_a01_a07_empty_blocks(empty_blocks, device, op, tail):
    for block in empty_blocks:
        dst = torch.randn(block.n_dst, *tail, device=device, requires_grad=True)
        src = torch.randn(block.n_src, *tail, device=device, requires_grad=True)
        out = sddmm(block.to(device), dst, src, op)
        out.sum().backward()
        assert out.shape == (0, 2)
        assert not dst.grad.any() and not src.grad.any()
        assert dst.grad.shape == dst.shape and src.grad.shape == src.shape


def test_a01_rows_without_edges_have_no_gradient(assert_near, device):
    block = Block(indptr=torch.tensor([0, 0, 1, 1, 1]), indices=torch.tensor([0]), n_src=4)
    for op, tail in (("dot", (1, 5)), ("add", (3,))):
        check(block, torch.randn(4, *tail), torch.randn(4, *tail), op, assert_near, device)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a09_sums_of_4096(device, dtype):
    star = Block(indptr=torch.tensor([0, 4096]), indices=torch.arange(4096) % 2, n_src=2).to(device)
    dst = torch.ones(1, 1, dtype=dtype, device=device, requires_grad=True)
    src = torch.ones(2, 1, dtype=dtype, device=device, requires_grad=True)
    sddmm(star, dst, src, "add").backward(torch.ones(4096, 1, dtype=dtype, device=device))
    assert dst.grad.tolist() == [[4096]] and src.grad.tolist() == [[2048], [2048]]
    one_edge = Block(indptr=torch.tensor([0, 1]), indices=torch.tensor([0]), n_src=1).to(device)
    wide = torch.ones(1, 1, 4096, dtype=dtype, device=device)
    assert sddmm(one_edge, wide, wide, "dot").item() == 4096


@pytest.mark.parametrize("op", ["dot", "add"])
def test_a10_strided_inputs_and_expanded_gradient(random_block, device, op):
    block = random_block(n_dst=4, n_src=4).to(device)
    base = torch.randn(4, 5, 2, device=device)
    x = base.transpose(1, 2) if op == "dot" else base[:, :, 1]
    strided = [x.detach().requires_grad_(), x.detach().requires_grad_()]
    plain = [x.contiguous().clone().requires_grad_() for _ in range(2)]
    out, expected = sddmm(block, *strided, op), sddmm(block, *plain, op)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    ours = torch.autograd.grad(out.sum(), strided)
    theirs = torch.autograd.grad((expected * torch.ones_like(expected)).sum(), plain)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
