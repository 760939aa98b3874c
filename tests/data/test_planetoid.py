"""Planetoid directories: the published ones, a tiny one written here, and hostile pickles."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import types
from collections import defaultdict

import numpy as np
import pytest
import scipy.sparse as sp

from tgnn.data import load
from tgnn.data.readers.pickle_allow import load_pickle
from tgnn.errors import UserError

CITESEER_ABSENT = [2407, 2489, 2553, 2682, 2781, 2953, 3042, 3063, 3212, 3214, 3250, 3292, 3305, 3306, 3309]


class _Csr:
    """Pickles as old scipy's csr_matrix did: that name, and a plain dictionary as state."""

    def __init__(self, matrix):
        self.__dict__.update(
            _shape=matrix.shape, data=matrix.data, indices=matrix.indices, indptr=matrix.indptr
        )


_Csr.__module__, _Csr.__qualname__, _Csr.__name__ = "scipy.sparse.csr", "csr_matrix", "csr_matrix"


def dump(value, path, monkeypatch):
    """Write a pickle; sparse matrices under their old name."""
    if sp.issparse(value):
        module = types.ModuleType("scipy.sparse.csr")
        module.csr_matrix = _Csr
        monkeypatch.setitem(sys.modules, "scipy.sparse.csr", module)
        value = _Csr(value.tocsr())
    path.write_bytes(pickle.dumps(value, protocol=2))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """8 vertices: 4 of them known in allx (2 train), test lines 7, 5, 4; vertex 6 is in no matrix."""
    lists = defaultdict(list, {0: [1, 1, 3], 1: [0], 2: [2, 2], 3: [], 4: [7], 5: [], 6: [0], 7: []})
    rest, test = (
        np.diag([1.0, 2, 3, 4])[:, :3].astype(np.float32),
        np.float32([[7, 0, 0], [5, 0, 0], [4, 0, 0]]),
    )
    one_hot = np.eye(2, dtype=np.int32)
    parts = {
        "graph": lists,
        "allx": sp.csr_matrix(rest),
        "x": sp.csr_matrix(rest[:2]),
        "tx": sp.csr_matrix(test),
        "ally": one_hot[[0, 1, 0, 1]],
        "y": one_hot[[0, 1]],
        "ty": one_hot[[1, 0, 1]],
    }
    for part, value in parts.items():
        dump(value, tmp_path / f"ind.tiny.{part}", monkeypatch)
    (tmp_path / "ind.tiny.test.index").write_text("7\n5\n4\n")
    return tmp_path


def test_tiny_directory_row_by_row(tiny):
    data = load(tiny)
    pairs = sorted(zip(*data.graph.edge_index().tolist(), strict=True))
    assert pairs == [(0, 1), (0, 3), (0, 6), (1, 0), (2, 2), (3, 0), (4, 7), (6, 0), (7, 4)]
    np.testing.assert_array_equal(data.x[:, 0], [1, 0, 0, 0, 4, 5, 0, 7])
    np.testing.assert_array_equal(data.y, [0, 1, 0, 1, 1, 0, -1, 1])
    assert [list(data.train), list(data.val), list(data.test)] == [[0, 1], [2, 3], [4, 5, 7]]
    assert data.name == "tiny" and data.options["made_symmetric"] is True


def test_a_missing_file_is_named(tiny):
    (tiny / "ind.tiny.allx").unlink()
    with pytest.raises(UserError, match="no file ind.tiny.allx"):
        load(tiny)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("ty", b"", "ind.tiny.ty.*cannot be read"),
        ("graph", pickle.dumps([1], 2), "ind.tiny.graph: got list, expected dict"),
        ("graph", pickle.dumps({0: [], 2: []}, 2), "ids 0 to 1"),
        ("graph", pickle.dumps({v: [9] for v in range(8)}, 2), r"ids in \[0, 8\)"),
        ("test.index", b"7\n5\nx\n", "test.index, line 3: got 'x'"),
        ("test.index", b"7\n5\n3\n", "test.index.*ids 3 to 7"),
        ("test.index", b"7\n5\n", "exactly 2 rows"),
    ],
)
def test_damaged_files_are_named(tiny, part, content, message):
    (tiny / f"ind.tiny.{part}").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(tiny)


