"""Every op on a GPU's tensors, chosen by itself, against the torch path in float64 on the CPU.

`tests/kernels/triton` runs there too and asks for more; this file is short enough for a first look at a new GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tgnn.kernels import (
    Block,
    attention,
    dropout,
    edge_softmax,
    gather,
    gather_spmm,
    last_ran,
    rng,
    sample_neighbors,
    sddmm,
    spmm,
    unique,
    use_backend,
)
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.unique import DirectTable

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none here"),
]
# A few roundings of the type, of the largest value.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
KEY = rng.stream(0, rng.ATTENTION_DROPOUT, 0, 0, 0)
Op = Callable[[Block, dict[str, torch.Tensor]], torch.Tensor]
OPS: dict[str, Op] = {
    "spmm sum": lambda b, t: spmm(b, t["src"], t["edge"]),
    "spmm mean": lambda b, t: spmm(b, t["src"], t["edge"], "mean"),
    "spmm max": lambda b, t: spmm(b, t["src"], t["edge"], "max"),
    "spmm min": lambda b, t: spmm(b, t["src"], None, "min"),
    "gather": lambda b, t: gather(t["src"], b.indices),
    "gather_spmm": lambda b, t: gather_spmm(b, t["src"].detach(), b.numbers, t["edge"], "mean"),
    "sddmm dot": lambda b, t: sddmm(b, t["dst"], t["src"]),
    "sddmm add": lambda b, t: sddmm(b, t["dst"][:, :, 0], t["src"][:, :, 0], "add"),
    "edge_softmax": lambda b, t: edge_softmax(b, t["edge"]),
    "attention gat": lambda b, t: attention(
        b, t["src"], "gat", t["src"][:, :, 0], t["dst"][:, :, 0], dropout=0.3, key=KEY
    ),
    "attention gatv2": lambda b, t: attention(b, t["src"], "gatv2", t["src"], t["dst"], t["att"]),
    "attention dot": lambda b, t: attention(b, t["src"], "dot", t["src"], t["dst"], dropout=0.3, key=KEY),
    "dropout": lambda b, t: dropout(t["src"].flatten(1), 0.4, KEY, b.numbers),
}


def run(
    op: Op, block: Block, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The op's output, and the gradients of its sum, weighted by numbers that every type holds, to what it reads."""
    block.numbers = torch.arange(block.n_src, device=block.indptr.device).flip(0)
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    out = op(block, leaves)
    grad = (torch.arange(out.numel()) % 9 - 4).view(out.shape) / 4
    out.backward(grad.to(out.device, out.dtype))
    return out.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, expected.abs().max().item())
    tolerance = TOLERANCES[got.dtype] * scale
    torch.testing.assert_close(got.cpu().double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_op_against_float64(random_block: Callable[..., Block], name: str, dtype: torch.dtype) -> None:
    """Odd widths, a hub, empty rows; forward and every gradient."""
    block = random_block(dtype=torch.int32 if dtype == torch.float32 else torch.int64)
    torch.manual_seed(0)
    shapes = {
        "src": (block.n_src, 3, 20),
        "dst": (block.n_dst, 3, 20),
        "edge": (block.n_edges, 3),
        "att": (3, 20),
    }
    inputs = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    with use_backend("torch"):
        expected, wide = run(OPS[name], block, {name: value.double() for name, value in inputs.items()})
    moved = {name: value.to(DEVICE) for name, value in inputs.items()}
    out, grads = run(OPS[name], block.to(DEVICE), moved)
    assert last_ran(name.split()[0]) == "triton"
    assert out.device.type == DEVICE and out.dtype == dtype and grads.keys() == wide.keys()
    assert_near(out, expected)
    for key, grad in grads.items():
        assert_near(grad, wide[key])


def test_two_tiers_are_read_where_they_lie() -> None:
    table, rows = torch.randn(50, 20), torch.tensor([49, 0, 7, 30, 30, 6])
    near, rest = table[:7].to(DEVICE), table[7:].pin_memory()
    assert torch.equal(gather(near, rows.to(DEVICE), rest).cpu(), table[rows])
    assert last_ran("gather") == "triton"
    block = Block(indptr=torch.tensor([0, 2, 6]), indices=torch.arange(6), n_src=6)
    found = gather_spmm(block.to(DEVICE), near, rows.to(DEVICE), rest=rest)
    assert last_ran("gather_spmm") == "triton"
    assert_near(found, torch.stack([table[rows[:2]].double().sum(0), table[rows[2:]].double().sum(0)]))


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("fanout", [-1, 1, 5, 100])
@pytest.mark.parametrize("kind", ["uniform", "replace", "labor", "weighted", "weighted-replace"])
def test_samples_are_those_of_the_cpu(kind: str, fanout: int, pinned: bool) -> None:
    """Bit for bit, also where the edges and their weights lie in pinned host memory."""
    torch.manual_seed(0)
    degrees = torch.cat([torch.randint(0, 30, (60,)), torch.tensor([0, 3000])])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices, weight = torch.randint(0, 62, (int(indptr[-1]),)), torch.rand(int(indptr[-1]))
    weight[::3] = 0
    rows, ids, replace = torch.randperm(62), torch.arange(62) * 10**9, kind.endswith("replace")

    def draw(device: str) -> list[torch.Tensor]:
        where, frontier = indptr.to(device), rows.to(device)
        edges = [x.pin_memory() if pinned and device != "cpu" else x.to(device) for x in (indices, weight)]
        more: dict[str, object] = {"source_id": ids.to(device)} if kind == "labor" else {}
        if kind.startswith("weighted"):
            more["weights"] = DrawWeights.of(where, edges[1], replace)
        drawn = sample_neighbors(where, edges[0], frontier, frontier + 7, fanout, 5, replace, **more)
        found = [drawn.indptr, drawn.src, drawn.position, drawn.edge]
        if "weights" in more:
            found.append(more["weights"].of_drawn(frontier, fanout, drawn.indptr, drawn.edge))
        return [x.cpu() for x in found]

    expected, found = draw("cpu"), draw(DEVICE)
    assert last_ran("sample_neighbors") == "triton"
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_numbers_and_distinct_ids_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    ids, first = torch.randint(0, 5000, (20_000,)), torch.randperm(5000)[:300]
    assert torch.equal(unique(ids.to(DEVICE)).cpu(), unique(ids))
    for others in (ids, ids[:40]):  # scanned, and sorted
        near, far = DirectTable(5000, DEVICE), DirectTable(5000)
        found = near.number(first.to(DEVICE), others.to(DEVICE))
        assert last_ran("relabel") == "triton"
        assert torch.equal(found.cpu(), far.number(first, others))
        assert torch.equal(near.lookup(others.to(DEVICE)).cpu(), far.lookup(others))


def test_a08_a_table_of_more_than_2_to_the_31_elements() -> None:
    rows, width = (1 << 21) + 16, 1024
    if torch.cuda.mem_get_info()[0] < 3 * rows * width:
        pytest.skip("needs 6 GB of free GPU memory")
    table = torch.empty(rows, width, dtype=torch.float16, device=DEVICE)
    table[-4:] = torch.arange(1.0, 5.0, device=DEVICE)[:, None]
    last = torch.arange(rows - 4, rows, device=DEVICE)
    assert gather(table, last).unique(dim=1).view(-1).tolist() == [1, 2, 3, 4]
    block = Block(indptr=torch.tensor([0, 3, 4], device=DEVICE), indices=last.to(torch.int32), n_src=rows)
    for reduce, values in (("sum", (6, 4)), ("mean", (2, 4)), ("max", (3, 4)), ("min", (1, 4))):
        assert spmm(block, table, reduce=reduce).unique(dim=1).view(-1).tolist() == list(values)
    assert last_ran("spmm") == last_ran("gather") == "triton"
