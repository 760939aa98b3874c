"""The undirected weighted view of a graph that partitioners cut: symmetrise, walk in pieces, contract.

An undirected edge {u, v} weighs as much as all edges u -> v and v -> u together, so the weight cut here is
the weight of the directed edges that cross parts. Self-loops never cross and weigh nothing.

A graph whose every edge has its reverse is its own undirected view: `Mirrored` shares its arrays and computes the
weights from those of the vertices when a piece is looked at, so the view takes no memory per edge.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.kernels.host import each, share
from tgnn.partition.edge_factors import EdgeFactors
from tgnn.partition.rows import edge_slots, row_chunks

CHUNK_ENTRIES = 1 << 19
CONTRACTION_PIECES = 16
# Contracted graphs of more entries keep their clusters' loops. Of 2^10, 2^18, 2^19, 2^20 and no limit, on the community
# graph of 200,000 vertices in 4 parts: 1.03, 1.02, 1.04, 1.06 and 1.06 times the rows exchanged under METIS.
LOOSE_ENTRIES = 1 << 18


class Mirrored:
    """A symmetric CSR whose entry (v, u) weighs `s[u] t[v] + s[v] t[u]` (1 + 1 without factors), 0 where u = v."""

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, factors: EdgeFactors | None = None) -> None:
        self.indptr, self.indices, self.factors = indptr, indices, factors
        self.shape = (len(indptr) - 1, len(indptr) - 1)
        self.loops = np.zeros(len(indptr) - 1, np.float32)
        for start, stop, low, high in spans(indptr, CHUNK_ENTRIES):
            rows = np.repeat(np.arange(start, stop, dtype=indices.dtype), np.diff(indptr[start : stop + 1]))
            at = np.flatnonzero(indices[low:high] == rows)
            self.loops += np.bincount(rows[at], minlength=len(self.loops)) if len(at) else 0

    def values(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Weights of the entries (rows, columns): float32."""
        if self.factors is None:
            weight = np.full(len(rows), 2, np.float32)
        else:
            s, t = self.factors.source, self.factors.destination
            weight = s[columns] * t[rows] + s[rows] * t[columns]
        weight[rows == columns] = 0
        return weight

    def to_parts(self, part_of: np.ndarray, num_parts: int) -> np.ndarray:
        """Each vertex's weight of edges to every part: float32 [N, P]. Holds as much again while it counts."""
        n, factors = self.shape[0], self.factors
        total, here = np.zeros((n, num_parts), np.float32), np.zeros((n, num_parts), np.float32)
        pairs = ((2.0, 1.0),)
        if factors is not None:
            pairs = ((factors.source, factors.destination), (factors.destination, factors.source))

        def add(of_row: np.ndarray | float, span: tuple[int, int, int, int]) -> None:
            start, stop, low, high = span
            ones = np.ones(high - low, np.float32)
            entries = (ones, self.indices[low:high], self.indptr[start : stop + 1] - low)
            sums = _csr(entries, (stop - start, n)) @ here
            total[start:stop] += sums if factors is None else sums * of_row[start:stop, None]

        for of_neighbour, of_row in pairs:
            here[np.arange(n), part_of] = of_neighbour
            each(partial(add, of_row), spans(self.indptr, share(CHUNK_ENTRIES)))
        looped = np.flatnonzero(self.loops)
        total[looped, part_of[looped]] -= self.loops[looped] * self._loop_weight(looped)
        return total

    def follow(self, total: np.ndarray, rows: np.ndarray, left: np.ndarray, entered: np.ndarray) -> None:
        """Bring `total`, what `to_parts` gave, up to date after `rows` [m] went from parts `left` to `entered`."""
        flat, num_parts = total.reshape(-1), total.shape[1]
        place = np.arange(len(rows))
        ends = np.concatenate([[0], np.cumsum(self.indptr[rows + 1] - self.indptr[rows])])
        for some in row_chunks(ends, place, CHUNK_ENTRIES):
            degrees, neighbours, weight = entries_of(self, rows[some])
            line = neighbours.astype(np.int64) * num_parts
            np.subtract.at(flat, line + np.repeat(left[some], degrees), weight)
            np.add.at(flat, line + np.repeat(entered[some], degrees), weight)

    def _loop_weight(self, rows: np.ndarray) -> np.ndarray:
        if self.factors is None:
            return np.full(len(rows), 2, np.float32)
        return 2 * self.factors.source[rows] * self.factors.destination[rows]

    def sum(self, axis: int) -> np.ndarray:
        """Weight of each vertex's edges, float32 [N]; `axis` is 1, as for a scipy matrix."""
        return self.to_parts(np.zeros(self.shape[0], np.int8), 1)[:, 0]

    def to_csr(self) -> sp.csr_matrix:
        """The same as a scipy matrix, with 4 more bytes an entry."""
        pieces = [np.zeros(0, np.float32)]
        for start, stop, low, high in spans(self.indptr, CHUNK_ENTRIES):
            rows = np.repeat(np.arange(start, stop), np.diff(self.indptr[start : stop + 1]))
            pieces.append(self.values(rows, self.indices[low:high]))
        return sp.csr_matrix((np.concatenate(pieces), self.indices, self.indptr), shape=self.shape)


