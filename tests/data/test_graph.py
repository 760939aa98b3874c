"""Graph: the canonical in-edge CSR, its constructors, and what they refuse."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from tgnn.data.graph import Graph, stable_order
from tgnn.errors import UserError


def test_rows_are_sorted_by_source_then_input_order():
    graph = Graph.from_edge_index([[0, 0, 2, 1, 2], [1, 1, 1, 1, 0]], 6, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(graph.indptr, [0, 1, 5, 5, 5, 5, 5])
    np.testing.assert_array_equal(graph.indices, [2, 0, 0, 1, 2])
    np.testing.assert_array_equal(graph.edge_weight, np.float32([5, 1, 2, 4, 3]))
    assert graph.indptr.dtype == np.int64 and graph.indices.dtype == np.int32
    assert graph.edge_weight.dtype == np.float32
    assert (graph.num_vertices, graph.num_edges) == (6, 5)
    np.testing.assert_array_equal(graph.degree_in(), [1, 4, 0, 0, 0, 0])
    np.testing.assert_array_equal(graph.degree_out(), [2, 1, 2, 0, 0, 0])
    np.testing.assert_array_equal(graph.destinations(), [0, 1, 1, 1, 1])


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_canonical_order_equals_a_stable_sort(dtype):
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 50, (2, 3000)).astype(dtype)
    weight = rng.random(3000).astype(np.float32)
    graph = Graph.from_edge_index(edges, 60, weight)
    order = np.lexsort((edges[0], edges[1]))
    np.testing.assert_array_equal(graph.edge_index(), edges[:, order])
    np.testing.assert_array_equal(graph.edge_weight, weight[order])


def test_stable_order_worked_example():
    indptr, order = stable_order(np.array([2, 0, 2, 1]), 3)
    np.testing.assert_array_equal(order, [1, 3, 0, 2])
    np.testing.assert_array_equal(indptr, [0, 1, 2, 4])


def test_tensors_strided_views_and_arrays_give_the_same_graph():
    pairs = np.array([[3, 1], [0, 1], [3, 0]])
    expected = Graph.from_edge_index(pairs.T.copy(), 4)
    for given in (pairs.T, torch.as_tensor(pairs).T, pairs.T.tolist()):
        np.testing.assert_array_equal(Graph.from_edge_index(given, 4).edge_index(), expected.edge_index())


@pytest.mark.parametrize("num_vertices", [0, 3])
def test_no_edges(num_vertices):
    graph = Graph.from_edge_index(np.zeros((2, 0), np.int64), num_vertices)
    assert (graph.num_vertices, graph.num_edges) == (num_vertices, 0)
    assert graph.edge_index().shape == (2, 0)
    assert len(graph.degree_in()) == len(graph.degree_out()) == num_vertices


def test_from_csr_sorts_rows_and_carries_weights():
    graph = Graph.from_csr([0, 3, 3, 4], [2, 0, 2, 1], [7, 8, 9, 6])
    np.testing.assert_array_equal(graph.indices, [0, 2, 2, 1])
    np.testing.assert_array_equal(graph.edge_weight, np.float32([8, 7, 9, 6]))


def test_constructor_refuses_rows_out_of_order():
    Graph(np.array([0, 2, 3]), np.array([0, 1, 0]))
    with pytest.raises(UserError, match="descends at position 1.*from_csr"):
        Graph(np.array([0, 2, 3]), np.array([1, 0, 0]))


def test_a02_isolated_last_vertex_keeps_its_row():
    graph = Graph.from_edge_index([[0, 1, 2, 3], [1, 2, 3, 4]], 6)
    assert graph.num_vertices == 6
    assert len(graph.degree_in()) == len(graph.degree_out()) == 6
    assert graph.degree_in()[5] == graph.degree_out()[5] == 0


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([[0, 2], [1, 9]], r"edge 1 = \(2, 9\).*\[0, 5\)"),
        ([[0, -1], [1, 0]], r"edge 1 = \(-1, 0\).*\[0, 5\)"),
        ([[1.0], [0.0]], "float64.*integer"),
        ([[True], [False]], "bool.*integer"),
        ([[0, 1, 2]], r"shape \(1, 3\).*\(2, E\)"),
        ([[0, 1], [1]], "ragged"),
        ([["a"], ["b"]], "numbers"),
    ],
)
def test_a03_bad_edges_are_named(edges, message):
    with pytest.raises(UserError, match=message):
        Graph.from_edge_index(edges, 5)


@pytest.mark.parametrize("count", [-1, 2.0, None, True, "3"])
def test_bad_number_of_vertices(count):
    with pytest.raises(UserError, match="num_vertices"):
        Graph.from_edge_index(np.zeros((2, 0), np.int64), count)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1], [0, 0], "offsets"),
        ([0, 1, 3], [0, 0], "offsets"),
        ([1, 1, 2], [0, 0], "offsets"),
        ([0.0, 1.0], [0], "integer"),
        ([0, 1, 2], [0, 2], r"id 2 at position 1.*\[0, 2\)"),
    ],
)
def test_bad_csr(indptr, indices, message):
    with pytest.raises(UserError, match=message):
        Graph.from_csr(indptr, indices)


@pytest.mark.parametrize(
    "weight", [[1.0], [1.0, np.nan], [-np.inf, 1.0], [1e300, 1.0], [[1.0, 2.0]], ["a", "b"]]
)
def test_bad_weights(weight):
    with pytest.raises(UserError, match="edge_weight"):
        Graph.from_edge_index([[0, 1], [1, 0]], 2, weight)


def test_a16_from_scipy_points_from_row_to_column_and_keeps_duplicates():
    matrix = sp.coo_matrix(([5.0, 1.0, 2.0, 0.0], ([0, 1, 1, 2], [1, 2, 2, 0])), shape=(4, 4))
    graph = Graph.from_scipy(matrix)
    np.testing.assert_array_equal(graph.edge_index(), [[0, 1, 1], [1, 2, 2]])
    assert graph.edge_weight is None
    np.testing.assert_array_equal(Graph.from_scipy(matrix, True).edge_weight, np.float32([5, 1, 2]))
    np.testing.assert_array_equal(
        Graph.from_scipy(sp.csr_array(matrix.toarray())).edge_index(), [[0, 1], [1, 2]]
    )


@pytest.mark.parametrize("matrix", [np.eye(3), sp.eye(2, 3)])
def test_from_scipy_refuses(matrix):
    with pytest.raises(UserError, match="matrix"):
        Graph.from_scipy(matrix)


def test_from_networkx_directed_undirected_and_multi():
    undirected = nx.Graph([("a", "b"), ("b", "b")])
    np.testing.assert_array_equal(Graph.from_networkx(undirected).edge_index(), [[1, 0, 1], [0, 1, 1]])
    directed = nx.MultiDiGraph([(10, 20), (10, 20), (20, 30)])
    directed.add_node(40)
    graph = Graph.from_networkx(directed)
    np.testing.assert_array_equal(graph.edge_index(), [[0, 0, 1], [1, 1, 2]])
    assert graph.num_vertices == 4
    assert Graph.from_networkx(nx.Graph()).num_vertices == 0


def test_from_networkx_weights():
    graph = nx.Graph()
    graph.add_edge(0, 1, w=2.5)
    np.testing.assert_array_equal(Graph.from_networkx(graph, "w").edge_weight, np.float32([2.5, 2.5]))
    graph.add_edge(1, 2)
    with pytest.raises(UserError, match="1 edges without the attribute 'w'"):
        Graph.from_networkx(graph, "w")