class _Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ((os.system, "touch {}"), "system"),
        ((eval, "open('{}', 'w')"), "eval"),
        ((getattr, "x", "y"), "getattr"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_that_name_anything_else_run_nothing(tmp_path, call, name, protocol):
    mark, path = tmp_path / "ran", tmp_path / "ind.x.graph"
    function, *arguments = call
    path.write_bytes(pickle.dumps(_Attack(function, *[a.format(mark) for a in arguments]), protocol))
    with pytest.raises(UserError, match=rf"ind\.x\.graph: got a pickle that names \w+\.{name}"):
        load_pickle(path)
    assert not mark.exists()


def test_cora_counts_and_split(shared_data):
    data = load(shared_data / "planetoid" / "cora")
    assert (data.num_vertices, data.graph.num_edges, data.x.shape[1]) == (2708, 10556, 1433)
    assert int((data.x != 0).sum()) == 31261 + 17955
    np.testing.assert_array_equal(np.bincount(data.y), [351, 217, 418, 818, 426, 298, 180])
    np.testing.assert_array_equal(np.bincount(data.y[data.train]), [20] * 7)
    np.testing.assert_array_equal(np.bincount(data.y[data.val]), [61, 36, 78, 158, 81, 57, 29])
    np.testing.assert_array_equal(np.bincount(data.y[data.test]), [130, 91, 144, 319, 149, 103, 64])
    assert data.graph.degree_in().max() == 168


def test_test_rows_are_at_the_ids_of_the_index_file(shared_data):
    folder = shared_data / "planetoid" / "cora"
    data = load(folder)
    index = np.loadtxt(folder / "ind.cora.test.index", dtype=int)
    assert not (np.diff(index) > 0).all()
    np.testing.assert_array_equal(data.x[index], load_pickle(folder / "ind.cora.tx").toarray())
    np.testing.assert_array_equal(data.y[index], load_pickle(folder / "ind.cora.ty").argmax(axis=1))
    source, destination = data.graph.edge_index()
    np.testing.assert_allclose(np.mean(data.y[source] == data.y[destination]), 0.810, atol=5e-4)


def test_a04_citeseer_vertices_without_features_are_unlabelled(shared_data):
    data = load(shared_data / "planetoid" / "citeseer")
    assert (data.num_vertices, data.graph.num_edges, data.num_classes) == (3327, 9228, 6)
    np.testing.assert_array_equal(np.flatnonzero(data.y == -1), CITESEER_ABSENT)
    assert not data.x[CITESEER_ABSENT].any()
    np.testing.assert_array_equal(np.bincount(data.y[data.y >= 0]), [249, 590, 668, 701, 596, 508])
    np.testing.assert_array_equal(np.bincount(data.y[data.test]), [77, 182, 181, 231, 169, 160])
    source, destination = data.graph.edge_index()
    assert (source == destination).sum() == 124
    np.testing.assert_array_equal(np.sort(source * 4000 + destination), np.sort(destination * 4000 + source))


def test_pubmed_names_the_file_it_lacks(shared_data):
    with pytest.raises(UserError, match="no file ind.pubmed.allx"):
        load(shared_data / "planetoid" / "pubmed")


def test_pubmed_structure_once_given_the_missing_features(shared_data, tmp_path, monkeypatch):
    for path in (shared_data / "planetoid" / "pubmed").glob("ind.*"):
        shutil.copy(path, tmp_path)
    stand_in = sp.csr_matrix(([1.0], ([0], [0])), shape=(18717, 500), dtype=np.float32)
    dump(stand_in, tmp_path / "ind.pubmed.allx", monkeypatch)
    data = load(tmp_path)
    assert (data.num_vertices, data.graph.num_edges) == (19717, 88651)
    np.testing.assert_array_equal(np.bincount(data.y), [4103, 7739, 7875])
    np.testing.assert_array_equal(np.bincount(data.y[data.val]), [98, 194, 208])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [">i4", "<f8", "bool", "u1"])
def test_arrays_of_any_plain_dtype_and_order_are_rebuilt(tmp_path, dtype, order):
    expected = np.array([[1, 0, 3], [0, 5, 6]]).astype(dtype, order=order)
    (tmp_path / "a").write_bytes(pickle.dumps(expected, 2))
    found = load_pickle(tmp_path / "a")
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("value", [np.array([{}], object), np.zeros(2, "i4,f4"), np.array(["text"])])
def test_arrays_of_other_dtypes_are_refused(tmp_path, value):
    (tmp_path / "a").write_bytes(pickle.dumps(value, 2))
    with pytest.raises(UserError, match="a: got a pickle that"):
        load_pickle(tmp_path / "a")


def test_a_damaged_dtype_state_is_no_crash(tmp_path):
    whole = pickle.dumps(np.arange(6, dtype=np.int32), 2)
    for place in range(len(whole)):
        for value in (0, 75, 255):
            (tmp_path / "a").write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                load_pickle(tmp_path / "a")
            except UserError as error:
                assert str(tmp_path / "a") in str(error)
