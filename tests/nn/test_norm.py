"""SyncBatchNorm on one rank is torch's own batch norm; over ranks see tests/dist/test_laws.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tgnn.errors import UserError
from tgnn.nn.norm import SyncBatchNorm, make_norm


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_sync_batch_norm_equals_batch_norm(dtype: torch.dtype, tolerance: float):
    """Three training steps, then evaluation: outputs, gradients, parameters' names, running statistics."""
    torch.manual_seed(0)
    ours, theirs = SyncBatchNorm(5).to(dtype), nn.BatchNorm1d(5).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 2)
    ours.load_state_dict(theirs.state_dict())

    def close(a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    for step in range(3):
        table = (torch.randn(7 + step, 5) * 3 + 100 * torch.arange(5)).to(dtype)
        weight = torch.randn(7 + step, 5).to(dtype)
        x, y = table.clone().requires_grad_(), table.clone().requires_grad_()
        (ours(x) * weight).sum().backward()
        (theirs(y) * weight).sum().backward()
        close(ours(table), theirs(table))
        close(x.grad, y.grad)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            close(a.grad, b.grad)
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    for name, value in ours.state_dict().items():
        close(value, state[name])
    ours.eval(), theirs.eval()
    close(ours(table), theirs(table))


def test_sync_batch_norm_without_rows_and_of_one_row():
    """No row: no statistics, no NaN. One row: its mean, no spread."""
    norm = SyncBatchNorm(3)
    out = norm(torch.zeros(0, 3, requires_grad=True))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert norm.num_batches_tracked == 0 and norm.weight.grad.isfinite().all()
    torch.testing.assert_close(norm.running_var, torch.ones(3), rtol=0, atol=0)
    torch.testing.assert_close(norm(torch.full((1, 3), 5.0)), torch.zeros(1, 3), rtol=0, atol=0)
    torch.testing.assert_close(norm.running_mean, torch.full((3,), 0.5), rtol=1e-6, atol=0)


def test_half_types_keep_their_type():
    """bfloat16 rows are normalised in float32: a mean of 300 would cost all their digits."""
    x = (torch.arange(64.0).view(32, 2) + 300).bfloat16()
    found, expected = SyncBatchNorm(2)(x), nn.BatchNorm1d(2)(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_make_norm():
    assert isinstance(make_norm("layer", 4), nn.LayerNorm)
    assert isinstance(make_norm("batch", 4), SyncBatchNorm)
    assert isinstance(make_norm("none", 4), nn.Identity)
    with pytest.raises(UserError, match="none, layer, batch"):
        make_norm("instance", 4)
