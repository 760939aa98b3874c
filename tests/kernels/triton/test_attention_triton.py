"""attention and edge_softmax by Triton kernels against dense softmax in float64: values, every gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tgnn.kernels import Block, attention, edge_softmax, last_ran, rng, segment_triton, tuning, use_backend
from tgnn.kernels.attention import KINDS, edge_keep

pytestmark = pytest.mark.usefixtures("triton_backend")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I32, I64 = torch.int32, torch.int64
SLOPE, KEY = 0.2, rng.stream(3, rng.ATTENTION_DROPOUT)
# (dtype, index dtype, heads, width): every width and type, each index type, heads a tile and tiles of heads.
SHAPES = [
    (F32, I32, 1, 1), (F32, I64, 3, 3), (F16, I64, 3, 31), (BF16, I32, 4, 64), (F32, I32, 1, 100), (BF16, I64, 8, 3),
    (F16, I32, 3, 100), (BF16, I64, 1, 31), (F32, I64, 3, 1),
]  # fmt: skip


def reference(block, kind, value, src, dst, att=None, keep=None):
    """Row by row with torch.softmax over the row's own edges; keep [n_edges, H] multiplies the weights."""
    rows = []
    for v in range(block.n_dst):
        edges = slice(int(block.indptr[v]), int(block.indptr[v + 1]))
        sources = block.indices[edges].long()
        if kind == "gat":
            score = F.leaky_relu(dst[v] + src[sources], SLOPE)
        elif kind == "gatv2":
            score = (att * F.leaky_relu(dst[v] + src[sources], SLOPE)).sum(-1)
        else:
            score = (dst[v] * src[sources]).sum(-1) / math.sqrt(src.shape[-1])
        weight = torch.softmax(score, 0)
        if keep is not None:
            weight = weight * keep[edges]
        rows.append((weight[..., None] * value[sources]).sum(0))
    return torch.stack(rows) if rows else value.new_zeros(0, *value.shape[1:])


def inputs(block, kind, heads=3, width=5, dtype=F64, score_width=None, shared=False):
    """Leaves by name; with `shared` the value is also the source of the scores."""
    generator = torch.Generator().manual_seed(width)

    def make(*shape):
        return torch.randn(*shape, dtype=F64, generator=generator).to(dtype).requires_grad_()

    tail = (heads,) if kind == "gat" else (heads, score_width or width)
    leaves = {"value": make(block.n_src, heads, width)}
    if not shared:
        leaves["src"] = make(block.n_src, *tail)
    leaves["dst"] = make(block.n_dst, *tail)
    if kind == "gatv2":
        leaves["att"] = make(heads, tail[1])
    return leaves


def call(block, kind, leaves, **options):
    """`attention` on the leaves."""
    ends = {"src": leaves["value"], "att": None, **leaves}
    tensors = (ends["src"], ends["dst"], ends["att"])
    return attention(block, ends["value"], kind, *tensors, slope=SLOPE, **options)


def check(block, kind, leaves, assert_near, device, dropout=0.0):
    """Values and every gradient against the reference in float64."""
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    ours = {name: leaf.detach().to(device).requires_grad_() for name, leaf in leaves.items()}
    heads = leaves["value"].shape[1]
    keep = edge_keep(block, heads, dropout, KEY, F64) if dropout and block.n_edges else None
    expected = reference(block, kind, **{"src": exact["value"], **exact}, keep=keep)
    out = call(block.to(device), kind, ours, dropout=dropout, key=KEY)
    assert last_ran("attention") == "triton"
    assert out.dtype == leaves["value"].dtype
    assert_near(out, expected)
    grad = torch.randn(expected.shape, dtype=F64, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    found = torch.autograd.grad(out, list(ours.values()), grad.to(device))
    # A term that is 0 times everything: without an edge some outputs depend on nothing.
    nothing = 0 * sum(leaf.sum() for leaf in exact.values())
    right = torch.autograd.grad((expected * grad.double()).sum() + nothing, list(exact.values()))
    for gradient, leaf, exact_gradient in zip(found, ours.values(), right, strict=True):
        assert gradient.dtype == leaf.dtype
        assert_near(gradient, exact_gradient)


@pytest.fixture
def short_pieces(monkeypatch):
    """Rows of more than 4 edges are hubs, cut into pieces in both directions; a program takes several rows."""
    monkeypatch.setattr(segment_triton, "PIECE", 4)
    monkeypatch.setattr("tgnn.kernels.attention_backward_triton.ATT_PROGRAMS", 3)


def test_docstring_examples(device):
    block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3).to(device)
    value = torch.tensor([[[7.0]], [[2.0]], [[5.0]]], device=device, requires_grad=True)
    src = torch.tensor([[0.0], [0.0], [math.log(2)]], device=device, requires_grad=True)
    zeros = torch.zeros(3, 1, device=device)
    assert attention(block, value, "gat", zeros, zeros[:2]).tolist() == [[[3.5]], [[0.0]]]
    out = attention(block, value, "gat", src, zeros[:2] + 1)
    torch.testing.assert_close(out.cpu(), torch.tensor([[[4.0]], [[0.0]]]), rtol=1e-6, atol=0)
    out.sum().backward()
    torch.testing.assert_close(value.grad.flatten().cpu(), torch.tensor([0, 1 / 3, 2 / 3]), rtol=1e-6, atol=0)
    torch.testing.assert_close(src.grad.flatten().cpu(), torch.tensor([0, -2 / 3, 2 / 3]), rtol=1e-6, atol=0)
    weight = edge_softmax(block, src.detach()[1:])
    torch.testing.assert_close(weight.cpu(), torch.tensor([[1 / 3], [2 / 3]]), rtol=1e-6, atol=0)
    assert last_ran("attention") == last_ran("edge_softmax") == "triton"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, index, heads, width", SHAPES)
