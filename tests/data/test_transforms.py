"""Edits of graphs and data sets, each against a small case worked out by hand or a dense matrix."""

from __future__ import annotations

import numpy as np
import pytest

from tgnn.data import Dataset, Graph, edits, synthetic, transforms
from tgnn.errors import UserError


def graph_of(pairs, n, weight=None):
    """A graph from (source, destination) pairs."""
    return Graph.from_edge_index(np.array(pairs).reshape(-1, 2).T, n, weight)


def pairs_of(graph):
    """Its edges as sorted (source, destination) pairs, parallel ones repeated."""
    return sorted(zip(*graph.edge_index().tolist(), strict=True))


def counts_of(graph):
    """Dense [N, N] number of edges from row to column."""
    counts = np.zeros((graph.num_vertices,) * 2, np.int64)
    np.add.at(counts, tuple(graph.edge_index()), 1)
    return counts


@pytest.fixture
def messy():
    """A random directed multigraph with loops and weights."""
    rng = np.random.default_rng(5)
    return Graph.from_edge_index(rng.integers(0, 12, (2, 150)), 14, rng.random(150))


def test_a16_merge_duplicates_of_the_worked_example():
    graph = graph_of([(0, 1), (0, 1), (2, 1)], 3, [1.0, 2.0, 4.0])
    merged = edits.merge_parallel_edges(graph)
    assert pairs_of(merged) == [(0, 1), (2, 1)]
    np.testing.assert_array_equal(merged.edge_weight, np.float32([3, 4]))
    x = np.array([1.0, 10.0, 5.0])
    np.testing.assert_allclose(x[graph.indices].mean(), (2 * x[0] + x[2]) / 3)
    np.testing.assert_allclose(x[merged.indices].mean(), (x[0] + x[2]) / 2)


def test_merge_duplicates_equals_the_dense_sum(messy):
    merged = edits.merge_parallel_edges(messy)
    np.testing.assert_array_equal(counts_of(merged), counts_of(messy) > 0)
    dense, expected = np.zeros((14, 14)), np.zeros((14, 14))
    dense[tuple(merged.edge_index())] = merged.edge_weight
    np.add.at(expected, tuple(messy.edge_index()), messy.edge_weight)
    np.testing.assert_allclose(dense, expected, rtol=1e-6)
    assert pairs_of(edits.merge_parallel_edges(merged)) == pairs_of(merged)


def test_a16_add_reverse_of_the_worked_example():
    graph = edits.add_reverse_edges(graph_of([(0, 1), (0, 1), (1, 0), (2, 2)], 3))
    assert pairs_of(graph) == [(0, 1), (0, 1), (1, 0), (1, 0), (2, 2)]


def test_add_reverse_takes_the_larger_count_of_both_directions(messy):
    both = edits.add_reverse_edges(messy)
    counts = counts_of(messy)
    np.testing.assert_array_equal(counts_of(both), np.maximum(counts, counts.T))
    assert edits.add_reverse_edges(both) is both


def test_add_reverse_copies_the_weight_of_the_edge_it_reverses():
    graph = edits.add_reverse_edges(graph_of([(0, 1), (0, 1), (1, 0)], 2, [1.0, 2.0, 7.0]))
    np.testing.assert_array_equal(graph.indices, [1, 1, 0, 0])
    np.testing.assert_array_equal(graph.edge_weight, np.float32([7, 2, 1, 2]))


def test_a16_direction_is_kept_on_a_path():
    graph = graph_of([(0, 1), (1, 2)], 3)
    assert [list(graph.indices[graph.indptr[v] : graph.indptr[v + 1]]) for v in range(3)] == [[], [0], [1]]


def test_a16_self_loops_are_added_once():
    graph = graph_of([(0, 1), (1, 1)], 3, [5.0, 6.0])
    looped = edits.add_self_loops(graph)
    assert pairs_of(looped) == [(0, 0), (0, 1), (1, 1), (2, 2)]
    np.testing.assert_array_equal(looped.edge_weight, np.float32([1, 5, 6, 1]))
    assert pairs_of(edits.add_self_loops(looped)) == pairs_of(looped)
    assert pairs_of(edits.remove_self_loops(looped)) == [(0, 1)]


def test_self_loop_edits_equal_the_dense_ones(messy):
    counts = counts_of(messy)
    off_diagonal = counts - np.diag(np.diag(counts))
    np.testing.assert_array_equal(counts_of(edits.remove_self_loops(messy)), off_diagonal)
    looped = off_diagonal + np.diag(np.maximum(np.diag(counts), 1))
    np.testing.assert_array_equal(counts_of(edits.add_self_loops(messy)), looped)


@pytest.mark.parametrize(
    "edit",
    [edits.merge_parallel_edges, edits.add_reverse_edges, edits.add_self_loops, edits.remove_self_loops],
)
@pytest.mark.parametrize("n", [0, 3])
def test_edits_of_a_graph_without_edges(edit, n):
    loops = n if edit is edits.add_self_loops else 0
    assert edit(graph_of([], n)).num_edges == loops


def test_largest_component_is_weak_and_takes_the_lowest_of_equals():
    graph = graph_of([(1, 0), (1, 2), (4, 3), (3, 5)], 7)
    np.testing.assert_array_equal(edits.largest_component(graph), [1, 1, 1, 0, 0, 0, 0])
    assert not edits.largest_component(graph_of([], 0)).size


