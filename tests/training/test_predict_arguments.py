"""`tgnn.predict` as a function: what it takes for a model and for a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.dist.training_runs import small_dataset, store_of, trainer
from tgnn.errors import UserError
from tgnn.training.inference import predict


def test_a_model_and_a_store_or_its_path(tmp_path: Path):
    store = store_of(small_dataset(), 1, tmp_path)
    model = trainer(store, None, epochs=1).model
    assert torch.equal(predict(model, str(store.path)), predict(model, store))
    with pytest.raises(UserError, match="model: got a Linear, expected a tgnn.nn.GNN"):
        predict(nn.Linear(3, 2), store)
    with pytest.raises(UserError, match="nostore"):
        predict(model, "nostore")
    with pytest.raises(UserError, match=r"tgnn\.launch\(fn, \.\.\., ranks=2\)"):
        predict(model, store_of(small_dataset(), 2, tmp_path))
