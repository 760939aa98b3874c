"""A user's mistake of any kind: status 2, one sentence on stderr, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.training_runs import small_dataset, store_of, trainer
from tgnn import train
from tgnn.data.load import load
from tgnn.errors import run_command
from tgnn.partition.__main__ import main as partition
from tgnn.predict import main as predict

ROOT = Path(__file__).resolve().parents[1]
Command = Callable[..., int]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, and a cache of stores that is empty, too."""
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    return place


@pytest.fixture
def refused(workplace: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must refuse its arguments; returns its sentence."""

    def run(*argv: str | Path, command: Command = train.main) -> str:
        before = everything(workplace)
        status = run_command(command, [str(word) for word in argv])
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), err
        assert err.startswith("error: ") and err.endswith(".\n") and err.count("\n") == 1, err
        assert ": got " in err and ", expected " in err and "; " in err, err
        assert everything(workplace) == before
        assert everything(workplace.parent / "cache") == []
        return err

    return run


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def archive(**changed: Any) -> dict[str, Any]:
    """The arrays of a whole tgnn .npz of 6 vertices, some of them changed, or left out where None."""
    good = {
        "edge_index": np.array([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]), "num_nodes": 6,
        "x": np.ones((6, 2), np.float32), "y": np.array([0, 1, 0, 1, 0, 1]),
        "train": np.array([0, 1]), "val": np.array([2, 3]), "test": np.array([4, 5]),
    }  # fmt: skip
    return {key: value for key, value in {**good, **changed}.items() if value is not None}


def mask(*ids: int) -> np.ndarray:
    return np.isin(np.arange(6), ids)


ARCHIVES = {
    "id too large": (archive(edge_index=np.array([[0, 2], [1, 9]])), r"9.*5|\[0, 6\)"),
    "negative id": (archive(edge_index=np.array([[0, -1], [1, 0]])), "-1"),
    "float ids": (archive(edge_index=np.array([[0.0, 1.0], [1.0, 2.0]])), "float64"),
    "edge shape": (archive(edge_index=np.zeros((3, 4), np.int64)), r"3, 4"),
    "edges are text": (archive(edge_index=np.array([["a"], ["b"]])), "edge_index"),
    "edges are objects": (archive(edge_index=np.array([[0, None], [1, 2]], object)), "small.npz"),
    "no edges": (archive(edge_index=None), "small.npz"),
    "feature rows": (archive(x=np.ones((5, 2))), "5"),
    "feature shape": (archive(x=np.ones((6, 2, 2))), "x"),
    "features are text": (archive(x=np.full((6, 2), "a")), "x"),
    "feature is nan": (archive(x=np.array([[1.0], [np.nan], [1], [1], [1], [1]])), "nan|NaN|finite"),
    "no features": (archive(x=None), "no features.*--feature-file"),
    "labels are text": (archive(y=np.array(list("ababab"))), "y|label"),
    "label is a fraction": (archive(y=np.array([0, 1, 0.5, 1, 0, 1])), r"0\.5"),
    "label below -1": (archive(y=np.array([0, 1, -2, 1, 0, 1])), "-2"),
    "label count": (archive(y=np.zeros(5, np.int64)), "5"),
    "labels of 3 axes": (archive(y=np.zeros((6, 2, 2))), "6, 2, 2"),
    "multi-label is not 0 or 1": (archive(y=np.full((6, 2), 3.0)), "3"),
    "no labels": (archive(y=None), "no labels.*--label-file"),
    "masks overlap": (archive(train=mask(0, 1), val=mask(1, 2)), "train and val: got 1 vert"),
    "ids overlap": (archive(train=[0, 1], test=[1, 4]), "train and test"),
    "mask is not boolean": (archive(train=mask(0, 1).astype(np.int64)), "train"),
    "mask is float": (archive(train=mask(0, 1).astype(np.float32)), "train.*float32"),
    "mask length": (archive(train=np.array([True, False])), "train"),
    "mask shape": (archive(train=np.zeros((6, 2), bool)), "train"),
    "split id too large": (archive(train=[0, 6]), "6"),
    "split id twice": (archive(train=[0, 0]), "train"),
    "unlabelled in a split": (archive(y=np.array([0, np.nan, 0, 1, 0, 1])), "train: got 1 of 2"),
    "no training vertices": (archive(train=None), "no training vertices.*--split"),
    "unknown key": (archive(weights=np.ones(5)), "weights"),
    "edge weights": (archive(edge_weight=np.ones(4, np.float32)), "edge_weight"),
    "number of vertices": (archive(num_nodes=-1), "num_nodes"),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_bad_data_set(workplace: Path, refused: Callable[..., str], case: str):
    arrays, names = ARCHIVES[case]
    np.savez(workplace / "small.npz", **arrays)
    sentence = refused("small.npz", "--ranks", "2")
    assert re.search(names, sentence), sentence
    kept = refused("small.npz", "--ranks", "2", "--store", "kept", "--run-dir", "run")
    assert kept == sentence


TEXTS = {
    "a03 id out of range": ("0 1\n2 9\n", "9"),
    "a03 negative id": ("0 1\n-1 0\n", "-1"),
    "a03 header": ("source target\n0 1\n", "source"),
    "a03 float id": ("0 1.0\n", r"1\.0"),
    "a03 empty": ("", "edges.txt"),
    "one column": ("0\n1\n", "edges.txt"),
    "binary": ("\0\1\2", "edges.txt"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a03_bad_edge_list(workplace: Path, refused: Callable[..., str], case: str):
    text, names = TEXTS[case]
    (workplace / "edges.txt").write_text(text)
    sentence = refused("edges.txt", "--num-vertices", "5")
    assert re.search(names, sentence), sentence


def test_damaged_and_missing_files(workplace: Path, refused: Callable[..., str]):
    (workplace / "bad.npz").write_text("no zip file")
    np.savez(workplace / "good.npz", **archive())
    (workplace / "cut.npz").write_bytes((workplace / "good.npz").read_bytes()[:-200])
    (workplace / "edges.txt").write_text("0 1\n")
    (workplace / "empty").mkdir()
    assert "bad.npz" in refused("bad.npz")
    assert "cut.npz" in refused("cut.npz")
    assert "'nowhere'" in refused("nowhere")
    assert "empty" in refused("empty")
    for flag in ("--feature-file", "--label-file", "--split-file"):
        assert "missing.csv" in refused("edges.txt", "--num-vertices", "2", flag, "missing.csv")


FLAGS = {
    "unknown flag": (["--batchsize", "8"], "--batchsize.*perhaps you meant --batch-size"),
    "abbreviated flag": (["--batch", "8"], "--batch.*unknown"),
    "two DATA": (["karate", "sbm"], "extra argument 'sbm'"),
    "no value": (["--lr"], "--lr: got no value"),
    "fanouts": (["--fanouts", "10,x"], "--fanouts: got '10,x'"),
    "fanouts below -1": (["--fanouts", "-2,10"], "--fanouts"),
    "no fanouts": (["--fanouts", ""], "--fanouts"),
    "batch size": (["--batch-size", "0"], "--batch-size: got 0, expected at least 1"),
    "batch size is text": (["--batch-size", "many"], "--batch-size: got 'many', expected an integer"),
    "epochs": (["--epochs", "0"], "--epochs"),
    "learning rate": (["--lr", "-1"], "--lr"),
    "learning rate nan": (["--lr", "nan"], "--lr"),
    "dropout": (["--dropout", "1"], "--dropout"),
    "ranks": (["--ranks", "0"], "--ranks"),
    "prefetch": (["--prefetch", "-1"], "--prefetch"),
    "timeout": (["--timeout", "0"], "--timeout"),
    "model": (["--model", "sagee"], "--model.*sage"),
    "metric": (["--metric", "auc"], "--metric: got auc with 4 classes"),
    "batch norm": (["--norm", "batch", "--parallel", "data"], "--norm"),
    "triton": (["--backend", "triton"], "--backend: got 'triton'"),
    "split": (["--split", "random:x"], "--split"),
    "feature norm": (["--feature-norm", "rows"], "--feature-norm"),
    "edge list option": (["--relabel"], "--relabel"),
    "resume of nothing": (["--resume", "nowhere"], "run nowhere"),
    "resume without a run": (["--resume"], "--resume: got no run"),
    "config": (["--config", "nowhere.toml"], "--config: got nowhere.toml"),
    "metis": (["--partitioner", "meits"], "--partitioner"),
    "huge fanout": (["--fanouts", "99999999999999999999"], "--fanouts: got 9+, expected at most"),
    "huge hidden": (["--hidden", "99999999999"], "--hidden: got 99999999999, expected at most 1000000"),
    "huge batch": (["--batch-size", "9" * 20], "--batch-size: got 9+, expected at most"),
    "huge timeout": (["--timeout", "1e300"], "--timeout"),
    "huge ranks": (["--ranks", "9999999"], "--ranks"),
    "wide heads": (["--model", "gat", "--hidden", "1000", "--heads", "2000"], "--heads: got 2000 beside"),
    "empty store": (["--store", ""], "--store: got ''"),
    "empty run directory": (["--run-dir", ""], "--run-dir: got ''"),
    "empty config": (["--config", ""], "--config: got ''"),
}


@pytest.mark.parametrize("case", FLAGS)
def test_bad_flag(workplace: Path, refused: Callable[..., str], case: str):
    np.savez(workplace / "four.npz", **archive(y=np.array([0, 1, 2, 3, 0, 1])))
    argv, names = FLAGS[case]
    data = [] if any("karate" in word for word in argv) else ["four.npz"]
    sentence = refused(*data, *argv)
    assert re.search(names, sentence), sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="wants a machine without a GPU")
def test_no_gpu(refused: Callable[..., str]):
    for ranks, got in (("1", "cuda for 1 rank,"), ("2", "cuda for 2 ranks,")):
        assert f"--device: got {got}" in refused("karate", "--device", "cuda", "--ranks", ranks)


def test_empty_data(workplace: Path, refused: Callable[..., str]):
    assert "DATA: got ''" in refused("")
    (workplace / "run.toml").write_text('[data]\nsource = ""\n')
    assert "DATA: got ''" in refused("--config", "run.toml")
    (workplace / "run.toml").write_text('[train]\nstore = ""\n')
    assert "--store: got ''" in refused("--config", "run.toml")
    assert "RUN: got ''" in refused("", command=predict)


def test_weights_that_cannot_be_drawn_by(workplace: Path, refused: Callable[..., str]):
    weights = np.array([1, 1, -2, 1, 1], np.float32)
    np.savez(workplace / "small.npz", **archive(edge_weight=weights))
    sentence = refused("small.npz", "--sampler", "weighted", "--ranks", "2")
    assert "--sampler weighted: got an edge weight of -2" in sentence
    kept = store_of(load("small.npz"), 2, workplace).path
    assert "an edge weight of -2" in refused(kept, "--sampler", "weighted")


def test_incomplete_commands(refused: Callable[..., str]):
    assert "python -m tgnn.predict: got no RUN, expected RUN" in refused(command=predict)
    assert "one RUN argument at most" in refused("a", "b", command=predict)
    sentence = refused("run", "--checkpoint", "bset", command=predict)
    assert "--checkpoint: got 'bset', expected one of best, last; perhaps you meant best" in sentence
    assert "--ranks: got 'x', expected an integer" in refused("run", "--ranks", "x", command=predict)
    assert "--parts" in refused("karate", command=partition)


@pytest.mark.parametrize(
    ("text", "names"),
    [("[train\nmodel=1", "--config"), ("[train]\nbatchsize = 3\n", "batchsize.*batch_size"),
     ("[trian]\n", "trian"), ('[train]\nlr = "x"\n', "lr"), ("[data]\nsource = 3\n", "source"),
     ("[train]\nfanouts = [1.5]\n", "fanouts"), ("train = 3\n", "train")],
)  # fmt: skip
def test_bad_toml(workplace: Path, refused: Callable[..., str], text: str, names: str):
    (workplace / "run.toml").write_text(text)
    sentence = refused("karate", "--config", "run.toml")
    assert re.search(names, sentence), sentence


@pytest.fixture
def store(workplace: Path) -> Path:
    """A store of two parts."""
    return store_of(small_dataset(), 2, workplace).path


def test_more_ranks_than_parts(refused: Callable[..., str], store: Path):
    sentence = refused(store, "--ranks", "3")
    assert "2 parts" in sentence and "python -m tgnn.partition DATA --parts 3 --out STORE" in sentence
    assert "1, one for each rank" in refused(store, "--ranks", "1")


def test_store_of_another_version(refused: Callable[..., str], store: Path):
    meta = json.loads((store / "store.json").read_text())
    (store / "store.json").write_text(json.dumps({**meta, "format_version": 99}))
    assert "format version 99" in refused(store)
    (store / "store.json").write_text("{")
    assert "store.json" in refused(store)


@pytest.mark.parametrize("name", ["indptr", "indices", "features", "labels", "train", "original_id"])
def test_truncated_or_missing_store_file(refused: Callable[..., str], store: Path, name: str):
    file = store / "part-0001" / f"{name}.npy"
    os.truncate(file, file.stat().st_size - 8)
    assert f"part-0001/{name}.npy" in refused(store)
    file.unlink()
    assert f"part-0001/{name}.npy: got no such file" in refused(store)


def test_options_that_a_store_was_not_made_with(refused: Callable[..., str], store: Path):
    assert "--self-loops" in refused(store, "--self-loops", "add")
    assert "--store" in refused(store, "--store", "other")


def test_bad_run_directory(workplace: Path, refused: Callable[..., str], store: Path):
    (workplace / "file").touch()
    (workplace / "old").mkdir()
    (workplace / "old" / "config.json").write_text("{}")
    assert "file is a file" in refused(store, "--run-dir", "file/run")
    assert "old, which holds a run" in refused(store, "--run-dir", "old")
    assert "old/config.json" in refused("--resume", "old")
    if os.geteuid():
        (workplace / "locked").mkdir(mode=0o500)
        assert "not writable" in refused(store, "--run-dir", "locked/run")


def test_bad_resume(workplace: Path, refused: Callable[..., str]):
    run, one = workplace / "run", store_of(small_dataset(), 1, workplace)
    trainer(one, run, epochs=1).fit()
    assert "--hidden: got 9 while resuming" in refused(one.path, "--resume", run, "--hidden", "9")
    assert "num vertices" in refused("karate", "--resume", run, "--ranks", "1")
    (run / "last.pt").write_bytes((run / "last.pt").read_bytes()[:500])
    assert "last.pt" in refused(one.path, "--resume", run)
    (run / "last.pt").write_bytes(pickle.dumps({"epoch": 1}, protocol=5))
    assert "last.pt" in refused(one.path, "--resume", run)
    (run / "last.pt").unlink()
    assert "run without last.pt" in refused(one.path, "--resume", run)


def test_bad_predict(workplace: Path, refused: Callable[..., str]):
    run, one = workplace / "run", store_of(small_dataset(), 1, workplace)
    trainer(one, run, epochs=1).fit()
    given = [run, "--data", one.path]
    assert "run nowhere" in refused("nowhere", command=predict)
    assert "--ranks" in refused(*given, "--ranks", "0", command=predict)
    assert "1 parts" in refused(*given, "--ranks", "2", command=predict)
    assert "--out" in refused(*given, "--out", "nowhere/scores.npy", command=predict)
    assert "--out" in refused(*given, "--out", run, command=predict)
    (run / "best.pt").unlink()
    assert "best.pt" in refused(*given, command=predict)


def test_bad_partition(workplace: Path, refused: Callable[..., str]):
    (workplace / "taken").mkdir()
    (workplace / "taken" / "file").touch()
    assert "--parts" in refused("karate", "--parts", "0", "--out", "store", command=partition)
    assert "taken" in refused("karate", "--parts", "2", "--out", "taken", command=partition)
    assert "nowhere" in refused("nowhere", "--parts", "2", "--out", "store", command=partition)


def test_through_a_real_command(workplace: Path):
    np.savez(workplace / "small.npz", **archive(train=mask(0, 1), val=mask(1, 2)))
    ran = subprocess.run(
        [sys.executable, "-m", "tgnn.train", "small.npz"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1 and ran.stderr.startswith("error: small.npz: train and val: got 1")
    assert [path.name for path in workplace.iterdir()] == ["small.npz"]
