"""What a user may hand over as ids, weights, features, labels or splits, brought into one form."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.errors import warn_once, wrong

_CHECK_ROWS = 1 << 16
MAX_CLASSES = 10_000_000
"""More classes than this are taken for ids or other numbers that were given as labels."""


def index_dtype(num_vertices: int) -> type:
    """The dtype vertex ids are stored in: int32 below 2^31 vertices."""
    return np.int32 if num_vertices < 2**31 else np.int64


def distinct(array: np.ndarray) -> np.ndarray:
    """The distinct values of an array of numbers, ascending; a list of millions takes the time of its sort.

    `np.unique` does the same through a hash table since NumPy 2.3, some forty times as slow on large arrays.
    """
    ordered = np.sort(array, axis=None)
    fresh = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=fresh[1:])
    return ordered[fresh]


def to_numpy(value: Any, what: str) -> np.ndarray:
    """`value` as a numpy array; tensors come to the host (one device sync where they are elsewhere).

    Raises:
        UserError: it is no rectangular array of numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise wrong(what, "a ragged list", "a rectangular array", "give rows of equal length") from error
    if array.dtype.kind not in "biuf":
        raise wrong(what, f"dtype {array.dtype}", "numbers", "convert it to a numeric array")
    return array


def check_count(value: Any, what: str) -> int:
    """`value` as an int of at least 0."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0 or isinstance(value, bool | np.bool_):
        raise wrong(what, repr(value), "a whole number of at least 0", "give the number of vertices")
    return count


def check_ids(ids: np.ndarray, num_vertices: int, what: str) -> None:
    """Refuse ids that are no integers or outside [0, num_vertices), naming the first bad one."""
    if ids.size == 0:
        return
    if ids.dtype.kind not in "iu":
        raise wrong(
            what, f"dtype {ids.dtype}", "integer vertex ids", "convert them with .astype(numpy.int64)"
        )
    if ids.min() >= 0 and ids.max() < num_vertices:
        return
    bad = (ids < 0) | (ids >= num_vertices)
    place = int(np.flatnonzero(bad.any(axis=0) if ids.ndim == 2 else bad)[0])
    pair = ids.ndim == 2
    found = (
        f"edge {place} = ({ids[0, place]}, {ids[1, place]})"
        if pair
        else f"id {ids[place]} at position {place}"
    )
    raise wrong(what, found, f"ids in [0, {num_vertices})", "correct the ids or the number of vertices")


def as_weights(weight: Any, num_edges: int) -> np.ndarray | None:
    """Edge weights as finite float32 [E], or None."""
    if weight is None:
        return None
    array = to_numpy(weight, "edge_weight")
    if array.shape != (num_edges,):
        raise wrong(
            "edge_weight",
            f"shape {array.shape}",
            f"({num_edges},), one per edge",
            "give a weight for every edge",
        )
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise wrong(
            "edge_weight",
            f"{array[place]} at position {place}",
            "finite weights",
            "correct or drop that edge",
        )
    return array


def as_features(x: Any, num_vertices: int) -> np.ndarray | None:
    """Features as finite float32 [N, F], or None; sparse ones become dense, float32 is not copied."""
    if x is None:
        return None
    if sp.issparse(x):
        x = x.astype(np.float32).toarray()
    array = to_numpy(x, "x")
    if array.ndim != 2 or array.shape[0] != num_vertices:
        raise wrong(
            "x",
            f"shape {array.shape}",
            f"({num_vertices}, F), one row per vertex",
            "give a row for every vertex, isolated ones included",
        )
    array = array.astype(np.float32, copy=False)
    for start in range(0, num_vertices, _CHECK_ROWS):
        finite = np.isfinite(array[start : start + _CHECK_ROWS])
        if not finite.all():
            row, column = (int(i) for i in np.argwhere(~finite)[0])
            raise wrong(
                "x",
                f"{array[start + row, column]} in row {start + row}, column {column}",
                "finite features",
                "replace or impute it",
            )
    return array


def as_labels(y: Any, num_vertices: int, num_classes: int | None) -> tuple[np.ndarray | None, int]:
    """(labels, number of classes): int64 [N] with -1, float32 [N, C] with NaN, or None.

    Worked example: `[0, 1, nan, 1, -1, 0, 2, nan]` becomes `[0, 1, -1, 1, -1, 0, 2, -1]` and 3 classes.
    """
    if y is None:
        return None, check_count(num_classes or 0, "num_classes")
    array = to_numpy(y.toarray() if sp.issparse(y) else y, "y")
    if array.ndim not in (1, 2) or array.shape[0] != num_vertices or 0 in array.shape[1:]:
        raise wrong(
            "y",
            f"shape {array.shape}",
            f"({num_vertices},), ({num_vertices}, 1) or ({num_vertices}, classes)",
            "give one label row per vertex, -1 or NaN where there is none",
        )
    if array.ndim == 2 and array.shape[1] > 1:
        labels, found = _multi_label(array), array.shape[1]
        if num_classes not in (None, found):
            raise wrong(
                "num_classes", num_classes, f"{found}, the columns of y", "leave it out or correct it"
            )
        return labels, found
    labels = _single_label(array.reshape(-1))
    found = int(labels.max(initial=-1)) + 1
    _check_class_count(labels, found)
    if num_classes is not None and check_count(num_classes, "num_classes") < found:
        raise wrong(
            "num_classes", num_classes, f"at least {found} (the largest label is {found - 1})", "correct it"
        )
    return labels, found if num_classes is None else int(num_classes)


def _check_class_count(labels: np.ndarray, found: int) -> None:
    """Refuse a class number that no model can have, and warn of more classes than labelled vertices."""
    if found > MAX_CLASSES:
        raise wrong(
            "y",
            f"class {found - 1} at vertex {int(labels.argmax())}",
            f"class numbers below {MAX_CLASSES}",
            "number the classes 0, 1, 2, ...",
        )
    labelled = int((labels >= 0).sum())
    if found > labelled:
        warn_once(
            "more classes than labels",
            f"y: the largest class number {found - 1} makes {found} classes for {labelled} labelled vertices; "
            "if that is not meant, number the classes 0, 1, 2, ...",
        )


def _single_label(values: np.ndarray) -> np.ndarray:
    """int64 labels with -1 for NaN and -1."""
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        whole = np.where(missing, -1, values)
        bad = ~np.isfinite(whole) | (np.floor(whole) != whole) | (np.abs(whole) >= 2**31)
    else:
        whole, bad = values, np.zeros(len(values), bool)
    bad |= whole < -1
    if bad.any():
        place = int(np.flatnonzero(bad)[0])
        raise wrong(
            "y",
            f"{values[place]} at vertex {place}",
            "class numbers from 0, or -1 or NaN for no label",
            "number the classes 0, 1, 2, ...",
        )
    return whole.astype(np.int64)


def _multi_label(values: np.ndarray) -> np.ndarray:
    """float32 [N, C] of 0, 1 and NaN; -1 counts as NaN."""
    labels = values.astype(np.float32)
    labels[labels == -1] = np.nan
    bad = ~(np.isnan(labels) | (labels == 0) | (labels == 1))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise wrong(
            "y",
            f"{values[row, column]} at vertex {row}, class {column}",
            "0, 1, or -1 or NaN for unknown",
            "give a 0/1 matrix for several labels a vertex, or one column of class numbers",
        )
    return labels


def labelled_rows(y: np.ndarray) -> np.ndarray:
    """bool [N]: which rows of normalised labels hold at least one known label."""
    return ~np.isnan(y).all(axis=1) if y.ndim == 2 else y >= 0


def as_ids(value: Any, num_vertices: int, what: str) -> np.ndarray:
    """A split as ascending unique int64 ids, from ids, a boolean mask [N], or None (empty)."""
    if value is None:
        return np.zeros(0, np.int64)
    array = to_numpy(value, what)
    if array.size == 0 and array.ndim == 1 and array.dtype != bool:
        return np.zeros(0, np.int64)
    if array.dtype == bool:
        if array.shape != (num_vertices,):
            raise wrong(
                what,
                f"a mask of shape {array.shape}",
                f"({num_vertices},), one value per vertex",
                "give a mask over all vertices or a list of ids",
            )
        return np.flatnonzero(array).astype(np.int64, copy=False)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise wrong(
            what,
            f"{array.dtype} of shape {array.shape}",
            "a boolean mask or a list of integer ids",
            "convert a 0/1 mask with .astype(bool)",
        )
    check_ids(array, num_vertices, what)
    ids, counts = np.unique(array, return_counts=True)
    if len(ids) != len(array):
        raise wrong(
            what,
            f"{len(array) - len(ids)} repeated ids (first: {ids[counts > 1][0]})",
            "each id once",
            "drop the repeats, or convert a 0/1 mask with .astype(bool)",
        )
    return ids.astype(np.int64, copy=False)
