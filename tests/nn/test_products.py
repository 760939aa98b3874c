"""Dense products by oneDNN: equal to torch's, gradients too, whatever lies behind the rows; left to torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from tgnn.data.synthetic import sbm
from tgnn.kernels.block import Block
from tgnn.kernels.room import first_rows, with_room
from tgnn.nn import products
from tgnn.nn.layer import Rows, _DivideHalf
from tgnn.nn.model import GNN
from tgnn.nn.products import Linear, add_linear, linear
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader

ROWS, IN, OUT = 1001, 24, 40
ROUNDED = 1008
HAS_ONEDNN = torch.backends.mkldnn.is_available()
needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Products of any size go to oneDNN; the shapes of the rows that it was given."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    found: list[tuple[int, ...]] = []
    inner = products._by_onednn

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found.append(tuple(x.shape))
        return inner(x, weight, bias)

    monkeypatch.setattr(products, "_by_onednn", counted)
    return found


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
    assert calls == [(ROUNDED, IN), (ROUNDED, OUT)]
    wide = [t.detach().double().requires_grad_() for t in given]
    right = F.linear(*wide)
    assert found.dtype == torch.float32 and found.is_contiguous()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    for own, expected in zip(gradients, torch.autograd.grad(right, wide, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_gradients_of_weights_on_one_thread_are_made_in_pieces(calls: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(products, "PIECE_ROWS", 300)
    pieces = []
    inner = products._weight_gradient_in_pieces
    monkeypatch.setattr(
        products, "_weight_gradient_in_pieces", lambda *given: pieces.append(len(given[0])) or inner(*given)
    )
    x, weight, _ = operands()
    grad = torch.randn(ROWS, OUT)
    for rows in (ROWS, 900, 299):
        (found,) = torch.autograd.grad(linear(x[:rows], weight), weight, grad[:rows])
        right = grad[:rows].double().t() @ x.detach()[:rows].double()
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    assert pieces == [ROWS, 900, 299]


@needs_onednn
def test_add_linear_writes_into_the_total(calls: list):
    x, weight, _ = operands()
    start = torch.randn(ROWS, OUT, requires_grad=True)
    total = start * 1
    found = add_linear(total, x, weight)
    assert found is total and calls == [(ROUNDED, IN)]
    assert total.grad_fn is found.grad_fn and "AddLinear" in total.grad_fn.name()
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
    assert calls == [(ROUNDED, IN)]  # none for x
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
@pytest.mark.parametrize("add", [False, True], ids=["linear", "add_linear"])
def test_only_what_gradients_need_is_kept(calls: list, add: bool):
    """As torch does: rows under frozen weights and weights above plain features may be changed after the product."""

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return add_linear(torch.zeros(ROWS, OUT), x, weight) if add else linear(x, weight)

    x, weight, _ = operands()
    hidden = x * 1
    out = product(hidden, weight.detach())
    hidden.relu_()
    out.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(ROWS, IN))
    out = product(x.detach(), weight)
    with torch.no_grad():
        weight.add_(1)
    out.sum().backward()
    assert calls


@needs_onednn
def test_changing_a_saved_operand_is_noticed(calls: list):
    x, weight, bias = operands()
    out = linear(x, weight, bias)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Named(Tensor):
    """A subclass of a tensor."""


LEFT_TO_TORCH = {
    "float64": lambda x, w, b: (x.double(), w.double(), b.double()),
    "half": lambda x, w, b: (x.half(), w.half(), b.half()),
    "three dimensions": lambda x, w, b: (x[None], w, b),
    "strided rows": lambda x, w, b: (x.repeat(1, 2)[:, :IN], w, b),
    "one row": lambda x, w, b: (x[0], w, b),
    "strided bias": lambda x, w, b: (x, w, b.repeat(2).view(2, OUT).t().reshape(-1)[::2]),
    "one number as bias": lambda x, w, b: (x, w, b[:1].expand(OUT)),
    "a bias of one": lambda x, w, b: (x, w, b[:1]),
    "a bias without dimension": lambda x, w, b: (x, w, b[0]),
    "a bias of every row": lambda x, w, b: (x, w, b.expand(ROWS, OUT).contiguous()),
    "a vector as weight": lambda x, w, b: (x, w[0]),
    "sparse rows": lambda x, w, b: (x.to_sparse_csr(), w),
    "a subclass": lambda x, w, b: (x.as_subclass(Named), w, b),
}
REFUSED = {
    "weight in float64": lambda x, w, b: (x, w.double(), b),
    "bias in float64": lambda x, w, b: (x, w, b.double()),
    "too wide a weight": lambda x, w, b: (x, torch.ones(OUT, IN + 1), b),
    "too long a bias": lambda x, w, b: (x, w, torch.ones(OUT + 1)),
    "three dimensions of weight": lambda x, w, b: (x, w.view(2, OUT // 2, IN)),
}


@pytest.mark.parametrize("kind", LEFT_TO_TORCH)
def test_other_operands_are_torchs(calls: list, kind: str):
    given = LEFT_TO_TORCH[kind](*(t.detach() for t in operands()))
    assert torch.equal(linear(*given), F.linear(*given))
    assert not calls


@pytest.mark.parametrize("kind", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(calls: list, kind: str):
    given = REFUSED[kind](*(t.detach() for t in operands()))
    with pytest.raises(RuntimeError) as expected:
        F.linear(*given)
    with pytest.raises(RuntimeError) as found:
        linear(*given)
    assert str(found.value) == str(expected.value) and not calls


def test_totals_of_other_shapes_are_torchs(calls: list):
    x, weight, _ = (t.detach() for t in operands())
    with pytest.raises(RuntimeError, match="size"):
        add_linear(torch.zeros(1, OUT), x, weight)
    on_meta = [torch.empty(shape, device="meta") for shape in ((5, 3), (5, 8), (3, 8))]
    assert add_linear(*on_meta).shape == (5, 3) and not calls


def test_which_products_are_large():
    assert products._is_large(torch.empty(20_000, 128), torch.empty(128, 128))
    assert products._is_large(torch.empty(4_000, 128), torch.empty(128, 128))
    assert not products._is_large(torch.empty(4_000, 128), torch.empty(16, 128))


def test_small_products_and_other_cpus_are_torchs(calls: list, monkeypatch: pytest.MonkeyPatch):
    given = [t.detach() for t in operands()]
    monkeypatch.setattr(products, "LEAST_WORK", ROWS * IN * OUT + 1)
    assert torch.equal(linear(*given), F.linear(*given))
    total, right = torch.ones(ROWS, OUT), torch.ones(ROWS, OUT).addmm_(given[0], given[1].t())
    assert torch.equal(add_linear(total, *given[:2]), right) and torch.equal(total, right)
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


@needs_onednn
@pytest.mark.parametrize("add", [False, True], ids=["linear", "add_linear"])
def test_many_gradients_at_once_and_their_tangents(calls: list, add: bool):
    """The backward pass may be transformed where the forward pass was not."""
    x, weight, _ = operands()
    out = add_linear(torch.zeros(ROWS, OUT), x, weight) if add else linear(x, weight)
    grad = torch.stack([torch.ones(ROWS, OUT), torch.full((ROWS, OUT), 2.0)])
    (found,) = torch.autograd.grad(out, x, grad, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, grad @ weight.detach())
    with forward_ad.dual_level():
        (slope,) = torch.autograd.grad(out, x, forward_ad.make_dual(grad[0], grad[1]))
        torch.testing.assert_close(forward_ad.unpack_dual(slope).tangent, grad[1] @ weight.detach())


@needs_onednn
def test_tracers_see_torchs_own_operations(calls: list):
    x, weight, bias = (t.detach() for t in operands())
    module = Linear(IN, OUT)
    module.load_state_dict({"weight": weight, "bias": bias})
    right = F.linear(x, weight, bias)
    assert torch.equal(torch.fx.symbolic_trace(nn.Sequential(module))(x), right)
    assert torch.equal(torch.jit.trace(module, x)(x), right)
    assert torch.equal(torch.jit.script(module)(x), right)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), right)
    calls.clear()
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert counter.get_total_flops() == 2 * ROWS * IN * OUT and not calls


def test_the_cpus_maker_is_read(tmp_path: Path):
    about = tmp_path / "cpuinfo"
    assert products._vendor(about) == "GenuineIntel"
    about.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\n")
    assert products._vendor(about) == "AuthenticAMD"
    about.write_text("CPU implementer\t: 0x41\n")
    assert products._vendor(about) == "GenuineIntel"


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


@pytest.mark.parametrize("kind", ["weights in bfloat16", "bias in float16", "operands in float64", "float16"])
def test_small_products_under_autocast_of_other_types_are_autocasts(kind: str):
    x, weight, bias = (t.detach() for t in operands())
    given = {
        "weights in bfloat16": (x, weight.bfloat16(), bias.bfloat16()),
        "bias in float16": (x, weight, bias.half()),
        "operands in float64": (x.double(), weight.double(), bias.double()),
        "float16": (x, weight, bias),
    }[kind]
    with torch.autocast("cpu", dtype=torch.float16 if kind == "float16" else torch.bfloat16):
        found, right = linear(*given), F.linear(*given)
    assert found.dtype == right.dtype
    torch.testing.assert_close(found, right, rtol=2**-6, atol=2**-4)


@needs_onednn
@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("product", ["linear", "add_linear"])
def test_large_products_under_autocast_are_autocasts(
    calls: list, room: bool, dtype: torch.dtype, product: str
):
    """Few shapes, and torch's values and types; gradients of the weights are more exact."""
    x, weight, bias = operands()
    table = torch.full((2 * ROWS, IN), torch.nan, dtype=dtype)
    table[:ROWS] = x.detach()
    x = (first_rows(table, ROWS) if room else table[:ROWS].clone()).requires_grad_()
    start = torch.randn(ROWS, OUT).bfloat16().requires_grad_()

    def run(ours: bool) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if product == "linear":
                out = (linear if ours else F.linear)(x, weight, bias)
            else:
                out = add_linear(start * 1, x, weight) if ours else torch.addmm(start, x, weight.t())
        grad = torch.ones(ROWS, OUT).cumsum(0).remainder(7).sub(3).bfloat16()
        given = (x, weight, bias if product == "linear" else start)
        return [out, *torch.autograd.grad(out, given, grad)]

    found, right = run(True), run(False)
    assert found[0].dtype == torch.bfloat16 and with_room(found[0].detach()) is not None
    assert torch.equal(found[0], right[0])
    assert len(calls) == (2 if product == "linear" else 1) and all(rows == ROUNDED for rows, _ in calls)
    for own, expected in zip(found[1:], right[1:], strict=True):
        assert own.dtype == expected.dtype
        scale = float(expected.abs().max())
        torch.testing.assert_close(own, expected, rtol=0, atol=2**-7 * scale)
    wide = found[1].new_zeros(OUT, IN).double()
    grad = torch.ones(ROWS, OUT).cumsum(0).remainder(7).sub(3).double()
    wide += grad.t() @ x.detach().bfloat16().double()
    assert (found[2].double() - wide).abs().max() <= (right[2].double() - wide).abs().max() * 1.01


