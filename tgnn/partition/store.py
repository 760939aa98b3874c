"""The on-disk partition store: plain `.npy` files per part, a `store.json` that describes and checks them.

    store/
      store.json     format version, name, sizes, offsets, dtypes, options, partition report, size and
      checksum of every file
      part-0000/     indptr indices original_id degree_out train val test [features labels edge_weight]
                     [hotness halo_id halo_hotness]

A store is written beside its final place and renamed into it, so a killed run leaves the last good store.
Opening checks the version and every file's size and names the bad file; checksums are compared once after
writing and on request. Nothing on disk is pickled.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tgnn.errors import UserError, wrong
from tgnn.partition.hotness import Hotness
from tgnn.partition.ownership import Ownership
from tgnn.partition.store_writer import (
    FORMAT,
    FORMAT_VERSION,
    META_FILE,
    NAMES_FILE,
    READABLE_VERSIONS,
    SPLITS,
    part_folder,
    store_bytes,
    sync_folder,
    write_files,
)

__all__ = ["FORMAT_VERSION", "Part", "Store", "write_store"]

HOTNESS_FILES = ("hotness", "halo_id", "halo_hotness")
REMAKE = "python -m tgnn.partition DATA --parts {parts} --out STORE"


@dataclass
class Part:
    """What one part owns: n vertices and all their in-edges (e).

    Rows are in descending hotness where the store was presampled, else (and among equals) in ascending original id.

    The arrays are memory-mapped copy-on-write: writing to them never reaches the disk.
    `indptr` int64 [n+1]; `indices` int32|int64 [e], NEW ids of the sources, each row ordered by (original
    source id, input order), so an in-edge's position is the same in every partitioning; `edge_weight` float32
    [e] or None; `original_id` int64 [n]; `degree_out` int64 [n] over the full graph; `features` float32 [n,
    F] or None; `labels` int64 [n] or float32 [n, C] or None; `train`, `val`, `test`: local rows, int64,
    ascending.

    Of a presampled store, else None: `hotness` float32 [n], appearances as an input row per step; `halo_id` int32|int64
    [h], NEW ids of the vertices of other parts that this part's layer 0 asked for, most requests first (ties:
    ascending original id); `halo_hotness` float32 [h], those requests per step.
    """

    indptr: np.ndarray
    indices: np.ndarray
    original_id: np.ndarray
    degree_out: np.ndarray
    features: np.ndarray | None
    labels: np.ndarray | None
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray
    edge_weight: np.ndarray | None
    hotness: np.ndarray | None = None
    halo_id: np.ndarray | None = None
    halo_hotness: np.ndarray | None = None

    @property
    def num_vertices(self) -> int:
        return len(self.original_id)

    @property
    def num_edges(self) -> int:
        return len(self.indices)


class Store:
    """A partitioned dataset on disk. Made by `write_store`, opened by `Store.open`; pickles to its path.

    Attributes: `path`, `meta` (all of store.json), `name`, `num_vertices`, `num_edges`, `num_features` (0
    without features), `num_classes`, `num_parts`, `task` ("single-label" or "multi-label"), `ownership`,
    `has_edge_weight`, `presampled` (how it was presampled, or None).
    """

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self.meta = meta
        self.name: str = meta["name"]
        self.num_vertices: int = meta["num_vertices"]
        self.num_edges: int = meta["num_edges"]
        self.num_features: int = meta["num_features"]
        self.num_classes: int = meta["num_classes"]
        self.num_parts: int = meta["num_parts"]
        self.task: str = meta["task"]
        self.ownership = Ownership(meta["offsets"])
        self.has_edge_weight: bool = meta["dtypes"]["edge_weight"] is not None
        self.presampled: dict[str, Any] | None = meta.get("presampled")

    @classmethod
    def open(cls, path: str | os.PathLike, verify: bool = False) -> Store:
        """Open the store at `path`; `verify=True` also reads every file and compares its checksum.

        Raises UserError where there is no store, it is of another version, or a file is missing or not as
        recorded (named).
        """
        path = Path(os.path.abspath(path))
        meta = _read_meta(path)
        try:
            store = cls(path, meta)
            records = dict(meta["files"])
            for name in store._file_names():
                _check_file(path, name, records[name], verify)
        except (KeyError, TypeError, AttributeError) as error:
            raise wrong(
                f"{path / META_FILE}",
                f"no usable entry for {error}",
                "the description of a whole store",
                _remake(meta),
            ) from error
        return store

    def part(self, part: int) -> Part:
        """The arrays of one part, memory-mapped. Raises UserError for a part the store lacks, or a file of
        another shape than described.
        """
        if not 0 <= part < self.num_parts:
            raise wrong(
                f"part of store {self.path}",
                part,
                f"0 to {self.num_parts - 1}",
                f"run {REMAKE.format(parts='P')} for another number of parts",
            )
        n = self.ownership.size(part)
        dtypes = self.meta["dtypes"]
        indptr = self._load(part, "indptr", "int64", (n + 1,))
        num_edges = int(indptr[-1])
        weight = self._load(part, "edge_weight", "float32", (num_edges,)) if self.has_edge_weight else None
        features = (
            self._load(part, "features", "float32", (n, self.num_features)) if dtypes["features"] else None
        )
        label_shape = (n, self.num_classes) if dtypes["labels"] == "float32" else (n,)
        labels = self._load(part, "labels", dtypes["labels"], label_shape) if dtypes["labels"] else None
        return Part(
            indptr=indptr,
            indices=self._load(part, "indices", dtypes["indices"], (num_edges,)),
            original_id=self._load(part, "original_id", "int64", (n,)),
            degree_out=self._load(part, "degree_out", "int64", (n,)),
            features=features,
            labels=labels,
            edge_weight=weight,
            **{split: self._load(part, split, "int64", None) for split in SPLITS},
            **({} if self.presampled is None else self._hotness(part, n)),
        )

    def _hotness(self, part: int, n: int) -> dict[str, np.ndarray]:
        """The arrays of a part that presampling made."""
        halo = self._load(part, "halo_id", self.meta["dtypes"]["indices"], None)
        return {
            "hotness": self._load(part, "hotness", "float32", (n,)),
            "halo_id": halo,
            "halo_hotness": self._load(part, "halo_hotness", "float32", halo.shape),
        }

    def require_parts(self, parts: int) -> Store:
        """This store, if it has `parts` parts; else UserError naming the command that makes the right one."""
        if parts != self.num_parts:
            raise wrong(
                f"store {self.path}",
                f"{self.num_parts} parts",
                f"{parts}, one for each rank",
                f"run {REMAKE.format(parts=parts)}",
            )
        return self

    def original_ids(self) -> np.ndarray:
        """Original id of every new id, int64 [N]."""
        return np.concatenate([self._original_ids_of(part) for part in range(self.num_parts)])

    def new_of_original(self) -> np.ndarray:
        """New id of every original id, int64 [N]."""
        original = self.original_ids()
        new = np.empty_like(original)
        new[original] = np.arange(len(original))
        return new

    def split_ids(self, split: str) -> np.ndarray:
        """Original ids of the `train`, `val` or `test` vertices of all parts, int64, ascending."""
        if split not in SPLITS:
            raise wrong("split", split, " or ".join(SPLITS), "ask for one of these")
        pieces = []
        for part in range(self.num_parts):
            pieces.append(self._original_ids_of(part)[self._load(part, split, "int64", None)])
        return np.sort(np.concatenate(pieces))

    def original_names(self) -> np.ndarray | None:
        """Names [N] that the data's source has for the original ids, where those are not 0 .. N - 1."""
        if NAMES_FILE not in self.meta["files"]:
            return None
        return np.load(self.path / NAMES_FILE, allow_pickle=False)

    def _original_ids_of(self, part: int) -> np.ndarray:
        return self._load(part, "original_id", "int64", (self.ownership.size(part),))

    def _file_names(self) -> list[str]:
        """Every file that a store of this description has, relative to its folder."""
        arrays = ["indptr", "indices", "original_id", "degree_out", *SPLITS]
        arrays += [name for name in ("features", "labels", "edge_weight") if self.meta["dtypes"][name]]
        arrays += () if self.presampled is None else HOTNESS_FILES
        files = [f"{part_folder(part)}/{name}.npy" for part in range(self.num_parts) for name in arrays]
        return files + [name for name in self.meta["files"] if name == NAMES_FILE]

    def _load(self, part: int, name: str, dtype: str, shape: tuple[int, ...] | None) -> np.ndarray:
        """Map one array and check it against the description (`shape` None: any length of one axis)."""
        file = self.path / part_folder(part) / f"{name}.npy"
        try:
            array = np.load(file, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise wrong(
                f"{file}", f"an unreadable file ({error})", f"{dtype} values", _remake(self.meta)
            ) from error
        if array.dtype != dtype or (array.ndim != 1 if shape is None else array.shape != shape):
            expected = f"{dtype} {list(shape) if shape is not None else '[*]'}"
            raise wrong(f"{file}", f"{array.dtype} {list(array.shape)}", expected, _remake(self.meta))
        return array.view(np.ndarray)

    def __reduce__(self) -> tuple:
        return Store.open, (str(self.path),)

    def __repr__(self) -> str:
        sizes = f"{self.num_vertices} vertices, {self.num_edges} edges, {self.num_parts} parts"
        return f"Store({str(self.path)!r}, {sizes})"


def write_store(
    dataset: Any,
    part_of: np.ndarray,
    path: str | os.PathLike,
    options: dict | None = None,
    report: dict | None = None,
    progress: bool = False,
    *,
    presampled: Hotness | None = None,
    num_parts: int | None = None,
    overwrite: bool = False,
) -> Store:
    """Write `dataset` (tgnn.data.Dataset), partitioned by `part_of` (integer [N]), to the folder `path` and
    open it.

    `options` (how it was partitioned) and `report` (what `tgnn.partition.report` said) are kept in
    store.json, the former under `options.partition` beside the dataset's own `options.dataset`. `num_parts`
    (default: the report's, else largest part + 1) counts empty parts too. `presampled` orders the vertices inside their
    parts and is kept. `progress` shows a bar where stderr
    is a terminal and the writing lasts. An existing store is replaced only with `overwrite`; what is no store
    of ours is never touched. Checksums are compared once before the store takes its place.

    Raises UserError for a `path` that is taken, or an assignment that does not fit the graph; OSError where
    the disk refuses. On any failure the half-written folder is removed and an older store stays as it was.
    """
    path = Path(os.path.abspath(path))
    check_target(path, overwrite)
    options, report = options or {}, report or {}
    part_of = np.asarray(part_of)
    if part_of.shape != (dataset.graph.num_vertices,):
        raise wrong(
            "assignment",
            f"shape {list(part_of.shape)}",
            f"[{dataset.graph.num_vertices}], a part for each vertex",
            "pass what assign() returns",
        )
    if num_parts is None:
        num_parts = report.get("num_parts") or int(part_of.max(initial=0)) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.writing-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        with _progress_bar(store_bytes(dataset), progress) as bar:
            write_files(temporary, dataset, part_of, num_parts, options, report, presampled, bar.update)
        Store.open(temporary, verify=True)
        _move_into_place(temporary, path, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Store.open(path)


def check_target(path: Path, overwrite: bool) -> None:
    """Refuse, before any work, a `path` that `write_store` may not write to: UserError with the reason."""
    if not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir())):
        return
    try:
        _read_meta(path, any_version=True)
    except UserError:
        raise wrong(
            f"{path}", "something that is no store", "a new folder or an older store", "choose another path"
        ) from None
    if not overwrite:
        raise wrong(
            f"{path}",
            "a store that exists already",
            "a new folder",
            "choose another path, or pass --overwrite (overwrite=True) to replace it",
        )


