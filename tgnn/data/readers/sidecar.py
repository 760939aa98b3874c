"""Files beside an edge list: features, labels and splits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.arrays import as_ids
from tgnn.data.readers.npz import load_npy, load_sparse, open_npz, reading
from tgnn.data.readers.text import ID, LABEL, NUMBER, WORD, Block, read_blocks
from tgnn.errors import UserError, wrong

_SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class LabelTable:
    """Labels as read: of vertex i in row i where `ids` is None, else of vertex `ids[i]`."""

    path: Path
    values: np.ndarray
    ids: np.ndarray | None = None

    @property
    def declares(self) -> int | None:
        """The number of vertices this file tells: its rows, if it has one for each of 0 .. rows - 1."""
        rows = len(self.values)
        return rows if self.ids is None or (self.ids.min() == 0 and self.ids.max() == rows - 1) else None

    def spread(self, num_vertices: int) -> np.ndarray:
        """One row per vertex, NaN where the file has none; `ids` must be below num_vertices.

        Raises:
            UserError: an id is not a vertex, or the rows are not one per vertex.
        """
        if self.ids is None:
            if len(self.values) != num_vertices:
                raise wrong(
                    str(self.path),
                    f"{len(self.values)} labels",
                    f"{num_vertices}, one per vertex",
                    "write nan or -1 for no label",
                )
            return self.values
        if self.ids.max() >= num_vertices:
            raise wrong(
                str(self.path),
                f"a label of vertex {self.ids.max()}",
                f"ids in [0, {num_vertices})",
                "correct the ids or the number of vertices",
            )
        labels = np.full(num_vertices, np.nan)
        labels[self.ids] = self.values
        return labels


def read_features(path: Path) -> Any:
    """Features [N, F]: a memory-mapped `.npy`, a scipy sparse `.npz`, or a `.csv`/`.csv.gz` of numbers.

    Raises:
        UserError: another kind of file, or a damaged one.
    """
    if path.suffix == ".npy":
        return load_npy(path, mmap=True)
    if path.suffix == ".npz":
        return load_sparse(path)
    if path.name.removesuffix(".gz").endswith(".csv"):
        blocks = read_blocks(path, lambda fields: [NUMBER] * len(fields))
        return np.concatenate([np.stack(block.columns, axis=1).astype(np.float32) for block in blocks])
    raise wrong("--feature-file", str(path), "a .npy, a scipy sparse .npz, a .csv or a .csv.gz", "convert it")


def read_labels(path: Path, delimiter: str = "auto") -> LabelTable:
    """Labels: a `.npy` [N] or [N, C]; or text, one label a line or 'id label' lines.

    Raises:
        UserError: a damaged file, more than two columns, a value that is no class number, or an id given
            twice.
    """
    if path.suffix == ".npy":
        return LabelTable(path, np.atleast_1d(load_npy(path)))
    if path.suffix == ".npz":
        raise wrong("--label-file", str(path), "a .npy or text", "save the labels with numpy.save")

    def kinds_of(fields: list[str]) -> list[str]:
        if len(fields) > 2:
            raise wrong(
                str(path),
                f"{len(fields)} columns",
                "one label a line, or an id and a label",
                "save several labels a vertex as a 0/1 matrix in a .npy",
            )
        return [ID, LABEL] if len(fields) == 2 else [LABEL]

    ids, values = [], []
    for block in read_blocks(path, kinds_of, delimiter, row_is_line=True):
        _check_labels(block)
        values.append(block.columns[-1])
        if len(block.columns) == 2:
            ids.append(block.columns[0])
    if not ids:
        return LabelTable(path, np.concatenate(values))
    table = LabelTable(path, np.concatenate(values), np.concatenate(ids))
    _check_once(path, table.ids)
    return table


def read_split(path: Path, num_vertices: int, names: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Train, val and test ids from a `.npz` or `.json` with those keys, or csv lines 'id,train|val|test'.

    Args:
        path: the file.
        num_vertices: N.
        names: ascending ids the vertices have in the file, where those are not 0 .. N - 1.

    Raises:
        UserError: another kind of file, unknown keys or words, or ids that are no vertices.
    """
    if path.suffix == ".npz":
        with open_npz(path) as arrays:
            raw = {key: arrays[key] for key in arrays.keys}
    elif path.suffix == ".json":
        raw = _read_json(path)
    elif path.name.removesuffix(".gz").endswith((".csv", ".txt", ".tsv")):
        raw = _read_split_text(path)
    else:
        raise wrong("--split-file", str(path), "a .npz, .json, .csv, .tsv or .txt", "convert it")
    unknown = sorted(set(raw) - set(_SPLIT_NAMES))
    if unknown or not raw:
        raise wrong(
            str(path), f"keys {', '.join(unknown) or 'none'}", "train, val and test", "rename or drop them"
        )
    splits = {}
    for key, value in raw.items():
        value = np.asarray(value)
        if names is not None and value.dtype.kind in "iu":
            value = _renamed(value, names, path)
        try:
            splits[_SPLIT_NAMES[key]] = as_ids(value, num_vertices, key)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return splits


