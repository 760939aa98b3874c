"""dropout on Triton: the torch path's mask and values, forward and backward, and nothing saved but the ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgnn.kernels import dropout, last_ran, rng, use_backend

KEY = rng.stream(3, rng.FEATURE_DROPOUT, 1)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    found = found.detach().cpu()
    assert found.dtype == expected.dtype
    assert torch.equal(found == 0, expected == 0)
    # The interpreter truncates to bfloat16.
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("width", [1, 3, 31, 64, 100, 260])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_torch_forward_and_backward(width: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(13, width, generator=generator).to(dtype)
    grad = torch.randn(13, width, generator=generator).to(dtype)
    ids = torch.randint(0, 1 << 40, (13,), generator=generator)
    for p in (0.1, 1 - 1e-9):
        results = []
        for place, backend in (("cpu", "torch"), (device, "triton")):
            leaf = x.to(place).requires_grad_()
            with use_backend(backend):
                out = dropout(leaf, p, KEY, ids.to(place))
                out.backward(grad.to(place))
            assert last_ran("dropout") == backend
            results.append((out.detach(), leaf.grad))
        check(results[1][0], results[0][0])
        check(results[1][1], results[0][1])


def test_a10_strided_input_expanded_gradient_and_no_rows(device: str, triton_backend: None):
    wide = torch.randn(5, 24, device=device)
    ids = torch.arange(10, device=device)[::2]
    for x in (wide[:, 4:12], wide.t()[:5], wide[:, ::3]):
        leaf = x.detach().requires_grad_()
        out = dropout(leaf, 0.5, KEY, ids)
        plain = dropout(x.contiguous(), 0.5, KEY, ids.contiguous())
        assert torch.equal(out, plain)
        out.sum().backward()
        assert torch.equal(leaf.grad, torch.where(out != 0, 2.0, 0.0))
    empty = dropout(torch.zeros(0, 8, device=device), 0.5, KEY, ids[:0])
    assert empty.shape == (0, 8)
    assert dropout(torch.zeros(5, 0, device=device), 0.5, KEY, ids).shape == (5, 0)


def test_no_mask_is_saved(device: str, triton_backend: None):
    x = torch.randn(50, 64, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        dropout(x, 0.5, KEY, torch.arange(50, device=device))
    assert [tensor.shape for tensor in saved] == [(50,)]


def test_a08_rows_far_apart(device: str, triton_backend: None):
    """Rows 2^30 elements apart: the last one starts at 2^31. The buffer is never touched elsewhere."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of GPU memory")
    buffer = torch.from_numpy(np.zeros((2 << 30) + 8, dtype=np.float16)).to(device)
    x = buffer.as_strided((3, 8), (1 << 30, 1))
    x.copy_(torch.randn(3, 8))
    ids = torch.arange(3, device=device)
    assert torch.equal(dropout(x, 0.5, KEY, ids), dropout(x.contiguous(), 0.5, KEY, ids))
