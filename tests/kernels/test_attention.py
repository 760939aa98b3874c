"""attention and edge_softmax against dense softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tgnn.errors import UserError
from tgnn.kernels import Block, attention, edge_softmax, last_ran, rng, segment
from tgnn.kernels.attention import KINDS, edge_keep

SLOPE = 0.2


def reference(block, value, kind, src, dst, att, keep=None):
    """Row by row with torch.softmax over the row's own edges; keep [n_edges, H] multiplies the weights."""
    rows = []
    for v in range(block.n_dst):
        edges = slice(int(block.indptr[v]), int(block.indptr[v + 1]))
        sources = block.indices[edges].long()
        if not len(sources):
            rows.append(torch.zeros(value.shape[1:], dtype=value.dtype))
            continue
        if kind == "gat":
            score = torch.nn.functional.leaky_relu(dst[v] + src[sources], SLOPE)
        elif kind == "gatv2":
            score = (att * torch.nn.functional.leaky_relu(dst[v] + src[sources], SLOPE)).sum(-1)
        else:
            score = (dst[v] * src[sources]).sum(-1) / math.sqrt(src.shape[-1])
        weight = torch.softmax(score, 0)
        if keep is not None:
            weight = weight * keep[edges]
        rows.append((weight[..., None] * value[sources]).sum(0))
    return torch.stack(rows) if rows else value.new_zeros(0, *value.shape[1:])


def inputs(block, kind, heads=3, width=5, score_width=4, dtype=torch.float64):
    tail = (heads,) if kind == "gat" else (heads, score_width)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

    tensors = [make(block.n_src, heads, width), make(block.n_src, *tail), make(block.n_dst, *tail)]
    return [*tensors, make(heads, score_width)] if kind == "gatv2" else tensors


def call(block, kind, tensors, **options):
    value, src, dst, *att = tensors
    return attention(block, value, kind, src, dst, *att, slope=SLOPE, **options)


def expect(block, kind, tensors, keep=None):
    value, src, dst, *att = tensors
    return reference(block, value, kind, src, dst, att[0] if att else None, keep)


def test_docstring_example():
    block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3)
    value = torch.tensor([[[7.0]], [[2.0]], [[5.0]]])
    zeros = torch.zeros(3, 1)
    assert attention(block, value, "gat", zeros, zeros[:2]).tolist() == [[[3.5]], [[0.0]]]
    src = torch.tensor([[0.0], [0.0], [math.log(2)]])
    expected = torch.tensor([[[4.0]], [[0.0]]])
    torch.testing.assert_close(attention(block, value, "gat", src, zeros[:2]), expected, rtol=1e-6, atol=0)
    score = torch.tensor([[0.0], [math.log(2)]])
    torch.testing.assert_close(
        edge_softmax(block, score), torch.tensor([[1 / 3], [2 / 3]]), rtol=1e-6, atol=0
    )
    assert last_ran("attention") == last_ran("edge_softmax") == "torch"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [1, 3, 31, 64, 100])
