"""`--to dgl-graph` and `--to dgl-partition`: a store as DGL's files, without DGL.

    dgl-graph      one file that `dgl.load_graphs` reads: `g.ndata` feat, label, train_mask, val_mask,
                   test_mask; `g.edata` weight where the data has any
    dgl-partition  a folder that `dgl.distributed.load_partition` reads, a part for each part of the store

Vertices carry *original* ids, or the store's *new* ones; then `orig_id` among the vertex data is the original
id, and among the edge data the edge's number in the graph in original ids. Where the data's source calls the
vertices otherwise (ids with gaps, say), `orig_name` keeps that. DGL's partition book knows a part
by the range of its ids, so a partition has new ids unless every part is a range of the original ones.
Everything is streamed: beside tables with an entry per vertex no more than a piece of a part is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.dgl_binary import Edges, Rows, StoredGraph, write_graph, write_tensors
from tgnn.data.dgl_format import (
    EDGE_DATA,
    EDGE_TYPE,
    FEATURES,
    GLOBAL_ID,
    INNER_EDGE,
    INNER_NODE,
    LABELS,
    MASKS,
    NAME,
    NODE_DATA,
    NODE_TYPE,
    ORIGINAL_ID,
    OWNER,
    PART_GRAPH,
    WEIGHT,
    describe_partition,
    encode_names,
)
from tgnn.errors import wrong
from tgnn.export.folder import check_free, new_folder
from tgnn.partition.rows import edge_slots, row_chunks
from tgnn.partition.store import Store
from tgnn.training.checkpoint import atomic_file, dataset_fingerprint
from tgnn.training.metrics import provenance, write_json
from tgnn.training.prepare import is_store, prepare_for_ranks
from tgnn.training.resolve import read_run

FORMATS = ("dgl-graph", "dgl-partition")
IDS = ("original", "new")
CHUNK_BYTES = 1 << 25
"""About how much of an array is in memory at a time."""


class StoreRows:
    """Rows and in-edges of any vertices of a store, by new id, with tables of an entry per vertex."""

    def __init__(self, store: Store) -> None:
        self.store, self.ownership = store, store.ownership
        self.parts = [store.part(part) for part in range(store.num_parts)]
        self.original = store.original_ids()
        self.degree = np.concatenate([np.diff(part.indptr) for part in self.parts])
        # Of the graph in original ids, in canonical order.
        self._first_edge = np.zeros(len(self.original) + 1, np.int64)
        self._first_edge[1:][self.original] = self.degree
        np.cumsum(self._first_edge, out=self._first_edge)
        names = store.original_names()
        self.names = None if names is None else encode_names(names)
        self.masks = {}
        for split in MASKS:
            self.masks[split] = np.zeros(len(self.original), np.uint8)
            for number, part in enumerate(self.parts):
                self.masks[split][self.ownership.offsets[number] + getattr(part, split)] = 1

    def own(self, part: int) -> np.ndarray:
        """The new ids that a part owns."""
        return np.arange(self.ownership.offsets[part], self.ownership.offsets[part + 1])

    def chunks(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """`ids` in runs whose in-edges take about CHUNK_BYTES."""
        indptr = np.zeros(len(ids) + 1, np.int64)
        np.cumsum(self.degree[ids], out=indptr[1:])
        for rows in row_chunks(indptr, np.arange(len(ids)), CHUNK_BYTES // 8):
            yield ids[rows]

    def data(self, name: str, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Rows of the parts' array `name`, for vertices `ids` in that order, piece by piece."""
        like = getattr(self.parts[0], name)
        row_bytes = like.dtype.itemsize * max(1, int(np.prod(like.shape[1:], dtype=np.int64)))
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, len(ids), step):
            some = ids[start : start + step]
            rows = np.empty((len(some), *like.shape[1:]), like.dtype)
            for part, mine in self._by_part(some):
                rows[mine] = getattr(self.parts[part], name)[self.ownership.local(some[mine], part)]
            yield rows

    def edges(self, ids: np.ndarray, name: str = "indices") -> Iterator[np.ndarray]:
        """Of the in-edges of vertices `ids`, row after row: their sources (new ids) or "edge_weight"."""
        for some in self.chunks(ids):
            place = np.zeros(len(some) + 1, np.int64)
            np.cumsum(self.degree[some], out=place[1:])
            values = np.empty(place[-1], getattr(self.parts[0], name).dtype)
            for number, mine in self._by_part(some):
                part = self.parts[number]
                slots = edge_slots(part.indptr, self.ownership.local(some[mine], number))
                values[edge_slots(place, mine)] = getattr(part, name)[slots]
            yield values

    def destinations(self, ids: np.ndarray, numbers: np.ndarray) -> Iterator[np.ndarray]:
        """For each in-edge of vertices `ids`, row after row, its vertex's entry in `numbers` [len(ids)]."""
        start = 0
        for some in self.chunks(ids):
            yield np.repeat(numbers[start : start + len(some)], self.degree[some])
            start += len(some)

    def original_edges(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """For each in-edge of vertices `ids`, row after row, its number in the graph in original ids."""
        for some in self.chunks(ids):
            yield edge_slots(self._first_edge, self.original[some])

    def _by_part(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(part, places in `ids` of its vertices) for each part that owns any."""
        owner = self.ownership.owner(ids)
        for part in np.unique(owner):
            yield int(part), np.flatnonzero(owner == part)


def vertex_data(rows: StoreRows, ids: np.ndarray, with_original: bool) -> dict[str, Any]:
    """The vertex data of `ids` (new) in that order, by DGL's name."""
    data: dict[str, Any] = {}
    for name, array in ((FEATURES, "features"), (LABELS, "labels")):
        like = getattr(rows.parts[0], array)
        if like is not None:
            data[name] = Rows(like.dtype, (len(ids), *like.shape[1:]), rows.data(array, ids))
    data |= {name: rows.masks[split][ids] for split, name in MASKS.items()}
    if rows.names is not None:
        data[NAME] = rows.names[rows.original[ids]]
    return data | ({ORIGINAL_ID: rows.original[ids]} if with_original else {})


def edge_data(rows: StoreRows, ids: np.ndarray, with_original: bool) -> dict[str, Any]:
    """The data of the in-edges of vertices `ids` (new), row after row, by DGL's name."""
    shape, data = (int(rows.degree[ids].sum()),), {}
    if rows.store.has_edge_weight:
        data[WEIGHT] = Rows(np.float32, shape, rows.edges(ids, "edge_weight"))
    return data | ({ORIGINAL_ID: Rows(np.int64, shape, rows.original_edges(ids))} if with_original else {})


def write_dgl_graph(store: Store, path: str | os.PathLike, ids: str = "original") -> None:
    """Write the store's graph and data as a file for `dgl.load_graphs`, whole or not at all.

    Args:
        store: a partition store.
        path: the file; an existing one is replaced.
        ids: "original", or "new" (the store's; original ones are kept as `orig_id`).

    Raises:
        UserError: `path` cannot be written, or `ids` is neither.
    """
    _check_ids(ids)
    rows, n, new = StoreRows(store), store.num_vertices, ids == "new"
    order = np.arange(n) if new else store.new_of_original()
    shape = (store.num_edges,)
    renamed: Callable[[np.ndarray], np.ndarray] = (lambda s: s) if new else (lambda s: rows.original[s])
    edges = Edges(
        "coo",
        (n, n),
        Rows(np.int64, shape, (renamed(sources) for sources in rows.edges(order))),
        Rows(np.int64, shape, rows.destinations(order, np.arange(n))),
    )
    graph = StoredGraph([n], [edges], [vertex_data(rows, order, new)], [edge_data(rows, order, new)])
    try:
        with atomic_file(path) as file:
            write_graph(file, graph)
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise wrong("--out", got, "a file that can be written", "choose another") from None


def write_dgl_partition(
    store: Store,
    out: str | os.PathLike,
    ids: str = "new",
    name: str | None = None,
    record: Mapping[str, Any] | None = None,
) -> Path:
    """Write the store as a folder for `dgl.distributed.load_partition(f"{out}/{name}.json", part)`.

    Args:
        store: a partition store of P parts.
        out: a new or empty folder; it appears whole or not at all.
        ids: "new" (original ones are kept as `orig_id`), or "original" where every part is a range of those.
        name: the graph's name (default: the dataset's).
        record: kept in the description as `tgnn`; DGL does not look at it.

    Returns:
        The path of the description.

    Raises:
        UserError: `out` is taken, or the parts are no ranges of original ids and `ids` is "original".
    """
    _check_ids(ids)
    rows, new = StoreRows(store), ids == "new"
    if not new and not np.array_equal(rows.original, np.arange(store.num_vertices)):
        raise wrong(
            "--ids",
            f"original for a store of {store.num_parts} parts that mix them",
            "new, since DGL knows a part by the range of its ids",
            "leave --ids out: the original ids are kept as orig_id",
        )
    name = name or "".join(c if c.isalnum() or c in "._-" else "-" for c in store.name) or "graph"
    counts = [part.num_edges for part in rows.parts]
    edge_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    method = store.meta["options"].get("partition", {}).get("partitioner", "tgnn")
    description = describe_partition(name, str(method), store.ownership.offsets, edge_offsets)
    if record:
        description["tgnn"] = dict(record)
    with new_folder(Path(out)) as folder:
        for part in range(store.num_parts):
            _write_part(folder / f"part{part}", rows, part, edge_offsets, new)
        (folder / f"{name}.json").write_text(json.dumps(description, indent=4), encoding="utf-8")
    return Path(out) / f"{name}.json"


def _write_part(folder: Path, rows: StoreRows, part: int, edge_offsets: np.ndarray, new: bool) -> None:
    """The three files of a part."""
    folder.mkdir()
    own = rows.own(part)
    for file_name, kind, data in (
        (NODE_DATA, NODE_TYPE, vertex_data(rows, own, new)),
        (EDGE_DATA, EDGE_TYPE, edge_data(rows, own, new)),
    ):
        with open(folder / file_name, "wb") as file:
            write_tensors(file, {f"{kind}/{name}": value for name, value in data.items()})
    with open(folder / PART_GRAPH, "wb") as file:
        write_graph(file, PartGraph(rows, part, edge_offsets).stored())


class PartGraph:
    """A part's graph as DGL has it: the part's vertices in their order, then the halo in order of appearance.

    Edges are the in-edges of the part's vertices, row after row, then those that run from the part's vertices
    to other parts, in ascending number. Edge numbers count through the parts.
    """

    def __init__(self, rows: StoreRows, part: int, edge_offsets: np.ndarray) -> None:
        self.rows, self.part, self.edge_offsets = rows, part, edge_offsets
        self.start, self.end = (int(end) for end in rows.ownership.offsets[part : part + 2])
        self.own = rows.own(part)
        self.num_inner = rows.parts[part].num_edges
        self.halo, self.num_out = self._find_halo()
        self.vertices = np.concatenate([self.own, self.halo])
        self.local = np.full(rows.ownership.num_vertices, -1, np.int64)
        self.local[self.vertices] = np.arange(len(self.vertices))

    def stored(self) -> StoredGraph:
        """The graph with DGL's flags and ids, its edges streamed."""
        n, shape = len(self.vertices), (self.num_inner + self.num_out,)
        ends = (Rows(np.int64, shape, chunks) for chunks in (self._sources(), self._ends()))
        edges = Edges("coo", (n, n), *ends)
        vertices = {
            GLOBAL_ID: self.vertices,
            INNER_NODE: (np.arange(n) < len(self.own)).astype(np.uint8),
            OWNER: self.rows.ownership.owner(self.vertices).astype(np.int64),
        }
        links = {
            GLOBAL_ID: Rows(np.int64, shape, self._numbers()),
            INNER_EDGE: Rows(np.uint8, shape, self._inner_flags()),
        }
        return StoredGraph([n], [edges], [vertices], [links])

    def _find_halo(self) -> tuple[np.ndarray, int]:
        """(new ids of the halo vertices, number of edges that leave the part)."""
        seen = np.zeros(self.rows.ownership.num_vertices, bool)
        seen[self.start : self.end] = True
        found, num_out = [], 0

        def meet(ids: np.ndarray) -> None:
            fresh = ids[~seen[ids]].astype(np.int64)
            fresh = fresh[np.sort(np.unique(fresh, return_index=True)[1])]
            seen[fresh] = True
            found.append(fresh)

        for sources in self.rows.edges(self.own):
            meet(sources)
        for _, destinations, _ in self._outgoing():
            num_out += len(destinations)
            meet(destinations)
        return np.concatenate([np.zeros(0, np.int64), *found]), num_out

    def _outgoing(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(sources, destinations, edge numbers), new ids, of the edges that leave the part."""
        for other in range(self.rows.ownership.num_parts):
            if other == self.part:
                continue
            ids, first = self.rows.own(other), int(self.edge_offsets[other])
            for sources, destinations in zip(
                self.rows.edges(ids), self.rows.destinations(ids, ids), strict=True
            ):
                mine = np.flatnonzero((sources >= self.start) & (sources < self.end))
                yield sources[mine], destinations[mine], first + mine
                first += len(sources)

    def _sources(self) -> Iterator[np.ndarray]:
        yield from (self.local[sources] for sources in self.rows.edges(self.own))
        yield from (self.local[sources] for sources, _, _ in self._outgoing())

    def _ends(self) -> Iterator[np.ndarray]:
        yield from self.rows.destinations(self.own, np.arange(len(self.own)))
        yield from (self.local[destinations] for _, destinations, _ in self._outgoing())

    def _inner_flags(self) -> Iterator[np.ndarray]:
        for count, flag in ((self.num_inner, 1), (self.num_out, 0)):
            for start in range(0, count, CHUNK_BYTES):
                yield np.full(min(CHUNK_BYTES, count - start), flag, np.uint8)

    def _numbers(self) -> Iterator[np.ndarray]:
        first = int(self.edge_offsets[self.part])
        for some in self.rows.chunks(self.own):
            count = int(self.rows.degree[some].sum())
            yield np.arange(first, first + count)
            first += count
        yield from (numbers for _, _, numbers in self._outgoing())


def _check_ids(ids: str) -> None:
    if ids not in IDS:
        raise wrong("--ids", repr(ids), " or ".join(IDS), "choose one of them")


def export_files(args: argparse.Namespace) -> int:
    """What `python -m tgnn.export RUN --to dgl-graph` (or dgl-partition) does with its arguments; RUN may
    also be a store. Prints a line and returns the exit status.
    """
    out, whole = Path(args.out), args.to == "dgl-graph"
    if args.verify:
        raise wrong("--verify", f"--to {args.to}, which writes no model", "--to dgl or pyg", "leave it out")
    if whole and os.path.lexists(out):
        raise wrong("--out", f"{out}, which exists", "a new file", "choose another, or remove it")
    if not whole:
        check_free(out)
    store = _store_of(args)
    ids = args.ids or ("original" if whole else "new")
    made_with = provenance()
    record = {
        "dataset": dataset_fingerprint(store),
        "options": store.meta["options"].get("dataset", {}),
        "ids": ids,
        "versions": {**made_with["versions"], "commit": made_with["commit"]},
    }
    if whole:
        write_dgl_graph(store, out, ids)
        write_json(out.with_name(out.name + ".json"), record)
        size = f"{store.num_vertices} vertices, {store.num_edges} edges"
    else:
        out = write_dgl_partition(store, out, ids, record=record)
        size = f"{store.num_parts} parts"
    print(f"exported     {out}  ({args.to}, {size}, {ids} ids)")
    return 0


def _store_of(args: argparse.Namespace) -> Store:
    """The store that RUN is, or that the run of that name trains on."""
    if is_store(args.run):
        return Store.open(args.run)
    resolved = read_run(args.run)
    if args.data is not None:
        resolved = resolved._replace(data=args.data)
        resolved.config.store = None
        resolved.config.ranks = None if is_store(args.data) else resolved.config.ranks
    return prepare_for_ranks(resolved, resolved.num_ranks())
