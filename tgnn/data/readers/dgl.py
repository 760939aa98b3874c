"""DGL's files (`dgl.save_graphs` and `dgl.distributed.partition_graph`) as data sets, without DGL.

Vertex data `feat`, `label`, `train_mask`, `val_mask` and `test_mask` and edge data `weight` are taken; other
data is left, and the record names it. Ids are the file's own; where it says what their source calls the
vertices (`orig_name`) or which original ones they are (`orig_id`), `original_names` keeps that. One graph of
one vertex and one edge type is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.arrays import index_dtype
from tgnn.data.dgl_binary import StoredGraph, read_graphs, read_tensors
from tgnn.data.dgl_format import (
    EDGE_TYPE,
    FEATURES,
    FIELD_NAMES,
    GLOBAL_ID,
    INNER_EDGE,
    INNER_NODE,
    LABELS,
    MASKS,
    NAME,
    NODE_TYPE,
    ORIGINAL_ID,
    WEIGHT,
    PartitionBook,
    original_names,
    read_book,
)
from tgnn.data.graph import Dataset, Graph
from tgnn.errors import UserError, warn_once, wrong


def read_dgl_graph(path: Path) -> Dataset:
    """The data set of a DGL graph file.

    Raises:
        UserError: a damaged file (names the byte), several graphs or types, or data of the wrong shape.
    """
    stored = _only_graph(path)
    n = stored.num_nodes[0]
    source, destination = _edges_of(stored, n, path)
    vertex_data = {name: _rows(value, n, name, path) for name, value in stored.ndata[0].items()}
    edge_data = {name: _rows(value, len(source), name, path) for name, value in stored.edata[0].items()}
    edges = np.stack([source, destination])
    return _dataset(path, path.name.split(".")[0], n, edges, vertex_data, edge_data, {"reader": "dgl-graph"})


def read_dgl_partition(path: Path) -> Dataset:
    """The data set of a DGL partition, given its `.json`: the parts' own vertices and edges put together.

    Raises:
        UserError: a damaged or missing file, several types, or parts that do not add up to the whole.
    """
    book = read_book(path)
    n, e = int(book.node_offsets[-1]), int(book.edge_offsets[-1])
    edges = np.empty((2, e), index_dtype(n))
    vertex_data: dict[str, np.ndarray] = {}
    edge_data: dict[str, np.ndarray] = {}
    for part, files in enumerate(book.parts):
        own_vertices, own_edges = _read_part(book, part, edges)
        _put(vertex_data, files.node_data, own_vertices, n, part == 0)
        _put(edge_data, files.edge_data, own_edges, e, part == 0)
    record = {"reader": "dgl-partition", "dgl_parts": len(book.parts)}
    return _dataset(path, book.name, n, edges, vertex_data, edge_data, record)


def _read_part(book: PartitionBook, part: int, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fill in the part's own edges; returns the global ids of its own vertices and edges in local order."""
    path = book.parts[part].graph
    stored = _only_graph(path)
    vertices, links = stored.ndata[0], stored.edata[0]
    absent = [name for name in (GLOBAL_ID, INNER_NODE) if name not in vertices]
    absent += [name for name in (GLOBAL_ID, INNER_EDGE) if name not in links]
    if absent:
        got = f"a graph without {', '.join(absent)}"
        raise wrong(str(path), got, "a part's graph as DGL writes it", "partition the graph again")
    n = stored.num_nodes[0]
    source, destination = _edges_of(stored, n, path)
    ids = _rows(vertices[GLOBAL_ID], n, GLOBAL_ID, path)
    if n and not 0 <= ids.min() <= ids.max() < book.node_offsets[-1]:
        got = f"vertex ids {ids.min()} to {ids.max()}"
        raise wrong(str(path), got, f"ids in [0, {book.node_offsets[-1]})", "partition the graph again")
    inner = _rows(links[INNER_EDGE], len(source), INNER_EDGE, path) != 0
    own_edges = _rows(links[GLOBAL_ID], len(source), GLOBAL_ID, path)[inner]
    own_vertices = ids[_rows(vertices[INNER_NODE], n, INNER_NODE, path) != 0]
    for what, own, offsets in (
        ("vertices", own_vertices, book.node_offsets),
        ("edges", own_edges, book.edge_offsets),
    ):
        start, end = int(offsets[part]), int(offsets[part + 1])
        if len(own) != end - start or not np.array_equal(np.sort(own), np.arange(start, end)):
            got = f"{len(own)} own {what} of part {part}"
            raise wrong(
                str(path), got, f"{start} to {end - 1} as {book.path.name} says", "partition the graph again"
            )
    edges[0, own_edges] = ids[source[inner]]
    edges[1, own_edges] = ids[destination[inner]]
    return own_vertices, own_edges


