"""Losses and metrics: hand-computed values, brute force, and the same figures on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tgnn.errors import UserError
from tgnn.parallel.comm import Comm
from tgnn.training.loss import check_metric, evaluate, loss_sum, mean_loss, task_of

NAN = float("nan")


class ThreadComm:
    """A `Comm` among threads: every collective meets at a barrier and reads the others' values."""

    def __init__(self, rank: int, ranks: int, board: list, barrier: threading.Barrier):
        self.rank, self.ranks, self.device = rank, ranks, torch.device("cpu")
        self._board, self._barrier = board, barrier

    def _meet(self, value: Any) -> list:
        self._board[self.rank] = value
        self._barrier.wait(timeout=20)
        values = list(self._board)
        self._barrier.wait(timeout=20)
        return values

    def all_reduce(self, t: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return t.copy_(torch.stack(self._meet(t.clone())).sum(dim=0))

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        return self._meet(list(values))

    def all_to_all_rows(
        self, send: torch.Tensor, send_counts: list[int], recv_counts: list[int]
    ) -> torch.Tensor:
        pieces = [groups[self.rank] for groups in self._meet(send.split(send_counts))]
        assert [len(piece) for piece in pieces] == recv_counts
        return torch.cat(pieces)


def on_ranks(ranks: int, fn: Callable[[Any], Any]) -> list:
    """`fn(comm)` in one thread per rank."""
    results: list = [None] * ranks
    board, barrier = [None] * ranks, threading.Barrier(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(rank, ranks, board, barrier))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def evaluate_split(logits: torch.Tensor, labels: torch.Tensor, metric: str, ranks: int) -> tuple:
    """The metric with the rows dealt in turn to all ranks but the last of several, which has none."""
    owner = torch.arange(len(labels)) % max(1, ranks - 1)
    results = on_ranks(
        ranks, lambda comm: evaluate(logits[owner == comm.rank], labels[owner == comm.rank], metric, comm)
    )
    assert all(result == results[0] for result in results)
    return results[0]


def brute_force_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Share of (positive, negative) pairs in the right order, ties half."""
    difference = scores[positive][:, None] - scores[~positive][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a17_metrics_do_not_depend_on_ranks(ranks: int) -> None:
    labels = torch.tensor([0, 1, 0, 1, 1])
    logits = F.one_hot(torch.tensor([0, 0, 1, 0, 0]), 2).float()
    assert evaluate_split(logits, labels, "accuracy", ranks) == (0.2, 5)


def test_single_label_loss_is_cross_entropy_summed() -> None:
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 1.0]], requires_grad=True)
    loss = loss_sum(logits, torch.tensor([0, -1, 1]), "single-label")
    expected = np.log(2) + np.log(1 + np.exp(2))
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float32))
    loss.backward()
    assert torch.count_nonzero(logits.grad[1]) == 0


def test_multi_label_loss_counts_labelled_cells_over_classes() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0], [5.0, 0.0, 0.0, 0.0]], requires_grad=True)
    labels = torch.tensor([[1.0, 0.0, NAN, NAN], [NAN, NAN, NAN, NAN]])
    loss = loss_sum(logits, labels, "multi-label")
    expected = (np.log(2) + np.log(1 + np.exp(2))) / 4
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float32))
    loss.backward()
    assert bool(logits.grad.isfinite().all())
    assert torch.count_nonzero(logits.grad[1]) == 0


@pytest.mark.parametrize("task", ["single-label", "multi-label"])
def test_loss_of_no_seeds_is_zero_and_connected(task: str) -> None:
    logits = torch.empty(0, 3, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64) if task == "single-label" else torch.empty(0, 3)
    loss = loss_sum(logits, labels, task)
    assert loss.item() == 0
    loss.backward()
    assert logits.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype, expected", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_loss_has_at_least_single_precision(dtype: torch.dtype, expected: torch.dtype) -> None:
    logits = torch.ones(4096, 2, dtype=dtype)
    loss = loss_sum(logits, torch.zeros(4096, dtype=torch.int64), "single-label")
    assert loss.dtype == expected
    torch.testing.assert_close(loss.double(), torch.tensor(4096 * np.log(2)), rtol=1e-6, atol=0)


def test_mean_loss_is_the_mean_over_all_ranks() -> None:
    logits, labels = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, -1, 2])
    alone = mean_loss(logits, labels, "single-label", Comm())
    assert alone == pytest.approx(F.cross_entropy(logits, labels, ignore_index=-1).item())
    shares = on_ranks(
        3,
        lambda comm: mean_loss(
            logits[comm.rank * 3 :][:3], labels[comm.rank * 3 :][:3], "single-label", comm
        ),
    )
    assert shares == [pytest.approx(alone)] * 3


@pytest.mark.parametrize("metric", ["accuracy", "f1", "auc"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_empty_split_has_no_figure(metric: str, ranks: int) -> None:
    assert evaluate_split(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), metric, ranks) == (None, 0)
    assert evaluate_split(torch.empty(0, 2), torch.empty(0, 2), metric, ranks) == (None, 0)
    assert mean_loss(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), "single-label", Comm()) is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_unlabelled_rows_count_in_no_metric(ranks: int) -> None:
    labels = torch.tensor([0, -1, 1, -1, 1])
    logits = F.one_hot(torch.tensor([0, 0, 1, 1, 0]), 2).float()
    assert evaluate_split(logits, labels, "accuracy", ranks) == (2 / 3, 3)
    value, count = evaluate_split(logits, labels, "f1", ranks)
    assert (value, count) == (pytest.approx((2 / 3 + 2 / 3) / 2), 3)
    assert evaluate_split(logits, labels, "auc", ranks) == (0.75, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_macro_f1_by_hand(ranks: int) -> None:
    # Class 0: 2 right of 3 predicted and 2 actual: F1 4/5. Class 1: 1 of 1 and 2: F1 2/3. Class 2: none,
    # one predicted, one actual: F1 0. Class 3 occurs nowhere and does not count.
    labels = torch.tensor([0, 0, 1, 1, 2])
    logits = F.one_hot(torch.tensor([0, 0, 1, 2, 0]), 4).float()
    value, count = evaluate_split(logits, labels, "f1", ranks)
    assert value == pytest.approx((4 / 5 + 2 / 3 + 0) / 3, abs=1e-12)
    assert count == 5


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_micro_f1_and_accuracy_of_multi_label_by_hand(ranks: int) -> None:
    # Labelled cells: 5. Predicted positive: 3 of them, 2 rightly; actual positive: 3. F1 = 2*2/(3+3).
    labels = torch.tensor([[1.0, 0.0], [1.0, NAN], [0.0, 1.0], [NAN, NAN]])
    logits = torch.tensor([[2.0, -1.0], [0.5, 9.0], [3.0, -0.1], [1.0, 1.0]])
    assert evaluate_split(logits, labels, "f1", ranks) == (pytest.approx(2 / 3), 3)
    assert evaluate_split(logits, labels, "accuracy", ranks) == (pytest.approx(3 / 5), 3)


def test_f1_without_any_positive_is_zero() -> None:
    assert evaluate(-torch.ones(3, 2), torch.zeros(3, 2), "f1", Comm()) == (0.0, 3)


def test_auc_by_hand() -> None:
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8])
    logits = torch.stack([torch.zeros(4), scores], dim=1)
    assert evaluate(logits, torch.tensor([0, 1, 0, 1]), "auc", Comm()) == (0.875, 4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_auc_equals_pair_counting_with_ties(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 6, (80, 2), generator=generator).float()
    labels = torch.randint(0, 2, (80,), generator=generator)
    expected = brute_force_auc((logits[:, 1] - logits[:, 0]).numpy(), labels.numpy() == 1)
    value, count = evaluate_split(logits, labels, "auc", ranks)
    assert (value, count) == (pytest.approx(expected, abs=1e-12), 80)
    assert value == evaluate(logits, labels, "auc", Comm())[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_multi_label_auc_is_the_mean_over_classes_with_both_kinds(ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 5, (40, 4), generator=generator).float()
    labels = torch.randint(0, 2, (40, 4), generator=generator).float()
    labels[:, 1] = 1
    labels[:, 3] = NAN
    labels[:7, 0] = NAN
    areas = []
    for column in (0, 2):
        known = ~labels[:, column].isnan().numpy()
        areas.append(brute_force_auc(logits[known, column].numpy(), labels[known, column].numpy() == 1))
    value, count = evaluate_split(logits, labels, "auc", ranks)
    assert (value, count) == (pytest.approx(np.mean(areas), abs=1e-12), 40)


def test_auc_is_undefined_with_one_class_and_nan_for_nan_scores() -> None:
    assert evaluate(torch.randn(3, 2), torch.ones(3, dtype=torch.int64), "auc", Comm()) == (None, 3)
    logits = torch.tensor([[0.0, NAN], [0.0, 1.0]])
    assert np.isnan(evaluate(logits, torch.tensor([0, 1]), "auc", Comm())[0])


def test_metric_is_resolved_and_checked() -> None:
    assert check_metric("auto", "single-label", 7) == "accuracy"
    assert check_metric("auto", "multi-label", 7) == "f1"
    assert check_metric("auc", "multi-label", 7) == "auc"
    assert check_metric("auc", "single-label", 2) == "auc"
    for metric, classes in (("auc", 3), ("recall", 2)):
        with pytest.raises(UserError, match=r"^--metric: got [^\n]+\.$"):
            check_metric(metric, "single-label", classes)
    with pytest.raises(UserError, match="auc with 3 classes"):
        evaluate(torch.randn(3, 3), torch.tensor([0, 1, 2]), "auc", Comm())


def test_task_follows_the_labels_shape() -> None:
    assert task_of(torch.zeros(3, dtype=torch.int64)) == "single-label"
    assert task_of(torch.zeros(3, 4)) == "multi-label"
