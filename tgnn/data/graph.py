"""Graph and Dataset: the two values every other part of tgnn starts from, and their invariants.

Ids here are *original* ids. An edge u -> v carries a message from u to v; the graph is kept as the CSR of
in-edges, so row v lists the sources of v. Rows are in canonical order, ascending (source id, input order): an
edge's place in its row is its *position*, which no later partitioning changes. Nothing is guessed: the number
of vertices is always given.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.data.arrays import (
    as_features,
    as_ids,
    as_labels,
    as_weights,
    check_count,
    check_ids,
    index_dtype,
    labelled_rows,
    to_numpy,
)
from tgnn.errors import wrong


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph of N vertices and E edges as its in-edge CSR, in canonical order.

    Use `from_edge_index` or `from_csr` for data in any order: the constructor refuses rows out of order.

    Attributes:
        indptr: int64 [N + 1]; the in-edges of v are `indices[indptr[v]:indptr[v + 1]]`.
        indices: int32 [E] (int64 where N >= 2^31), sources; each row ascending by (source, input order).
        edge_weight: float32 [E] or None.
    """

    indptr: np.ndarray
    indices: np.ndarray
    edge_weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        indptr, indices = _checked_csr(self.indptr, self.indices)
        descends = np.flatnonzero(indices[1:] < indices[:-1]) + 1
        if len(descends):
            starts_row = indptr[np.searchsorted(indptr, descends, side="left")] == descends
            if not starts_row.all():
                place = int(descends[~starts_row][0])
                raise wrong(
                    "indices",
                    f"a row that descends at position {place}",
                    "ascending sources in each row",
                    "build the graph with Graph.from_csr, which sorts",
                )
        object.__setattr__(self, "indptr", indptr)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "edge_weight", as_weights(self.edge_weight, len(indices)))

    @property
    def num_vertices(self) -> int:
        """N, isolated vertices included."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """E, each parallel edge and each self-loop counted."""
        return len(self.indices)

    def degree_in(self) -> np.ndarray:
        """In-degrees, int64 [N]."""
        return np.diff(self.indptr)

    def degree_out(self) -> np.ndarray:
        """Out-degrees, int64 [N]."""
        return np.bincount(self.indices, minlength=self.num_vertices).astype(np.int64, copy=False)

    def destinations(self) -> np.ndarray:
        """The destination of each edge in canonical order, same dtype as `indices`, [E]."""
        return np.repeat(np.arange(self.num_vertices, dtype=self.indices.dtype), self.degree_in())

    def edge_index(self) -> np.ndarray:
        """Edges in canonical order as int64 [2, E]: row 0 sources, row 1 destinations."""
        return np.stack([self.indices.astype(np.int64), self.destinations().astype(np.int64)])

    @classmethod
    def from_edge_index(cls, edge_index: Any, num_vertices: int, edge_weight: Any = None) -> Graph:
        """A graph from its edges in any order.

        Args:
            edge_index: integers [2, E], array or tensor: row 0 sources, row 1 destinations, all in
                [0, num_vertices).
            num_vertices: N. It is never taken from the edges, so isolated vertices keep their rows.
            edge_weight: numbers [E], one per edge in the given order, or None.

        Raises:
            UserError: wrong shape or dtype, or an id outside [0, num_vertices) (the first bad edge is named).
        """
        edges = to_numpy(edge_index, "edge_index")
        if edges.ndim != 2 or edges.shape[0] != 2:
            raise wrong(
                "edge_index",
                f"shape {edges.shape}",
                "shape (2, E): sources, then destinations",
                "transpose or stack the two columns",
            )
        num_vertices = check_count(num_vertices, "num_vertices")
        _check_memory(num_vertices)
        check_ids(edges, num_vertices, "edge_index")
        dtype = index_dtype(num_vertices)
        source, destination = edges[0].astype(dtype), edges[1].astype(dtype)
        return cls(*canonical_csr(source, destination, num_vertices, as_weights(edge_weight, edges.shape[1])))

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, edge_weight: Any = None) -> Graph:
        """A graph from an in-edge CSR whose rows may be in any order.

        Args:
            indptr: integers [N + 1], from 0 to E, not descending.
            indices: integers [E] in [0, N): sources of each row's in-edges.
            edge_weight: numbers [E] in the order of `indices`, or None.

        Raises:
            UserError: wrong shape, dtype, offsets or ids.
        """
        indptr, indices = _checked_csr(indptr, indices)
        num_vertices = len(indptr) - 1
        destination = np.repeat(np.arange(num_vertices, dtype=indices.dtype), np.diff(indptr))
        return cls(*canonical_csr(indices, destination, num_vertices, as_weights(edge_weight, len(indices))))

    @classmethod
    def from_scipy(cls, matrix: Any, with_weights: bool = False) -> Graph:
        """A graph from a square scipy sparse matrix: a stored A[i, j] != 0 is an edge i -> j.

        Entries stored twice (COO, or CSR with repeated columns) stay parallel edges; stored zeros are no
        edges. The entries become edge weights only with `with_weights`.

        Raises:
            UserError: not a sparse matrix, or not square.
        """
        if not sp.issparse(matrix):
            raise wrong(
                "matrix", type(matrix).__name__, "a scipy sparse matrix", "wrap it in scipy.sparse.coo_matrix"
            )
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise wrong(
                "matrix",
                f"shape {matrix.shape}",
                "a square adjacency matrix",
                "give one row and column per vertex",
            )
        coo = matrix.tocoo()
        kept = np.flatnonzero(coo.data != 0)
        weight = coo.data[kept] if with_weights else None
        return cls.from_edge_index(np.stack([coo.row[kept], coo.col[kept]]), matrix.shape[0], weight)

    @classmethod
    def from_networkx(cls, graph: Any, weight: str | None = None) -> Graph:
        """A graph from a networkx one: vertex i is the i-th of `graph.nodes`.

        An undirected edge becomes two (a self-loop one); a multigraph keeps its parallel edges.

        Args:
            graph: any networkx graph.
            weight: the edge attribute to take as edge weight, or None for no weights.

        Raises:
            UserError: an edge lacks the weight attribute.
        """
        number = {name: i for i, name in enumerate(graph.nodes)}
        ends = [(number[u], number[v]) for u, v in graph.edges()]
        edges = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        weights = None
        if weight is not None:
            found = [value for _, _, value in graph.edges(data=weight)]
            if any(value is None for value in found):
                raise wrong(
                    "from_networkx",
                    f"{found.count(None)} edges without the attribute {weight!r}",
                    "a weight on every edge",
                    "set it on all edges or leave weight out",
                )
            weights = np.array(found, dtype=np.float32)
        if not graph.is_directed():
            back = np.flatnonzero(edges[0] != edges[1])
            edges = np.concatenate([edges, edges[::-1, back]], axis=1)
            weights = None if weights is None else np.concatenate([weights, weights[back]])
        return cls.from_edge_index(edges, len(number), weights)


def _check_memory(num_vertices: int) -> None:
    """Refuse a number of vertices whose offsets alone, 16 bytes a vertex while sorting, exceed the machine's
    memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 16 * num_vertices > memory:
        raise wrong(
            "number of vertices",
            num_vertices,
            f"at most {memory // 16}, which fit this machine's memory",
            "correct it, or number the vertices without gaps",
        )


