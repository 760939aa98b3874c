"""spmm and gather_spmm by Triton kernels against float64 loops: values and every gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgnn.kernels import Block, gather_spmm, last_ran, segment_triton, spmm
from tgnn.kernels.gather_triton import gather_triton

pytestmark = pytest.mark.usefixtures("triton_backend")
REDUCTIONS = ("sum", "mean", "max", "min")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64
# (dtype, index dtype, shape of a row): every width, heads and type, and each index type with every type.
CASES = [
    (F32, I32, (1,)), (F32, I64, (3,)), (F16, I32, (31,)), (BF16, I64, (64,)), (F32, I32, (100,)),
    (F64, I64, (31,)), (F16, I64, (100,)), (BF16, I32, (1,)), (F32, I64, (3, 31)), (F16, I32, (1, 64)),
    (BF16, I32, (3, 3)), (F32, I32, (3, 1)), (F32, I64, (300,)),
]  # fmt: skip


def reference(block, x, weight, reduce):
    """float64 [n_dst, ...], row after row, differentiable; of equal messages the first wins."""
    rows = []
    for v in range(block.n_dst):
        edges = slice(int(block.indptr[v]), int(block.indptr[v + 1]))
        message = x[block.indices[edges].long()]
        if weight is not None:
            message = message * weight[edges][..., None]
        if len(message) == 0:
            rows.append(torch.zeros_like(x[0]))
        elif reduce in ("sum", "mean"):
            rows.append(message.sum(0) / (len(message) if reduce == "mean" else 1))
        else:
            best = message.detach().amax(0) if reduce == "max" else message.detach().amin(0)
            order = torch.arange(len(message)).view(-1, *[1] * (message.dim() - 1))
            first = torch.where(message.detach() == best, order, len(message)).amin(0)
            rows.append(message.gather(0, first[None])[0])
    return torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])


def leaf(values, dtype=None, device="cpu"):
    return values.detach().clone().to(device=device, dtype=dtype or values.dtype).requires_grad_()


def check(block, x, weight, reduce, assert_near, device, op=None):
    """Values and gradients of spmm (or `op(block, x, weight, reduce)`) against the reference."""
    x64, w64 = leaf(x, F64), None if weight is None else leaf(weight, F64)
    ours, w = leaf(x, device=device), None if weight is None else leaf(weight, device=device)
    moved = block.to(device)
    out = (op or spmm)(moved, ours, w, reduce)
    assert out.dtype == x.dtype
    grad = torch.randn(out.shape, dtype=F64).to(x.dtype)
    out.backward(grad.to(device))
    expected = reference(block, x64, w64, reduce)
    (expected * grad.double()).sum().backward()
    assert_near(out, expected)
    assert_near(ours.grad, x64.grad)
    if weight is not None:
        assert_near(w.grad, w64.grad)


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows of more than 4 edges are hubs: the random block's are cut into several pieces."""
    monkeypatch.setattr(segment_triton, "PIECE", 4)


def test_docstring_example(device):
    block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3).to(device)
    x = torch.tensor([[1.0], [2.0], [5.0]], device=device)
    expected = {"sum": [[7], [0]], "mean": [[3.5], [0]], "max": [[5], [0]], "min": [[2], [0]]}
    for reduce, values in expected.items():
        assert spmm(block, x, reduce=reduce).tolist() == values
        assert last_ran("spmm") == "triton"


# A mean is a sum and a min a max but for a line: each of them with and without weights in turn.
WAYS = [("sum", False), ("sum", True), ("max", False), ("max", True), ("mean", None), ("min", None)]


@pytest.mark.parametrize("reduce, weighted", WAYS)
@pytest.mark.parametrize("dtype, index, tail", CASES)
def test_values_and_gradients(
    random_block, assert_near, short_pieces, device, dtype, index, tail, reduce, weighted
):
    block = random_block(dtype=index, seed=tail[-1])
    weighted = CASES.index((dtype, index, tail)) % 2 if weighted is None else weighted
    weight = torch.randn(block.n_edges, *tail[:-1]).to(dtype) if weighted else None
    check(block, torch.randn(block.n_src, *tail).to(dtype), weight, reduce, assert_near, device)
    assert last_ran("spmm") == "triton"


def test_pieces_as_in_the_module_docstring(monkeypatch, device):
    monkeypatch.setattr(segment_triton, "PIECE", 4)
    block = Block(indptr=torch.tensor([0, 2, 11]), indices=torch.arange(11), n_src=11).to(device)
    x = (2.0 ** torch.arange(11, device=device))[:, None]
    assert spmm(block, x).tolist() == [[3.0], [2.0**11 - 4]]
    assert spmm(block, x, reduce="max").tolist() == [[2.0], [2.0**10]]
    assert spmm(block, x, reduce="min").tolist() == [[1.0], [4.0]]