def _progress_bar(total_bytes: int, progress: bool) -> tqdm:
    """A bar that shows after two seconds, and only where stderr is a terminal."""
    return tqdm(
        total=total_bytes,
        unit="B",
        unit_scale=True,
        desc="writing store",
        leave=False,
        delay=2,
        disable=None if progress else True,
    )


def _move_into_place(temporary: Path, path: Path, overwrite: bool) -> None:
    """Give `path` the new store's name. Where an older store is there, the two swap names in one step if the
    system can.
    """
    if not overwrite or not path.is_dir() or not any(path.iterdir()):
        os.rename(temporary, path)
    elif not _swap_names(temporary, path):
        older = temporary.with_name(temporary.name + "-older")
        os.rename(path, older)
        try:
            os.rename(temporary, path)
        except OSError:
            os.rename(older, path)
            raise
        shutil.rmtree(older, ignore_errors=True)
    sync_folder(path.parent)


def _swap_names(one: Path, other: Path) -> bool:
    """Atomically exchange two folders' names (Linux renameat2); False where that is not to be had."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    current_folder, exchange = -100, 2
    return renameat2(current_folder, os.fsencode(one), current_folder, os.fsencode(other), exchange) == 0


def _read_meta(path: Path, any_version: bool = False) -> dict[str, Any]:
    """Parse store.json. Raises UserError where there is none, it is not ours, or of another version."""
    make = f"make one with {REMAKE.format(parts='P')}"
    if not path.is_dir():
        raise wrong(
            "store",
            f"{path}, which is {'a file' if path.exists() else 'not there'}",
            "a store's folder",
            make,
        )
    file = path / META_FILE
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise wrong("store", f"{path}, a folder without {META_FILE}", "a store's folder", make) from None
    except (OSError, ValueError) as error:
        raise wrong(f"{file}", f"an unreadable file ({error})", "the description of a store", make) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or "format_version" not in meta:
        raise wrong(f"{file}", "another kind of JSON", f'a description with "format": "{FORMAT}"', make)
    if meta["format_version"] not in READABLE_VERSIONS and not any_version:
        expected = " or ".join(str(version) for version in READABLE_VERSIONS)
        raise wrong(f"store {path}", f"format version {meta['format_version']}", expected, _remake(meta))
    return meta


def _check_file(path: Path, name: str, record: dict[str, Any], verify: bool) -> None:
    """Compare one file with its record. Raises UserError naming it."""
    file = path / name
    remake = f"the store is damaged, remake it with {REMAKE.format(parts='P')}"
    if not file.is_file():
        raise wrong(f"{file}", "no such file", f"{record['bytes']} bytes", remake)
    if file.stat().st_size != record["bytes"]:
        raise wrong(f"{file}", f"{file.stat().st_size} bytes", record["bytes"], remake)
    if verify and _sha256(file) != record["sha256"]:
        raise wrong(f"{file}", "another checksum", f"sha256 {record['sha256']}", remake)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as source:
        while chunk := source.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _remake(meta: Any) -> str:
    """The cure for a store that cannot be used, with its number of parts where that is known."""
    parts = meta.get("num_parts", "P") if isinstance(meta, dict) else "P"
    return f"remake it with {REMAKE.format(parts=parts)}"