@pytest.mark.parametrize("limit", [1 << 25, 50])
def test_values_and_every_gradient(random_block, monkeypatch, kind, heads, width, limit):
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", limit)
    block = random_block(seed=width, dtype=torch.int32)
    tensors = inputs(block, kind, heads, width, score_width=width)
    out, expected = call(block, kind, tensors), expect(block, kind, tensors)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, tensors, grad)
    for a, b in zip(found, torch.autograd.grad(expected, tensors, grad), strict=True):
        # One edge makes a softmax constant: a gradient may be absent in the reference only where it is 0.
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(random_block, kind):
    block = random_block(n_dst=4, n_src=5, most=2, seed=2)
    assert torch.autograd.gradcheck(lambda *t: call(block, kind, t), inputs(block, kind, 2, 2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_large_scores_do_not_overflow(random_block, kind):
    block = random_block()
    tensors = [t.detach() * (1 if i == 0 else 300) for i, t in enumerate(inputs(block, kind))]
    torch.testing.assert_close(call(block, kind, tensors), expect(block, kind, tensors), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a01_rows_without_edges_give_zero_and_finite_gradients(kind):
    block = Block(indptr=torch.tensor([0, 0, 1, 1, 1]), indices=torch.tensor([0]), n_src=4)
    tensors = inputs(block, kind)
    out = call(block, kind, tensors)
    out.sum().backward()
    assert torch.equal(out[[0, 2, 3]], torch.zeros(3, 3, 5, dtype=torch.float64))
    torch.testing.assert_close(out[1], tensors[0][0], rtol=1e-15, atol=0)
    assert all(torch.isfinite(t.grad).all() for t in tensors)
    assert torch.equal(tensors[0].grad[1:], torch.zeros(3, 3, 5, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_a01_a07_blocks_without_edges(empty_blocks, kind):
    for block in empty_blocks:
        tensors = inputs(block, kind)
        out = call(block, kind, tensors, dropout=0.5)
        out.sum().backward()
        assert torch.equal(out, torch.zeros(block.n_dst, 3, 5, dtype=torch.float64))
        for t in tensors:
            assert torch.equal(t.grad, torch.zeros_like(t))
        assert edge_softmax(block, torch.zeros(0, 2)).shape == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a09_half_types_round_once(random_block, kind, dtype):
    block = random_block(n_dst=12, most=9, seed=3)
    tensors = inputs(block, kind, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    out, expected = call(block, kind, tensors), expect(block, kind, wide)
    assert out.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=1e-5)
    grad = torch.randn_like(expected).to(dtype)
    found = torch.autograd.grad(out, tensors, grad)
    for a, b in zip(found, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=eps, atol=1e-4 * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a09_star_of_4096(dtype):
    star = Block(indptr=torch.tensor([0, 4096]), indices=torch.arange(4096), n_src=4096)
    value = torch.ones(4096, 1, 2, dtype=dtype)
    zeros = torch.zeros(4096, 1, dtype=dtype)
    assert torch.equal(attention(star, value, "gat", zeros, zeros[:1]), torch.ones(1, 1, 2, dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_a10_strided_inputs_and_expanded_gradients(random_block, kind):
    block = random_block()
    plain = [t.detach() for t in inputs(block, kind)]
    strided = [torch.stack([t, t], -1)[..., 0] for t in plain]
    strided[0] = plain[0].transpose(0, 2).contiguous().transpose(0, 2)
    results = []
    for tensors in (plain, strided):
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = call(block, kind, leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """Remembers the most elements of a tensor that anything made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_edges_and_columns(monkeypatch, kind):
    """3000 edges, nearly all into one row, out of 40; 2 heads, 16 columns: E x H = 6000 against 96,000."""
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", 3000)
    indptr = torch.tensor([0, 0, 2900, 2950, 3000])
    position = torch.cat([torch.arange(d) for d in indptr.diff().tolist()])
    block = Block(indptr, torch.arange(3000) % 40, 40, position=position, dst_id=torch.arange(4))
    tensors, saved = inputs(block, kind, heads=2, width=16, score_width=16, dtype=torch.float32), []
    assert block.transposed.edge.numel() == 3000

    def remember(tensor):
        saved.append(tensor.numel())
        return tensor

    with Largest() as seen, torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        call(block, kind, tensors, dropout=0.2).sum().backward()
    assert seen.elements <= 6000 and max(saved) <= 6000


def test_edge_softmax_equals_softmax_row_by_row(random_block):
    block = random_block(n_dst=10, most=6, seed=4)
    score = torch.randn(block.n_edges, 3, dtype=torch.float64, requires_grad=True)
    out = edge_softmax(block, score)
    ends = block.indptr.tolist()
    parts = [torch.softmax(score[a:b], 0) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda s: edge_softmax(block, s), (score,))
    with pytest.raises(UserError, match="one row per edge"):
        edge_softmax(block, score[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_scales_exactly_the_kept_weights(random_block, kind):
    block = random_block(n_dst=10, most=6, seed=6)
    tensors = inputs(block, kind)
    key = rng.stream(0, rng.ATTENTION_DROPOUT)
    keep = edge_keep(block, 3, 0.3, key, torch.float64)
    scale = 65536 / (65536 - round(0.3 * 65536))
    assert set(keep.unique().tolist()) == {0.0, scale}
    out = call(block, kind, tensors, dropout=0.3, key=key)
    expected = expect(block, kind, tensors, keep)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(out, tensors, grad)
    for a, b in zip(found, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a14_dropout_is_keyed_by_the_edge_not_by_its_place(random_block):
    block = random_block(n_dst=8, most=5, seed=7)
    keep = edge_keep(block, 3, 0.5, 11)
    order = torch.randperm(8)
    degrees = block.degrees[order]
    edges = torch.cat([torch.arange(int(block.indptr[v]), int(block.indptr[v + 1])) for v in order.tolist()])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    moved = Block(
        indptr=indptr, indices=block.indices[edges], n_src=block.n_src, position=block.position[edges],
        dst_id=block.dst_id[order],
    )  # fmt: skip
    assert torch.equal(edge_keep(moved, 3, 0.5, 11), keep[edges])
    assert not torch.equal(edge_keep(block, 3, 0.5, 12), keep)


def test_wrong_arguments_are_named(random_block):
    block = random_block()
    value, src, dst, att = inputs(block, "gatv2")
    with pytest.raises(UserError, match="one of gat, gatv2, dot"):
        attention(block, value, "gcn", src, dst)
    for bad in [
        (value[1:], src, dst, att),
        (value, src, dst, None),
        (value, src, dst, att[1:]),
        (value[:, 1:], src, dst, att),
    ]:
        with pytest.raises(UserError, match="one row per vertex and the same heads"):
            attention(block, bad[0], "gatv2", *bad[1:])
    with pytest.raises(UserError, match="one row per vertex"):
        attention(block, value, "gat", src, dst)
    bare = Block(indptr=block.indptr, indices=block.indices, n_src=block.n_src)
    with pytest.raises(UserError, match="dst_id and position"):
        attention(bare, value, "dot", src, dst, dropout=0.5)