@pytest.mark.parametrize("piece", [1, 3, 8])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_every_way_to_cut_gives_the_same(monkeypatch, assert_near, device, piece, reduce):
    """Degrees around multiples of the piece, rows that start anywhere in a window, hubs side by side."""
    monkeypatch.setattr(segment_triton, "PIECE", piece)
    degrees = torch.tensor([0, piece, piece + 1, 0, 2 * piece, 2 * piece + 1, 1, 5 * piece + 2, 3 * piece, 0])
    indptr = torch.cat([torch.zeros(1, dtype=I64), degrees.cumsum(0)])
    indices = torch.randint(0, 6, (int(indptr[-1]),), generator=torch.Generator().manual_seed(piece))
    block = Block(indptr=indptr, indices=indices, n_src=6)
    check(block, torch.randn(6, 5), torch.randn(block.n_edges), reduce, assert_near, device)


def test_sum_of_a_row_has_the_same_bits_in_every_block(short_pieces, device):
    x = torch.randn(30, 5, device=device)
    row = torch.arange(29, device=device)
    alone = Block(indptr=torch.tensor([0, 29], device=device), indices=row, n_src=30)
    behind = Block(
        indptr=torch.tensor([0, 3, 32], device=device), indices=torch.cat([row[:3], row]), n_src=30
    )
    assert torch.equal(spmm(alone, x)[0], spmm(behind, x)[1])


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_ties_go_to_the_lowest_position(monkeypatch, device, reduce):
    for piece in (2, 512):
        monkeypatch.setattr(segment_triton, "PIECE", piece)
        block = Block(indptr=torch.tensor([0, 5]), indices=torch.tensor([3, 1, 0, 2, 4]), n_src=5).to(device)
        for value in (0.0, 7.0, float("-inf"), float("inf")):
            x = torch.full((5, 2), value, device=device, requires_grad=True)
            out = spmm(block, x, reduce=reduce)
            out.backward(torch.ones_like(out))
            assert out.tolist() == [[value] * 2]
            assert x.grad.tolist() == [[0.0] * 2] * 3 + [[1.0] * 2] + [[0.0] * 2]


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_nan_beats_everything_as_in_torch(monkeypatch, device, reduce):
    for piece in (2, 512):
        monkeypatch.setattr(segment_triton, "PIECE", piece)
        block = Block(indptr=torch.tensor([0, 6]), indices=torch.arange(6), n_src=6).to(device)
        x = torch.tensor([[1.0], [9.0], [-9.0], [float("nan")], [99.0], [float("nan")]], device=device)
        x.requires_grad_()
        out = spmm(block, x, reduce=reduce)
        out.sum().backward()
        assert bool(out.isnan().all())
        assert x.grad.view(-1).tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a01_a07_empty_blocks(empty_blocks, device, reduce):
    for block in empty_blocks:
        for tail in ((2,), (2, 3)):
            x = torch.randn(block.n_src, *tail, device=device, requires_grad=True)
            weight = torch.randn(0, *tail[:-1], device=device, requires_grad=True)
            out = spmm(block.to(device), x, weight, reduce)
            out.sum().backward()
            assert last_ran("spmm") == "triton"
            assert torch.equal(out, torch.zeros(block.n_dst, *tail, device=device))
            assert torch.equal(x.grad, torch.zeros_like(x))
            assert weight.grad.shape == weight.shape


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a01_nodes_nobody_points_at(assert_near, device, reduce):
    block = Block(indptr=torch.tensor([0, 0, 1, 1, 1]), indices=torch.tensor([0]), n_src=4)
    check(block, torch.randn(4, 3), torch.randn(1), reduce, assert_near, device)


def test_columns_of_width_zero(device):
    block = Block(indptr=torch.tensor([0, 2]), indices=torch.tensor([1, 0]), n_src=2).to(device)
    for reduce in REDUCTIONS:
        x = torch.ones(2, 0, device=device, requires_grad=True)
        out = spmm(block, x, torch.ones(2, device=device), reduce)
        out.sum().backward()
        assert out.shape == (1, 0) and x.grad.shape == (2, 0)


