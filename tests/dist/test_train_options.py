"""The train command with groups, caches, narrower exchange and a planned mode: same run, what was asked for recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.training_runs import small_dataset
from tgnn import train
from tgnn.data.readers.tgnn_npz import save_npz
from tgnn.errors import run_command
from tgnn.partition.store import Store
from tgnn.predict import main as predict

SMALL = ["--hidden", "8", "--fanouts", "3,3", "--batch-size", "64", "--epochs", "2", "--device", "cpu"]
RUNS = {
    "alone": ["--ranks", "1"],
    "groups": ["--ranks", "2", "--replicas", "2"],
    "caches": ["--ranks", "2", "--halo-cache", "1kB", "--feature-cache", "2KiB"],
    "narrow": ["--ranks", "2", "--exchange-dtype", "bfloat16", "--halo-cache", "auto"],
    "planned": ["--ranks", "2", "--parallel", "auto"],
    "unweighted": ["--ranks", "2", "--presample", "0", "--store"],
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run directory for each of `RUNS`."""
    folder = tmp_path_factory.mktemp("options")
    save_npz(small_dataset(), folder / "small.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TGNN_CACHE", str(folder / "cache"))
        for name, options in RUNS.items():
            more = [str(folder / "store")] if options[-1] == "--store" else []
            words = [str(folder / "small.npz"), *SMALL, *options, *more, "--run-dir", str(folder / name)]
            assert run_command(train.main, words) == 0, name
    return folder


def lines(ran: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (ran / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name for name in RUNS if name != "narrow"])
def test_the_same_losses_and_figures(ran: Path, name: str):
    for found, right in zip(lines(ran, name), lines(ran, "alone"), strict=True):
        assert found["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert found["val_acc"] == pytest.approx(right["val_acc"], abs=0.01)
        assert found["work"]["seeds"] == right["work"]["seeds"]


def test_rows_in_bfloat16_train_nearly_the_same(ran: Path):
    assert lines(ran, "narrow")[0]["loss"] == pytest.approx(lines(ran, "alone")[0]["loss"], rel=2**-6)


def test_caches_show_in_the_work(ran: Path):
    work = lines(ran, "caches")[0]["work"]
    assert work["halo_cache_rows"] > 0 and 0 < work["cache_hit"] < 1
    assert lines(ran, "narrow")[0]["work"]["halo_rows"] < lines(ran, "unweighted")[0]["work"]["halo_rows"]
    placement = json.loads((ran / "caches" / "summary.json").read_text())["placement"]
    assert placement["graph"] == "cpu" and placement["graph_bytes"] > 0
    assert 0 < placement["halo_cache_bytes"] <= 1000 and 0 < placement["feature_cache_bytes"] <= 2048


def test_groups_say_so_and_evaluate_as_one(ran: Path):
    line = lines(ran, "groups")[0]
    assert (line["ranks"], line["parallel"], line["work"]["halo_rows"]) == (2, "split", 0)


def test_the_planned_mode_is_recorded(ran: Path):
    recorded = json.loads((ran / "planned" / "config.json").read_text())["train"]["parallel"]
    assert recorded in ("split", "data") and lines(ran, "planned")[0]["parallel"] == recorded


def test_presampling_orders_the_store_unless_told_not_to(ran: Path):
    assert Store.open(ran / "store").presampled is None
    made = [Store.open(path.parent) for path in (ran / "cache").glob("*/store.json")]
    assert {store.num_parts for store in made if store.presampled} == {2}


def test_a_run_of_groups_predicts_and_goes_on(
    ran: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Prediction needs one group only; a resumed run may have other groups."""
    monkeypatch.setenv("TGNN_CACHE", str(ran / "cache"))
    assert run_command(predict, [str(ran / "groups"), "--device", "cpu"]) == 0
    assert "accuracy" in capsys.readouterr().out
    words = ["--resume", str(ran / "groups"), "--replicas", "1", "--epochs", "3"]
    assert run_command(train.main, words) == 0
    assert [line["epoch"] for line in lines(ran, "groups")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "3", "--replicas", "2"], "--replicas: got 2 for 3 ranks, expected groups of equal size"),
        (["--replicas", "2", "--parallel", "data"], "--replicas: got 2 together with --parallel data"),
        (["--replicas", "2", "--norm", "batch"], "--norm: got batch together with --replicas 2"),
        (["--replicas", "0"], "--replicas: got 0"),
        (["--halo-cache", "4Gib"], "--halo-cache: got '4Gib'"),
        (["--feature-cache", "-1"], "--feature-cache: got '-1'"),
        (["--feature-cache", "lots"], "--feature-cache: got 'lots'"),
        (["--graph-placement", "pinned", "--device", "cpu"], "--graph-placement: got pinned"),
        (["--exchange-dtype", "float16"], "--exchange-dtype: got "),
        (["--presample", "-1"], "--presample: got -1"),
    ],
)
def test_wrong_options_are_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture):
    assert run_command(train.main, ["karate", *words]) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith(said) or said in text
    assert len(text.splitlines()) == 1