Undirected = sp.csr_matrix | Mirrored


def undirected(graph: Any, edge_weight: np.ndarray | EdgeFactors | None = None) -> Undirected:
    """Symmetric view [N, N] of `graph`; `edge_weight`: [E] in in-edge order, or factors (default: 1 each).

    Takes 8 bytes a vertex where every edge of the graph has its reverse and the weights come from the vertices, else
    8 to 16 bytes an edge and about 28 at its peak. Self-loops stay stored, with weight 0.
    """
    n = graph.num_vertices
    factors = edge_weight if isinstance(edge_weight, EdgeFactors) else None
    if (edge_weight is None or (factors is not None and factors.edge is None)) and is_symmetric(graph):
        return Mirrored(graph.indptr, graph.indices, factors)
    if factors is not None:
        edge_weight = factors.weights(graph.indptr, graph.indices)
    weight = np.ones(graph.num_edges, np.float32) if edge_weight is None else edge_weight.astype(np.float32)
    one_way = sp.csr_matrix((weight, graph.indices, graph.indptr), shape=(n, n))
    both_ways = sp.csr_matrix(one_way + one_way.T.tocsr())
    _zero_diagonal(both_ways)
    return both_ways


def is_symmetric(graph: Any) -> bool:
    """Whether there are as many edges u -> v as v -> u for all u, v: x A y = y A x for random x, y modulo 2^64.

    Two passes over the edges instead of a transpose. A graph that is not symmetric passes with a probability of about
    2^-60 (Schwartz-Zippel).
    """
    n = graph.num_vertices
    rng = np.random.default_rng(0x6D6972726F72)
    x, y = rng.integers(0, 2**63, (2, n), dtype=np.uint64)
    difference = np.zeros(1, np.uint64)
    for start, stop, low, high in spans(graph.indptr, CHUNK_ENTRIES):
        if high == low:
            continue
        filled = start + np.flatnonzero(np.diff(graph.indptr[start : stop + 1]))
        sources = graph.indices[low:high]
        first = graph.indptr[filled] - low
        difference += (x[filled] * np.add.reduceat(y[sources], first)).sum(dtype=np.uint64)
        difference -= (y[filled] * np.add.reduceat(x[sources], first)).sum(dtype=np.uint64)
    return bool(difference[0] == 0)


def sketch(matrix: Undirected, rows: np.ndarray, most: int, rng: np.random.Generator) -> sp.csr_matrix:
    """A sample of the graph between `rows` (ascending, [m]): at most `most` entries of each row, as [m, m].

    Entries are picked at even distances from a random start, so each of d is kept with probability q = most / d. The
    entry {u, v}, which both rows may keep, is divided by q_u + q_v: the sum of the sketch and its transpose is the
    matrix on average (the balance heuristic of Veach and Guibas, SIGGRAPH 1995). The result is not symmetric.
    """
    degree = np.diff(matrix.indptr)
    kept_share = np.minimum(1.0, most / np.maximum(degree, 1)).astype(np.float32)
    place = np.full(matrix.shape[0], -1, np.int32)
    place[rows] = np.arange(len(rows), dtype=np.int32)
    counts = np.minimum(degree[rows], most)
    indptr = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    indices, data = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32)
    for start, stop, low, high in spans(indptr, CHUNK_ENTRIES):
        some, number = rows[start:stop], counts[start:stop]
        of = np.repeat(np.arange(len(some)), number)
        turn = np.arange(low, high) - np.repeat(indptr[start:stop], number) + rng.random(len(some))[of]
        picked = np.minimum(
            (turn * (degree[some] / np.maximum(number, 1))[of]).astype(np.int64), degree[some][of] - 1
        )
        slots = matrix.indptr[some][of] + picked
        of, columns = some[of], matrix.indices[slots]
        value = matrix.values(of, columns) if isinstance(matrix, Mirrored) else matrix.data[slots]
        # Neighbours outside `rows` have weight 0 only.
        indices[low:high] = np.maximum(place[columns], 0)
        data[low:high] = np.where(place[columns] < 0, 0, value / (kept_share[of] + kept_share[columns]))
    if indptr[-1] < 2**31:
        indptr = indptr.astype(np.int32)
    return _csr((data, indices, indptr), (len(rows), len(rows)))