def test_largest_component_of_a_data_set_renumbers_everything():
    graph = graph_of([(0, 1), (3, 2), (5, 3), (2, 5)], 6, [1, 2, 3, 4])
    x = np.arange(6.0).reshape(6, 1)
    data = Dataset("two", graph, x, [0, 1, 2, 0, 1, 2], train=[0, 3], val=[5], test=[1, 2])
    kept = transforms.largest_component(data)
    np.testing.assert_array_equal(kept.original_names, [2, 3, 5])
    np.testing.assert_array_equal(kept.x[:, 0], [2, 3, 5])
    np.testing.assert_array_equal(kept.y, [2, 0, 2])
    assert (list(kept.train), list(kept.val), list(kept.test)) == ([1], [2], [0])
    assert pairs_of(kept.graph) == [(0, 2), (1, 0), (2, 1)]
    np.testing.assert_array_equal(kept.graph.edge_weight, np.float32([2, 3, 4]))
    assert kept.options["largest_component"] and kept.options["vertices_before_component"] == 6
    named = transforms.largest_component(data.changed(original_names=np.arange(6) * 10))
    np.testing.assert_array_equal(named.original_names, [20, 30, 50])


def test_random_split_takes_so_many_per_class_and_no_unlabelled_vertex():
    data = synthetic.sbm(2000)
    y = data.y.copy()
    y[::7] = -1
    none = {"train": None, "val": None, "test": None}
    cut = transforms.split(data.changed(y=y, **none), "random:20,30", seed=3)
    np.testing.assert_array_equal(np.bincount(y[cut.train]), [20] * 8)
    np.testing.assert_array_equal(np.bincount(y[cut.val]), [30] * 8)
    assert len(cut.test) == (y >= 0).sum() - 8 * 50
    assert cut.options["split"] == "random:20,30" and cut.options["split_seed"] == 3
    again, other = (transforms.split(data, "random:20,30", seed) for seed in (3, 4))
    assert not np.array_equal(other.train, again.train)


def test_share_split_leaves_out_unlabelled_vertices():
    y = [0, 1, np.nan, 1, -1, 0, 2, np.nan, 0, 0, 1, 1, 2]
    data = Dataset("tiny", graph_of([], 13), y=y)
    cut = transforms.split(data, "0.6,0.2,.2")
    assert [len(cut.train), len(cut.val), len(cut.test)] == [6, 2, 2]
    assert sorted(np.concatenate([cut.train, cut.val, cut.test])) == list(np.flatnonzero(data.labelled()))
    assert len(transforms.split(data, "0.1,0.1,0.1").train) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fixed", "without a split"),
        ("random:2,2", "3 vertices of class 1.*at least 4"),
        ("0.6,0.3,0.2", "1.1.*at most 1"),
        ("random:20", "random:T,V"),
        ("often", "'often'"),
    ],
)
def test_bad_splits(spec, message):
    data = Dataset("tiny", graph_of([], 8), y=[0] * 5 + [1] * 3)
    with pytest.raises(UserError, match=message):
        transforms.split(data, spec)
    with pytest.raises(UserError):
        transforms.split(Dataset("bare", graph_of([], 8)), spec)


def test_random_split_of_multi_label_data_is_refused():
    with pytest.raises(UserError, match="multi-label"):
        transforms.split(Dataset("multi", graph_of([], 2), y=[[0, 1], [1, 1]]), "random:1,1")


def test_feature_norm_rows_and_columns():
    x = np.array([[1.0, 3.0, 7.0], [0.0, 0.0, 0.0], [2.0, 0.0, 7.0]])
    data = Dataset("tiny", graph_of([], 3), x)
    rows = transforms.feature_norm(data, "row")
    np.testing.assert_allclose(rows.x, [[1 / 11, 3 / 11, 7 / 11], [0, 0, 0], [2 / 9, 0, 7 / 9]], rtol=1e-6)
    columns = transforms.feature_norm(data.changed(x=x[:, :2]), "column").x
    np.testing.assert_allclose(columns.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(columns.std(axis=0), 1, rtol=1e-6)
    constant = transforms.feature_norm(data.changed(x=np.full((3, 1), 7.0)), "column").x
    np.testing.assert_array_equal(constant, np.zeros((3, 1)))
    np.testing.assert_array_equal(data.x, x)
    assert rows.options["feature_norm"] == "row" and "feature_norm" not in data.options


def test_feature_norm_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="negative"):
        transforms.feature_norm(Dataset("tiny", graph_of([], 1), [[-1.0]]), "row")
    with pytest.raises(UserError, match="without features"):
        transforms.feature_norm(Dataset("tiny", graph_of([], 1)), "row")


def test_edits_record_themselves():
    data = Dataset("tiny", graph_of([(0, 1), (0, 1)], 2))
    assert transforms.merge_duplicates(data).options == {"duplicates": "merge"}
    assert transforms.add_reverse(data).options == {"add_reverse": True}
    assert transforms.self_loops(data, "add").options == {"self_loops": "add"}
    assert transforms.self_loops(data, "keep").graph is data.graph
    with pytest.raises(UserError, match="add, remove or keep"):
        transforms.self_loops(data, "twice")
