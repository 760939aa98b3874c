"""The undirected view: the one that shares a symmetric graph's arrays against the one that is written out."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tgnn.data.graph import Graph
from tgnn.data.synthetic import hand_drawn, rmat, sbm
from tgnn.partition.assign import assign
from tgnn.partition.edge_factors import EdgeFactors
from tgnn.partition.rows import degree_out
from tgnn.partition.undirected import Mirrored, contract, is_symmetric, sketch, undirected

N, P = 50, 4


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Symmetric, with parallel edges and self-loops."""
    edges = np.random.default_rng(0).integers(0, N, (2, 300))
    return Graph.from_edge_index(np.concatenate([edges, edges[::-1]], axis=1), N)


def factors() -> EdgeFactors:
    rng = np.random.default_rng(1)
    return EdgeFactors(rng.random(N, np.float32), rng.random(N, np.float32))


def by_hand(graph: Graph, weight: np.ndarray) -> np.ndarray:
    dense = np.zeros((N, N))
    for (u, v), w in zip(graph.edge_index().T, weight, strict=True):
        if u != v:
            dense[u, v] += w
            dense[v, u] += w
    return dense


@pytest.mark.parametrize("weighed", [False, True])
def test_a_symmetric_graph_is_its_own_view(graph: Graph, weighed: bool) -> None:
    given = factors() if weighed else None
    view = undirected(graph, given)
    assert isinstance(view, Mirrored) and view.indices is graph.indices
    weight = given.weights(graph.indptr, graph.indices) if weighed else np.ones(graph.num_edges, np.float32)
    dense = by_hand(graph, weight)
    np.testing.assert_allclose(view.to_csr().toarray(), dense, rtol=1e-5)
    np.testing.assert_allclose(view.sum(axis=1), dense.sum(axis=1), rtol=1e-5)
    part_of = np.arange(N) % P
    total = view.to_parts(part_of, P)
    np.testing.assert_allclose(total, dense @ np.eye(P)[part_of], rtol=1e-4, atol=1e-4)
    rows = np.array([3, 10, 7])
    left, part_of[rows] = part_of[rows], [0, 0, 1]
    view.follow(total, rows, left, part_of[rows])
    np.testing.assert_allclose(total, dense @ np.eye(P)[part_of], rtol=1e-4, atol=1e-4)


def test_a_directed_graph_and_weights_of_single_edges_are_written_out(graph: Graph) -> None:
    directed = hand_drawn().graph
    assert isinstance(undirected(directed), sp.csr_matrix)
    single = np.arange(graph.num_edges, dtype=np.float32)
    np.testing.assert_allclose(undirected(graph, single).toarray(), by_hand(graph, single), rtol=1e-5)
    given = EdgeFactors(*[np.ones(N, np.float32)] * 2, edge=single)
    np.testing.assert_allclose(undirected(graph, given).toarray(), by_hand(graph, single), rtol=1e-5)


def test_symmetry_counts_parallel_edges() -> None:
    assert is_symmetric(Graph.from_edge_index(np.array([[0, 1, 2], [1, 0, 2]]), 4))
    assert not is_symmetric(Graph.from_edge_index(np.array([[0, 0, 1], [1, 1, 0]]), 3))
    # A ring: in- and out-degrees agree, directions do not.
    assert not is_symmetric(Graph.from_edge_index(np.array([[0, 1, 2], [1, 2, 0]]), 3))
    assert is_symmetric(Graph.from_edge_index(np.zeros((2, 0), int), 0))


def test_a_sketch_is_right_on_average_and_exact_where_rows_are_short(graph: Graph) -> None:
    view, rows = undirected(graph), np.arange(N)
    dense = by_hand(graph, np.ones(graph.num_edges))
    whole = sketch(view, rows, 10_000, np.random.default_rng(0)).toarray()
    np.testing.assert_allclose(whole + whole.T, dense)
    mean = np.zeros((N, N))
    for seed in range(400):
        some = sketch(view, rows, 5, np.random.default_rng(seed))
        assert np.diff(some.indptr).max() == 5
        mean += (some + some.T).toarray() / 400
    np.testing.assert_allclose(mean.sum(), dense.sum(), rtol=0.01)
    assert np.abs(mean - dense).max() < 1.0 and np.abs(mean - dense).mean() < 0.05


def test_a_sketch_of_some_rows_numbers_them_anew(graph: Graph) -> None:
    rows = np.arange(0, N, 2)
    some = sketch(undirected(graph), rows, 10_000, np.random.default_rng(0)).toarray()
    dense = by_hand(graph, np.ones(graph.num_edges))[np.ix_(rows, rows)]
    # Weights to vertices outside are dropped; column 0 takes their zeros.
    np.testing.assert_allclose(some + some.T, dense)


def test_a_sketched_graph_is_cut_as_well_as_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = sbm(6_000, seed=3, num_communities=40, pairs_per_vertex=12.5, inside=0.85, num_features=1)
    graph = dataset.graph
    destination = np.repeat(np.arange(graph.num_vertices), graph.degree_in())

    def cut(part_of: np.ndarray) -> int:
        return int((part_of[graph.indices] != part_of[destination]).sum())

    whole = cut(assign(dataset, 4))
    monkeypatch.setattr(importlib.import_module("tgnn.partition.assign"), "LARGE", 1_000)
    assert cut(assign(dataset, 4)) < 1.1 * whole


def test_out_degrees_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = rmat(8, num_features=0).graph
    monkeypatch.setattr("tgnn.partition.rows.CHUNK_EDGES", 10)
    np.testing.assert_array_equal(degree_out(graph), np.bincount(graph.indices, minlength=256))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 19])
def test_contraction_and_directed_views_in_pieces(monkeypatch: pytest.MonkeyPatch, chunk: int, threads: int):
    """Loops go away in every piece; scipy copies slices of matrices, so writing into one would change nothing."""
    monkeypatch.setattr("tgnn.partition.undirected.CHUNK_ENTRIES", chunk)
    edges = np.random.default_rng(3).integers(0, N, (2, 400))
    one_way = Graph.from_edge_index(np.concatenate([edges, [[5] * 9, [5] * 9]], axis=1), N)
    view = undirected(one_way)
    np.testing.assert_array_equal(view.toarray(), by_hand(one_way, np.ones(one_way.num_edges)))
    label = (np.arange(N) % 6).astype(np.int32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        small = contract(view, label, 6)
    finally:
        torch.set_num_threads(before)
    members = np.eye(6)[label]
    expected = members.T @ view.toarray() @ members
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(small.toarray(), expected, rtol=1e-6)
    assert small.nnz == np.count_nonzero(expected)


def test_a_large_contracted_graph_keeps_its_loops(monkeypatch: pytest.MonkeyPatch, graph: Graph):
    view, label = undirected(graph).to_csr(), (np.arange(N) % 6).astype(np.int32)
    members = np.eye(6)[label]
    expected = members.T @ view.toarray() @ members
    for most, kept in ((36, 0), (35, 1)):
        monkeypatch.setattr("tgnn.partition.undirected.LOOSE_ENTRIES", most)
        np.testing.assert_allclose(
            contract(view, label, 6).diagonal(), kept * np.diagonal(expected), rtol=1e-6
        )


def test_a_partition_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch):
    for module, name in (("undirected", "CHUNK_ENTRIES"), ("refine", "CHUNK_CONNECTIONS")):
        monkeypatch.setattr(f"tgnn.partition.{module}.{name}", 1 << 10)
    data = rmat(12, num_features=0)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(assign(data, 4))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