@needs_onednn
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("product", ["linear", "add_linear"])
def test_a_backward_pass_under_autocast_keeps_the_types_of_the_forward_pass(
    calls: list, monkeypatch: pytest.MonkeyPatch, product: str, threads: int
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(products, "PIECE_ROWS", 300)
    x, weight, _ = operands()
    out = linear(x, weight) if product == "linear" else add_linear(torch.zeros(ROWS, OUT), x, weight)
    grad = torch.randn(ROWS, OUT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out, (x, weight), grad)
    right = grad.double() @ weight.detach().double(), grad.double().t() @ x.detach().double()
    for own, expected in zip(found, right, strict=True):
        assert own.dtype == torch.float32
        torch.testing.assert_close(own.double(), expected, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_autocast_products_have_gradients_of_gradients(calls: list):
    x, weight, _ = operands()

    def penalty(product: Callable) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = product(x, weight).float().square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), (x, weight)))

    for own, right in zip(penalty(linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(own, right, rtol=0, atol=2**-6 * float(right.abs().max()))


class NoProducts(TorchFunctionMode):
    """Fails where a dense product goes past `linear` and `add_linear`."""

    KNOWN = (
        F.linear, torch.addmm, torch.matmul, torch.mm, Tensor.addmm, Tensor.addmm_, Tensor.matmul, Tensor.mm,
        Tensor.__matmul__,
    )  # fmt: skip

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.KNOWN
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    dataset = sbm(400, seed=2)
    return write_store(dataset, np.zeros(400, np.int32), tmp_path_factory.mktemp("products") / "store")


@needs_onednn
@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "gatv2", "gin", "transformer"])
@pytest.mark.parametrize("hidden", [8, 40], ids=["narrower", "wider"])
def test_models_compute_the_same(
    calls: list, monkeypatch: pytest.MonkeyPatch, store: Store, model: str, hidden: int
):
    batch = next(iter(Loader(store, [5, 5], 64, seed=1)))

    def step(watched: AbstractContextManager) -> list[Tensor]:
        torch.manual_seed(0)
        net = GNN.build(model, store.num_features, hidden, store.num_classes, residual=True)
        with watched:
            out = net(batch)
        loss = F.cross_entropy(out, batch.y)
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in net.parameters())]

    found = step(NoProducts())
    assert calls
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    for own, right in zip(found, step(nullcontext()), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [256.0, 257.0])  # 257 is no bfloat16
def test_means_of_half_rows_are_divided_once_and_in_place(most: float):
    """Under autocast: the sum, rounded once, over the float32 number of edges, rounded once."""
    total = (torch.randn(3, 5) * 1000).bfloat16().requires_grad_()
    divisor = torch.tensor([[1.0], [3.0], [most]])
    rows = total * 1
    found = _DivideHalf.apply(rows, divisor)
    assert found is rows and "DivideHalf" in rows.grad_fn.name()
    assert torch.equal(found, (total.float() / divisor).bfloat16())
    grad = torch.randn(3, 5).bfloat16()
    (slope,) = torch.autograd.grad(found, total, grad, retain_graph=True)
    assert torch.equal(slope, (grad.float() / divisor).bfloat16())
    again = grad.clone().requires_grad_()
    (slope,) = torch.autograd.grad(found, total, again, create_graph=True)
    assert torch.equal(torch.autograd.grad(slope.sum(), again)[0], (1 / divisor).expand(3, 5).bfloat16())
    many = torch.stack([grad, 2 * grad])
    (slopes,) = torch.autograd.grad(found, total, many, is_grads_batched=True)
    assert torch.equal(slopes[1], (2 * grad.float() / divisor).bfloat16())


@pytest.mark.parametrize("autocast", [True, False])
def test_means_of_half_rows_come_in_the_type_of_the_products(autocast: bool):
    indptr = torch.cat([torch.tensor([0]), torch.tensor([257, 3]).cumsum(0)])
    block = Block(indptr, torch.arange(260), 260)
    x = torch.randint(-3, 4, (260, 4)).bfloat16()  # sums are exact in any order
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = Rows(x, x).aggregate(block, None, "mean")
    total = torch.stack([x[:257].float().sum(0), x[257:].float().sum(0)]).bfloat16().float()
    right = total / torch.tensor([[257.0], [3.0]])
    assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert torch.equal(found, right.to(found.dtype))
