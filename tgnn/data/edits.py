"""Edits of a Graph: reverse edges, parallel edges, self-loops, components. Pure functions Graph -> Graph.

`transforms.py` applies them to whole data sets and records that it did.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from tgnn.data.graph import Graph


def merge_parallel_edges(graph: Graph) -> Graph:
    """One edge for each (source, destination) that has any; the weights of merged edges are summed.

    Worked example: in-edges 0, 0, 2 of a vertex become 0, 2.
    """
    first = _starts_group(graph)
    if first.all():
        return graph
    starts = np.flatnonzero(first)
    weight = graph.edge_weight
    if weight is not None:
        weight = np.add.reduceat(weight, starts, dtype=np.float64).astype(np.float32)
    return Graph(np.searchsorted(starts, graph.indptr), graph.indices[starts], weight)


def add_reverse_edges(graph: Graph) -> Graph:
    """The graph made symmetric: every edge gets its reverse unless that exists already.

    Afterwards u -> v and v -> u are equally many, the larger of the two counts before, so parallel edges
    survive, a self-loop is not doubled and a symmetric graph stays as it is. An added edge takes the weight
    of the one it reverses; weights that are there already stay.

    Worked example: 0 -> 1, 0 -> 1, 1 -> 0, 2 -> 2 gains one 1 -> 0.
    """
    back = Graph.from_edge_index(graph.edge_index()[::-1], graph.num_vertices, graph.edge_weight)
    have, want = _keys(graph), _keys(back)
    group_start = np.maximum.accumulate(np.where(_starts_group(back), np.arange(len(want)), 0))
    existing = np.searchsorted(have, want, side="right") - np.searchsorted(have, want, side="left")
    added = np.flatnonzero(np.arange(len(want)) - group_start >= existing)
    if not len(added):
        return graph
    weight = graph.edge_weight
    if weight is not None:
        weight = np.concatenate([weight, back.edge_weight[added]])
    edges = np.concatenate([graph.edge_index(), back.edge_index()[:, added]], axis=1)
    return Graph.from_edge_index(edges, graph.num_vertices, weight)


def remove_self_loops(graph: Graph) -> Graph:
    """The graph without edges v -> v."""
    kept = graph.indices != graph.destinations()
    return graph if kept.all() else keep_edges(graph, kept)


def add_self_loops(graph: Graph) -> Graph:
    """One edge v -> v, of weight 1, for each vertex that has none; loops that are there stay as they are."""
    destination = graph.destinations()
    has_loop = np.zeros(graph.num_vertices, bool)
    has_loop[destination[graph.indices == destination]] = True
    loops = np.flatnonzero(~has_loop)
    weight = graph.edge_weight
    if weight is not None:
        weight = np.concatenate([weight, np.ones(len(loops), np.float32)])
    edges = np.concatenate([graph.edge_index(), np.stack([loops, loops])], axis=1)
    return Graph.from_edge_index(edges, graph.num_vertices, weight)


def keep_edges(graph: Graph, kept: np.ndarray) -> Graph:
    """The graph with the edges where `kept` (bool [E], canonical order) holds; all vertices stay."""
    before = np.concatenate([[0], np.cumsum(kept)])
    weight = None if graph.edge_weight is None else graph.edge_weight[kept]
    return Graph(before[graph.indptr], graph.indices[kept], weight)


def keep_vertices(graph: Graph, kept: np.ndarray) -> Graph:
    """The subgraph of the vertices where `kept` (bool [N]) holds, renumbered in ascending order."""
    inside = keep_edges(graph, kept[graph.indices] & kept[graph.destinations()])
    new_id = np.cumsum(kept) - 1
    indptr = np.concatenate([[0], np.cumsum(inside.degree_in()[kept])])
    return Graph(indptr, new_id[inside.indices], inside.edge_weight)


def largest_component(graph: Graph) -> np.ndarray:
    """bool [N]: the largest weakly connected component; among equals the one with the lowest vertex id."""
    n = graph.num_vertices
    if n == 0:
        return np.zeros(0, bool)
    ones = np.ones(graph.num_edges, np.int8)
    matrix = sp.csr_matrix((ones, graph.indices, graph.indptr), shape=(n, n))
    _, component = connected_components(matrix, directed=True, connection="weak")
    sizes = np.bincount(component)
    largest_first = component[np.argmax(sizes[component] == sizes.max())]
    return component == largest_first


def _starts_group(graph: Graph) -> np.ndarray:
    """bool [E]: the first of each run of parallel edges."""
    first = np.ones(graph.num_edges, bool)
    first[1:] = graph.indices[1:] != graph.indices[:-1]
    starts = graph.indptr[:-1]
    first[starts[starts < graph.num_edges]] = True
    return first


def _keys(graph: Graph) -> np.ndarray:
    """int64 [E], ascending: destination x N + source."""
    return graph.destinations().astype(np.int64) * graph.num_vertices + graph.indices