def to_rows(ids: np.ndarray, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(position of each id in the ascending `names`, bool whether it is there)."""
    rows = np.searchsorted(names, ids)
    return rows, names[np.minimum(rows, len(names) - 1)] == ids


def _renamed(ids: np.ndarray, names: np.ndarray, path: Path) -> np.ndarray:
    """The new numbers of relabelled vertices."""
    rows, known = to_rows(ids, names)
    if not known.all():
        raise wrong(
            str(path), f"id {ids[~known][0]}", "ids of the edge list or label file", "correct or drop it"
        )
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of id lists."""
    with reading(path):
        raw = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise wrong(
            str(path), f"a JSON {type(raw).__name__}", "an object with train, val and test", "wrap the lists"
        )
    for key, value in raw.items():
        faults = [] if not isinstance(value, list) else [i for i in value if not isinstance(i, int | float)]
        if faults or not isinstance(value, list):
            got = f"{json.dumps(faults[0] if faults else value)[:60]} {'in' if faults else 'for'} {key}"
            raise wrong(str(path), got, "a flat list of vertex ids for each split", "write [0, 1, 2]")
    return raw


def _read_split_text(path: Path) -> dict[str, np.ndarray]:
    """Lines 'id,split'."""
    parts: dict[str, list[np.ndarray]] = {}
    every = []

    def kinds_of(fields: list[str]) -> list[str]:
        if len(fields) != 2:
            raise wrong(
                str(path), f"{len(fields)} columns", "two: an id and train, val or test", "write 'id,train'"
            )
        return [ID, WORD]

    for block in read_blocks(path, kinds_of):
        ids, words = block.columns
        unknown = np.flatnonzero(~np.isin(words, list(_SPLIT_NAMES)))
        if len(unknown):
            raise block.fault(int(unknown[0]), "train, val or test after the id", "correct that line")
        every.append(ids)
        for word in np.unique(words):
            parts.setdefault(_SPLIT_NAMES[str(word)], []).append(ids[words == word])
    _check_once(path, np.concatenate(every))
    return {name: np.concatenate(ids) for name, ids in parts.items()}


def _check_labels(block: Block) -> None:
    """Refuse labels that are no class numbers and negative ids, by line."""
    labels = block.columns[-1]
    bad = ~np.isnan(labels) & ~((labels >= -1) & (labels < 2**31) & (np.floor(labels) == labels))
    if bad.any():
        raise block.fault(
            int(np.flatnonzero(bad)[0]),
            "a class number from 0, -1, nan or nothing",
            "number the classes 0, 1, 2, ...",
        )
    if len(block.columns) == 2 and (block.columns[0] < 0).any():
        raise block.fault(
            int(np.flatnonzero(block.columns[0] < 0)[0]), "an id of at least 0", "correct that line"
        )


def _check_once(path: Path, ids: np.ndarray) -> None:
    """Refuse an id that a file gives twice."""
    found, counts = np.unique(ids, return_counts=True)
    if len(found) != len(ids):
        raise wrong(
            str(path),
            f"id {found[counts > 1][0]} on {counts.max()} lines",
            "each id once",
            "drop the repeats",
        )
