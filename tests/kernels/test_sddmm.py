"""sddmm against loops in float64."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import Block, last_ran, sddmm, segment


def reference(block: Block, dst: torch.Tensor, src: torch.Tensor, op: str) -> torch.Tensor:
    values = []
    for v in range(block.n_dst):
        for e in range(int(block.indptr[v]), int(block.indptr[v + 1])):
            a, b = dst[v].double(), src[int(block.indices[e])].double()
            values.append((a * b).sum(-1) if op == "dot" else a + b)
    return torch.stack(values)


def inputs(
    block: Block, op: str, heads: int, width: int, dtype=torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    tail = (heads, width) if op == "dot" else (heads,)
    make = [
        torch.randn(n, *tail, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (block.n_dst, block.n_src)
    ]
    return make[0], make[1]


def test_docstring_example():
    block = Block(indptr=torch.tensor([0, 2]), indices=torch.tensor([1, 2]), n_src=3)
    out = sddmm(block, torch.tensor([[10.0]]), torch.tensor([[1.0], [2.0], [5.0]]), "add")
    assert out.tolist() == [[12.0], [15.0]]
    assert last_ran("sddmm") == "torch"


@pytest.mark.parametrize("op", ["dot", "add"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [1, 3, 31, 64, 100])
@pytest.mark.parametrize("limit", [1 << 25, 40])
def test_values_and_gradients(random_block, monkeypatch, op, heads, width, limit):
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", limit)
    block = random_block(seed=width, dtype=torch.int32)
    dst, src = inputs(block, op, heads, width)
    grad = torch.randn(block.n_edges, heads, dtype=torch.float64)
    out = sddmm(block, dst, src, op)
    expected = reference(block, dst, src, op)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(out, (dst, src), grad)
    for a, b in zip(found, torch.autograd.grad(expected, (dst, src), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", ["dot", "add"])
def test_gradcheck(random_block, op):
    block = random_block(n_dst=4, n_src=5, most=2)
    assert torch.autograd.gradcheck(lambda a, b: sddmm(block, a, b, op), inputs(block, op, 2, 3))


@pytest.mark.parametrize("op", ["dot", "add"])
def test_a07_empty_blocks(empty_blocks, op):
    for block in empty_blocks:
        dst, src = inputs(block, op, 2, 3)
        out = sddmm(block, dst, src, op)
        out.sum().backward()
        assert out.shape == (0, 2)
        assert torch.equal(dst.grad, torch.zeros_like(dst))
        assert torch.equal(src.grad, torch.zeros_like(src))


@pytest.mark.parametrize("op", ["dot", "add"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a09_half_types_accumulate_in_float32(op, dtype):
    star = Block(indptr=torch.tensor([0, 4096]), indices=torch.zeros(4096, dtype=torch.int64), n_src=1)
    tail = (1, 1) if op == "dot" else (1,)
    dst, src = (torch.ones(1, *tail, dtype=dtype, requires_grad=True) for _ in range(2))
    sddmm(star, dst, src, op).backward(torch.ones(4096, 1, dtype=dtype))
    assert dst.grad.item() == src.grad.item() == 4096
    if op == "dot":
        pair = Block(indptr=torch.tensor([0, 2]), indices=torch.zeros(2, dtype=torch.int64), n_src=1)
        wide = torch.ones(1, 1, 4096, dtype=dtype)
        assert torch.equal(sddmm(pair, wide, wide), torch.full((2, 1), 4096.0, dtype=dtype))


@pytest.mark.parametrize("op", ["dot", "add"])
def test_a10_strided_inputs_and_expanded_gradients(random_block, op):
    block = random_block()
    if op == "dot":
        dst = torch.randn(3, block.n_dst, 2, dtype=torch.float64).permute(1, 2, 0)
        src = torch.randn(block.n_src, 2, 6, dtype=torch.float64)[:, :, ::2]
    else:
        dst = torch.randn(2, block.n_dst, dtype=torch.float64).t()
        src = torch.randn(block.n_src, 1, dtype=torch.float64).expand(-1, 2)
    results = []
    for pair in ((dst, src), (dst.contiguous(), src.contiguous())):
        leaves = [t.detach().requires_grad_() for t in pair]
        out = sddmm(block, *leaves, op)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_wrong_arguments_are_named(random_block):
    block = random_block()
    dst, src = inputs(block, "dot", 2, 3)
    with pytest.raises(UserError, match="'dot' or 'add'"):
        sddmm(block, dst, src, "mul")
    with pytest.raises(UserError, match="one row per vertex"):
        sddmm(block, src, dst)
    with pytest.raises(UserError, match="one row per vertex"):
        sddmm(block, dst, src, "add")
