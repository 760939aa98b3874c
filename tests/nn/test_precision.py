"""Rows in bfloat16: products in bfloat16 where the CPU has them, else in float32; near the float32 model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tgnn.data.synthetic import sbm
from tgnn.nn import precision
from tgnn.nn.model import GNN, MODELS
from tgnn.nn.precision import mixed_precision
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    dataset = sbm(400, seed=2)
    return write_store(dataset, np.zeros(400, np.int32), tmp_path_factory.mktemp("precision") / "store")


def loss_and_gradients(
    store: Store, model: str, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    batch = next(iter(Loader(store, [5, 5], 64, seed=1)))
    torch.manual_seed(0)
    net = GNN.build(model, store.num_features, 16, store.num_classes)
    with mixed_precision(dtype, "cpu"):
        batch.x = batch.x.to(dtype)
        loss = F.cross_entropy(net(batch).float(), batch.y)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("native", [True, False], ids=["in bfloat16", "in float32"])
@pytest.mark.parametrize("model", MODELS)
def test_mixed_precision_is_near_float32(
    store: Store, model: str, native: bool, monkeypatch: pytest.MonkeyPatch
):
    """Eight bits of mantissa in a row or a product: some 2^-8 of the largest value, not more than 2^-4 added up."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: native)
    loss, gradients = loss_and_gradients(store, model, torch.bfloat16)
    right, right_gradients = loss_and_gradients(store, model, torch.float32)
    assert loss != right
    torch.testing.assert_close(loss, right, rtol=2**-5, atol=0)
    for found, expected in zip(gradients, right_gradients, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(
            found, expected, rtol=0, atol=2**-4 * max(1.0, float(expected.abs().max()))
        )


def test_products_are_float32_where_the_cpu_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch):
    """The values are those of the rounded rows, multiplied in float32: no further rounding."""
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)
    x, weight, bias = torch.randn(5, 7).bfloat16(), torch.randn(3, 7), torch.randn(3)
    with mixed_precision(torch.bfloat16, "cpu"):
        found = (
            F.linear(x, weight, bias),
            x @ weight.t(),
            torch.addmm(bias, x, weight.t()),
            torch.mm(x, weight.t()),
        )
    product = x.float() @ weight.t()
    for value, right in zip(found, (product + bias, product, product + bias, product), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, right)
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: True)
    with mixed_precision(torch.bfloat16, "cpu"):
        assert F.linear(x, weight, bias).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_compute_as_they_are(dtype: torch.dtype):
    with mixed_precision(dtype, "cpu"):
        assert F.linear(torch.ones(2, 3, dtype=dtype), torch.ones(1, 3, dtype=dtype)).dtype == dtype
