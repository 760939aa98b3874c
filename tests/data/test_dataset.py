"""Dataset: what it takes as features, labels and splits, what it makes of them, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tgnn import errors
from tgnn.data import Dataset, Graph
from tgnn.errors import UserError

NAN = float("nan")
ROOT = Path(__file__).resolve().parents[2]


def dataset(n=8, **fields):
    """A data set of n vertices and no edges."""
    return Dataset("tiny", Graph.from_edge_index(np.zeros((2, 0), np.int64), n), **fields)


@pytest.mark.parametrize(
    "y",
    [
        [0, 1, NAN, 1, -1, 0, 2, NAN],
        np.array([[0, 1, NAN, 1, -1, 0, 2, NAN]]).T,
        torch.tensor([0, 1, NAN, 1, -1, 0, 2, NAN]),
        np.array([0, 1, -1, 1, -1, 0, 2, -1], np.int8),
    ],
)
def test_a04_missing_labels_become_minus_one(y):
    data = dataset(y=y, train=[0, 1], val=[6])
    np.testing.assert_array_equal(data.y, [0, 1, -1, 1, -1, 0, 2, -1])
    assert data.y.dtype == np.int64
    assert (data.num_classes, data.task) == (3, "single-label")
    np.testing.assert_array_equal(data.labelled(), [1, 1, 0, 1, 0, 1, 1, 0])


def test_a04_split_of_unlabelled_vertices_is_refused_with_a_count():
    with pytest.raises(UserError, match=r"val: got 2 of 3 vertices without a label \(first: 2\)"):
        dataset(y=[0, 1, NAN, 1, -1, 0, 2, NAN], train=[0], val=[1, 2, 4])


def test_a04_multi_label_matrix():
    y = np.array([[0, 1, 1]] * 6 + [[NAN, 1, 0], [-1, NAN, NAN]])
    data = dataset(y=y, train=np.arange(7))
    assert (data.task, data.num_classes, data.y.dtype) == ("multi-label", 3, np.float32)
    np.testing.assert_array_equal(data.y[6:], [[NAN, 1, 0], [NAN, NAN, NAN]])
    np.testing.assert_array_equal(data.labelled(), [True] * 7 + [False])
    with pytest.raises(UserError, match="test: got 1 of 1 vertices without a label"):
        dataset(y=y, test=[7])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0, 1, 0.5, 0, 0, 0, 0, 0], "0.5 at vertex 2"),
        ([0, 1, 0, -2, 0, 0, 0, 0], "-2 at vertex 3"),
        ([0, 1, 0, np.inf, 0, 0, 0, 0], "inf at vertex 3"),
        ([0, 1], r"shape \(2,\)"),
        (np.full((8, 2), 2), "2 at vertex 0, class 0"),
        (np.zeros((8, 2, 2)), "shape"),
        (np.zeros((8, 0)), "shape"),
        (["a"] * 8, "numbers"),
    ],
)
def test_a04_bad_labels(y, message):
    with pytest.raises(UserError, match=message):
        dataset(y=y)


def test_num_classes_may_exceed_what_occurs_but_not_fall_short():
    assert dataset(y=[0, 1] * 4, num_classes=5).num_classes == 5
    assert dataset().num_classes == 0
    with pytest.raises(UserError, match="num_classes: got 1, expected at least 2"):
        dataset(y=[0, 1] * 4, num_classes=1)


def test_masks_and_ids_become_sorted_ids():
    mask = np.zeros(8, bool)
    mask[[5, 1]] = True
    data = dataset(train=mask, val=[7, 0, 3], test=torch.tensor([2], dtype=torch.int32))
    np.testing.assert_array_equal(data.train, [1, 5])
    np.testing.assert_array_equal(data.val, [0, 3, 7])
    assert data.train.dtype == data.val.dtype == data.test.dtype == np.int64
    assert len(dataset(train=[]).train) == 0


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": [1, 2], "val": [2, 3]}, r"train and val: got 1 vertices in both \(first: 2\)"),
        ({"val": [1], "test": [1]}, "val and test"),
        ({"train": [8]}, r"id 8 at position 0.*\[0, 8\)"),
        ({"train": [0, -1]}, r"id -1 at position 1"),
        ({"train": [1, 1]}, "1 repeated ids"),
        ({"train": [0, 1, 0, 0, 0, 0, 0, 1]}, "repeated ids.*astype"),
        ({"train": [0.0, 1.0]}, "boolean mask or a list"),
        ({"train": np.zeros(7, bool)}, r"mask of shape \(7,\)"),
        ({"train": [[0], [1]]}, "boolean mask or a list"),
    ],
)
def test_bad_splits(splits, message):
    with pytest.raises(UserError, match=message):
        dataset(**splits)


def test_a02_features_need_a_row_for_every_vertex():
    assert dataset(6, x=np.zeros((6, 2))).x.shape == (6, 2)
    with pytest.raises(UserError, match=r"x: got shape \(5, 2\).*\(6, F\)"):
        dataset(6, x=np.zeros((5, 2)))


def test_features_of_any_kind_become_float32():
    expected = np.arange(16).reshape(8, 2)
    for x in (
        expected.astype(np.int8),
        torch.tensor(expected).bfloat16(),
        sp.csr_matrix(expected),
        expected.tolist(),
    ):
        data = dataset(x=x)
        assert data.x.dtype == np.float32 and data.num_features == 2
        np.testing.assert_array_equal(data.x, expected)


@pytest.mark.parametrize("bad", [NAN, np.inf])
def test_features_that_are_not_finite(bad):
    x = np.zeros((8, 3))
    x[5, 2] = bad
    with pytest.raises(UserError, match="row 5, column 2"):
        dataset(x=x)


def test_changed_copies_and_records():
    before = dataset(y=[0] * 8, options={"a": 1})
    after = before.changed({"b": 2}, train=[3])
    assert before.options == {"a": 1} and len(before.train) == 0
    assert after.options == {"a": 1, "b": 2} and list(after.train) == [3]
    with pytest.raises(UserError, match="original_names"):
        before.changed(original_names=[1, 2])


def test_graph_must_be_a_graph():
    with pytest.raises(UserError, match="from_edge_index"):
        Dataset("tiny", np.zeros((2, 0)))


def test_a13_data_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import tgnn.data as data; print(data.load('karate').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("karate", 0), done.stderr


def test_class_numbers_that_no_model_can_have_are_refused():
    graph = Graph.from_edge_index([[0, 1], [1, 0]], 2)
    with pytest.raises(
        UserError, match="y: got class 1000000000000 at vertex 1, expected class numbers below"
    ):
        Dataset("d", graph, y=np.array([0, 10**12]))


def test_more_classes_than_labelled_vertices_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    graph = Graph.from_edge_index([[0, 1], [1, 0]], 2)
    with pytest.warns(UserWarning, match="class number 7 makes 8 classes for 2 labelled vertices") as warned:
        Dataset("d", graph, y=[0, 7])
        Dataset("d", graph, y=[0, 7])
    assert len(warned) == 1


def test_an_authors_dots_survive():
    assert str(errors.wrong("a", 1, 2, "number them 0, 1, 2, ...")).endswith("0, 1, 2, ...")
    assert str(errors.wrong("a", 1, 2, "stop.")) == "a: got 1, expected 2; stop."
