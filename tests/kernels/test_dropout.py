"""dropout: rate, scale, gradient, and that the mask belongs to (key, id, column) alone."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.kernels import dropout, last_ran, rng, segment
from tgnn.kernels.dropout import threshold

KEY = rng.stream(0, rng.FEATURE_DROPOUT, 3)


def mask_reference(key: int, ids: list[int], width: int, p: float) -> torch.Tensor:
    """Which elements are kept, from Python's big integers."""
    golden, drop = 0x9E3779B97F4A7C15, round(p * 65536)
    rows = []
    for vertex in ids:
        state = rng.mix_int(key + vertex * golden)
        words = [rng.mix_int(state + (k + 1) * golden) for k in range((width + 3) // 4)]
        lanes = [(words[c // 4] >> 16 * (c % 4)) % 65536 for c in range(width)]
        rows.append([(lane - 65536 if lane >= 32768 else lane) >= drop - 32768 for lane in lanes])
    return torch.tensor(rows, dtype=torch.bool).view(len(ids), width)


def test_docstring_example():
    out = dropout(torch.ones(5, 8), 0.5, KEY, torch.tensor([4, 1, 4, 2, 1]))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(out[0], out[2])
    assert torch.equal(out[1], out[4])
    assert not torch.equal(out[0], out[1])
    assert last_ran("dropout") == "torch"


@pytest.mark.parametrize("width", [0, 1, 3, 31, 64, 100])
@pytest.mark.parametrize("n", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_values_and_gradient(width, n, dtype):
    ids = torch.arange(n) * 2**33 + 5
    x = torch.randn(n, width).to(dtype).requires_grad_()
    out = dropout(x, 0.3, KEY, ids)
    scale = mask_reference(KEY, ids.tolist(), width, 0.3).double() * (65536 / (65536 - round(0.3 * 65536)))
    torch.testing.assert_close(out, (x.double() * scale).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    grad = torch.randn(n, width).to(dtype)
    out.backward(grad)
    torch.testing.assert_close(x.grad, (grad.double() * scale).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_gradcheck():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, 0.4, KEY, torch.arange(4)), (x,))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_mean(p):
    n, width = 4000, 50
    out = dropout(torch.ones(n, width, dtype=torch.float64), p, KEY, torch.arange(n))
    kept = (out != 0).double()
    deviation = (p * (1 - p) / (n * width)) ** 0.5
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation
    assert abs(out.mean().item() - 1) < 5 * deviation / (1 - p)
    # Every column by itself, and neighbouring columns and rows unrelated.
    by_column = (p * (1 - p) / n) ** 0.5
    assert (kept.mean(0) - (1 - p)).abs().max() < 5 * by_column
    centred = kept - (1 - p)
    for product in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(product.mean().item()) < 5 * p * (1 - p) / (n * (width - 1)) ** 0.5


def test_a14_mask_depends_on_key_and_id_not_on_place_order_or_runs(monkeypatch):
    ids = torch.randint(0, 10**12, (200,), generator=torch.Generator().manual_seed(0))
    x = torch.ones(200, 10)
    out = dropout(x, 0.5, KEY, ids)
    order = torch.randperm(200)
    assert torch.equal(dropout(x, 0.5, KEY, ids[order]), out[order])
    assert torch.equal(dropout(x[:7], 0.5, KEY, ids[40:47]), out[40:47])
    assert torch.equal(dropout(torch.ones(200, 6), 0.5, KEY, ids), out[:, :6])
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", 64)
    assert torch.equal(dropout(x, 0.5, KEY, ids), out)
    other = dropout(x, 0.5, rng.stream(0, rng.FEATURE_DROPOUT, 4), ids)
    # Two unrelated masks agree in half of 2000 places: 1000, standard deviation 22.
    assert 850 < ((other != 0) == (out != 0)).sum().item() < 1150


def test_a10_strided_input_and_expanded_gradient():
    ids = torch.arange(4)
    for x in (torch.randn(4, 5, 2)[:, :, 1], torch.randn(5, 4).t(), torch.randn(4, 1).expand(4, 5)):
        results = []
        for leaf in (x.detach().requires_grad_(), x.contiguous().detach().requires_grad_()):
            out = dropout(leaf, 0.5, KEY, ids)
            results.append((out.detach(), torch.autograd.grad(out.sum(), leaf)[0]))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_probabilities_at_the_ends():
    x = torch.ones(3, 4)
    assert dropout(x, 0.0, KEY, torch.arange(3)) is x
    assert dropout(x, 1e-6, KEY, torch.arange(3)) is x
    assert threshold(0.9999999) == 65535
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match=r"a number in \[0, 1\)"):
            dropout(x, p, KEY, torch.arange(3))
    with pytest.raises(UserError, match="give every row its id"):
        dropout(x, 0.5, KEY, torch.arange(1))