def entries_of(matrix: Undirected, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(degrees of `rows`, their neighbours row after row, the weights)."""
    slots = edge_slots(matrix.indptr, rows)
    degrees = matrix.indptr[rows + 1] - matrix.indptr[rows]
    columns = matrix.indices[slots]
    if isinstance(matrix, Mirrored):
        return degrees, columns, matrix.values(np.repeat(rows, degrees), columns)
    return degrees, columns, matrix.data[slots]


def spans(indptr: np.ndarray, chunk: int, width: int = 1) -> Iterator[tuple[int, int, int, int]]:
    """(first row, end row, first entry, end entry) of runs of rows: at most `chunk` entries, `chunk / width` rows."""
    start, n = 0, len(indptr) - 1
    while start < n:
        stop = int(np.searchsorted(indptr, int(indptr[start]) + chunk, side="right")) - 1
        stop = min(n, max(start + 1, min(stop, start + max(1, chunk // width))))
        yield start, stop, int(indptr[start]), int(indptr[stop])
        start = stop


def _csr(entries: tuple[np.ndarray, np.ndarray, np.ndarray], shape: tuple[int, int]) -> sp.csr_matrix:
    """A matrix that shares `entries`: (data, indices, indptr)."""
    return sp.csr_matrix(entries, shape=shape, copy=False)


def row_pieces(
    matrix: sp.csr_matrix, chunk: int | None = None, width: int = 1
) -> Iterator[tuple[int, int, sp.csr_matrix]]:
    """Yield (start, stop, matrix[start:stop]), to be read only: at most `chunk` entries and `chunk / width`
    rows each.

    `chunk` is CHUNK_ENTRIES by default, but no less than a quarter of the number of rows: a sparse product with a
    piece takes a pass over a table of that many. Threads share that default. A piece holds one row at least.
    """
    indptr = matrix.indptr
    chunk = share(max(CHUNK_ENTRIES, matrix.shape[0] // 4)) if chunk is None else chunk
    for start, stop, low, high in spans(indptr, chunk, width):
        entries = (matrix.data[low:high], matrix.indices[low:high], indptr[start : stop + 1] - low)
        yield start, stop, _csr(entries, (stop - start, matrix.shape[1]))


def membership(label: np.ndarray, num_labels: int) -> sp.csr_matrix:
    """The 0/1 matrix [n, num_labels] with a one at (i, label[i])."""
    n = len(label)
    return sp.csr_matrix((np.ones(n, np.float32), label, np.arange(n + 1)), shape=(n, num_labels))


def contract(matrix: sp.csr_matrix, label: np.ndarray, num_labels: int) -> sp.csr_matrix:
    """The graph between clusters: entry (a, b) sums the weights between members of a and of b.

    The diagonal is zeroed in graphs of up to LOOSE_ENTRIES entries. In larger ones it stays: a cluster that is tied to
    itself more than to any other does not join that yet, which ends in fewer cut edges.
    """
    members = membership(label, num_labels)
    # A few clusters at a time, so that only the result is held beside the graph.
    some_vertices = len(label) // CONTRACTION_PIECES + 1
    pieces = each(lambda of: of[2] @ matrix @ members, row_pieces(members.T.tocsr(), some_vertices))
    between = sp.csr_matrix(sp.vstack(pieces, format="csr"))
    if between.nnz <= LOOSE_ENTRIES:
        _zero_diagonal(between)
    between.eliminate_zeros()
    return between


def _zero_diagonal(matrix: sp.csr_matrix) -> None:
    """Set the stored entries (i, i) to 0."""
    # Not through `row_pieces`: scipy copies what is a small part of a larger array.
    indptr, indices, data = matrix.indptr, matrix.indices, matrix.data
    for start, stop, low, high in spans(indptr, CHUNK_ENTRIES):
        rows = np.repeat(np.arange(start, stop, dtype=indices.dtype), np.diff(indptr[start : stop + 1]))
        data[low:high][indices[low:high] == rows] = 0.0