def canonical_csr(
    source: np.ndarray, destination: np.ndarray, num_vertices: int, weight: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(indptr int64 [N + 1], indices [E], weight [E] or None) of edges in any order; ids must be valid.

    Two stable counting sorts, by source and then by destination, in O(N + E) time: scipy's CSR <-> CSC
    conversion is one, and unlike its COO conversion it keeps repeated entries.
    """
    by_source = stable_order(source, num_vertices)
    payload = np.zeros(len(source), np.int8) if weight is None else weight[by_source[1]]
    shape = (num_vertices, num_vertices)
    rows = sp.csr_matrix((payload, destination[by_source[1]], by_source[0]), shape=shape).tocsc()
    indices = rows.indices.astype(source.dtype, copy=False)
    return rows.indptr.astype(np.int64), indices, None if weight is None else rows.data


def stable_order(keys: np.ndarray, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """(indptr [num_keys + 1], order [len(keys)]): a stable counting sort of keys in [0, num_keys).

    >>> stable_order(np.array([2, 0, 2, 1]), 3)[1].tolist()
    [1, 3, 0, 2]
    """
    count = len(keys)
    rows = np.arange(count + 1, dtype=np.int32 if count < 2**31 - 1 else np.int64)
    ones = sp.csr_matrix((np.zeros(count, np.int8), keys, rows), shape=(count, num_keys)).tocsc()
    return ones.indptr, ones.indices


def _checked_csr(indptr: Any, indices: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both arrays in their stored dtypes, with shapes, offsets and ids checked."""
    indptr, indices = to_numpy(indptr, "indptr"), to_numpy(indices, "indices")
    for name, array in (("indptr", indptr), ("indices", indices)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise wrong(
                name, f"{array.dtype} of shape {array.shape}", "a one-dimensional integer array", "convert it"
            )
    if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != len(indices) or (indptr[1:] < indptr[:-1]).any():
        raise wrong(
            "indptr",
            f"{len(indptr)} offsets for {len(indices)} indices",
            f"ascending offsets from 0 to {len(indices)}",
            "give N + 1 offsets of the in-edge CSR",
        )
    num_vertices = len(indptr) - 1
    check_ids(indices, num_vertices, "indices")
    return indptr.astype(np.int64, copy=False), indices.astype(index_dtype(num_vertices), copy=False)


@dataclass(eq=False)
class Dataset:
    """A graph with what is learnt on it. The constructor brings every field into one form and checks it.

    Attributes:
        name: short name, for people and reports.
        graph: the Graph, N vertices.
        x: features float32 [N, F], or None. Any number dtype, tensor or scipy sparse matrix is taken; must be
            finite.
        y: single-label int64 [N] with -1 for unlabelled, multi-label float32 [N, C] with NaN for unlabelled
            cells, or None. Taken: integers, whole floats with NaN, booleans, a column [N, 1], a 0/1 matrix
            [N, C].
        train, val, test: int64 ids, ascending and unique. Taken: id lists or boolean masks [N]. They are
            disjoint and, where there are labels, hold labelled vertices only.
        num_classes: C; taken from the labels when None (0 without labels).
        options: JSON-able record of what was done to the data.
        original_names: [N] names or ids the vertices had in the source where those are not 0 .. N - 1.

    Raises:
        UserError: any of the above does not hold.
    """

    name: str
    graph: Graph
    x: Any = None
    y: Any = None
    train: Any = None
    val: Any = None
    test: Any = None
    num_classes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    original_names: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.graph, Graph):
            got = type(self.graph).__name__
            raise wrong("graph", got, "a Graph", "build one with Graph.from_edge_index")
        n = self.graph.num_vertices
        self.x = as_features(self.x, n)
        self.y, self.num_classes = as_labels(self.y, n, self.num_classes)
        for split in SPLITS:
            setattr(self, split, as_ids(getattr(self, split), n, split))
        _check_disjoint(self)
        _check_labelled(self)
        names = self.original_names = None if self.original_names is None else np.asarray(self.original_names)
        if names is not None and names.shape != (n,):
            got = f"shape {names.shape}"
            raise wrong("original_names", got, f"{n}, one per vertex", "give all or none")

    @property
    def task(self) -> str:
        """ "single-label" or "multi-label"."""
        return "multi-label" if self.y is not None and self.y.ndim == 2 else "single-label"

    @property
    def num_vertices(self) -> int:
        """N."""
        return self.graph.num_vertices

    @property
    def num_edges(self) -> int:
        """E."""
        return self.graph.num_edges

    @property
    def num_features(self) -> int:
        """F, or 0 without features."""
        return 0 if self.x is None else self.x.shape[1]

    def labelled(self) -> np.ndarray:
        """bool [N]: vertices with a label (in multi-label data: with at least one known cell)."""
        return np.zeros(self.num_vertices, bool) if self.y is None else labelled_rows(self.y)

    def changed(self, record: dict[str, Any] | None = None, **fields: Any) -> Dataset:
        """A copy with other fields and `record` added to its options; everything is checked again."""
        return replace(self, options={**self.options, **(record or {})}, **fields)


SPLITS = ("train", "val", "test")


def _check_disjoint(dataset: Dataset) -> None:
    """Refuse a vertex that is in two splits."""
    for i, first in enumerate(SPLITS):
        for second in SPLITS[i + 1 :]:
            both = np.intersect1d(getattr(dataset, first), getattr(dataset, second), assume_unique=True)
            if len(both):
                raise wrong(
                    f"{first} and {second}",
                    f"{len(both)} vertices in both (first: {both[0]})",
                    "disjoint splits",
                    "take each vertex out of one of them",
                )


def _check_labelled(dataset: Dataset) -> None:
    """Refuse splits with unlabelled vertices, with their count; data without labels may have splits."""
    if dataset.y is None:
        return
    labelled = dataset.labelled()
    for split in SPLITS:
        ids = getattr(dataset, split)
        missing = ids[~labelled[ids]]
        if len(missing):
            raise wrong(
                split,
                f"{len(missing)} of {len(ids)} vertices without a label (first: {missing[0]})",
                "labelled vertices only",
                f"take them out of {split} or give their labels",
            )