def _put(whole: dict[str, np.ndarray], file: Path, ids: np.ndarray, total: int, first: bool) -> None:
    """Fill in a part's rows `ids` of every array of its data file; the first part says which there are."""
    found = {}
    for name, value in read_tensors(file).items():
        kind, slash, short = name.rpartition("/")
        if slash and kind not in (NODE_TYPE, EDGE_TYPE):
            expected = f"{NODE_TYPE} or {EDGE_TYPE}"
            raise wrong(str(file), f"data of type {kind}", expected, "partition one type alone")
        found[short] = _rows(value, len(ids), short, file)
        if first:
            whole[short] = np.empty((total, *value.shape[1:]), value.dtype)
    if found.keys() != whole.keys():
        got = f"data {', '.join(sorted(found)) or 'of no name'}"
        expected = f"{', '.join(sorted(whole)) or 'none'} as in the first part"
        raise wrong(str(file), got, expected, "partition the graph again")
    for name, value in found.items():
        if value.shape[1:] != whole[name].shape[1:]:
            got = f"rows of shape {value.shape[1:]}"
            expected = f"{whole[name].shape[1:]} as in the first part"
            raise wrong(f"{file}, {name}", got, expected, "partition the graph again")
        whole[name][ids] = value


def _only_graph(path: Path) -> StoredGraph:
    """The one graph of a file, of one vertex and one edge type."""
    graphs, _ = read_graphs(path)
    if len(graphs) != 1:
        raise wrong(str(path), f"{len(graphs)} graphs", "one graph", "save the one you mean by itself")
    stored = graphs[0]
    if len(stored.ntypes) != 1 or len(stored.etypes) != 1:
        kinds = f"{len(stored.ntypes)} vertex types ({', '.join(stored.ntypes)}) and {len(stored.etypes)}"
        got = f"{kinds} edge types ({', '.join(stored.etypes)})"
        do = "save one type's graph, for example g[etype], or dgl.to_homogeneous(g)"
        raise wrong(str(path), got, "a graph of one type each", do)
    return stored


def _edges_of(stored: StoredGraph, n: int, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(sources, destinations) in edge id order."""
    if stored.edges[0].shape != (n, n):
        got = f"edges among {stored.edges[0].shape} vertices"
        raise wrong(str(path), got, f"{n} at both ends", "save a graph, not a block of one")
    return stored.edges[0].in_id_order()


def _rows(value: np.ndarray, count: int, name: str, path: Path) -> np.ndarray:
    """The array, which must have `count` rows."""
    if value.ndim == 0 or value.shape[0] != count:
        raise wrong(f"{path}, {name}", f"shape {value.shape}", f"{count} rows", "write or fetch it again")
    return value


def _dataset(
    path: Path,
    name: str,
    n: int,
    edges: np.ndarray,
    vertex_data: Mapping[str, np.ndarray],
    edge_data: Mapping[str, np.ndarray],
    record: dict[str, Any],
) -> Dataset:
    """The data set of edges [2, E] in edge id order with DGL's data by name."""
    left = sorted({*vertex_data} - {*FIELD_NAMES, ORIGINAL_ID, NAME})
    if left and not {FEATURES, LABELS} <= vertex_data.keys():
        absent = " and ".join(field for field in (FEATURES, LABELS) if field not in vertex_data)
        warn_once(f"dgl {path}", f"{path} has no {absent}; its {', '.join(left)} are not used")
    left_of_edges = sorted({*edge_data} - {WEIGHT, ORIGINAL_ID})
    record |= {"weighted": WEIGHT in edge_data, "left_out": [*left, *left_of_edges]}
    try:
        masks = {split: _mask(vertex_data.get(mask), mask) for split, mask in MASKS.items()}
        weight = edge_data.get(WEIGHT)
        if weight is not None and weight.ndim == 2 and weight.shape[1] == 1:
            weight = weight[:, 0]
        x = vertex_data.get(FEATURES)
        return Dataset(
            name,
            Graph.from_edge_index(edges, n, weight),
            None if x is None else np.require(x, requirements="A"),
            vertex_data.get(LABELS),
            **masks,
            options=record,
            original_names=original_names(vertex_data),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _mask(value: np.ndarray | None, name: str) -> np.ndarray | None:
    """A mask as booleans; DGL stores them as 0 and 1."""
    if value is None:
        return None
    if value.ndim != 1 or value.dtype.kind not in "iu" or not np.isin(value, (0, 1)).all():
        raise wrong(name, f"{value.dtype} of shape {value.shape}", "0 or 1 for each vertex", "save one mask")
    return value.astype(bool)
