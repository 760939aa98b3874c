"""`python -m tgnn.plan` as a user meets it: its table, its file, and what it says of mistakes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.dist.training_runs import small_dataset, store_of
from tgnn import plan
from tgnn.data.readers.tgnn_npz import save_npz
from tgnn.errors import run_command
from tgnn.training.profile import load_profile

SMALL = ["--hidden", "8", "--fanouts", "3,3", "--batch-size", "64", "--presample", "0"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of stores and profiles for this test."""
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """The small graph as a file."""
    path = tmp_path / "small.npz"
    save_npz(small_dataset(), path)
    return str(path)


def test_the_table(data: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "plan.json"
    assert (
        run_command(plan.main, [data, "--gpus", "1,2", "--profile", "h200-nvlink", "--out", str(out), *SMALL])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["ranks", "layout"] and "limited by" in lines[1]
    assert [line.split()[:2] for line in lines[2:5]] == [["1", "single"], ["2", "data"], ["2", "split"]]
    # Columns line up: the header's and every row's last column start at one place.
    place = lines[1].index("limited by")
    assert all(line[place - 2 : place] == "  " and line[place] != " " for line in lines[2:5])
    assert lines[5].startswith("Train ") and lines[5].endswith(".")
    record = json.loads(out.read_text())
    assert [row["layout"] for row in record["rows"]] == ["single", "data", "split"]
    assert record["recommendation"] == lines[5]
    assert record["profile"]["alone"]["copy"]["source"] and record["config"]["train"]["hidden"] == 8
    row = record["rows"][2]
    assert sum(row["stages"].values()) == pytest.approx(row["step_s"])
    assert row["memory_bytes"] == pytest.approx(sum(row["memory"].values()))


def test_a_store_is_planned_for_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture):
    store = str(store_of(small_dataset(), 2, tmp_path).path)
    assert run_command(plan.main, [store, "--profile", "cpu", *SMALL]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[2:4]] == [
        ["2", "data"],
        ["2", "split"],
    ]
    assert run_command(plan.main, [store, "--gpus", "4", "--replicas", "2", "--profile", "cpu", *SMALL]) == 0
    assert "2 x split 2" in capsys.readouterr().out


def test_a_store_is_partitioned_anew_for_other_numbers(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    """The store has the whole graph: the work planned from it is what is planned from its data."""
    store = str(store_of(small_dataset(), 2, tmp_path).path)
    works = []
    for source in (data, store):
        out = tmp_path / "plan.json"
        assert (
            run_command(plan.main, [source, "--gpus", "1,3", "--profile", "cpu", "--out", str(out), *SMALL])
            == 0
        )
        works.append([(row["layout"], row["work"]) for row in json.loads(out.read_text())["rows"]])
    assert works[0] == works[1] and len(works[0]) == 3


def test_a_profile_file(data: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "mine.json"
    dataclasses.replace(load_profile("cpu"), name="mine").save(path)
    assert run_command(plan.main, [data, "--gpus", "1", "--profile", str(path), *SMALL]) == 0
    assert "profile mine" in capsys.readouterr().out


def test_measuring_alone_writes_the_profile(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    measured = dataclasses.replace(load_profile("cpu"), name="measured")
    monkeypatch.setattr(plan, "measure", lambda device, name: dataclasses.replace(measured, name=name))
    assert run_command(plan.main, ["--measure", "--device", "cpu"]) == 0
    path = cache / "profile-cpu.json"
    assert str(path) in capsys.readouterr().out and load_profile(str(path)) == measured


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", "v101"], "--profile: got v101"),
        (["--gpus", "0"], "--gpus: got '0'"),
        (["--gpus", "two"], "--gpus: got 'two'"),
        (["--gpus", "1,,2"], "--gpus"),
        (["--gpus", "-1"], "--gpus"),
        (["--gpus", "99999999999"], "--gpus"),
        (["--steps", "0"], "--steps: got 0"),
        (["--measure", "--profile", "cpu"], "--measure"),
        (["--gpu", "1"], "perhaps you meant --gpus"),
        (["--fanouts", "x"], "--fanouts"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, data: str, capsys: pytest.CaptureFixture):
    assert run_command(plan.main, [data, *SMALL, *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_wrong_files_are_one_sentence(data: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    empty = tmp_path / "empty.npz"
    save_npz(dataclasses.replace(small_dataset(), train=np.empty(0, np.int64)), empty)
    cases = [
        ([data, "--profile", str(damaged)], "a damaged file"),
        ([str(empty), "--profile", "cpu"], "no training vertices"),
        (["no-such-data", "--profile", "cpu"], "no-such-data"),
        ([data, "--profile", "cpu", "--gpus", "1", "--out", str(damaged / "x")], "--out"),
    ]
    for words, said in cases:
        assert run_command(plan.main, [*words, *SMALL]) == 2, words
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err
