"""The loss, and the metrics accuracy, F1 and ROC AUC, exact over any number of ranks.

Ranks hold disjoint rows of a split. Sums of integers (and, for AUC, the scores themselves) travel, never
averages, so a figure does not depend on how the rows are dealt. Labels are int64 [n] (single-label; -1 =
unlabelled) or float [n, C] of 0 and 1 (multi-label; NaN = unlabelled cell).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tgnn.errors import UserError, wrong
from tgnn.parallel.comm import Comm

SINGLE_LABEL, MULTI_LABEL = "single-label", "multi-label"


def task_of(labels: torch.Tensor) -> str:
    """The task that labels of this shape belong to: one label per vertex, or a row of them."""
    return SINGLE_LABEL if labels.dim() == 1 else MULTI_LABEL


def loss_sum(logits: torch.Tensor, labels: torch.Tensor, task: str) -> torch.Tensor:
    """Sum of the seeds' losses: a scalar of at least float32, connected to `logits` also where there are no
    seeds.

    `logits` [B, C]. Single-label: cross entropy; label -1 adds nothing. Multi-label: per seed, the binary
    cross entropies of its labelled cells, divided by C. The global loss is the sum over ranks divided by the
    global batch's number of seeds.
    """
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if len(logits) == 0:
        return logits.sum()
    if task == SINGLE_LABEL:
        return F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
    labelled = ~labels.isnan()
    target = torch.where(labelled, labels, 0).to(logits.dtype)
    cells = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(labelled, cells, 0).sum() / logits.shape[1]


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, task: str, comm: Comm) -> float | None:
    """Mean loss over the split whose rows the ranks share; None for an empty split. Collective."""
    with torch.no_grad():
        rows = torch.tensor(float(_labelled_rows(labels)), dtype=torch.float64)
        total = torch.stack([loss_sum(logits, labels, task).double().cpu(), rows]).to(comm.device)
        loss, count = comm.all_reduce(total).tolist()
    return loss / count if count else None


def check_metric(metric: str, task: str, num_classes: int) -> str:
    """The metric's name with `auto` resolved: accuracy, or f1 for multi-label.

    Raises UserError for AUC on single-label data that has not exactly 2 classes.
    """
    if metric == "auto":
        return "f1" if task == MULTI_LABEL else "accuracy"
    if metric not in _METRICS:
        raise wrong("--metric", metric, "one of auto, " + ", ".join(_METRICS), "choose one of these")
    if metric == "auc" and task == SINGLE_LABEL and num_classes != 2:
        raise _auc_needs_two_classes(num_classes)
    return metric


def evaluate(logits: torch.Tensor, labels: torch.Tensor, metric: str, comm: Comm) -> tuple[float | None, int]:
    """The metric over a split whose rows the ranks share, and the number of labelled rows over all ranks.

    `logits` [n, C] and `labels` are this rank's rows, perhaps none. The same on every rank and for every
    number of ranks; None where the split is empty or the metric is undefined on it. Collective.
    """
    accumulator = _METRICS[metric]()
    accumulator.update(logits, labels)
    return accumulator.compute(comm)


class Accuracy:
    """Share of labelled vertices whose largest logit is their label; multi-label: share of labelled cells
    whose logit's sign agrees with the label (threshold: probability 0.5).
    """

    def __init__(self) -> None:
        self._right, self._cells, self._rows = 0, 0, 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the rows of `logits` [n, C] with their `labels`."""
        if task_of(labels) == SINGLE_LABEL:
            labelled = labels >= 0
            right = (logits.argmax(dim=1) == labels) & labelled
        else:
            labelled = ~labels.isnan()
            right = ((logits > 0) == (labels > 0.5)) & labelled
        self._right += int(right.sum())
        self._cells += int(labelled.sum())
        self._rows += _labelled_rows(labels)

    def compute(self, comm: Comm) -> tuple[float | None, int]:
        """(accuracy, labelled rows) over all ranks. Collective."""
        sums = torch.tensor([self._right, self._cells, self._rows], dtype=torch.int64, device=comm.device)
        right, cells, rows = comm.all_reduce(sums).tolist()
        return (right / cells if cells else None), rows


