"""spmm against loops in float64: values, both gradients, ties, half types, strides, empties."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import Block, last_ran, segment, spmm

REDUCTIONS = ("sum", "mean", "max", "min")
STAR = Block(indptr=torch.tensor([0, 4096]), indices=torch.arange(4096), n_src=4096)
REVERSE_STAR = Block(indptr=torch.arange(4097), indices=torch.zeros(4096, dtype=torch.int64), n_src=4096)


def reference(block: Block, x: torch.Tensor, weight: torch.Tensor | None, reduce: str) -> torch.Tensor:
    """float64 [n_dst, ...], one edge after the other, differentiable; ties keep the edge that came first."""
    x = x.double()
    rows = []
    for v in range(block.n_dst):
        total = torch.zeros(x.shape[1:], dtype=torch.float64)
        edges = range(int(block.indptr[v]), int(block.indptr[v + 1]))
        for e in edges:
            message = x[int(block.indices[e])]
            if weight is not None:
                message = message * weight[e].double()[..., None]
            if reduce in ("sum", "mean"):
                total = total + message
            elif e == edges.start:
                total = message
            else:
                total = torch.where(message > total if reduce == "max" else message < total, message, total)
        rows.append(total / len(edges) if reduce == "mean" and len(edges) else total)
    return torch.stack(rows) if rows else torch.zeros(0, *x.shape[1:], dtype=torch.float64)


def check(block, x, weight, reduce, tolerance):
    """Values and gradients of spmm against the reference, with a random incoming gradient."""
    pairs = [(x.detach().clone().requires_grad_(), x.detach().clone().double().requires_grad_())]
    if weight is not None:
        w = weight.detach().clone()
        pairs.append((w.clone().requires_grad_(), w.double().clone().requires_grad_()))
    ours, theirs = zip(*pairs, strict=True)
    out = spmm(block, ours[0], ours[1] if weight is not None else None, reduce)
    expected = reference(block, theirs[0], theirs[1] if weight is not None else None, reduce)
    assert last_ran("spmm") == "torch"
    assert out.dtype == x.dtype
    grad = torch.randn(expected.shape, dtype=torch.float64).to(x.dtype)
    close = {
        "rtol": tolerance,
        "atol": tolerance * max(1.0, expected.abs().max().item() if len(expected) else 1.0),
    }
    torch.testing.assert_close(out.double(), expected, **close)
    out.backward(grad)
    (expected * grad.double()).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        scale = tolerance * max(1.0, b.grad.abs().max().item() if b.grad.numel() else 1.0)
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=tolerance, atol=scale)


def test_docstring_example():
    block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3)
    x = torch.tensor([[1.0], [2.0], [5.0]])
    expected = {"sum": [[7], [0]], "mean": [[3.5], [0]], "max": [[5], [0]], "min": [[2], [0]]}
    for reduce, values in expected.items():
        assert spmm(block, x, reduce=reduce).tolist() == values
    assert last_ran("spmm") == "torch"


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 3, 31, 64, 100])
def test_two_dimensional(random_block, reduce, weighted, width):
    for index, dtype, tolerance in [(torch.int32, torch.float64, 1e-12), (torch.int64, torch.float32, 1e-5)]:
        block = random_block(dtype=index, seed=width)
        weight = torch.randn(block.n_edges).to(dtype) if weighted else None
        check(block, torch.randn(block.n_src, width).to(dtype), weight, reduce, tolerance)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [1, 5])
def test_heads(random_block, reduce, weighted, heads, width):
    block = random_block(seed=heads)
    weight = torch.randn(block.n_edges, heads, dtype=torch.float64) if weighted else None
    check(block, torch.randn(block.n_src, heads, width, dtype=torch.float64), weight, reduce, 1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_half_types_round_once(random_block, reduce, dtype, weighted):
    block = random_block(n_dst=12, most=9, seed=3)
    weight = torch.rand(block.n_edges) if weighted else None
    check(block, torch.randn(block.n_src, 31).to(dtype), weight, reduce, torch.finfo(dtype).eps)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_runs_of_bounded_size_change_nothing(random_block, monkeypatch, reduce, weighted):
    block = random_block(n_dst=20, most=5, seed=5)
    weight = torch.randn(block.n_edges, dtype=torch.float64, requires_grad=True) if weighted else None
    x = torch.randn(block.n_src, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(20, 3, dtype=torch.float64)
    inputs = [x] if weight is None else [x, weight]
    found = []
    for limit in (1 << 25, 20, 1):
        monkeypatch.setattr(segment, "CHUNK_ELEMENTS", limit)
        out = spmm(block, x, weight, reduce)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for small in found[1:]:
        for a, b in zip(small, found[0], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradcheck(random_block, reduce):
    block = random_block(n_dst=4, n_src=5, most=3, seed=1)
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(block.n_edges, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: spmm(block, a, b, reduce), (x, weight))
    assert torch.autograd.gradcheck(lambda a: spmm(block, a[:, 0], None, reduce), (x,))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_ties_give_the_whole_gradient_to_the_lowest_position(reduce):
    # Sources 2 and 1 tie in row 0, with 2 first; row 1 reads source 0 twice.
    block = Block(indptr=torch.tensor([0, 3, 5]), indices=torch.tensor([2, 1, 2, 0, 0]), n_src=3)
    x = torch.tensor([[4.0], [7.0], [7.0]], requires_grad=True)
    weight = torch.ones(5, requires_grad=True)
    out = spmm(block, x, weight, reduce)
    out.backward(torch.tensor([[10.0], [1.0]]))
    assert out.tolist() == [[7.0], [4.0]]
    assert x.grad.tolist() == [[1.0], [0.0], [10.0]]
    assert weight.grad.tolist() == [70.0, 0.0, 0.0, 4.0, 0.0]


def test_max_of_infinities_and_negative_numbers():
    block = Block(indptr=torch.tensor([0, 2, 3, 3]), indices=torch.tensor([0, 1, 0]), n_src=2)
    x = torch.tensor([[float("-inf")], [-3.0]])
    assert spmm(block, x, reduce="max").tolist() == [[-3.0], [float("-inf")], [0.0]]
    assert spmm(block, -x, reduce="min").tolist() == [[3.0], [float("inf")], [0.0]]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a01_nodes_nobody_points_at(reduce):
    block = Block(indptr=torch.tensor([0, 0, 1, 1, 1]), indices=torch.tensor([0]), n_src=4)
    x = torch.randn(4, 3, requires_grad=True)
    out = spmm(block, x, reduce=reduce)
    out.sum().backward()
    assert torch.equal(out[[0, 2, 3]], torch.zeros(3, 3))
    assert torch.equal(out[1], x[0])
    assert torch.equal(x.grad, torch.tensor([[1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("tail", [(3,), (0,), (2, 3), (2, 0)])
def test_a07_empty_blocks_and_widths(random_block, empty_blocks, reduce, tail):
    for block in [*empty_blocks, random_block()] if tail[-1] == 0 else empty_blocks:
        x = torch.ones(block.n_src, *tail, requires_grad=True)
        weight = torch.ones(block.n_edges, *tail[:-1], requires_grad=True)
        for w in (None, weight):
            out = spmm(block, x, w, reduce)
            out.sum().backward()
            assert torch.equal(out, torch.zeros(block.n_dst, *tail))
            assert torch.equal(x.grad, torch.zeros(block.n_src, *tail))
        assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a09_star_of_4096_ones(dtype, weighted):
    weight = torch.ones(4096) if weighted else None
    for reduce, value in (("sum", 4096.0), ("mean", 1.0)):
        x = torch.ones(4096, 5, dtype=dtype, requires_grad=True)
        out = spmm(STAR, x, weight, reduce)
        out.backward(torch.ones(1, 5, dtype=dtype))
        assert torch.equal(out, torch.full((1, 5), value, dtype=dtype))
        assert torch.equal(x.grad, torch.full((4096, 5), 1.0 if reduce == "sum" else 1 / 4096, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a09_reverse_star_accumulates_gradients_in_float32(dtype, reduce, weighted):
    weight = torch.ones(4096) if weighted else None
    x = torch.ones(4096, 3, dtype=dtype, requires_grad=True)
    spmm(REVERSE_STAR, x, weight, reduce).backward(torch.ones(4096, 3, dtype=dtype))
    assert torch.equal(x.grad[0], torch.full((3,), 4096.0, dtype=dtype))
    assert torch.equal(x.grad[1:], torch.zeros(4095, 3, dtype=dtype))


def test_a09_mean_over_a_hub_whose_sum_exceeds_float16():
    for heads in (False, True):
        x = torch.full((4096, 2, 3) if heads else (4096, 3), 100.0, dtype=torch.float16, requires_grad=True)
        out = spmm(STAR, x, reduce="mean")
        assert torch.equal(out, torch.full(out.shape, 100.0, dtype=torch.float16))
    # The divided gradient, 2^-13 / 4096, is below float16's smallest number; 4096 of them are 2^-13 again.
    pairs = Block(indptr=torch.tensor([0, 4096]), indices=torch.zeros(4096, dtype=torch.int64), n_src=1)
    x = torch.ones(1, 3, dtype=torch.float16, requires_grad=True)
    spmm(pairs, x, reduce="mean").backward(torch.full((1, 3), 2.0**-13, dtype=torch.float16))
    assert torch.equal(x.grad, torch.full((1, 3), 2.0**-13, dtype=torch.float16))


def test_a09_gradient_of_weights_is_summed_in_float32():
    block = Block(indptr=torch.tensor([0, 1]), indices=torch.tensor([0]), n_src=1)
    for reduce in REDUCTIONS:
        weight = torch.ones(1, requires_grad=True)
        spmm(block, torch.ones(1, 4097, dtype=torch.bfloat16), weight, reduce).sum(
            dtype=torch.float32
        ).backward()
        assert weight.grad.item() == 4097


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a10_strided_inputs_and_expanded_gradients(reduce):
    block = Block(indptr=torch.tensor([0, 2, 3, 3, 5]), indices=torch.tensor([1, 2, 0, 3, 3]), n_src=4)
    base = torch.randn(4, 5, 2, dtype=torch.float64)
    strided = [
        base[:, :, 1],
        torch.randn(5, 4, dtype=torch.float64).t(),
        torch.randn(4, 1).double().expand(4, 5),
    ]
    weights = torch.randn(5, 2, dtype=torch.float64)[:, 1]
    for x in [*strided, base, base.transpose(1, 2)]:
        w = weights if x.dim() == 2 else torch.randn(x.shape[1], 5, dtype=torch.float64).t()
        results = []
        for inputs in ((x, w), (x.contiguous(), w.contiguous())):
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = spmm(block, *leaves, reduce)
            results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a14_same_bits_on_every_run_and_number_of_threads(random_block, reduce):
    block = random_block(n_dst=400, n_src=300, most=20, seed=8)
    x = torch.randn(300, 64, requires_grad=True)
    weight = torch.rand(block.n_edges, requires_grad=True)
    grad = torch.randn(400, 64)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 1, 2):
            torch.set_num_threads(threads)
            out = spmm(block, x, weight, reduce)
            found.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert torch.equal(a, b)


def test_a_hub_of_100000_edges():
    hub = Block(indptr=torch.tensor([0, 100_000]), indices=torch.arange(100_000) % 7, n_src=7)
    x = torch.randn(7, 3, dtype=torch.float64)
    counts = torch.bincount(hub.indices, minlength=7).double()
    torch.testing.assert_close(spmm(hub, x)[0], counts @ x, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(spmm(hub, x, reduce="max")[0], x.amax(0), rtol=0, atol=0)


def test_wrong_arguments_are_named(random_block):
    block = random_block()
    x = torch.ones(block.n_src, 2)
    with pytest.raises(UserError, match="one of sum, mean, max, min"):
        spmm(block, x, reduce="median")
    with pytest.raises(UserError, match="one row per source"):
        spmm(block, x[:-1])
    with pytest.raises(UserError, match="floating"):
        spmm(block, x.long())
    with pytest.raises(UserError, match="one weight per edge"):
        spmm(block, x, torch.ones(block.n_edges, 2))
