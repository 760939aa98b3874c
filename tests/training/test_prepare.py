"""Preparing a store: made once, found again, remade when damaged, refused in one sentence where need be."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tgnn.data.graph import Dataset
from tgnn.data.options import DataOptions
from tgnn.data.synthetic import hand_drawn, karate
from tgnn.errors import UserError
from tgnn.partition.store import Store
from tgnn.training import prepare as module
from tgnn.training.partitioning import Partitioned, PresampleOptions
from tgnn.training.prepare import is_store, prepare, prepare_for_ranks, wait_for_store
from tgnn.training.resolve import resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parts of every partition that was really computed."""
    computed, real = [], module.partitioned

    def counting(dataset: Any, parts: int, *options: Any) -> Partitioned:
        computed.append(parts)
        return real(dataset, parts, *options)

    monkeypatch.setattr(module, "partitioned", counting)
    return computed


def refusal(*args: Any, **options: Any) -> str:
    """The one sentence with which a request is refused."""
    with pytest.raises(UserError) as caught:
        prepare(*args, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_a_store_is_made_once_and_found_again(cache: Path, made: list[int]) -> None:
    first = prepare("karate", 2)
    again = prepare("karate", 2)
    assert made == [2]
    assert first.path == again.path and first.path.parent == cache
    assert (first.num_parts, first.num_vertices, first.name) == (2, 34, "karate")
    assert [folder.name for folder in cache.iterdir()] == [first.path.name]
    assert first.path.name.startswith("karate-2-")


def test_every_difference_makes_another_store(cache: Path) -> None:
    variants = [
        {}, {"seed": 1}, {"partitioner": "random"}, {"data_options": DataOptions(self_loops="add")},
    ]  # fmt: skip
    paths = {prepare("karate", 2, **variant).path for variant in variants}
    paths |= {prepare("karate", 1).path, prepare("hand-drawn", 2).path}
    assert len(paths) == 6
    assert len(list(cache.iterdir())) == 6


SAMPLING = PresampleOptions(fanouts=(3, 2), batch_size=8)


def test_presampling_is_part_of_what_a_cached_store_is_known_by(cache: Path, made: list[int]) -> None:
    variants = [None, SAMPLING]
    for change in (
        {"fanouts": (2, 3)},
        {"batch_size": 4},
        {"sampler": "labor"},
        {"replace": True},
        {"epochs": 2},
    ):
        variants.append(dataclasses.replace(SAMPLING, **change))
    paths = {prepare("sbm:300", 2, presample=variant).path for variant in variants}
    assert len(paths) == len(variants)
    count = len(made)
    assert prepare("sbm:300", 2, presample=SAMPLING).path in paths and len(made) == count


def test_a_presampled_store_knows_its_hot_rows_and_what_a_step_costs() -> None:
    store = prepare("sbm:300", 2, presample=SAMPLING)
    assert store.presampled["fanouts"] == [3, 2] and store.presampled["steps"] >= 1
    expected = store.meta["report"]["expected"]
    assert list(expected["partitions"]) == ["random", "presampled lp"]
    for found in expected["partitions"].values():
        assert len(found["exchange_rows"]) == 2 and found["balance"] >= 1
    for number in range(2):
        part = store.part(number)
        assert (np.diff(part.hotness) <= 0).all() and part.hotness[0] > 0
        assert len(part.halo_id) and (store.ownership.owner(part.halo_id) != number).all()


def test_there_is_nothing_to_presample_for_one_part_or_without_seeds(made: list[int]) -> None:
    assert prepare("sbm:300", 1, presample=SAMPLING).path == prepare("sbm:300", 1).path
    assert made == [1]
    unlabelled = Dataset("no seeds", hand_drawn().graph)
    assert prepare(unlabelled, 2, presample=SAMPLING).presampled is None


def test_a_kept_store_that_was_presampled_otherwise_is_used_with_a_warning(
    tmp_path: Path, made: list[int]
) -> None:
    store = prepare("sbm:300", 2, presample=SAMPLING, store=tmp_path / "kept")
    with pytest.warns(UserWarning, match="was presampled with other options"):
        again = prepare("sbm:300", 2, store=tmp_path / "kept")
    assert again.path == store.path and again.presampled and made == [2]


def test_the_seed_of_a_run_does_not_change_its_store(made: list[int]) -> None:
    paths = set()
    for seed in (0, 1):
        resolved = resolve(["sbm:300", "--ranks", "2", "--seed", str(seed), "--fanouts", "3,2"])
        paths.add(prepare_for_ranks(resolved, 2).path)
    assert len(paths) == 1 and made == [2]
    store = Store.open(paths.pop())
    assert store.presampled["fanouts"] == [3, 2] and store.presampled["batch_size"] == 1024


def test_a_run_can_leave_presampling_out() -> None:
    resolved = resolve(["sbm:300", "--ranks", "2", "--presample", "0"])
    assert prepare_for_ranks(resolved, 2).presampled is None


def test_options_are_applied() -> None:
    plain = prepare("karate", 1)
    looped = prepare("karate", 1, data_options=DataOptions(self_loops="add"))
    assert looped.num_edges == plain.num_edges + 34


def test_datasets_in_memory_are_told_apart_by_content(made: list[int]) -> None:
    one, other = hand_drawn(), hand_drawn()
    assert prepare(one, 2).path == prepare(other, 2).path
    other.x = other.x + 1
    assert prepare(other, 2).path != prepare(one, 2).path
    assert prepare(hand_drawn(with_weights=True), 2).path != prepare(one, 2).path
    assert made == [2, 2, 2]


def test_a_changed_file_is_noticed(tmp_path: Path, made: list[int]) -> None:
    file = tmp_path / "graph.csv"
    options = DataOptions(num_vertices=4)
    file.write_text("0,1\n1,2\n")
    assert prepare(str(file), 1, data_options=options).num_edges == 2
    file.write_text("0,1\n1,2\n2,3\n")
    assert prepare(file, 1, data_options=options).num_edges == 3
    assert made == [1, 1]


@pytest.mark.parametrize("damage", ["truncate", "remove file", "garble store.json", "remove store.json"])
def test_a_damaged_cache_is_remade(cache: Path, made: list[int], damage: str) -> None:
    store = prepare("karate", 2)
    victim = store.path / ("store.json" if "store.json" in damage else "part-0001/indices.npy")
    if damage == "truncate":
        os.truncate(victim, victim.stat().st_size // 2)
    elif damage.startswith("garble"):
        victim.write_text("{")
    else:
        victim.unlink()
    again = prepare("karate", 2)
    assert made == [2, 2]
    Store.open(again.path, verify=True)
    assert [folder.name for folder in cache.iterdir()] == [store.path.name]


def test_a_kept_store_is_reused_and_nothing_else_overwritten(tmp_path: Path, made: list[int]) -> None:
    kept = tmp_path / "kept"
    store = prepare("karate", 2, store=kept)
    assert store.path == kept
    assert prepare("karate", 2, store=str(kept)).path == kept
    assert made == [2]
    for args, options in ((("karate", 3), {}), (("hand-drawn", 2), {}), (("karate", 2), {"seed": 1})):
        sentence = refusal(*args, store=kept, **options)
        assert sentence.startswith(f"--store: got {kept}, a store made from other data")
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    assert "something that is no store" in refusal("karate", 2, store=full)
    assert (full / "thesis.tex").read_text() == "precious"
    os.truncate(kept / "part-0000" / "indptr.npy", 3)
    assert "indptr.npy" in refusal("karate", 2, store=kept)


def test_a_store_as_data_must_fit(tmp_path: Path) -> None:
    store = prepare("karate", 2, data_options=DataOptions(self_loops="add"), store=tmp_path / "kept")
    assert is_store(tmp_path / "kept") and not is_store("karate") and not is_store(karate())
    for data in (store, str(store.path), store.path):
        assert prepare(data, 2).path == store.path
    assert prepare(store, 2, data_options=DataOptions(self_loops="add")).path == store.path
    assert "tgnn.partition" in refusal(store.path, 3) and "--parts 3" in refusal(store.path, 3)
    assert refusal(store.path, 2, store=tmp_path / "x").startswith("--store: got ")
    sentence = refusal(store.path, 2, data_options=DataOptions(self_loops="remove"))
    assert sentence.startswith("--self-loops: got remove for the store") and "made with (add)" in sentence


def test_what_cannot_be_prepared_is_refused_and_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no-such-data" in refusal("no-such-data", 2)
    assert refusal("karate", 0).startswith("parts: got 0")
    assert "partitioner" in refusal("karate", 2, partitioner="spectral")
    assert not cache.exists() or list(cache.iterdir()) == []
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TGNN_CACHE", str(file / "sub"))
    assert "TGNN_CACHE" in refusal("karate", 2)


def test_more_parts_than_vertices_and_training_vertices() -> None:
    assert prepare("hand-drawn", 40).num_parts == 40


@pytest.mark.parametrize("kept", [False, True])
def test_the_slower_of_two_uses_the_faster_ones_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    options = {"store": tmp_path / "kept"} if kept else {}
    real = module.partitioned

    def overtaken(*args: Any) -> Partitioned:
        monkeypatch.setattr(module, "partitioned", real)
        prepare("karate", 2, **options)
        return real(*args)

    monkeypatch.setattr(module, "partitioned", overtaken)
    store = prepare("karate", 2, **options)
    Store.open(store.path, verify=True)
    assert len(list(store.path.parent.iterdir())) == 1


def test_processes_that_prepare_at_once_do_not_disturb_each_other(cache: Path) -> None:
    program = (
        "import sys; from tgnn.training.prepare import prepare;"
        "store = prepare('sbm:500', 3); print(store.path, store.part(2).features.shape[1])"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(answers) == 1
    assert len(list(cache.iterdir())) == 1


def wait_on_ranks(ranks: int, prepare_on_rank_0: Any, **options: Any) -> list[Any]:
    """What `wait_for_store` gives or raises on each rank, a thread for each."""
    mailbox, results = dist.HashStore(), [None] * ranks
    start = threading.Barrier(ranks)

    def run(rank: int) -> None:
        start.wait()
        try:
            results[rank] = wait_for_store(
                prepare_on_rank_0, rank, ranks, mailbox=mailbox, poll_s=0.01, **options
            )
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_waiting_ranks_open_what_rank_0_has_prepared(ranks: int) -> None:
    stores = wait_on_ranks(ranks, lambda: prepare("karate", 2))
    assert len({str(store.path) for store in stores}) == 1
    assert [store.num_vertices for store in stores] == [34] * ranks


def test_waiting_ranks_see_rank_0s_failure_at_once() -> None:
    errors = wait_on_ranks(3, lambda: prepare("no-such-data", 2))
    assert [type(error) for error in errors] == [UserError] * 3
    assert len({str(error) for error in errors}) == 1

    def broken() -> Store:
        raise ZeroDivisionError("our own fault")

    errors = wait_on_ranks(2, broken)
    assert isinstance(errors[0], ZeroDivisionError)
    assert isinstance(errors[1], RuntimeError) and "ZeroDivisionError: our own fault" in str(errors[1])


def test_waiting_ends_at_the_timeout() -> None:
    with pytest.raises(TimeoutError, match="within 0.05 seconds"):
        wait_for_store(lambda: None, 1, 2, mailbox=dist.HashStore(), timeout_s=0.05, poll_s=0.01)
