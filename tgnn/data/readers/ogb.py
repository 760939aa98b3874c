"""OGB's raw directories (Open Graph Benchmark, `ogbn-*` and `ogbl-*`): the csv and the binary variant.

    RELEASE_v1.txt
    raw/    edge.csv.gz, num-node-list.csv.gz, num-edge-list.csv.gz, and optionally node-feat.csv.gz,
            node-label.csv.gz, edge_weight.csv.gz (no headers); or data.npz and node-label.npz
    split/  <name>/train.csv.gz, valid.csv.gz, test.csv.gz, an id a line

Some published graphs hold each undirected edge once, and OGB's own reader repeats every edge and swaps the
ends of the second: whether it does is a matter of the data set's name, and this reader does the same for the
names it knows. For other names the edges stay as they are, with a warning, unless the option says what to do.
The record says what was done. Labels may be missing (nan or nothing) and may have several columns. Splits of
edges (`ogbl-*`) are no splits of vertices and stay where they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.arrays import index_dtype
from tgnn.data.graph import SPLITS, Dataset, Graph
from tgnn.data.readers.npz import Npz, mapped_array, open_npz
from tgnn.data.readers.text import ID, LABEL, NUMBER, Block, read_blocks
from tgnn.errors import UserError, warn_once, wrong

# As OGB's list of data sets says.
_INVERSE = {
    "ogbn-proteins": True, "ogbn-products": True, "ogbn-arxiv": False, "ogbn-papers100M": False,
    "ogbl-ppa": True, "ogbl-collab": True, "ogbl-ddi": True, "ogbl-citation2": False, "ogbl-vessel": False,
}  # fmt: skip
_SPLIT = {
    "ogbn-proteins": "species", "ogbn-products": "sales_ranking", "ogbn-arxiv": "time",
    "ogbn-papers100M": "time",
}  # fmt: skip
# Folders in the zip files as published.
_UNZIPPED = {
    "proteins": "ogbn-proteins", "products": "ogbn-products", "arxiv": "ogbn-arxiv",
    "papers100M-bin": "ogbn-papers100M", "ppassoc": "ogbl-ppa", "collab": "ogbl-collab", "ddi": "ogbl-ddi",
    "citation-v2": "ogbl-citation2", "vessel": "ogbl-vessel",
}  # fmt: skip
_SPLIT_FILES = {"train": "train.csv.gz", "val": "valid.csv.gz", "test": "test.csv.gz"}
_TYPED = ("triplet-type-list.csv.gz", "num-node-dict.csv.gz", "num_nodes_dict.npz", "edge_index_dict.npz")


@dataclass(frozen=True)
class _Raw:
    """What `raw/` holds: N, the edges [2, E] in the order of OGB's reader, and arrays or None."""

    num_vertices: int
    edges: np.ndarray
    weight: np.ndarray | None
    x: np.ndarray | None
    y: np.ndarray | None
    left_out: list[str]


def ogb_files(folder: Path) -> list[Path]:
    """The files of an OGB raw directory; empty where it is no such directory."""
    raw = folder / "raw"
    if not any((raw / name).is_file() for name in ("edge.csv.gz", "data.npz", *_TYPED)):
        return []
    splits = [path for path in folder.glob("split/*/*") if path.is_file()]
    return sorted([*folder.glob("RELEASE_v*.txt"), *(p for p in raw.iterdir() if p.is_file()), *splits])


def read_ogb(
    folder: Path,
    add_inverse_edge: bool | None = None,
    *,
    own_split: bool = True,
    reverse_follows: bool = False,
) -> Dataset:
    """The data set of an OGB raw directory.

    Args:
        folder: the directory that holds `raw/`.
        add_inverse_edge: whether every edge is repeated with its ends swapped, edges 2i and 2i + 1 being a
            pair; None: as OGB does for this data set's name. Of the csv variant only.
        own_split: whether to read its split; otherwise the data set has none.
        reverse_follows: whether the caller adds the reverse of edges that have none: nothing to warn of then.

    Raises:
        UserError: a missing or faulty file (names the line), several graphs, vertex or edge types, an id
            outside [0, N), or counts that do not agree.
    """
    raw = folder / "raw"
    typed = [name for name in _TYPED if (raw / name).exists()]
    if typed:
        got = f"{typed[0]}, a graph of several types"
        raise wrong(str(raw), got, "one vertex and one edge type", "choose other data")
    name, release = _identity(folder)
    csv = (raw / "edge.csv.gz").is_file()
    inverse = _inverse(folder, name, add_inverse_edge, csv, warn=not reverse_follows)
    read = _read_csv(raw, inverse) if csv else _read_binary(raw)
    split = _split_folder(folder, name) if own_split else None
    splits = {} if split is None else _read_split(split, read.num_vertices)
    record = {
        "reader": "ogb",
        "ogb_variant": "csv" if csv else "binary",
        "ogb_release": release,
        "add_inverse_edge": inverse,
        "ogb_split": None if split is None else split.name,
        "weighted": read.weight is not None,
        "left_out": read.left_out,
    }
    try:
        graph = Graph.from_edge_index(read.edges, read.num_vertices, read.weight)
        return Dataset(name, graph, read.x, read.y, **splits, options=record)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _identity(folder: Path) -> tuple[str, str | None]:
    """(name, release): the name that OGB lists, by the folder or what its release note says, else as is."""
    notes = sorted(folder.glob("RELEASE_v*.txt"))
    release = notes[-1].stem.removeprefix("RELEASE_") if notes else None
    own = folder.resolve().name
    told = [_UNZIPPED.get(own, own.replace("_", "-"))]
    if notes:
        title = notes[-1].read_text(encoding="utf-8", errors="replace")[:500]
        told += re.findall(r"\bogb[nl]-[A-Za-z0-9-]+", title)
    return next((name for name in told if name in _INVERSE), told[0]), release


