"""The Python API as a user meets it: the names of `tgnn`, one rank without `launch`, ranks with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tgnn
from tests.dist.ranks import run_ranks
from tests.dist.training_runs import small_dataset
from tgnn.kernels import spmm


def test_every_name_is_there():
    for name in tgnn.__all__:
        assert getattr(tgnn, name) is not None, name
    for name in ("data", "kernels", "nn", "parallel", "partition", "sampling", "training"):
        assert getattr(tgnn, name).__name__ == f"tgnn.{name}"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tgnn.nonsense  # noqa: B018


def test_predict_is_a_function_before_and_after_its_module_is_imported():
    program = "import tgnn; a = tgnn.predict; import tgnn.predict as b; assert callable(a) and callable(b)"
    program += "; assert callable(b.main) and callable(tgnn.predict)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class MeanLayer(nn.Module):
    """A user's layer."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * in_width, out_width)

    def forward(self, block, x: Tensor) -> Tensor:
        return self.linear(torch.cat([x[: block.n_dst], spmm(block, x, reduce="mean")], dim=1))


def train(store: tgnn.Store, classes: int) -> Tensor | None:
    """A user's loop, in float64 so that numbers of ranks can be compared."""
    torch.manual_seed(0)
    model = tgnn.nn.GNN([MeanLayer(store.num_features, 8), MeanLayer(8, classes)]).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = tgnn.Loader(store, fanouts=[3, 3], batch_size=20)
    for _ in range(2):
        for batch in loader:
            batch.x = batch.x.double()
            loss = cross_entropy(model(batch), batch.y, reduction="sum") / batch.global_seeds
            optimizer.zero_grad()
            loss.backward()
            tgnn.all_reduce_gradients(model)
            optimizer.step()
    return tgnn.predict(model, store)


def test_own_loop_on_ranks_is_that_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path))
    dataset = small_dataset()
    one, two = tgnn.prepare(dataset, parts=1), tgnn.prepare(dataset, parts=2)
    alone = train(one, dataset.num_classes)
    launched = tgnn.launch(train, one, dataset.num_classes, ranks=1)
    torch.testing.assert_close(launched, alone, rtol=0, atol=0)
    together = run_ranks(train, 2, two, dataset.num_classes)
    assert together.shape == (300, dataset.num_classes) and together.dtype == torch.float64
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_a_store_of_another_number_of_parts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path))
    two = tgnn.prepare("karate", parts=2)
    model = tgnn.nn.GNN([MeanLayer(34, 2)])
    for call in (lambda: tgnn.Loader(two, fanouts=[3]), lambda: tgnn.predict(model, two)):
        with pytest.raises(tgnn.UserError, match=r"got 2 parts, expected 1, one for each rank"):
            call()
