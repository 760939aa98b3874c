"""A dataset as one .npy file per array, for processes to map instead of making it again; and R-MAT written so.

`write_rmat` makes the graph of `tgnn.data.synthetic.rmat` in bounded memory: draws go to a file for each range of
destinations, and the ranges are sorted and merged one after the other.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tgnn.data import synthetic
from tgnn.data.arrays import distinct
from tgnn.data.graph import Dataset, Graph
from tgnn.training.metrics import write_json

ARRAYS = ("indptr", "indices", "x", "y", "train", "val", "test")
QUADRANTS = (0.57, 0.19, 0.19)
EDGE_FACTOR, TRAIN_SHARE, CLASSES = 15, 0.1, 16
DRAWN_AT_ONCE = 1 << 22
ROWS_AT_ONCE = 1 << 17


def save_dataset(dataset: Dataset, folder: Path) -> None:
    """Write `dataset` (single-label, without edge weights) into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"indptr": dataset.graph.indptr, "indices": dataset.graph.indices}
    for name in ARRAYS:
        array = arrays.get(name, getattr(dataset, name, None))
        if array is not None:
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
    _write_about(folder, dataset.name, dataset.num_classes, dataset.options)


def _write_about(folder: Path, name: str, num_classes: int, options: dict[str, Any]) -> None:
    # Written last: what has it is whole.
    write_json(folder / "about.json", {"name": name, "num_classes": num_classes, "options": options})


def open_dataset(folder: Path, features: bool = True) -> Dataset:
    """The dataset in `folder`, its large arrays mapped."""
    about = json.loads((folder / "about.json").read_text())
    found = {
        name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        for name in ARRAYS
        if (folder / f"{name}.npy").exists() and (features or name != "x")
    }
    graph = Graph(found.pop("indptr"), found.pop("indices"))
    return Dataset(about["name"], graph, num_classes=about["num_classes"], options=about["options"], **found)


def write_rmat(folder: Path, scale: int, num_features: int, seed: int = 0) -> dict[str, int]:
    """Write an R-MAT graph of 2^scale vertices with random features and labels; returns its sizes.

    The graph is that of `tgnn.data.synthetic.rmat(scale, seed=seed)`; features, labels and splits are drawn apart.
    """
    folder.mkdir(parents=True, exist_ok=True)
    n = 1 << scale
    pieces = folder / "pieces"
    pieces.mkdir(exist_ok=True)
    try:
        num_edges = _write_graph(folder, pieces, scale, seed)
    finally:
        shutil.rmtree(pieces, ignore_errors=True)
    rng = np.random.Generator(np.random.PCG64([seed, scale]))
    degree = np.diff(np.load(folder / "indptr.npy", mmap_mode="r", allow_pickle=False))
    connected = rng.permutation(np.flatnonzero(degree > 0))
    first, second = (int(share * len(connected)) for share in (TRAIN_SHARE, (1 + TRAIN_SHARE) / 2))
    splits = (connected[:first], connected[first:second], connected[second:])
    for name, ids in zip(("train", "val", "test"), splits, strict=True):
        np.save(folder / f"{name}.npy", np.sort(ids), allow_pickle=False)
    np.save(folder / "y.npy", rng.integers(0, CLASSES, n), allow_pickle=False)
    with _npy_file(folder / "x.npy", np.float32, (n, num_features)) as file:
        for start in range(0, n, ROWS_AT_ONCE):
            shape = (min(ROWS_AT_ONCE, n - start), num_features)
            rng.standard_normal(shape, dtype=np.float32).tofile(file)
    options = {"generator": "rmat", "scale": scale, "edge_factor": EDGE_FACTOR, "generator_seed": seed}
    _write_about(folder, "rmat", CLASSES, options)
    return {"vertices": n, "edges": num_edges, "features": num_features}


def _write_graph(folder: Path, pieces: Path, scale: int, seed: int) -> int:
    """Write indptr and indices; returns the number of edges. Holds one range of destinations at a time."""
    n = 1 << scale
    ranges = max(1, EDGE_FACTOR * n // (4 * DRAWN_AT_ONCE))
    # By the bits below the top ones: R-MAT's low ids have most of the edges.
    files = [open(pieces / f"{number}.bin", "wb") for number in range(ranges)]
    bounds = _equal_ranges(n, ranges, scale)
    for source, destination in _draws(scale, seed):
        keys = np.concatenate([destination * n + source, source * n + destination])
        keys = np.sort(keys[keys >> scale != keys & (n - 1)])
        cuts = np.searchsorted(keys, bounds * n)
        for file, low, high in zip(files, cuts[:-1], cuts[1:], strict=True):
            keys[low:high].tofile(file)
    for file in files:
        file.close()
    degree = np.zeros(n, np.int64)
    for number in range(ranges):
        keys = distinct(np.fromfile(pieces / f"{number}.bin", np.int64))
        degree[bounds[number] : bounds[number + 1]] = np.bincount(
            (keys >> scale) - bounds[number], minlength=bounds[number + 1] - bounds[number]
        )
        (keys & (n - 1)).astype(np.int32).tofile(pieces / f"{number}.bin")
    indptr = np.concatenate([[0], np.cumsum(degree)])
    np.save(folder / "indptr.npy", indptr, allow_pickle=False)
    with _npy_file(folder / "indices.npy", np.int32, (int(indptr[-1]),)) as file:
        for number in range(ranges):
            np.fromfile(pieces / f"{number}.bin", np.int32).tofile(file)
    return int(indptr[-1])


@contextmanager
def _npy_file(path: Path, dtype: type, shape: tuple[int, ...]) -> Iterator[BinaryIO]:
    """A .npy file to write an array into piece by piece: pages of a mapped one would count as this process's memory."""
    with open(path, "wb") as file:
        about = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(file, about)
        yield file


def _draws(scale: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The generator's draws, some millions at a time; in pieces of its own it uses the random stream alike."""
    rng = np.random.Generator(np.random.PCG64(seed))
    left = EDGE_FACTOR << scale
    while left:
        count = min(left, DRAWN_AT_ONCE)
        yield synthetic._rmat_draws(scale, count, QUADRANTS, rng)
        left -= count


def _equal_ranges(n: int, ranges: int, scale: int) -> np.ndarray:
    """Bounds [ranges + 1] of destinations with about equally many edges, int64.

    A bit of an id is 1 with probability 0.24 (the mean of both directions): the edges below an id follow.
    """
    one = 1 - QUADRANTS[0] - (QUADRANTS[1] + QUADRANTS[2]) / 2
    share = np.ones(1)
    for _ in range(min(scale, 16)):
        share = np.repeat(share, 2) * np.tile([1 - one, one], len(share))
    below = np.cumsum(share)
    places = np.searchsorted(below, np.arange(1, ranges) / ranges) + 1
    return np.concatenate([[0], places * (n // len(share)), [n]]).astype(np.int64)
