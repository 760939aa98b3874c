"""A training run from each kind of data; those from OGB's and DGL's files are beside the tests of their readers."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import scipy.sparse
import torch

from tgnn.data import Dataset, Graph, from_pyg, load, save_npz
from tgnn.data.synthetic import karate
from tgnn.predict import main as predict
from tgnn.train import main as train

SMALL = ["--epochs", "1", "--ranks", "1", "--device", "cpu", "--hidden", "4"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))


def trained(tmp_path, *data: object) -> dict:
    """The summary of one epoch on the data and its options."""
    run = tmp_path / "run"
    assert train([*map(str, data), *SMALL, "--run-dir", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert 0 <= summary["test_acc"] <= 1
    return summary


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("planetoid/cora", []),
        ("planetoid/citeseer", ["--feature-norm", "row"]),
        ("gnn_benchmark/citeseer.npz", ["--split", "random:20,30"]),
        ("heterophilous/chameleon_filtered.npz", ["--split", "3", "--add-reverse"]),
    ],
)
def test_published_files(shared_data, tmp_path, name: str, flags: list[str]):
    trained(tmp_path, shared_data / name, *flags)


def test_tgnn_npz(tmp_path):
    save_npz(karate(), tmp_path / "karate.npz")
    trained(tmp_path, tmp_path / "karate.npz", "--split", "0.5,0.2,0.3")


def edge_list(tmp_path) -> list[str]:
    """Karate as a csv edge list whose ids have gaps, with features, labels and splits beside it."""
    data = karate()
    edges, n = data.graph.edge_index() * 3 + 10, data.num_vertices
    (tmp_path / "edges.csv").write_text("source,target\n" + "".join(f"{u},{v}\n" for u, v in edges.T))
    scipy.sparse.save_npz(tmp_path / "x.npz", scipy.sparse.eye(n, dtype=np.float32).tocsr())
    (tmp_path / "y.csv").write_text("".join(f"{3 * v + 10} {label}\n" for v, label in enumerate(data.y)))
    splits = ("train", "val", "test")
    (tmp_path / "split.csv").write_text("".join(f"{3 * v + 10},{splits[v % 3]}\n" for v in range(n)))
    files = {"feature": "x.npz", "label": "y.csv", "split": "split.csv"}
    flags = [word for kind, file in files.items() for word in (f"--{kind}-file", str(tmp_path / file))]
    return [str(tmp_path / "edges.csv"), "--relabel", *flags]


def test_a_scipy_matrix_with_files_beside_it(tmp_path):
    data = karate()
    source, destination = data.graph.edge_index()
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.csr_matrix((np.ones(156), (source, destination))))
    np.save(tmp_path / "x.npy", np.eye(34, dtype=np.float32))
    np.save(tmp_path / "y.npy", data.y)
    np.savez(tmp_path / "s.npz", train=np.arange(10), val=np.arange(10, 20), test=np.arange(20, 34))
    files = {"feature": "x.npy", "label": "y.npy", "split": "s.npz"}
    flags = [word for kind, file in files.items() for word in (f"--{kind}-file", tmp_path / file)]
    trained(tmp_path, tmp_path / "a.npz", *flags)


def test_a03_an_edge_list_whose_ids_have_gaps_keeps_them(tmp_path, capsys):
    summary = trained(tmp_path, *edge_list(tmp_path))
    assert summary["val_acc"] is not None
    assert predict([str(tmp_path / "run"), "--out", str(tmp_path / "scores.npy")]) == 0
    assert "scores.names.npy" in capsys.readouterr().out
    scores, names = (np.load(tmp_path / name) for name in ("scores.npy", "scores.names.npy"))
    assert len(scores) == len(names) == 34
    np.testing.assert_array_equal(names, np.arange(34) * 3 + 10)


def test_scores_of_ids_without_gaps_have_no_names(tmp_path):
    save_npz(karate(), tmp_path / "karate.npz")
    trained(tmp_path, tmp_path / "karate.npz", "--split", "0.5,0.2,0.3")
    assert predict([str(tmp_path / "run"), "--out", str(tmp_path / "scores.npy")]) == 0
    assert not list(tmp_path.glob("*.names.npy"))


def test_scipy_and_pyg_objects(tmp_path):
    data = karate()
    source, destination = data.graph.edge_index()
    matrix = scipy.sparse.coo_matrix((np.ones(len(source)), (source, destination)), (34, 34))
    of_scipy = Dataset("scipy", Graph.from_scipy(matrix), data.x, data.y, data.train)
    edges = torch.from_numpy(np.stack([source, destination]))
    held = {"edge_index": edges, "x": torch.from_numpy(data.x), "y": torch.from_numpy(data.y)}
    of_pyg = from_pyg(types.SimpleNamespace(**held))
    for number, dataset in enumerate((of_scipy, of_pyg)):
        save_npz(dataset, tmp_path / f"{number}.npz")
        np.testing.assert_array_equal(load(tmp_path / f"{number}.npz").graph.indices, data.graph.indices)
        trained(tmp_path / str(number), tmp_path / f"{number}.npz", "--split", "0.5,0.2,0.3")
