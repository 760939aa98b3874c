"""Writes the files of a partition store, part by part, in bounded memory.

The arrays are streamed: header, then chunks, hashed on the way and synced to disk at the end. Beside the
dataset itself the writer holds three [N] id tables and one chunk. Where the files go and how they replace an
older store is `store.py`'s business.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.partition.hotness import Hotness
from tgnn.partition.ownership import Ownership, ownership_from_assignment
from tgnn.partition.rows import degree_out, in_edges

FORMAT = "tgnn partition store"
FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 knew no hotness: its parts are in ascending original id, and read as if nothing was presampled."""
META_FILE = "store.json"
NAMES_FILE = "original_names.npy"
CHUNK_BYTES = 1 << 25
SPLITS = ("train", "val", "test")


def part_folder(part: int) -> str:
    """Name of a part's folder inside the store."""
    return f"part-{part:04d}"


class _ArrayFile:
    """One `.npy` file written in chunks along its first axis; `record` then holds its size and checksum."""

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
        self._dtype = np.dtype(dtype)
        self._expected_bytes = self._dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._hash = hashlib.sha256()
        self._bytes = 0
        header = io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        self._header_bytes = len(header.getvalue())
        self._file = open(path, "wb")
        self._put(header.getvalue())

    def _put(self, data: Any) -> None:
        self._hash.update(data)
        self._file.write(data)
        self._bytes += len(data)

    def write(self, chunk: np.ndarray) -> None:
        """Append the rows of `chunk`, cast to the file's dtype."""
        chunk = np.ascontiguousarray(chunk, dtype=self._dtype)
        if chunk.size:
            self._put(chunk.reshape(-1).view(np.uint8).data)

    def close(self) -> dict[str, Any]:
        """Sync the file and return its record `{bytes, sha256}`."""
        assert self._bytes == self._header_bytes + self._expected_bytes, (
            "a store file got another number of rows than its header says"
        )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def abort(self) -> None:
        self._file.close()


class _StoreFiles:
    """The files of one store under way: writes arrays from chunks, keeps their records, reports progress."""

    def __init__(self, root: Path, advance: Callable[[int], Any]) -> None:
        self.root = root
        self.records: dict[str, dict[str, Any]] = {}
        self._advance = advance

    def write(self, name: str, dtype: Any, shape: tuple[int, ...], chunks: Iterator[np.ndarray]) -> None:
        target = _ArrayFile(self.root / name, dtype, shape)
        try:
            for chunk in chunks:
                target.write(chunk)
                self._advance(chunk.nbytes)
            self.records[name] = target.close()
        finally:
            target.abort()


