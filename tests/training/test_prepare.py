"""Preparing a store: made once, found again, remade when damaged, refused in one sentence where need be."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tgnn.data.options import DataOptions
from tgnn.data.synthetic import hand_drawn, karate
from tgnn.errors import UserError
from tgnn.partition.store import Store
from tgnn.training import prepare as module
from tgnn.training.prepare import is_store, prepare, wait_for_store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The parts of every partition that was really computed."""
    computed, real = [], module.assign

    def counting(dataset: Any, parts: int, **options: Any) -> np.ndarray:
        computed.append(parts)
        return real(dataset, parts, **options)

    monkeypatch.setattr(module, "assign", counting)
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
    real = module.assign

    def overtaken(*args: Any, **kwargs: Any) -> np.ndarray:
        monkeypatch.setattr(module, "assign", real)
        prepare("karate", 2, **options)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "assign", overtaken)
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
