"""A scipy sparse matrix in a file as the graph."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from tgnn.data import DataOptions, load
from tgnn.errors import UserError

# 0 -> 1 twice, 2 -> 0, and a stored zero; vertex 3 is isolated.
ENTRIES = ([1.0, 1.0, 2.5, 0.0], ([0, 0, 2, 1], [1, 1, 0, 2]))


@pytest.fixture
def save(tmp_path):
    """A function that writes a matrix: (entries, shape, format) -> path."""

    def write(entries=ENTRIES, shape=(4, 4), form="coo"):
        path = tmp_path / "a.npz"
        sp.save_npz(path, sp.coo_matrix(entries, shape).asformat(form))
        return path

    return write


@pytest.mark.parametrize("form", ["coo", "csr", "csc"])
def test_entries_are_edges_and_weights(save, form):
    data = load(save(form=form))
    assert data.num_vertices == 4 and data.options["weighted"] is True
    found = zip(*data.graph.edge_index().tolist(), data.graph.edge_weight.tolist(), strict=True)
    # Other forms than COO add up what is stored twice.
    twice = [(0, 1, 1), (0, 1, 1)] if form == "coo" else [(0, 1, 2)]
    assert sorted(found) == [*twice, (2, 0, 2.5)]


def test_ones_are_no_weights_and_weights_can_be_left(save):
    path = save(([1, 1], ([0, 2], [1, 0])))
    assert load(path).graph.edge_weight is None
    path = save()
    data = load(path, DataOptions(weight_column=0))
    assert data.graph.edge_weight is None and data.num_edges == 3 and data.options["weighted"] is False


def test_side_files(save, tmp_path):
    sp.save_npz(tmp_path / "x.npz", sp.eye(4, dtype=np.float32, format="csr"))
    (tmp_path / "y.csv").write_text("0,1\n2,0\n")
    (tmp_path / "s.json").write_text('{"train": [0], "val": [2], "test": []}')
    files = {f"{kind}_file": str(tmp_path / name) for kind, name in
             {"feature": "x.npz", "label": "y.csv", "split": "s.json"}.items()}  # fmt: skip
    data = load(save(), DataOptions(**files))
    np.testing.assert_array_equal(data.x, np.eye(4))
    np.testing.assert_array_equal(data.y, [1, -1, 0, -1])
    assert data.train.tolist() == [0] and data.val.tolist() == [2]


def test_a03_faults_name_the_file(save, tmp_path):
    with pytest.raises(UserError, match=r"a\.npz.*square"):
        load(save(shape=(4, 5)))
    path = save()
    np.save(tmp_path / "x.npy", np.zeros((5, 2), np.float32))
    with pytest.raises(UserError, match=r"a\.npz: x: got"):
        load(path, DataOptions(feature_file=str(tmp_path / "x.npy")))
    for options in (DataOptions(relabel=True), DataOptions(num_vertices=9)):
        with pytest.raises(UserError, match="no edge list"):
            load(path, options)
    with pytest.raises(UserError, match="the entries are the weights"):
        load(path, DataOptions(weight_column=3))
    wrong = {"format": b"csr", "shape": [4, 4], "data": [1.0], "indices": [0]}
    np.savez(path, **wrong, indptr=[0, 1, 1, 1, 10**9])
    with pytest.raises(UserError, match=r"a\.npz: got a file that cannot be read"):
        load(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"a\.npz"):
        load(path)