def test_values_and_every_gradient(random_block, assert_near, device, kind, dtype, index, heads, width):
    """A block with an empty row, repeated edges and half a hub; GATv2 with one tensor at both places."""
    block = random_block(n_dst=3, n_src=4, most=3, seed=width, dtype=index)
    shared = kind == "gatv2" and heads != 1
    check(block, kind, inputs(block, kind, heads, width, dtype, shared=shared), assert_near, device)


@pytest.mark.parametrize("dtype", [F64, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_hubs_in_pieces_with_dropout(random_block, short_pieces, assert_near, device, kind, dtype):
    """Rows and sources of many pieces, a score width of its own, several tiles of heads, dropped edges."""
    block = random_block(n_dst=3, n_src=3, most=4, seed=3)
    leaves = inputs(block, kind, heads=5, width=6, dtype=dtype, score_width=3)
    check(block, kind, leaves, assert_near, device, dropout=0.4)


@pytest.mark.parametrize("dtype", [F32, F64])
def test_every_kernel_of_a_call_is_looked_up(random_block, short_pieces, device, dtype):
    """Also the one that merges pieces; what is compiled ahead of time is what a launch takes by default."""
    from tgnn.kernels import attention_triton

    block = random_block()
    leaves = {name: leaf.to(device) for name, leaf in inputs(block, "dot", 4, 16, dtype).items()}
    block = block.to(device)
    merge = next(spec for spec in attention_triton.SPECS if spec.name == "attention_merge")
    with tuning.trial({}) as asked:
        out = call(block, "dot", leaves)
        out.sum().backward()
    names = {"attention_forward_dot", "attention_merge", "attention_backward_rows_dot",
             "attention_backward_sources_dot", "spmm_finish"}  # fmt: skip
    assert {question.spec.name for question in asked.values()} == names
    for question in asked.values():
        if question.spec.op == "attention" and question.spec is not merge:
            assert question.width == 16
            assert question.candidates == question.spec.configs(32 if dtype == F64 else 16)
    with tuning.trial({"attention_merge": merge.candidates(16, dtype)[1]}):
        torch.testing.assert_close(call(block, "dot", leaves), out, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [1, 2, 4, 9])
def test_dropout_has_the_bits_of_the_torch_path(random_block, device, heads):
    """Values of one make every output the sum of its kept weights."""
    block = random_block(n_dst=8, n_src=8, most=1, seed=4)
    value, zeros = torch.ones(8, heads, 1, dtype=F64), torch.zeros(8, heads, dtype=F64)
    out = attention(block, value, "gat", zeros, zeros, dropout=0.37, key=KEY)
    keep = edge_keep(block, heads, 0.37, KEY, F64)
    with use_backend("torch"):
        expected = attention(block, value, "gat", zeros, zeros, dropout=0.37, key=KEY)
    assert 0 < (keep > 0).sum() < keep.numel()
    single = block.degrees == 1
    torch.testing.assert_close(out[single, :, 0], keep[block.indptr[:-1][single]], rtol=0, atol=0)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a01_a07_empty_blocks_and_vertices_nobody_points_at(empty_blocks, assert_near, device, kind):
    alone = Block(indptr=torch.tensor([0, 0, 1, 1, 1]), indices=torch.tensor([0]), n_src=4)
    for block in [*empty_blocks, alone]:
        check(block, kind, inputs(block, kind, heads=2, width=3, dtype=F32), assert_near, device)
    assert edge_softmax(empty_blocks[0].to(device), torch.zeros(0, 2, device=device)).shape == (0, 2)


def test_a09_hub_of_600_edges(device):
    """300 edges of weight 1/300 into each of two rows, all from one source: no sum stops at 256 terms."""
    indptr, indices = torch.tensor([0, 300, 600]), torch.zeros(600, dtype=I64)
    block = Block(indptr, indices, 2).to(device)
    value = torch.ones(2, 1, 1, dtype=BF16, device=device, requires_grad=True)
    zeros = torch.zeros(2, 1, dtype=BF16, device=device)
    out = attention(block, value, "gat", zeros, zeros)
    torch.testing.assert_close(out.float(), torch.ones_like(out).float(), rtol=2**-7, atol=0)
    out.sum().backward()
    assert value.grad.flatten().tolist() == pytest.approx([2, 0], rel=2**-7)
    weight = edge_softmax(block, torch.zeros(600, 1, dtype=F16, device=device))
    torch.testing.assert_close(
        weight.float(), torch.full((600, 1), 1 / 300, device=device), rtol=2**-10, atol=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a10_strided_inputs_and_expanded_gradients(random_block, device, kind):
    """Every layout gives the bits of contiguous copies: rows with gaps, transposed, expanded, slices."""
    block = random_block(n_dst=3, n_src=4, most=2).to(device)
    plain = {name: leaf.detach() for name, leaf in inputs(block, kind, heads=2, width=3, dtype=F32).items()}
    side_by_side = torch.cat([plain["value"], plain["value"]], 1)
    strided = {name: torch.stack([leaf, leaf], -1)[..., 0] for name, leaf in plain.items()}
    layouts = [plain, strided, {**plain, "value": side_by_side[:, 2:]}]
    layouts.append({**plain, "value": plain["value"].transpose(0, 2).contiguous().transpose(0, 2)})
    results = []
    for tensors in layouts:
        leaves = {name: leaf.to(device).requires_grad_() for name, leaf in tensors.items()}
        out = call(block, kind, leaves)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values()))])
    for result in results[1:]:
        for found, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    one_row = {**plain, "value": plain["value"][:1].expand(4, -1, -1)}
    copies = {name: leaf.contiguous() for name, leaf in one_row.items()}
    torch.testing.assert_close(call(block, kind, one_row), call(block, kind, copies), rtol=0, atol=0)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # of edges past a row's end, masked after it
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_gradients_asked_for(random_block, device, kind):
    """Each alone has the bits it has among all; large scores overflow nowhere."""
    block = random_block(n_dst=3, n_src=3, most=2).to(device)
    leaves = {name: leaf.detach() for name, leaf in inputs(block, kind, heads=2, width=3, dtype=F32).items()}
    leaves["dst"] = leaves["dst"] * 300
    every = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    call(block, kind, every).square().sum().backward()
    for name in leaves:
        ours = {other: leaf.to(device).requires_grad_(other == name) for other, leaf in leaves.items()}
        call(block, kind, ours).square().sum().backward()
        assert ours[name].grad.isfinite().all()
        torch.testing.assert_close(ours[name].grad, every[name].grad, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that anything made, and how many were made by scattering."""

    def __init__(self):
        super().__init__()
        self.bytes, self.scatters = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.scatters += any(name in str(func) for name in ("scatter", "index_add", "index_put"))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_edges_and_columns(device, kind):
    """96 edges, 2 heads, 16 columns, 6 rows: nothing is larger than [n, H, D] or [E], or scattered."""
    indptr = torch.tensor([0, 60, 70, 80, 96])
    ids, position = torch.arange(4), torch.cat([torch.arange(d) for d in indptr.diff().tolist()])
    block = Block(indptr, torch.arange(96) % 6, 6, position=position, dst_id=ids).to(device)
    leaves = inputs(block, kind, heads=2, width=16, dtype=F32)
    leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in leaves.items()}
    assert block.transposed.edge.numel() == 96
    with Largest() as seen:
        call(block, kind, leaves, dropout=0.2, key=KEY).sum().backward()
    assert last_ran("attention") == "triton"
    assert 0 < seen.bytes <= 6 * 2 * 16 * 4 == 96 * 8 and seen.scatters == 0


@pytest.mark.parametrize("dtype, heads", [(F32, 1), (F64, 3), (F16, 4), (BF16, 9)])
def test_edge_softmax(random_block, short_pieces, assert_near, device, dtype, heads):
    block = random_block(n_dst=8, most=5, seed=heads)
    score = (4 * torch.randn(block.n_edges, heads, dtype=F64)).to(dtype)
    exact, ours = score.double().requires_grad_(), score.to(device).requires_grad_()
    expected = torch.cat([torch.softmax(part, 0) for part in exact.split(block.degrees.tolist())])
    # Strided, as a slice of something wider, and with an expanded gradient.
    wider = torch.stack([ours, ours], 1)[:, 0]
    out = edge_softmax(block.to(device), wider)
    assert last_ran("edge_softmax") == "triton" and out.dtype == dtype
    assert_near(out, expected)
    factor = torch.randn(block.n_edges, 1, dtype=F64).to(dtype)
    (found,) = torch.autograd.grad(out, ours, factor.to(device).expand(-1, heads))
    (right,) = torch.autograd.grad(expected, exact, factor.double().expand(-1, heads))
    assert_near(found, right)
