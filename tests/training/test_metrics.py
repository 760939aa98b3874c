"""Stage clocks, work counters, the run directory's files and the table at the end."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tgnn.errors import UserError
from tgnn.parallel.comm import Comm
from tgnn.training import metrics
from tgnn.training.metrics import (
    STAGES,
    RunLog,
    StageClock,
    WorkCounters,
    advise,
    create_run_dir,
    epoch_line,
    format_summary,
    memory,
    provenance,
    summarise,
    to_json,
)


class ScriptedComm:
    """Two ranks, of which the other one's integers are given beforehand."""

    ranks = 2

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def all_gather_ints(self, values: list[int]) -> list[list[int]]:
        return [list(values), self.other]


def line(epoch: int, val_acc: float | None = 0.5, **seconds: float) -> dict[str, Any]:
    """A line of `metrics.jsonl` of an epoch that took 1 second unless said otherwise."""
    times = dict.fromkeys((*STAGES, "total", "overlapped"), 0.0) | {"forward": 0.9, "total": 1.0} | seconds
    counters = WorkCounters(
        seeds=1000, edges=20_000, feature_rows_loaded=3000, halo_rows=70, exchange_bytes=1_500_000
    )
    return epoch_line(
        epoch=epoch, loss=1.5, metric="accuracy", train_acc=0.9, val_acc=val_acc, test_acc=0.6, val_loss=1.0,
        ranks=2, parallel="split", seconds=times, work=counters.sum_over_ranks(Comm()),
        memory={"rss_bytes": epoch, "device_bytes": 0},
    )  # fmt: skip


def test_stages_are_disjoint_and_add_up() -> None:
    now = [0.0]
    clock = StageClock(now=lambda: now[0])
    clock.start()
    with clock.stage("forward"):
        now[0] += 1
        with clock.stage("wait"):
            now[0] += 2
            with clock.stage("wait"):
                now[0] += 4
        now[0] += 8
    now[0] += 16
    with clock.stage("eval"):
        now[0] += 32
    clock.add_overlapped(0.5)
    seconds = clock.seconds()
    assert list(seconds) == [*STAGES, "total", "overlapped"]
    assert {name: value for name, value in seconds.items() if value} == {
        "forward": 9, "wait": 6, "eval": 32, "total": 63, "overlapped": 0.5,
    }  # fmt: skip
    clock.start()
    assert set(clock.seconds().values()) == {0.0}


def test_a23_stages_of_a_real_clock_add_up_to_the_wall_time() -> None:
    clock = StageClock()
    begin = time.perf_counter()
    for _ in range(20):
        for name in STAGES:
            with clock.stage(name):
                time.sleep(1e-3)
    seconds, wall = clock.seconds(), time.perf_counter() - begin
    total = sum(seconds[name] for name in STAGES)
    # A busy machine may stop this process between two stages: the exact sum is the tests' above with a made clock.
    assert 0.16 <= total <= seconds["total"] <= wall


def test_a_stage_survives_an_exception_and_unknown_stages_are_refused() -> None:
    now = [0.0]
    clock = StageClock(now=lambda: now[0])
    with pytest.raises(ValueError, match="inside"):
        with clock.stage("load"):
            now[0] += 1
            raise ValueError("inside")
    now[0] += 1
    assert clock.seconds()["load"] == 1
    with pytest.raises(KeyError, match="lunch"):
        with clock.stage("lunch"):
            pass


def test_work_is_summed_over_ranks_with_its_balance() -> None:
    counters = WorkCounters(seeds=3, edges=10, input_rows=4)
    other = WorkCounters(seeds=1, edges=30, exchange_bytes=8)
    work = counters.sum_over_ranks(ScriptedComm(list(other.as_dict().values())))
    assert list(work) == [
        "seeds", "edges", "input_rows", "feature_rows_loaded", "halo_rows", "halo_cache_rows",
        "exchange_bytes", "cache_hit", "balance",
    ]  # fmt: skip
    assert (work["seeds"], work["edges"], work["exchange_bytes"], work["input_rows"]) == (4, 40, 8, 4)
    assert work["balance"] == 1.5
    assert work["cache_hit"] is None
    half = WorkCounters(feature_rows_loaded=8, feature_cache_rows=4).sum_over_ranks(Comm())
    assert half["cache_hit"] == 0.5 and "feature_cache_rows" not in half
    assert WorkCounters().sum_over_ranks(Comm())["balance"] == 1.0


def test_work_from_before_a_restart_counts() -> None:
    counters, comm = WorkCounters(seeds=3, edges=10), ScriptedComm([1, 30, 0, 0, 0, 0, 0, 0])
    work = counters.sum_over_ranks(comm, earlier={"seeds": [5, 0], "edges": [990, 70]})
    assert (work["seeds"], work["edges"], work["balance"]) == (9, 1100, 1000 * 2 / 1100)
    on_three_ranks = counters.per_rank(comm, earlier={"seeds": [5, 1, 1]})
    assert on_three_ranks["seeds"] == [3 + 4, 1 + 3]


def test_memory_is_the_largest_ranks() -> None:
    alone = memory("cpu", Comm())
    assert alone["rss_bytes"] > 10_000_000 and alone["device_bytes"] == 0
    assert memory("cpu", ScriptedComm([1 << 50, 7])) == {"rss_bytes": 1 << 50, "device_bytes": 7}


def test_line_has_the_published_keys_in_order() -> None:
    assert list(line(1)) == [
        "epoch", "loss", "metric", "train_acc", "val_acc", "test_acc", "val_loss", "ranks", "parallel",
        "seconds", "work", "memory", "energy_joules",
    ]  # fmt: skip
    assert line(1)["energy_joules"] is None


