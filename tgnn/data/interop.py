"""Data sets from objects of other libraries that are in memory; those libraries are never imported here."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgnn.data.arrays import check_count, to_numpy
from tgnn.data.dgl_format import FEATURES, LABELS, MASKS, NAME, ORIGINAL_ID, WEIGHT, original_names
from tgnn.data.graph import SPLITS, Dataset, Graph
from tgnn.errors import wrong


def from_pyg(
    data: Any, *, name: str = "pyg", num_vertices: int | None = None, split: int | None = None
) -> Dataset:
    """The data set that a `torch_geometric.data.Data` holds.

    Args:
        data: has `edge_index` [2, E] or a sparse `adj_t`, and optionally `x`, `y`, `edge_weight` [E] and
            `train_mask`, `val_mask`, `test_mask` ([N], or [N, splits]). Other attributes are not looked at.
        name: the data set's name.
        num_vertices: N; by default `data.num_nodes` where that was set, or the rows of x, y or a mask. It is
            never taken from the edges.
        split: which column of masks [N, splits] to take.

    Raises:
        UserError: data of several types, no edges, no number of vertices, masks of several splits without
            `split`, or anything that `Dataset` refuses.
    """
    if hasattr(data, "node_types") and hasattr(data, "edge_types"):
        got = f"a {type(data).__name__} of several vertex and edge types"
        raise wrong("from_pyg", got, "a Data of one type", "call its to_homogeneous() first")
    held = data.to_dict() if callable(getattr(data, "to_dict", None)) else vars(data)
    edges, weight = _pyg_edges(held)
    masks = {part: _column(held.get(f"{part}_mask"), f"{part}_mask", split) for part in SPLITS}
    if num_vertices is None:
        num_vertices = _pyg_vertices(held, masks)
    graph = Graph.from_edge_index(edges, num_vertices, weight)
    x, y = held.get("x"), held.get("y")
    record = {"reader": "pyg", "weighted": weight is not None, "split": None if split is None else str(split)}
    return Dataset(name, graph, x, y, **masks, options=record)


def _pyg_edges(held: dict[str, Any]) -> tuple[np.ndarray, Any]:
    """(edges [2, E], weights or None) from `edge_index` or from the transposed sparse matrix `adj_t`."""
    if held.get("edge_index") is not None:
        return to_numpy(held["edge_index"], "edge_index"), held.get("edge_weight")
    adjacency = held.get("adj_t")
    if adjacency is None:
        raise wrong("from_pyg", "no edge_index and no adj_t", "the edges", "set data.edge_index")
    if getattr(adjacency, "layout", None) is not None:
        # torch's own sparse tensors; row v of the transposed matrix lists the sources of v.
        coo = adjacency.to_sparse_coo().coalesce()
        (destination, source), value = coo.indices(), coo.values()
    else:
        destination, source, value = adjacency.coo()
    edges = np.stack([to_numpy(source, "adj_t"), to_numpy(destination, "adj_t")])
    return edges, value


def _pyg_vertices(held: dict[str, Any], masks: dict[str, Any]) -> int:
    """N as the data tells it."""
    if held.get("num_nodes") is not None:
        return check_count(held["num_nodes"], "num_nodes")
    for value in (held.get("x"), held.get("y"), *masks.values()):
        if value is not None:
            return len(value)
    raise wrong(
        "from_pyg",
        "no x, y, mask or num_nodes",
        "the number of vertices, since the last ones may be isolated",
        "set data.num_nodes or pass num_vertices",
    )


def _column(mask: Any, name: str, split: int | None) -> np.ndarray | None:
    """A mask [N], or column `split` of masks [N, splits]."""
    if mask is None:
        return None
    mask = to_numpy(mask, name)
    if mask.ndim != 2:
        return mask
    if split is None or not 0 <= split < mask.shape[1]:
        given = "no split" if split is None else f"split {split}"
        got = f"{mask.shape[1]} splits and {given}"
        raise wrong(name, got, f"a split from 0 to {mask.shape[1] - 1}", "pass split=0, or another")
    return mask[:, split]


def graph_from_dgl(g: Any, *, weight: str | None = None) -> Graph:
    """The Graph of a `dgl.DGLGraph` of one vertex and one edge type.

    With its data: `Dataset("name", graph_from_dgl(g), g.ndata["feat"], g.ndata["label"], ...)`, or
    `dataset_from_dgl`.

    Args:
        g: the graph, on any device.
        weight: the edge data to take as edge weights, numbers [E]; None for no weights.

    Raises:
        UserError: a graph of several types, a block, or no such edge data.
    """
    if getattr(g, "is_block", False) or len(g.ntypes) != 1 or len(g.etypes) != 1:
        got = f"vertex types {', '.join(g.ntypes)} and edge types {', '.join(g.etypes)}"
        raise wrong("graph_from_dgl", got, "a graph of one type each", "call dgl.to_homogeneous(g) first")
    if weight is not None and weight not in g.edata:
        have = ", ".join(g.edata) or "none"
        raise wrong("graph_from_dgl", f"edge data {have}", f"{weight!r} among it", "pass another weight")
    # A graph that is kept as CSR or CSC alone cannot list its edges by id.
    source, destination, ids = (to_numpy(ends, "edges") for ends in g.edges(form="all", order=None))
    edges = np.empty((2, len(ids)), np.int64)
    edges[0, ids], edges[1, ids] = source, destination
    return Graph.from_edge_index(edges, g.num_nodes(), None if weight is None else g.edata[weight])


def dataset_from_dgl(g: Any, *, name: str = "dgl") -> Dataset:
    """The data set of a `dgl.DGLGraph`: `g.ndata` feat, label, train_mask, val_mask, test_mask and, as
    `original_names`, orig_name or orig_id, `g.edata` weight, each where it is there; other data is not looked
    at.

    Raises:
        UserError: as `graph_from_dgl`, and anything that `Dataset` refuses.
    """
    graph = graph_from_dgl(g, weight=WEIGHT if WEIGHT in g.edata else None)
    held = {key: g.ndata[key] for key in (FEATURES, LABELS, *MASKS.values()) if key in g.ndata}
    masks = {part: held.get(mask) for part, mask in MASKS.items()}
    masks = {
        part: None if mask is None else to_numpy(mask, MASKS[part]).astype(bool)
        for part, mask in masks.items()
    }
    record = {"reader": "dgl", "weighted": graph.edge_weight is not None}
    called = original_names(
        {key: to_numpy(g.ndata[key], key) for key in (NAME, ORIGINAL_ID) if key in g.ndata}
    )
    x, y = held.get(FEATURES), held.get(LABELS)
    return Dataset(name, graph, x, y, **masks, options=record, original_names=called)
