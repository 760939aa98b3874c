"""Checkpoints: written atomically, read without unpickling anything but tensors and plain values.

`save` and `load` move one dict to and from a file; `CheckpointState` says what a training run keeps in it, so
that a resumed run equals one that was never broken off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tgnn.errors import wrong

KIND = "tgnn-checkpoint"
FORMAT_VERSION = 1

_PLAIN = (bool, int, float, str, type(None))


def save(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write `state` (nested dicts, lists and tuples of tensors and plain values) to `path`, whole or not at
    all.

    Tensors are stored as CPU tensors. Raises TypeError for anything that `load` would refuse to read back.
    """
    content = {"kind": KIND, "format": FORMAT_VERSION, "state": _plain(state, "state")}
    with atomic_file(path) as file:
        torch.save(content, file)


def load(path: str | Path) -> dict[str, Any]:
    """The state that `save` wrote, its tensors on the CPU.

    Raises UserError when the file is missing, damaged, not a tgnn checkpoint, or of another version.
    """
    try:
        with warnings.catch_warnings():
            # Of a plain pickle torch warns before it refuses: our own sentence says it.
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise wrong("checkpoint", f"no file {path}", "an existing checkpoint", "check the path") from None
    except pickle.UnpicklingError:
        raise wrong(
            f"checkpoint {path}",
            "a damaged file or one that holds objects of Python",
            "tensors and plain values as tgnn writes them",
            "do not trust it, and use a checkpoint that tgnn has written",
        ) from None
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
    ) as error:
        raise wrong(
            f"checkpoint {path}",
            f"a damaged file ({type(error).__name__})",
            "a whole checkpoint",
            "restore a copy, or start a new run",
        ) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise wrong(f"checkpoint {path}", "a file of another kind", f"a {KIND}", "check the path")
    if content.get("format") != FORMAT_VERSION:
        raise wrong(
            f"checkpoint {path}",
            f"format {content.get('format')}",
            f"format {FORMAT_VERSION}",
            "use the tgnn version that wrote it, or start a new run",
        )
    return content["state"]


@dataclasses.dataclass(kw_only=True)
class CheckpointState:
    """All that a run needs to go on as if it had never stopped.

    Samples, order and dropout follow from (seed, epoch, step), so there is no generator state to keep.
    `epoch` counts from 1; `step` is the number of steps already done in it, 0 between epochs.
    """

    model: dict[str, Any]
    """The model's state_dict."""
    optimizer: dict[str, Any]
    """The optimizer's state_dict."""
    epoch: int
    """The epoch to go on with."""
    step: int = 0
    best_metric: float | None = None
    """Best validation metric so far; None before the first evaluation."""
    best_loss: float | None = None
    """Validation loss at that point: it breaks ties."""
    best_epoch: int | None = None
    best_figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the summary says of that epoch; empty before it, and in older checkpoints."""
    stale: int = 0
    """Epochs from the best one to the last evaluated one."""
    loss_sum: float = 0.0
    """Sum of the losses, over all ranks, of the seeds already seen in this epoch."""
    seeds: int = 0
    """Number of those seeds."""
    work: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Work counters of those steps, one per rank."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The run's options, as in config.json."""
    dataset: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What `dataset_fingerprint` said of the data."""

    def save(self, path: str | Path) -> None:
        """Write this state to `path` atomically."""
        save(path, {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @classmethod
    def load(cls, path: str | Path) -> CheckpointState:
        """Read a state; raises UserError for a file that is not a whole training checkpoint."""
        state = load(path)
        names = {field.name for field in dataclasses.fields(cls)}
        missing = {"model", "optimizer", "epoch"} - state.keys()
        if missing or state.keys() - names:
            odd = ", ".join(sorted(missing or state.keys() - names))
            raise wrong(
                f"checkpoint {path}",
                f"{'no' if missing else 'an unknown'} entry {odd}",
                "the state of a training run",
                "use last.pt or best.pt of a run directory",
            )
        return cls(**state)

    def check_dataset(self, fingerprint: Mapping[str, Any]) -> None:
        """Refuse to go on with other data than this state was trained on: UserError naming the difference.

        The name may differ: a file that was moved or renamed is the same data.
        """
        for key, before in self.dataset.items():
            now = fingerprint.get(key)
            if now != before and key != "name":
                raise wrong(
                    f"the dataset's {key.replace('_', ' ')}",
                    now,
                    f"{before}, as the checkpoint was trained on",
                    "give the dataset and options that it was trained with",
                )


def dataset_fingerprint(store: Any) -> dict[str, Any]:
    """What tells one dataset from another, whatever its partitioning: name, sizes, task of a store or a
    Dataset.
    """
    names = ("name", "num_vertices", "num_edges", "num_features", "num_classes", "task")
    return {name: getattr(store, name) for name in names}


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A binary file to write that becomes `path` only when the block ends well: temporary name, fsync,
    rename.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _plain(value: Any, where: str) -> Any:
    """`value` with its tensors detached on the CPU; TypeError for what is neither tensor nor plain value."""
    if isinstance(value, torch.Tensor):
        # A view would drag its whole storage into the file.
        tensor = value.detach().cpu()
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{where} is a {type(value).__name__}; a checkpoint holds tensors and plain values only")