def _inverse(folder: Path, name: str, asked: bool | None, csv: bool, warn: bool) -> bool:
    """Whether every edge gets its inverse."""
    if not csv:
        if asked:
            raise wrong(
                "--add-inverse-edge",
                f"{folder}, which is binary",
                "the csv variant, as OGB's own reader does",
                "give --add-reverse, which adds the edges that lack a reverse",
            )
        return False
    if warn and asked is None and name not in _INVERSE:
        warn_once(
            f"ogb {folder}",
            f"{name} is no name that OGB lists, so its edges are taken as they are: give --add-inverse-edge "
            "if each stands for both directions, or --no-add-inverse-edge",
        )
    return _INVERSE.get(name, False) if asked is None else asked


def _read_csv(raw: Path, inverse: bool) -> _Raw:
    """The csv variant."""
    n, e = _one_count(raw / "num-node-list.csv.gz"), _one_count(raw / "num-edge-list.csv.gz")
    edges = _read_edges(raw / "edge.csv.gz", n, e, inverse)
    weight, x, y = None, None, None
    if (path := raw / "edge_weight.csv.gz").is_file():
        weight = _table(path, e, lambda fields: [NUMBER] * len(fields), np.float32, _check_finite)
        weight = np.repeat(weight.reshape(e, -1)[:, 0], 2 if inverse else 1)
    if (path := raw / "node-feat.csv.gz").is_file():
        x = _table(path, n, lambda fields: [NUMBER] * len(fields), np.float32, _check_finite)
    if (path := raw / "node-label.csv.gz").is_file():
        y = _table(path, n, lambda fields: [LABEL] * len(fields), np.float64, _check_labels)
    used = ("edge", "edge_weight", "node-feat", "node-label", "num-node-list", "num-edge-list")
    left = sorted(p.name for p in raw.glob("*.csv.gz") if p.name.removesuffix(".csv.gz") not in used)
    return _Raw(n, edges, weight, x, y, left)


def _read_edges(path: Path, n: int, e: int, inverse: bool) -> np.ndarray:
    """Edges [2, E], or [2, 2 E] with each followed by its inverse."""
    step = 2 if inverse else 1
    edges, done = np.empty((2, step * e), index_dtype(n)), 0
    for block in _blocks(path, e, lambda fields: [ID] * len(fields)):
        if len(block.columns) != 2:
            got = f"{len(block.columns)} columns"
            raise wrong(str(path), got, "two: source, destination", "fetch it again")
        for column in block.columns:
            bad = np.flatnonzero((column < 0) | (column >= n))
            if len(bad):
                raise block.fault(int(bad[0]), f"ids in [0, {n})", "fetch the file again")
        source, destination = block.columns
        place = slice(step * done, step * (done + len(source)), step)
        edges[0, place], edges[1, place] = source, destination
        if inverse:
            place = slice(place.start + 1, place.stop, step)
            edges[0, place], edges[1, place] = destination, source
        done += len(source)
    return edges


def _table(
    path: Path,
    rows: int,
    kinds_of: Callable[[list[str]], list[str]],
    dtype: Any,
    check: Callable[[Block], None],
) -> np.ndarray:
    """The numbers of a csv of exactly `rows` lines, [rows, columns]."""
    table, done = np.empty((rows, 0), dtype), 0
    for block in _blocks(path, rows, kinds_of):
        check(block)
        if not done:
            table = np.empty((rows, len(block.columns)), dtype)
        end = done + len(block.columns[0])
        for number, column in enumerate(block.columns):
            table[done:end, number] = column
        done = end
    return table