def _row_pieces(array: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """`array[rows]` in pieces of about CHUNK_BYTES."""
    row_bytes = array.dtype.itemsize * max(1, int(np.prod(array.shape[1:], dtype=np.int64)))
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield array[rows[start : start + step]]


def _write_part(files: _StoreFiles, dataset: Any, part: int, tables: _Tables) -> None:
    """Write one part's folder: rows in the order of `tables`, each row's in-edges in the graph's own
    (canonical) order.
    """
    graph = dataset.graph
    ownership = tables.ownership
    owned = tables.original_of_new[ownership.offsets[part] : ownership.offsets[part + 1]]
    folder = files.root / part_folder(part)
    folder.mkdir()

    def put(name: str, dtype: Any, shape: tuple[int, ...], chunks: Iterator[np.ndarray]) -> None:
        files.write(f"{part_folder(part)}/{name}.npy", dtype, shape, chunks)

    indptr = np.zeros(len(owned) + 1, dtype=np.int64)
    np.cumsum(graph.indptr[owned + 1] - graph.indptr[owned], out=indptr[1:])
    num_edges = int(indptr[-1])
    put("indptr", np.int64, indptr.shape, iter([indptr]))
    new_ids = tables.new_of_original
    put(
        "indices", new_ids.dtype, (num_edges,), (new_ids[sources] for _, sources, _ in in_edges(graph, owned))
    )
    if graph.edge_weight is not None:
        put(
            "edge_weight",
            np.float32,
            (num_edges,),
            (graph.edge_weight[slots] for _, _, slots in in_edges(graph, owned)),
        )
    put("original_id", np.int64, owned.shape, iter([owned]))
    put("degree_out", np.int64, owned.shape, iter([tables.degree_out[owned]]))
    if dataset.x is not None:
        put("features", np.float32, (len(owned), dataset.x.shape[1]), _row_pieces(dataset.x, owned))
    if dataset.y is not None:
        put(
            "labels",
            label_dtype(dataset.y),
            (len(owned), *dataset.y.shape[1:]),
            _row_pieces(dataset.y, owned),
        )
    for split in SPLITS:
        new = tables.new_of_original[getattr(dataset, split)].astype(np.int64)
        local = np.sort(ownership.local(new[ownership.owner(new) == part], part))
        put(split, np.int64, local.shape, iter([local]))
    if tables.hotness is not None:
        inputs, (halo, requests) = tables.hotness.inputs, tables.hotness.halo[part]
        put("hotness", np.float32, owned.shape, iter([inputs[owned]]))
        put("halo_id", new_ids.dtype, halo.shape, iter([new_ids[halo]]))
        put("halo_hotness", np.float32, requests.shape, iter([requests]))
    sync_folder(folder)


class _Tables:
    """The [N] tables that every part's writing looks things up in."""

    def __init__(self, graph: Any, part_of: np.ndarray, num_parts: int, hotness: Hotness | None) -> None:
        self.hotness = None if hotness is None else hotness.require(graph.num_vertices, num_parts)
        self.ownership: Ownership
        self.ownership, self.original_of_new, new_of_original = ownership_from_assignment(
            part_of, num_parts, None if hotness is None else hotness.inputs
        )
        self.new_of_original = new_of_original.astype(graph.indices.dtype, copy=False)
        self.degree_out = degree_out(graph)


def label_dtype(y: np.ndarray) -> np.dtype:
    """int64 for class ids, float32 for multi-label tables."""
    return np.dtype(np.float32 if y.ndim == 2 else np.int64)


def write_files(
    root: Path,
    dataset: Any,
    part_of: np.ndarray,
    num_parts: int,
    options: dict,
    report: dict,
    hotness: Hotness | None,
    advance: Callable[[int], Any],
) -> None:
    """Fill the empty folder `root` with a whole store of `dataset` and sync it to disk.

    `advance(bytes)` is called as data goes out, for a progress bar. Raises OSError where the disk refuses.
    """
    graph = dataset.graph
    tables = _Tables(graph, part_of, num_parts, hotness)
    files = _StoreFiles(root, advance)
    for part in range(num_parts):
        _write_part(files, dataset, part, tables)
    if dataset.original_names is not None:
        names = np.asarray(dataset.original_names)
        names = names.astype(str) if names.dtype.hasobject else names
        files.write(NAMES_FILE, names.dtype, names.shape, iter([names]))
    meta = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": dataset.name,
        "num_vertices": graph.num_vertices,
        "num_edges": graph.num_edges,
        "num_features": 0 if dataset.x is None else dataset.x.shape[1],
        "num_classes": dataset.num_classes,
        "num_parts": num_parts,
        "task": dataset.task,
        "offsets": tables.ownership.offsets,
        "dtypes": {
            "indices": str(graph.indices.dtype),
            "features": None if dataset.x is None else "float32",
            "labels": None if dataset.y is None else str(label_dtype(dataset.y)),
            "edge_weight": None if graph.edge_weight is None else "float32",
        },
        "presampled": None if hotness is None else hotness.options,
        "options": {"dataset": dataset.options, "partition": options},
        "report": report,
        "files": files.records,
    }
    with open(root / META_FILE, "w", encoding="utf-8") as target:
        json.dump(meta, target, indent=1, default=_to_json)
        target.flush()
        os.fsync(target.fileno())
    sync_folder(root)


def store_bytes(dataset: Any) -> int:
    """About how many bytes the arrays of a store of `dataset` take, whatever the number of parts."""
    graph = dataset.graph
    arrays = [graph.indices, graph.edge_weight, dataset.x, dataset.y]
    return 24 * graph.num_vertices + sum(array.nbytes for array in arrays if array is not None)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a no-op where folders cannot be opened)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