class F1:
    """Single-label: macro F1, the mean over the classes that occur among the labels or the predictions.
    Multi-label: micro F1 over all labelled cells (threshold: logit 0)."""

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self._rows = 0
        self._is_macro = True

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count the rows of `logits` [n, C] with their `labels`."""
        num_classes = logits.shape[1]
        if task_of(labels) == SINGLE_LABEL:
            logits, labels = logits[labels >= 0], labels[labels >= 0]
            predicted = logits.argmax(dim=1)
            hits = predicted[predicted == labels]
            pieces = [torch.bincount(ids, minlength=num_classes) for ids in (hits, predicted, labels)]
            self._rows += len(labels)
        else:
            self._is_macro = False
            labelled = ~labels.isnan()
            predicted, actual = (logits > 0) & labelled, (labels > 0.5) & labelled
            pieces = [cells.sum(dim=0) for cells in (predicted & actual, predicted, actual)]
            self._rows += _labelled_rows(labels)
        counts = torch.stack(pieces)
        self._counts = counts if self._counts is None else self._counts + counts

    def compute(self, comm: Comm) -> tuple[float | None, int]:
        """(F1, labelled rows) over all ranks; 0 where nothing is positive. Collective."""
        if self._counts is None:
            raise RuntimeError("F1.compute needs an update on every rank, with no rows where a rank has none")
        rows = int(comm.all_reduce(torch.tensor([self._rows], dtype=torch.int64, device=comm.device)))
        hits, predicted, actual = comm.all_reduce(self._counts.to(comm.device, copy=True)).double().cpu()
        if rows == 0:
            return None, 0
        if not self._is_macro:
            hits, predicted, actual = hits.sum(), predicted.sum(), actual.sum()
            return float(2 * hits / (predicted + actual).clamp(min=1)), rows
        occurs = (predicted + actual) > 0
        return float((2 * hits[occurs] / (predicted + actual)[occurs]).mean()), rows


class RocAuc:
    """Area under the ROC curve: the share of (positive, negative) pairs that the score ranks rightly, ties
    counting half. Single-label with 2 classes scores by logit 1 minus logit 0; multi-label is the mean over
    the classes that have both positives and negatives. Exact: every rank gathers the scores of the split,
    class by class.
    """

    def __init__(self) -> None:
        self._scores: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._rows = 0

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Keep the scores of `logits` [n, C] and their `labels`; UserError for single-label, C != 2."""
        self._rows += _labelled_rows(labels)
        scores = logits.double()
        if task_of(labels) == SINGLE_LABEL:
            if logits.shape[1] != 2:
                raise _auc_needs_two_classes(logits.shape[1])
            scores = (scores[:, 1] - scores[:, 0])[:, None]
            labels = torch.where(labels >= 0, labels.double(), torch.nan)[:, None]
        self._scores.append(scores)
        self._labels.append(labels.double())

    def compute(self, comm: Comm) -> tuple[float | None, int]:
        """(AUC, labelled rows) over all ranks; None where no class has both kinds. Collective."""
        scores, labels = torch.cat(self._scores), torch.cat(self._labels)
        rows = sum(counts[0] for counts in comm.all_gather_ints([self._rows]))
        areas = []
        for column in range(scores.shape[1]):
            labelled = ~labels[:, column].isnan()
            pairs = torch.stack([scores[labelled, column], labels[labelled, column]], dim=1)
            pairs = _gather_rows(pairs.to(comm.device), comm)
            areas.append(_area(pairs[:, 0], pairs[:, 1] > 0.5))
        areas = [area for area in areas if area is not None]
        return (sum(areas) / len(areas) if areas else None), rows


_METRICS = {"accuracy": Accuracy, "f1": F1, "auc": RocAuc}


def _auc_needs_two_classes(num_classes: int) -> UserError:
    return wrong(
        "--metric", f"auc with {num_classes} classes", "2 classes or multi-label data", "use accuracy or f1"
    )


def _labelled_rows(labels: torch.Tensor) -> int:
    """Number of rows with any label. One device sync."""
    if task_of(labels) == SINGLE_LABEL:
        return int((labels >= 0).sum())
    return int((~labels.isnan()).any(dim=1).sum())


def _gather_rows(rows: torch.Tensor, comm: Comm) -> torch.Tensor:
    """The rows of all ranks, in rank order, on every rank. Collective."""
    if comm.ranks == 1:
        return rows
    received = [counts[0] for counts in comm.all_gather_ints([len(rows)])]
    return comm.all_to_all_rows(rows.repeat(comm.ranks, 1), [len(rows)] * comm.ranks, received)


def _area(scores: torch.Tensor, positive: torch.Tensor) -> float | None:
    """AUC of `scores` float64 [n] with `positive` bool [n], by the Mann-Whitney rank sum with mid-ranks.

    None without positives or negatives; NaN where a score is NaN. The same for every order of the rows.

    >>> _area(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([False, True, False, True]))
    0.875
    """
    num_positive = int(positive.sum())
    num_negative = len(scores) - num_positive
    if num_positive == 0 or num_negative == 0:
        return None
    if bool(scores.isnan().any()):
        return math.nan
    _, group, sizes = torch.unique(scores, return_inverse=True, return_counts=True)
    # A group of ties takes ranks before+1 .. before+size; twice its mid-rank is an integer: an exact sum.
    twice_mid_rank = 2 * (sizes.cumsum(0) - sizes) + sizes + 1
    twice_rank_sum = int(twice_mid_rank[group[positive]].sum())
    twice_wins = twice_rank_sum - num_positive * (num_positive + 1)
    return twice_wins / (2 * num_positive * num_negative)
