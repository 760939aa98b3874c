"""The undirected weighted view of a graph that partitioners cut: symmetrise, walk in pieces, contract.

An undirected edge {u, v} weighs as much as all edges u -> v and v -> u together, so the weight cut here is
the weight of the directed edges that cross parts. Self-loops never cross and weigh nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp

CHUNK_ENTRIES = 1 << 19
CONTRACTION_PIECES = 16


def undirected(graph: Any, edge_weight: np.ndarray | None = None) -> sp.csr_matrix:
    """Symmetric float32 CSR [N, N] of `graph`; `edge_weight` [E] in in-edge order counts edges (default: 1
    each).

    Peak memory is about 28 bytes an edge beside the graph; the result takes 8 to 16. Self-loops stay stored,
    with weight 0.
    """
    n = graph.num_vertices
    weight = np.ones(graph.num_edges, np.float32) if edge_weight is None else edge_weight.astype(np.float32)
    one_way = sp.csr_matrix((weight, graph.indices, graph.indptr), shape=(n, n))
    both_ways = sp.csr_matrix(one_way + one_way.T.tocsr())
    _zero_diagonal(both_ways)
    return both_ways


def row_pieces(
    matrix: sp.csr_matrix, chunk: int | None = None, width: int = 1
) -> Iterator[tuple[int, int, sp.csr_matrix]]:
    """Yield (start, stop, matrix[start:stop]), sharing memory: at most `chunk` entries and `chunk / width`
    rows each.

    `chunk` is CHUNK_ENTRIES by default, but no less than the number of rows: a sparse product with a piece
    costs at least that much. A piece holds one row at least.
    """
    indptr, start, n = matrix.indptr, 0, matrix.shape[0]
    chunk = max(CHUNK_ENTRIES, n) if chunk is None else chunk
    while start < n:
        stop = int(np.searchsorted(indptr, int(indptr[start]) + chunk, side="right")) - 1
        stop = min(n, max(start + 1, min(stop, start + max(1, chunk // width))))
        low, high = indptr[start], indptr[stop]
        entries = (matrix.data[low:high], matrix.indices[low:high], indptr[start : stop + 1] - low)
        yield start, stop, sp.csr_matrix(entries, shape=(stop - start, matrix.shape[1]), copy=False)
        start = stop


def membership(label: np.ndarray, num_labels: int) -> sp.csr_matrix:
    """The 0/1 matrix [n, num_labels] with a one at (i, label[i])."""
    n = len(label)
    return sp.csr_matrix((np.ones(n, np.float32), label, np.arange(n + 1)), shape=(n, num_labels))


def contract(matrix: sp.csr_matrix, label: np.ndarray, num_labels: int) -> sp.csr_matrix:
    """The graph between clusters: entry (a, b) sums the weights between members of a and of b; the diagonal
    is zeroed.
    """
    members = membership(label, num_labels)
    # A few clusters at a time, so that only the result is held beside the graph.
    some_vertices = len(label) // CONTRACTION_PIECES + 1
    pieces = [of @ matrix @ members for _, _, of in row_pieces(members.T.tocsr(), some_vertices)]
    between = sp.csr_matrix(sp.vstack(pieces, format="csr"))
    _zero_diagonal(between)
    between.eliminate_zeros()
    return between


def _zero_diagonal(matrix: sp.csr_matrix) -> None:
    """Set the stored entries (i, i) to 0."""
    for start, stop, piece in row_pieces(matrix):
        rows = np.repeat(np.arange(start, stop, dtype=piece.indices.dtype), np.diff(piece.indptr))
        piece.data[piece.indices == rows] = 0.0