def test_json_never_holds_nan() -> None:
    text = to_json({"a": float("nan"), "b": [float("inf"), (1.5, -float("inf"))]})
    assert json.loads(text) == {"a": None, "b": [None, [1.5, None]]}
    assert to_json({"loss": 1.5}) == '{"loss": 1.5}'


def test_lines_are_appended_read_back_and_rewound(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert log.lines() == []
    for epoch in (1, 2, 3):
        log.append(line(epoch))
    assert [entry["epoch"] for entry in log.lines()] == [1, 2, 3]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 4, "lo')
    assert [entry["epoch"] for entry in log.lines()] == [1, 2, 3]
    log.rewind(3)
    log.append(line(3, val_acc=0.7))
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["epoch"] for text in texts] == [1, 2, 3]
    assert json.loads(texts[2])["val_acc"] == 0.7
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_config_and_summary_are_whole_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "deep" / "run")
    log.write_config({"train": {"fanouts": (1, 2)}})
    log.write_summary({"loss": float("nan")})
    assert json.loads((log.run_dir / "config.json").read_text()) == {"train": {"fanouts": [1, 2]}}
    assert json.loads((log.run_dir / "summary.json").read_text()) == {"loss": None}
    assert sorted(file.name for file in log.run_dir.iterdir()) == ["config.json", "summary.json"]


def test_run_directories_are_numbered(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    names = [create_run_dir(None, "a/b c", "sage", root).name for _ in range(3)]
    assert names == ["a-b-c-sage-1", "a-b-c-sage-2", "a-b-c-sage-3"]
    assert create_run_dir(str(tmp_path / "x" / "own"), "n", "m", root) == tmp_path / "x" / "own"


def test_taken_or_impossible_run_directories_are_refused(tmp_path: Path) -> None:
    RunLog(tmp_path).write_config({})
    with pytest.raises(UserError, match=r"^--run-dir: got [^\n]* which holds a run, [^\n]*--resume[^\n]*\.$"):
        create_run_dir(str(tmp_path), "n", "m")
    with pytest.raises(UserError, match=r"^--run-dir: got [^\n]*config.json is a file[^\n]*\.$"):
        create_run_dir(str(tmp_path / "config.json" / "x"), "n", "m")
    with pytest.raises(UserError, match=r"^--run-dir: "):
        create_run_dir(str(tmp_path / "config.json"), "n", "m")


def test_provenance_names_versions_device_and_commit() -> None:
    facts = provenance()
    assert list(facts) == ["versions", "device", "commit"]
    assert list(facts["versions"]) == ["python", "tgnn", "torch", "numpy", "triton"]
    assert facts["versions"]["torch"] and facts["device"]
    assert facts["commit"] is None or re.fullmatch("[0-9a-f]{40}", facts["commit"])


def test_commit_is_read_from_every_layout_of_git(tmp_path: Path) -> None:
    commit, git = "a" * 40, tmp_path / ".git"
    assert metrics._commit(tmp_path) is None
    git.mkdir()
    (git / "HEAD").write_text(commit + "\n")
    assert metrics._commit(tmp_path) == commit
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert metrics._commit(tmp_path) is None
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert metrics._commit(tmp_path) == "b" * 40
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text(commit + "\n")
    assert metrics._commit(tmp_path) == commit
    worktree, inner = tmp_path / "worktree", git / "worktrees" / "w"
    worktree.mkdir()
    inner.mkdir(parents=True)
    (worktree / ".git").write_text(f"gitdir: {inner}\n")
    (inner / "HEAD").write_text("ref: refs/heads/main\n")
    (inner / "commondir").write_text("../..\n")
    assert metrics._commit(worktree) == commit


def test_summary_takes_the_best_epoch_and_means_per_epoch() -> None:
    lines = [line(1), line(2, val_acc=0.8, total=3.0, eval=1.0), line(3)]
    summary = summarise(lines, 2, stopped="patience")
    assert (summary["epochs"], summary["best_epoch"], summary["val_acc"]) == (3, 2, 0.8)
    assert summary["seconds_per_epoch"]["total"] == pytest.approx(5 / 3)
    assert summary["seeds_per_second"] == pytest.approx(1000 / (5 / 3 - 1 / 3))
    assert summary["work_per_epoch"]["edges"] == 20_000
    assert summary["memory"] == {"rss_bytes": 3, "device_bytes": 0}
    assert summary["stopped"] == "patience"
    assert summarise(lines, None)["best_epoch"] == 3
    lost = summarise(lines[2:], 2)
    assert (lost["best_epoch"], lost["val_acc"], lost["loss"], lost["metric"]) == (2, None, None, "accuracy")


def test_table_shows_every_promised_figure() -> None:
    text = format_summary(summarise([line(1), line(2, val_acc=None)], 2))
    assert "train 0.9000  val -  test 0.6000  (best epoch: 2 of 2)" in text
    for word in (
        *STAGES,
        "sum",
        "wall",
        "20,000 edges",
        "3,000 rows loaded",
        "70 halo rows",
        "1.5 MB exchanged",
    ):
        assert word in text
    assert "1,000 seeds/s on 2 ranks, split" in text
    assert len(text.splitlines()) <= 8 and max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("stage", ["sample", "split", "load", "wait"])
def test_a23_advice_when_a_stage_dominates(stage: str) -> None:
    seconds = line(1, forward=0.3, **{stage: 0.65})["seconds"]
    assert advise(seconds).startswith(f"{stage} takes 65% of the epoch: ")
    assert advise(line(1, **{stage: 0.55})["seconds"]) is None
    assert advise(line(1)["seconds"]) is None
    assert f"{stage} takes" in format_summary(summarise([line(1, **{stage: 0.65})], 1))
