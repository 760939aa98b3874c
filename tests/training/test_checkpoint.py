"""Checkpoints: whole or not there, plain on disk, and refused in one sentence when they cannot be read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tgnn.errors import UserError
from tgnn.training import checkpoint
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint, load, save


def trained_state() -> tuple[torch.nn.Module, torch.optim.Optimizer, CheckpointState]:
    """A small model after two Adam steps, in the middle of its second epoch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    state = CheckpointState(
        model=model.state_dict(), optimizer=optimizer.state_dict(), epoch=2, step=5, best_metric=0.75,
        best_loss=0.1, best_epoch=1, stale=1, loss_sum=1.25, seeds=10, work={"edges": [7, 8]},
        config={"train": {"fanouts": [10, 10]}}, dataset={"name": "cora", "num_vertices": 2708},
    )  # fmt: skip
    return model, optimizer, state


def refusal(path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(UserError) as caught:
        CheckpointState.load(path)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and "checkpoint" in sentence
    return sentence


def test_a25_state_survives_the_file_and_training_goes_on_alike(tmp_path: Path) -> None:
    model, optimizer, state = trained_state()
    state.save(tmp_path / "last.pt")
    loaded = CheckpointState.load(tmp_path / "last.pt")
    assert (loaded.epoch, loaded.step, loaded.best_metric, loaded.best_loss, loaded.best_epoch) == (
        2,
        5,
        0.75,
        0.1,
        1,
    )
    assert (loaded.stale, loaded.loss_sum, loaded.seeds, loaded.work) == (1, 1.25, 10, {"edges": [7, 8]})
    assert loaded.config == state.config and loaded.dataset == state.dataset
    again = torch.nn.Linear(3, 2)
    again_optimizer = torch.optim.Adam(again.parameters(), lr=0.5)
    again.load_state_dict(loaded.model)
    again_optimizer.load_state_dict(loaded.optimizer)
    for net, rule in ((model, optimizer), (again, again_optimizer)):
        rule.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        rule.step()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a25_file_loads_with_torch_alone_and_weights_only(tmp_path: Path) -> None:
    trained_state()[2].save(tmp_path / "last.pt")
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    assert (content["kind"], content["format"]) == ("tgnn-checkpoint", 1)


def test_plain_values_of_every_kind_round_trip(tmp_path: Path) -> None:
    state = {
        "half": torch.arange(3, dtype=torch.bfloat16), "empty": torch.empty(0, 4), "scalar": torch.tensor(3),
        "nested": [1, (2.5, None), {"deep": [True, "text"]}], 7: "integer key",
    }  # fmt: skip
    save(tmp_path / "x.pt", state)
    loaded = load(tmp_path / "x.pt")
    assert loaded.keys() == state.keys()
    for key in ("half", "empty", "scalar"):
        torch.testing.assert_close(loaded[key], state[key])
    assert loaded["nested"] == state["nested"]


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", {"row": torch.zeros(1000, 1000)[3]})
    assert (tmp_path / "x.pt").stat().st_size < 20_000


@pytest.mark.parametrize("value", [np.float64(1), np.zeros(2), {1, 2}, Path("x"), torch.float32])
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\]"):
        save(tmp_path / "x.pt", {"a": [value]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["torch.save", "os.replace"])
def test_a_failed_write_leaves_the_last_good_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path / "last.pt", {"epoch": 1})

    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "last.pt", {"epoch": 2})
    monkeypatch.undo()
    assert load(tmp_path / "last.pt") == {"epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "last.pt"
    trained_state()[2].save(path)
    os.truncate(path, int(path.stat().st_size * share))
    assert "damaged" in refusal(path)


def test_missing_foreign_and_newer_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    assert f"no file {path}" in refusal(path)
    path.mkdir()
    assert "damaged" in refusal(path)
    path.rmdir()
    path.write_text("not a checkpoint")
    assert "damaged" in refusal(path)
    torch.save({"weight": torch.zeros(2)}, path)
    assert "a file of another kind" in refusal(path)
    torch.save([1, 2], path)
    assert "a file of another kind" in refusal(path)
    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", 2)
    save(path, {})
    monkeypatch.undo()
    assert "got format 2, expected format 1" in refusal(path)
    save(path, {"model": {}, "epoch": 1})
    assert "no entry optimizer" in refusal(path)
    save(path, {"model": {}, "optimizer": {}, "epoch": 1, "generator": 3})
    assert "an unknown entry generator" in refusal(path)


class Malicious:
    """Would create a file while being unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.witness,))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_unread(tmp_path: Path, writer: str) -> None:
    witness, path = tmp_path / "witness", tmp_path / "last.pt"
    content = {"kind": "tgnn-checkpoint", "format": 1, "state": Malicious(witness)}
    if writer == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    assert "holds objects of Python" in refusal(path)
    assert not witness.exists()


def test_another_dataset_is_refused_by_what_differs() -> None:
    store = SimpleNamespace(
        name="cora", num_vertices=2708, num_edges=10556, num_features=1433, num_classes=7, task="single-label"
    )
    fingerprint = dataset_fingerprint(store)
    state = CheckpointState(model={}, optimizer={}, epoch=1, dataset=fingerprint)
    state.check_dataset(fingerprint)
    state.check_dataset({**fingerprint, "name": "a copy of cora"})
    with pytest.raises(UserError, match=r"^the dataset's num edges: got 13264, expected 10556, [^\n]*\.$"):
        state.check_dataset({**fingerprint, "num_edges": 13264})