@pytest.mark.parametrize("dtype, reduce", [(F16, "sum"), (BF16, "mean"), (BF16, "max")])
def test_a09_star_of_4096(device, dtype, reduce):
    star = Block(indptr=torch.tensor([0, 4096]), indices=torch.arange(4096), n_src=4096).to(device)
    x = torch.ones(4096, 1, dtype=dtype, device=device)
    assert spmm(star, x, reduce=reduce).tolist() == [[{"sum": 4096, "mean": 1, "max": 1}[reduce]]]
    reverse = Block(indptr=torch.arange(4097), indices=torch.zeros(4096, dtype=I64), n_src=1).to(device)
    leaf = torch.ones(1, 1, dtype=dtype, device=device, requires_grad=True)
    spmm(reverse, leaf, reduce=reduce).backward(torch.ones(4096, 1, dtype=dtype, device=device))
    assert leaf.grad.item() == 4096


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a10_strided_inputs_and_expanded_gradients(random_block, short_pieces, device, reduce):
    block = random_block(n_dst=4, n_src=4).to(device)
    base = torch.randn(4, 5, 2, device=device)
    weights = torch.randn(block.n_edges, 2, device=device)[:, 1]
    square = torch.randn(4, 4, device=device)
    row = torch.randn(1, 3, device=device)
    for x in (base[:, :, 1], square.t(), square[:, 1:3], row.expand(4, 3), base.transpose(1, 2)):
        weight = weights if x.dim() == 2 else torch.randn(2, block.n_edges, device=device).t()
        strided, w = x.detach().requires_grad_(), weight.detach().requires_grad_()
        plain, wp = x.contiguous().clone().requires_grad_(), weight.contiguous().clone().requires_grad_()
        out, expected = spmm(block, strided, w, reduce), spmm(block, plain, wp, reduce)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        for ours, theirs in zip(
            torch.autograd.grad(out.sum(), (strided, w)),
            torch.autograd.grad((expected * torch.ones_like(expected)).sum(), (plain, wp)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("tail", [(3,), (2, 3)])
def test_an_output_may_be_changed_in_place(random_block, assert_near, device, reduce, tail):
    """Layers add the halo's sum to the local rows' where it lies; the gradients stay those of a plain sum."""

    def added(block, x, weight, reduce):
        return spmm(block, x, weight, reduce).mul_(0.25).add_(spmm(block, x, weight, reduce), alpha=0.75)

    block = random_block(n_dst=5, n_src=6)
    x, weight = torch.randn(6, *tail), torch.randn(block.n_edges, *tail[:-1])
    check(block, x, weight, reduce, assert_near, device, added)


def test_a11_first_call_equals_the_second(random_block, device):
    block = random_block(n_dst=8, n_src=15, seed=3).to(device)
    x = torch.randn(15, 8, device=device)
    assert torch.equal(spmm(block, x), spmm(block, x))


@pytest.mark.parametrize(
    "reduce, index, tail",
    [("sum", I32, (31,)), ("mean", I64, (3, 3)), ("max", I64, (64,)), ("min", I32, (3, 3)),
     ("mean", I64, (1,))],
)  # fmt: skip
def test_gather_spmm(random_block, assert_near, short_pieces, device, reduce, index, tail):
    """One tier and two: the weight's gradient reads the table, the table's own comes through a gather."""
    block = random_block(seed=tail[-1])
    table = torch.randn(20, *tail)
    rows = torch.randint(0, 20, (block.n_src,)).to(index)
    weight = torch.randn(block.n_edges, *tail[:-1])
    grad = torch.randn(block.n_dst, *tail)
    w64 = leaf(weight, F64)
    expected = reference(block, table.double()[rows.long()], w64, reduce)
    (expected * grad.double()).sum().backward()
    for prefix in (20, 7):
        rest = table[prefix:] if device == "cpu" else table[prefix:].pin_memory()
        w = leaf(weight, device=device)
        near = table[:prefix].to(device)
        out = gather_spmm(
            block.to(device), near, rows.to(device), w, reduce, rest=rest if prefix < 20 else None
        )
        assert last_ran("gather_spmm") == "triton"
        out.backward(grad.to(device))
        assert_near(out, expected)
        assert_near(w.grad, w64.grad)

    def through_gather(block, table, weight, reduce):
        return gather_spmm(block, table, torch.arange(block.n_src, device=device), weight, reduce)

    check(block, torch.randn(block.n_src, *tail), weight, reduce, assert_near, device, through_gather)


def lazy_table(device):
    """[2_200_000, 1024] fp16, 4.5 GB of which a CPU has only touched pages; the last four rows are set."""
    shape = (2_200_000, 1024)
    if device == "cpu":
        table = torch.from_numpy(np.zeros(shape, dtype=np.float16))
    else:
        table = torch.zeros(shape, dtype=F16, device=device)
    table[-4:] = torch.arange(4.0, device=device)[:, None] + 1
    return table


def test_a08_offsets_beyond_32_bits(device):
    table = lazy_table(device)
    last = len(table) - 4
    indices = torch.tensor([0, 1, 2, 3, 3], dtype=I32) + last
    block = Block(indptr=torch.tensor([0, 4, 5]), indices=indices, n_src=len(table)).to(device)
    for reduce, values in (("sum", (10, 4)), ("max", (4, 4)), ("min", (1, 4))):
        out = spmm(block, table, reduce=reduce)
        assert out.unique(dim=1).tolist() == [[values[0]], [values[1]]]
    assert gather_triton(table, indices.to(device)).unique(dim=1).view(-1).tolist() == [1, 2, 3, 4, 4]
    small = Block(indptr=block.indptr, indices=torch.tensor([0, 1, 2, 3, 3]), n_src=4).to(device)
    rows = torch.arange(4, dtype=I32, device=device) + last
    assert gather_spmm(small, table, rows).unique(dim=1).tolist() == [[10], [4]]
    near = table[: last + 2]
    rest = table[last + 2 :]
    assert gather_spmm(small, near, rows, rest=rest).unique(dim=1).tolist() == [[10], [4]]
    weight = torch.ones(5, device=device, requires_grad=True)
    gather_spmm(small, table, rows, weight).sum(dtype=F32).backward()
    assert weight.grad.tolist() == [1024, 2048, 3072, 4096, 4096]
