"""The exchange on one rank: nothing to do, or rows asked of oneself; plans that make no sense are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tgnn.errors import UserError
from tgnn.parallel import Comm, ExchangePlan, all_reduce_gradients, start_exchange


def test_one_rank_without_halo_needs_no_exchange():
    x = torch.randn(4, 3, requires_grad=True)
    plan = ExchangePlan.none(4)
    assert (plan.n_halo, plan.n_local) == (0, 4)
    halo = start_exchange(plan, x).wait()
    assert halo.shape == (0, 3) and halo.dtype == x.dtype
    torch.cat([x, halo]).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 3))
    assert start_exchange(ExchangePlan.none(0), torch.empty(0, 2, 2)).wait().shape == (0, 2, 2)


def test_rows_asked_of_oneself():
    """Rows 2 and 0 of [10, 11, 12]; their gradients 5 and 7 come back as [7, 0, 5]."""
    x = torch.tensor([10.0, 11.0, 12.0], requires_grad=True)
    transfer = start_exchange(ExchangePlan(torch.tensor([2, 0]), [2], [2], 3), x, Comm())
    halo = transfer.wait()
    assert halo is transfer.wait()
    assert halo.tolist() == [12.0, 10.0]
    (halo * torch.tensor([5.0, 7.0])).sum().backward()
    assert x.grad.tolist() == [7.0, 0.0, 5.0]


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="got torch.int32 of shape"):
        ExchangePlan(torch.zeros(1, dtype=torch.int32), [1], [1], 1)
    with pytest.raises(ValueError, match="got 1 send rows, send counts"):
        ExchangePlan(torch.zeros(1, dtype=torch.int64), [2], [1], 1)
    with pytest.raises(ValueError, match="got 3 rows, expected the plan's 4"):
        start_exchange(ExchangePlan.none(4), torch.ones(3))
    with pytest.raises(ValueError, match="got dtype torch.int64 for rows of torch.float32"):
        start_exchange(ExchangePlan.none(3), torch.ones(3), dtype=torch.int64)


def test_gradients_on_one_rank_stay_and_missing_ones_become_zeros():
    model = nn.Linear(2, 1)
    model.weight.grad = torch.full((1, 2), 3.0)
    extra = torch.tensor([1.0, 2.0], dtype=torch.float64)
    summed = all_reduce_gradients(model, extra=extra)
    assert summed.tolist() == [1.0, 2.0] and summed is not extra
    assert model.weight.grad.tolist() == [[3.0, 3.0]] and model.bias.grad.tolist() == [0.0]
    with pytest.raises(ValueError, match="extra: got torch.float32"):
        all_reduce_gradients(model, extra=torch.ones(1))


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(UserError, match="gradient: got a sparse one, expected a dense one"):
        all_reduce_gradients(embedding)


def test_gradients_of_all_uses_meet():
    """Rows as local ones, as the first of them and as travellers: one gradient, and nobody else's is touched."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    other = torch.zeros(3, requires_grad=True)
    plan = ExchangePlan(torch.tensor([2]), [1], [1], 2 + 1)
    halo = start_exchange(plan, x, Comm(), head=2)
    assert halo.head.tolist() == [1.0, 2.0] and halo.local.tolist() == [1.0, 2.0, 3.0]
    # An addition hands the same tensor on as the gradient of both its terms.
    loss = (halo.local + other).sum() + 10 * halo.head.sum() + 100 * halo.wait().sum()
    loss.backward(retain_graph=True)
    assert x.grad.tolist() == [11.0, 11.0, 101.0] and other.grad.tolist() == [1.0, 1.0, 1.0]
    loss.backward()
    assert x.grad.tolist() == [22.0, 22.0, 202.0]


def test_rows_beyond_the_plan_stay_and_have_gradients():
    x = torch.ones(5, 2, requires_grad=True)
    halo = start_exchange(ExchangePlan(torch.tensor([1]), [1], [1], 3), x, Comm())
    (halo.local.sum() + halo.wait().sum()).backward()
    assert x.grad.sum(1).tolist() == [2.0, 4.0, 2.0, 2.0, 2.0]


def test_half_types_are_summed_in_float32():
    """256 + 1 + 1 in bfloat16 would stop at 256."""
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    halo = start_exchange(ExchangePlan(torch.tensor([0]), [1], [1], 1), x, Comm(), head=1)
    (256 * halo.local.float() + halo.head.float() + halo.wait().float()).sum().backward()
    assert x.grad.item() == 258.0
