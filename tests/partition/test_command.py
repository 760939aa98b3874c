"""`python -m tgnn.partition`: its table, its refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tgnn.errors import run_command
from tgnn.partition import Store
from tgnn.partition.__main__ import _announce, main


def test_writes_a_store_and_prints_the_table(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tgnn.partition",
            "karate",
            "--parts",
            "3",
            "--out",
            tmp_path / "store",
            "--seed",
            "1",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "karate: 34 vertices, 156 in-edges, 3 parts"
    assert lines[1].split()[:3] == ["part", "vertices", "in-edges"]
    assert any(line.startswith("cut: ") for line in lines)
    store = Store.open(tmp_path / "store", verify=True)
    assert store.num_parts == 3
    made_how = store.meta["options"]["partition"]
    sampling = {"fanouts": [10, 10], "batch_size": 1024, "sampler": "uniform", "replace": False, "epochs": 1}
    assert made_how == {"data": "karate", "partitioner": "lp", "parts": 3, "seed": 1, "presample": sampling}
    tried = [line for line in lines if line.startswith(("random", "unweighted lp", "presampled lp"))]
    assert len(tried) == 3 and all(len(line.split()) >= 5 for line in tried)


def test_presampling_follows_the_flags_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--fanouts", "4,3,2", "--batch-size", "16", "--sampler", "labor", "--presample", "2"]
    assert run_command(main, ["sbm:300", "--parts", "2", "--out", str(tmp_path / "one"), *flags]) == 0
    presampled = Store.open(tmp_path / "one").presampled
    assert (presampled["fanouts"], presampled["batch_size"], presampled["sampler"]) == (
        [4, 3, 2],
        16,
        "labor",
    )
    assert presampled["epochs"] == 2 and "layer 2" in capsys.readouterr().out
    assert (
        run_command(main, ["sbm:300", "--parts", "2", "--out", str(tmp_path / "two"), "--presample", "0"])
        == 0
    )
    assert Store.open(tmp_path / "two").presampled is None
    assert "expected" not in capsys.readouterr().out


def test_data_options_are_flags_and_are_recorded(tmp_path: Path) -> None:
    out = str(tmp_path / "store")
    assert (
        run_command(main, ["karate", "--parts=2", "--out", out, "--self-loops", "--partitioner", "random"])
        == 0
    )
    store = Store.open(out)
    assert store.num_edges == 156 + 34
    assert store.meta["options"]["dataset"]["self_loops"] == "add"


def test_overwrite_replaces_a_store(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = str(tmp_path / "store")
    assert run_command(main, ["karate", "--parts", "2", "--out", out]) == 0
    assert run_command(main, ["karate", "--parts", "4", "--out", out]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert Store.open(out).num_parts == 2
    assert run_command(main, ["karate", "--parts", "4", "--out", out, "--overwrite"]) == 0
    assert Store.open(out).num_parts == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--parts", "2", "--out", "STORE"], "DATA"),
        (["karate", "--out", "STORE"], "--parts"),
        (["karate", "--parts", "0", "--out", "STORE"], "--parts"),
        (["karate", "--parts", "two", "--out", "STORE"], "--parts"),
        (["karate", "--parts", "2"], "--out"),
        (["karate", "--parts", "2", "--out", "STORE", "--presample", "-1"], "--presample"),
        (["karate", "--parts", "2", "--out", "STORE", "--batch-size", "0"], "--batch-size 0"),
        (["karate", "--parts", "2", "--out", "STORE", "--sampler", "labor", "--replace"], "--replace"),
        (["karate", "--parts", "2", "--out", "STORE", "--sampler", "weighted"], "without edge weights"),
        (["no such data", "--parts", "2", "--out", "STORE"], "no such data"),
        (["karate", "--parts", "2", "--out", "STORE", "--partitioner", "best"], "--partitioner"),
        (["karate", "--parts", "2", "--out", "STORE", "--part", "2"], "--part"),
        (["karate", "--parts", "2", "--out", "STORE", "--self-loops", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(main, arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and named in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert run_command(main, ["karate", "--parts", "2", "--out", str(tmp_path / "file" / "store")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "--out" in printed
    assert [child.name for child in tmp_path.iterdir()] == ["file"]


def test_a20_large_inputs_are_announced_with_their_memory(capsys: pytest.CaptureFixture) -> None:
    _announce(1_000, 10_000, "lp", 10**6)
    assert capsys.readouterr().err == ""
    _announce(10**7, 10**8, "lp", 10**10)
    lp = capsys.readouterr().err
    assert "14.5 GiB of memory" in lp and "9.3 GiB on disk" in lp
    _announce(10**7, 10**8, "lp", 10**10, symmetric=True)
    assert "11.4 GiB of memory" in capsys.readouterr().err
    _announce(10**7, 10**8, "random", 10**10)
    assert "9.9 GiB of memory" in capsys.readouterr().err


def test_an_edge_list_goes_in_and_comes_out_in_its_own_ids(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1\n1 2\n2 0\n3 4\n")
    out = str(tmp_path / "store")
    data = str(tmp_path / "edges.txt")
    assert run_command(main, [data, "--parts", "2", "--out", out, "--num-vertices", "6"]) == 0
    store = Store.open(out)
    original = store.original_ids()
    edges = set()
    for p in range(2):
        part = store.part(p)
        destination = np.repeat(part.original_id, np.diff(part.indptr))
        edges |= set(zip(original[part.indices].tolist(), destination.tolist(), strict=True))
    assert edges == {(0, 1), (1, 2), (2, 0), (3, 4)} and store.num_vertices == 6