def _blocks(path: Path, rows: int, kinds_of: Callable[[list[str]], list[str]]) -> Iterator[Block]:
    """The blocks of a csv that must have exactly `rows` lines."""
    done = 0
    for block in read_blocks(path, kinds_of, "comma", row_is_line=True, may_be_empty=True):
        count = len(block.columns[0])
        if done + count > rows:
            raise block.fault(rows - done, f"{rows} lines, as many as counted", "fetch the files again")
        done += count
        yield block
    if done != rows:
        raise wrong(str(path), f"{done} lines", f"{rows}, as many as counted", "fetch the files again")


def _check_finite(block: Block) -> None:
    for column in block.columns:
        if not np.isfinite(column).all():
            row = int(np.flatnonzero(~np.isfinite(column))[0])
            raise block.fault(row, "finite numbers", "fetch the file again, or impute it")


def _check_labels(block: Block) -> None:
    """Class numbers in one column, 0 and 1 in several; nan, -1 or nothing where there is none."""
    several = len(block.columns) > 1
    limit = 1 if several else 2**31 - 1
    for column in block.columns:
        bad = ~np.isnan(column) & ~((column >= -1) & (column <= limit) & (np.floor(column) == column))
        if bad.any():
            expected = "0, 1 or nan in each column" if several else "a class number from 0, -1 or nan"
            raise block.fault(int(np.flatnonzero(bad)[0]), expected, "number the classes 0, 1, 2, ...")


def _one_count(path: Path) -> int:
    """The number in a file of counts, one for each graph, of which there must be one."""
    counts = np.concatenate([block.columns[0] for block in read_blocks(path, lambda _: [ID], "comma")])
    return _only(counts, str(path))


def _only(counts: np.ndarray, where: str) -> int:
    if counts.size != 1 or counts.dtype.kind not in "iu" or counts.reshape(-1)[0] < 0:
        raise wrong(where, f"{counts.size} counts", "one graph", "choose a data set of one graph")
    return int(counts.reshape(-1)[0])


def _read_binary(raw: Path) -> _Raw:
    """The binary variant; big arrays are unpacked to a file without a name and mapped, not held in memory."""
    path = raw / "data.npz"
    with open_npz(path) as arrays:
        n = _only(arrays["num_nodes_list"], f"{path}, num_nodes_list")
        e = _only(arrays["num_edges_list"], f"{path}, num_edges_list")
        used = {"edge_index", "num_nodes_list", "num_edges_list", "node_feat", "edge_weight"}
        left = sorted(arrays.keys - used)
    edges = mapped_array(path, "edge_index")
    if edges is None or edges.shape != (2, e):
        got = "no edges" if edges is None else f"edge_index of shape {edges.shape}"
        raise wrong(str(path), got, f"(2, {e})", "fetch the file again")
    x, weight = mapped_array(path, "node_feat"), mapped_array(path, "edge_weight")
    labels = raw / "node-label.npz"
    y = Npz(labels)["node_label"] if labels.is_file() else None
    return _Raw(n, edges, None if weight is None else weight.reshape(-1), x, y, left)


def _split_folder(folder: Path, name: str) -> Path | None:
    """The folder of the split of vertices; None where there is none."""
    found = sorted(path for path in folder.glob("split/*") if path.is_dir())
    listed = [path for path in found if path.name == _SPLIT.get(name)]
    if not listed and len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise wrong(str(folder / "split"), f"the splits {names}", "one split", "remove the others")
    if not found or name.startswith("ogbl-"):
        return None
    split = (listed or found)[0]
    if (split / "split_dict.pt").exists():
        raise wrong(
            str(split), "split_dict.pt, a pickle", "train.csv.gz, valid.csv.gz and test.csv.gz",
            "write the ids to a file for --split-file",
        )  # fmt: skip
    return split if any((split / file).is_file() for file in _SPLIT_FILES.values()) else None


def _read_split(split: Path, n: int) -> dict[str, np.ndarray]:
    """Train, val and test ids."""
    ids = {}
    for name in SPLITS:
        path, found = split / _SPLIT_FILES[name], [np.zeros(0, np.int64)]
        for block in read_blocks(path, lambda _: [ID], "comma", may_be_empty=True):
            bad = np.flatnonzero((block.columns[0] < 0) | (block.columns[0] >= n))
            if len(bad):
                raise block.fault(int(bad[0]), f"ids in [0, {n})", "fetch the file again")
            found.append(block.columns[0])
        ids[name] = np.concatenate(found)
    return ids
