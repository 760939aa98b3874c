"""Aggregating straight from the table of all features: the numbers of a copy of the input rows, on one CPU rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tgnn.data import synthetic
from tgnn.errors import UserError
from tgnn.nn.model import GNN
from tgnn.parallel import Comm
from tgnn.partition.store import Store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch
from tgnn.training.loss import loss_sum
from tgnn.training.prepare import prepare

FANOUTS = (4, 3)
# Layers that read in place, wider and narrower outputs than inputs: the latter project first.
IN_PLACE = [
    ("sage", 24, "mean"),
    ("sage", 24, "gcn"),
    ("gcn", 24, "mean"),
    ("gin", 24, "mean"),
    ("gin", 4, "mean"),
]
NOT_IN_PLACE = [
    ("sage", 4, "mean"),
    ("sage", 24, "pool"),
    ("sage", 24, "max"),
    ("gcn", 4, "mean"),
    ("gat", 4, "mean"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    dataset = synthetic.community(600, num_features=12)
    return prepare(dataset, 1, store=tmp_path_factory.mktemp("in_place") / "store")


def build(store: Store, kind: str, hidden: int, aggregator: str, **options) -> GNN:
    torch.manual_seed(0)
    sizes = (store.num_features, hidden, store.num_classes, len(FANOUTS))
    return GNN.build(kind, *sizes, aggregator=aggregator, **options)


def batch_of(store: Store, in_place: bool, **options) -> MiniBatch:
    return next(iter(Loader(store, FANOUTS, 40, in_place=in_place, **options)))


def results(model: GNN, batch: MiniBatch, task) -> list[torch.Tensor]:
    """Logits, and the gradients of the loss."""
    logits = model(batch)
    model.zero_grad()
    loss_sum(logits, batch.y, task).backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("sampler", ["uniform", "labor"])
@pytest.mark.parametrize(("kind", "hidden", "aggregator"), IN_PLACE)
def test_same_bits_as_a_copy_of_the_rows(store: Store, kind: str, hidden: int, aggregator: str, sampler: str):
    model = build(store, kind, hidden, aggregator, residual=True, norm="layer")
    assert model.reads_in_place
    copied, in_place = (batch_of(store, flag, sampler=sampler) for flag in (False, True))
    assert in_place.x.shape[0] == store.num_vertices > copied.x.shape[0]
    assert copied.dst_rows is None and torch.equal(
        in_place.x[in_place.dst_rows], copied.x[: copied.blocks[0].n_dst]
    )
    for a, b in zip(results(model, copied, store.task), results(model, in_place, store.task), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "options", [{}, {"replace": True}, {"feature_cache": 0}, {"sampler": "labor"}], ids=str
)
def test_the_same_work_is_counted(store: Store, options: dict):
    batches = [list(Loader(store, FANOUTS, 40, in_place=flag, **options)) for flag in (False, True)]
    for copied, in_place in zip(*batches, strict=True):
        assert copied.work == in_place.work
        assert copied.work["input_rows"] == len(copied.ids[0])
        for ours, theirs in zip(copied.ids[1:], in_place.ids[1:], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("kind", "hidden", "aggregator"), NOT_IN_PLACE)
def test_models_that_change_or_project_all_rows_are_refused(
    store: Store, kind: str, hidden: int, aggregator: str
):
    model = build(store, kind, hidden, aggregator)
    assert not model.reads_in_place
    with pytest.raises(UserError, match="without in_place"):
        model(batch_of(store, True))


def test_dropout_changes_input_rows_while_training_only(store: Store):
    model = build(store, "sage", 24, "mean", dropout=0.5)
    assert not model.reads_in_place
    batch, copied = batch_of(store, True), batch_of(store, False)
    with pytest.raises(UserError, match="in_place"):
        model(batch)
    model.eval()
    assert model.reads_in_place and torch.equal(model(batch), model(copied))


def test_where_features_are_in_several_pieces_or_of_another_type_rows_are_copied(
    store: Store, tmp_path: Path
):
    assert batch_of(store, True, dtype=torch.float64).dst_rows is None
    two = prepare(synthetic.community(600, num_features=12), 2, store=tmp_path / "two")
    loader = Loader(two, FANOUTS, 40, parallel="data", in_place=True, comm=Comm(0, 2, "cpu"))
    assert next(iter(loader)).dst_rows is None


def test_rows_of_half_the_width_are_read_in_place_too(store: Store):
    batch = batch_of(store, True, dtype=torch.bfloat16)
    assert batch.dst_rows is not None and batch.x.dtype == torch.bfloat16
