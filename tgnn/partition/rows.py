"""In-edges of chosen vertices in bounded pieces: how partitioning walks a graph without an [E]-sized
temporary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

CHUNK_EDGES = 1 << 20


def edge_slots(indptr: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where the in-edges of `rows` lie in `indices`, row after row: int64 [sum of degrees].

    >>> edge_slots(np.array([0, 2, 2, 5]), np.array([2, 0]))
    array([2, 3, 4, 0, 1])
    """
    starts = indptr[rows]
    degrees = indptr[rows + 1] - starts
    ends = np.cumsum(degrees)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(starts - ends + degrees, degrees)


def row_chunks(indptr: np.ndarray, rows: np.ndarray, chunk_edges: int = CHUNK_EDGES) -> Iterator[np.ndarray]:
    """Cut `rows` into runs of at most `chunk_edges` in-edges and as many rows (but at least one row)."""
    start = 0
    while start < len(rows):
        some = rows[start : start + chunk_edges]
        ends = np.cumsum(indptr[some + 1] - indptr[some])
        count = max(1, int(np.searchsorted(ends, chunk_edges, side="right")))
        yield some[:count]
        start += count


def in_edges(
    graph: Any, rows: np.ndarray, chunk_edges: int = CHUNK_EDGES
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield (rows, sources, slots) piece by piece: sources of the rows' in-edges in order, and where they lie
    in `indices`.
    """
    for some in row_chunks(graph.indptr, rows, chunk_edges):
        slots = edge_slots(graph.indptr, some)
        yield some, graph.indices[slots], slots


def degree_out(graph: Any) -> np.ndarray:
    """Out-degree of every vertex, int64 [N]; numpy's count of all edges at once would copy them to 8 bytes each."""
    total = np.zeros(graph.num_vertices, np.int64)
    step = max(CHUNK_EDGES, graph.num_vertices)
    for start in range(0, graph.num_edges, step):
        total += np.bincount(graph.indices[start : start + step], minlength=len(total))
    return total
