"""What `launch` does before and without starting a process: one rank, torchrun's variables, refusals."""

from __future__ import annotations

import pytest
import torch

from tgnn.errors import UserError
from tgnn.parallel import current, default_ranks, initialise_from_env, launch


def describe(*args: object) -> tuple:
    return args, current().rank, current().ranks, current().backend, torch.get_num_threads()


def fail() -> None:
    raise UserError("x: got y, expected z; do w.")


def test_one_rank_runs_here():
    before = torch.get_num_threads()
    local = object()  # cannot be pickled by value: it must come back as it is
    args, rank, ranks, backend, threads = launch(describe, local, ranks=1, device="cpu", threads=before + 1)
    assert args[0] is local
    assert (rank, ranks, backend, threads) == (0, 1, "single", before + 1)
    assert torch.get_num_threads() == before
    with pytest.raises(UserError, match="got y"):
        launch(fail, ranks=1, device="cpu")
    assert current().ranks == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"ranks": 0}, "ranks: got 0, expected at least 1"),
        ({"ranks": -2}, "ranks: got -2, expected at least 1"),
        ({"timeout": 0}, "timeout: got 0, expected a positive number"),
        ({"threads": 0}, "threads: got 0, expected at least 1"),
        ({"device": "tpu"}, "device: got 'tpu', expected auto, cpu or cuda"),
        ({"device": "cuda", "ranks": 1000}, "device: got cuda for 1000 ranks, expected no more ranks than"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict, sentence: str):
    with pytest.raises(UserError, match=sentence):
        launch(describe, **arguments)


def test_function_that_cannot_be_pickled_is_refused():
    with pytest.raises(UserError, match="cannot be pickled .* move the function"):
        launch(lambda: None, ranks=2, device="cpu")


def test_torchrun_variables(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="torchrun: got no RANK, WORLD_SIZE"):
        initialise_from_env()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    assert default_ranks() == 1
    assert launch(describe, device="cpu")[1:4] == (0, 1, "single")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert default_ranks() == 4
    with pytest.raises(UserError, match="ranks: got 2, expected torchrun's 4; leave ranks out"):
        launch(describe, ranks=2, device="cpu")
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(UserError, match="WORLD_SIZE: got 'four', expected an integer"):
        launch(describe, device="cpu")
