"""Checks an exported folder: its model, run by the framework in a clean process, against our exact
inference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tgnn.errors import ReportedError, wrong
from tgnn.export import clean_run
from tgnn.export.frameworks import Framework
from tgnn.parallel.launch import launch
from tgnn.partition.store import Store
from tgnn.training.checkpoint import CheckpointState
from tgnn.training.inference import predict
from tgnn.training.resolve import Resolved
from tgnn.training.trainer import build_model

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


class Verdict(NamedTuple):
    """How far the framework's logits are from ours."""

    largest_difference: float
    largest_output: float
    allowed: float
    """Share of the largest output that the largest difference may be."""
    versions: dict[str, str]

    @property
    def good(self) -> bool:
        """Whether the difference is allowed; never where an output is NaN."""
        return self.largest_difference <= self.allowed * self.largest_output

    def as_dict(self) -> dict[str, Any]:
        """For config.json."""
        return {**self._asdict(), "versions": dict(self.versions)}


def probe(framework: Framework, python: str = sys.executable) -> dict[str, str]:
    """The framework's and torch's versions in that Python; UserError where it is absent or not supported."""
    found = _run(framework, python)
    if "absent" in found:
        raise framework.absent(found["absent"], ", or give --python of an environment that has it")
    framework.check(found["version"])
    return {framework.package: found["version"], "torch": found["torch"]}


def verify(
    framework: Framework, folder: Path, resolved: Resolved, store: Store, checkpoint: Path, *,
    versions: dict[str, str], python: str = sys.executable,
) -> Verdict:  # fmt: skip
    """Compare the folder's model with exact inference of the checkpoint on the store's whole graph, on the
    CPU.

    `versions` are what `probe` found in that Python.
    """
    with tempfile.TemporaryDirectory(prefix="tgnn-verify-") as scratch:
        graph, ours, theirs = (Path(scratch) / name for name in ("graph.npz", "ours.npy", "theirs.npy"))
        np.savez(graph, **whole_graph(store))
        launch(_reference_rank, resolved, store, checkpoint, ours, ranks=store.num_parts, device="cpu",
               timeout=resolved.config.timeout)  # fmt: skip
        _run(framework, python, folder, graph, theirs)
        expected, got = (np.load(file, allow_pickle=False) for file in (ours, theirs))
    return judge(expected, got, versions)


def judge(expected: np.ndarray, got: np.ndarray, versions: dict[str, str]) -> Verdict:
    """The verdict on logits [N, classes]; a NaN on either side makes it a bad one."""
    allowed = TOLERANCE[torch.float64 if expected.dtype == np.float64 else torch.float32]
    if expected.shape != got.shape:
        raise ReportedError(
            f"the exported model gives logits of shape {got.shape}, ours are {expected.shape}"
        )
    difference = float(np.abs(expected - got).max(initial=0))
    return Verdict(difference, float(np.abs(expected).max(initial=0)), allowed, versions)


def whole_graph(store: Store) -> dict[str, np.ndarray]:
    """edge_index int64 [2, E], x [N, F] and, where there is one, edge_weight [E] of a store, in original
    ids.
    """
    original = store.original_ids()
    parts = [store.part(number) for number in range(store.num_parts)]
    source = [original[np.asarray(part.indices)] for part in parts]
    destination = [np.repeat(part.original_id, np.diff(part.indptr)) for part in parts]
    x = np.empty((store.num_vertices, store.num_features), np.float32)
    for part in parts:
        x[part.original_id] = part.features
    found = {"edge_index": np.stack([np.concatenate(source), np.concatenate(destination)]), "x": x}
    if store.has_edge_weight:
        found["edge_weight"] = np.concatenate([part.edge_weight for part in parts])
    return found


def _reference_rank(resolved: Resolved, store: Store, checkpoint: Path, out: Path) -> None:
    """Exact inference as one of the current ranks, in the type of the weights; rank 0 writes it.
    Collective.
    """
    model = build_model(resolved.config, store)
    model.load_state_dict(CheckpointState.load(checkpoint).model)
    logits = predict(model, store, chunk_edges=resolved.config.inference_edges)
    if logits is not None:
        np.save(out, logits.numpy(), allow_pickle=False)


def _run(framework: Framework, python: str, *arguments: Path) -> dict[str, str]:
    """What the clean process says."""
    paths = [str(path.resolve()) for path in arguments]
    command = [python, clean_run.__file__, framework.name, *paths]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise wrong(
            "--python", f"{python} ({error.strerror})", "a Python interpreter", "check the path"
        ) from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ReportedError(f"{framework.title} failed to run the exported model:\n{done.stderr.strip()}")
    return json.loads(lines[-1])
