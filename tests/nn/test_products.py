"""Dense products by oneDNN: equal to torch's, gradients too, whatever lies behind the rows; left to torch elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from tgnn.data.synthetic import sbm
from tgnn.kernels.block import Block
from tgnn.kernels.gather import gather
from tgnn.kernels.room import first_rows, rounded_rows, rows_with_room, with_room
from tgnn.kernels.spmm import spmm
from tgnn.nn import products
from tgnn.nn.model import GNN
from tgnn.nn.products import Linear, add_linear, linear
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader

ROWS, IN, OUT = 1001, 24, 40
HAS_ONEDNN = torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Products of any size go to oneDNN; the numbers of rows that it was asked for."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    found: list[tuple[int, ...]] = []
    inner = products._multiplied

    def counted(x: Tensor, *rest: Tensor | None) -> Tensor:
        found.append(tuple(x.shape))
        return inner(x, *rest)

    monkeypatch.setattr(products, "_multiplied", counted)
    yield found


def operands(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [ROWS, IN] with NaN behind it, weight [OUT, IN] and bias [OUT], all wanting gradients."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.full((2 * ROWS, IN), torch.nan)
    table[:ROWS] = torch.randn(ROWS, IN, generator=generator)
    weight, bias = torch.randn(OUT, IN, generator=generator), torch.randn(OUT, generator=generator)
    return first_rows(table, ROWS).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@needs_onednn
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
def test_linear_and_its_gradients_are_torchs(calls: list, with_bias: bool, room: bool):
    x, weight, bias = operands()
    if not room:
        x = x.detach().clone().requires_grad_()
    given = [x, weight, *([bias] if with_bias else [])]
    grad = torch.randn(ROWS, OUT, generator=torch.Generator().manual_seed(1))
    found = linear(*given)
    gradients = torch.autograd.grad(found, given, grad)
    assert calls == [(ROWS, IN), (ROWS, OUT)]
    wide = [t.detach().double().requires_grad_() for t in given]
    right = F.linear(*wide)
    assert found.dtype == torch.float32 and found.is_contiguous()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    for own, expected in zip(gradients, torch.autograd.grad(right, wide, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_add_linear_writes_into_the_total(calls: list):
    x, weight, _ = operands()
    start = torch.randn(ROWS, OUT, requires_grad=True)
    total = start * 1
    found = add_linear(total, x, weight)
    assert found.data_ptr() == total.data_ptr() and calls == [(ROWS, IN)]
    grad = torch.randn(ROWS, OUT)
    gradients = torch.autograd.grad(found, (start, x, weight), grad)
    wide = [t.detach().double().requires_grad_() for t in (start, x, weight)]
    right = wide[0] + wide[1] @ wide[2].t()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    for own, expected in zip(gradients, torch.autograd.grad(right, wide, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_only_the_gradients_that_are_wanted(calls: list):
    x, weight, bias = operands()
    linear(x.detach(), weight, bias).sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert calls == [(ROWS, IN)]  # none for x
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad


@needs_onednn
def test_the_gradient_has_a_gradient(calls: list):
    """As a gradient penalty takes it."""

    def penalty(product: object, x: Tensor, weight: Tensor) -> list[Tensor]:
        out = product(x, weight).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), (x, weight)))

    x, weight, _ = operands()
    found = penalty(linear, x, weight)
    assert calls
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    for own, expected in zip(found, penalty(F.linear, *wide), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max()))


@needs_onednn
def test_changing_a_saved_operand_is_noticed(calls: list):
    x, weight, bias = operands()
    out = linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


LEFT_TO_TORCH = {
    "float64": lambda x, w, b: (x.double(), w.double(), b.double()),
    "half": lambda x, w, b: (x.half(), w.half(), b.half()),
    "three dimensions": lambda x, w, b: (x[None], w, b),
    "strided rows": lambda x, w, b: (x.repeat(1, 2)[:, :IN], w, b),
    "one row": lambda x, w, b: (x[0], w, b),
}


@pytest.mark.parametrize("kind", LEFT_TO_TORCH)
def test_other_operands_are_torchs(calls: list, kind: str):
    given = LEFT_TO_TORCH[kind](*(t.detach() for t in operands()))
    assert torch.equal(linear(*given), F.linear(*given))
    assert not calls


def test_small_products_and_other_cpus_are_torchs(calls: list, monkeypatch: pytest.MonkeyPatch):
    given = [t.detach() for t in operands()]
    monkeypatch.setattr(products, "LEAST_WORK", ROWS * IN * OUT + 1)
    assert torch.equal(linear(*given), F.linear(*given))
    total, right = torch.ones(ROWS, OUT), torch.ones(ROWS, OUT).addmm_(given[0], given[1].t())
    assert torch.equal(add_linear(total, *given[:2]), right)
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    linear(*given)
    assert not calls


@needs_onednn
def test_oneDNN_may_be_switched_off(calls: list):
    given = [t.detach() for t in operands()]
    with torch.backends.mkldnn.flags(enabled=False):
        linear(*given)
        assert not calls
    linear(*given)
    assert calls


@needs_onednn
def test_transforms_of_torch_func_work(calls: list):
    x, weight, bias = (t.detach() for t in operands())
    tangent = torch.ones_like(x)
    _, slope = torch.func.jvp(lambda rows: linear(rows, weight, bias), (x,), (tangent,))
    torch.testing.assert_close(slope, tangent @ weight.t())
    many = torch.func.vmap(lambda rows: linear(rows, weight, bias))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(many[1], F.linear(2 * x, weight, bias))
    with forward_ad.dual_level():
        out = linear(forward_ad.make_dual(x, tangent), weight, bias)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, tangent @ weight.t())


@pytest.mark.parametrize(
    ("capability", "vendor", "faster"),
    [
        ("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False),
        ("AVX2", "AuthenticAMD", False), ("NO AVX", "AuthenticAMD", False),
    ],
)  # fmt: skip
def test_which_cpus_multiply_by_onednn(
    monkeypatch: pytest.MonkeyPatch, capability: str, vendor: str, faster: bool
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(products, "_vendor", lambda: vendor)
    assert products.onednn_is_faster.__wrapped__() == (faster and HAS_ONEDNN)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_small_products_under_autocast_are_rounded_once(dtypes: tuple[torch.dtype, torch.dtype]):
    """Made in float32 of the operands as they are, in the type that autocast gives."""
    x, weight, bias = (t.detach() for t in operands())
    x = x.to(dtypes[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = Linear(IN, OUT)
        found.load_state_dict({"weight": weight, "bias": bias})
        out = found(x)
        assert F.linear(x, weight, bias).dtype == out.dtype == torch.bfloat16
    assert torch.equal(out, F.linear(x.float(), weight, bias).bfloat16())
    out.float().sum().backward()
    assert found.weight.grad.dtype == torch.float32


def test_large_products_under_autocast_are_autocasts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    x, weight, bias = (t.detach() for t in operands())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
        total = torch.ones(ROWS, OUT, dtype=torch.bfloat16)
        assert torch.equal(add_linear(total, x, weight), torch.addmm(total, x, weight.t()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    dataset = sbm(400, seed=2)
    return write_store(dataset, np.zeros(400, np.int32), tmp_path_factory.mktemp("products") / "store")


@needs_onednn
@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gatv2", "gin", "transformer"])
def test_models_compute_the_same(calls: list, monkeypatch: pytest.MonkeyPatch, store: Store, model: str):
    batch = next(iter(Loader(store, [5, 5], 64, seed=1)))

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        net = GNN.build(model, store.num_features, 16, store.num_classes, residual=True)
        loss = F.cross_entropy(net(batch), batch.y)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in net.parameters())]

    found = step()
    assert calls
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    for own, right in zip(found, step(), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


def test_rows_are_rounded_to_few_numbers():
    numbers = [rounded_rows(rows) for rows in range(1, 1 << 15)]
    assert all(number >= rows for rows, number in enumerate(numbers, start=1))
    assert all(number - rows < max(32, rows / 32 + 1) for rows, number in enumerate(numbers, start=1))
    # 32 of an octave and those below 1024.
    assert len(set(numbers)) <= 32 * 6
    assert rounded_rows(0) == 0


def test_room_is_found_where_there_is_some():
    table = torch.arange(100.0).view(50, 2)
    assert with_room(table) is None  # 64 rows
    assert with_room(table[1:17]).shape == (32, 2)
    assert torch.equal(with_room(table[18:30]), table[18:50])
    assert with_room(table[19:31]) is None
    rows = rows_with_room(table, 45)
    assert rows.shape == (45, 2) and with_room(rows).shape == (64, 2)
    assert not with_room(rows)[45:].any()


def test_gathered_and_summed_rows_have_room():
    table = torch.randn(40, 8)
    rows = torch.tensor([3, 39, 0])
    picked = gather(table, rows)
    assert torch.equal(picked, table[rows])
    block = Block(torch.tensor([0, 2, 2, 3]), torch.tensor([5, 1, 7]), 40)
    for reduce in ("sum", "mean"):
        summed = spmm(block, table.requires_grad_(), None, reduce)
        # In-place work on the result of a function whose rows were a view would be an error.
        summed = summed.mul_(2)
        right = table[5] + table[1]
        torch.testing.assert_close(summed[0], 2 * right if reduce == "sum" else right)
        assert not summed[1].any() and len(summed) == 3
        for found in (picked, summed):
            assert with_room(found).shape == (32, 8)
        summed.sum().backward()
