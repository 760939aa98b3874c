"""Generators: their promised statistics, and that a seed gives one data set."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp

from tgnn.data import synthetic
from tgnn.errors import UserError


def assert_symmetric_simple(graph):
    source, destination = graph.edge_index()
    assert (source != destination).all()
    pairs = set(zip(source.tolist(), destination.tolist(), strict=True))
    assert len(pairs) == graph.num_edges
    assert pairs == {(v, u) for u, v in pairs}


def ridge_accuracy(x, data):
    """Test accuracy of a linear model with bias, fitted on train in closed form."""
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)
    fit, target = x[data.train], np.eye(data.num_classes)[data.y[data.train]]
    weight = np.linalg.solve(fit.T @ fit + np.eye(x.shape[1]), fit.T @ target)
    return np.mean((x[data.test] @ weight).argmax(axis=1) == data.y[data.test])


@pytest.mark.parametrize("seed", [0, 1])
def test_sbm_is_hard_without_the_graph_and_easy_with_it(seed):
    data = synthetic.sbm(seed=seed)
    graph = data.graph
    adjacency = sp.csr_matrix(
        (np.ones(graph.num_edges), graph.indices, graph.indptr), shape=(data.num_vertices,) * 2
    )
    mean = sp.diags(1 / np.maximum(graph.degree_in(), 1)) @ adjacency
    one_hop = mean @ data.x
    assert 0.40 <= ridge_accuracy(data.x, data) <= 0.60
    assert ridge_accuracy(np.concatenate([data.x, one_hop, mean @ one_hop], axis=1), data) >= 0.85
    assert_symmetric_simple(graph)
    assert sorted(np.concatenate([data.train, data.val, data.test])) == list(range(data.num_vertices))
    assert (4000 <= data.num_vertices <= 10000) and data.num_classes == 8


def test_rmat_counts_at_a_small_scale():
    data = synthetic.rmat(scale=12, num_features=3)
    assert data.num_vertices == 4096 and data.x.shape == (4096, 3)
    assert_symmetric_simple(data.graph)
    degree = data.graph.degree_in()
    assert 80_000 < data.graph.num_edges < 2 * 15 * 4096
    assert degree.max() > 20 * np.median(degree)
    splits = np.concatenate([data.train, data.val, data.test])
    assert sorted(splits) == list(np.flatnonzero(degree > 0))


def test_rmat_quadrants_are_drawn_with_their_probabilities():
    rng = np.random.Generator(np.random.PCG64(3))
    source, destination = synthetic._rmat_draws(1, 100_000, (0.57, 0.19, 0.19), rng)
    share = np.bincount(source * 2 + destination, minlength=4) / 100_000
    np.testing.assert_allclose(share, [0.57, 0.19, 0.19, 0.05], atol=0.006)


def test_rmat_at_the_default_scale_has_7_2_million_edges():
    graph = synthetic.rmat(num_features=0).graph
    assert graph.num_vertices == 2**18
    np.testing.assert_allclose(graph.num_edges, 7.2e6, rtol=0.01)


def test_community_statistics_at_full_size():
    graph = synthetic.community(num_features=1).graph
    np.testing.assert_allclose(graph.num_edges, 4.7e6, rtol=0.01)
    assert 600 <= graph.degree_in().max() <= 1200


def test_community_pairs_stay_inside_as_often_as_asked():
    rng = np.random.Generator(np.random.PCG64(0))
    groups = rng.integers(0, 50, 2000)
    source, destination = synthetic._community_pairs(groups, 1.0 + rng.pareto(2.2, 2000), 50_000, 0.85, rng)
    np.testing.assert_allclose(np.mean(groups[source] == groups[destination]), 0.85 + 0.15 / 50, atol=0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: synthetic.sbm(500, seed),
        lambda seed: synthetic.rmat(8, seed=seed, num_features=2),
        lambda seed: synthetic.community(1000, seed, num_features=2),
    ],
)
def test_a14_same_seed_same_data_other_seed_other_data(make):
    first, again, other = make(7), make(7), make(8)
    for field in ("x", "y", "train", "val", "test"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    np.testing.assert_array_equal(first.graph.edge_index(), again.graph.edge_index())
    assert not np.array_equal(first.graph.degree_in(), other.graph.degree_in())
    assert not np.array_equal(first.train, other.train)


def test_karate_is_zacharys_club():
    data, reference = synthetic.karate(), nx.karate_club_graph()
    ours = set(zip(*data.graph.edge_index().tolist(), strict=True))
    assert ours == set(reference.to_directed().edges())
    assert (data.num_vertices, data.graph.num_edges) == (34, 156)
    officers = [reference.nodes[v]["club"] == "Officer" for v in range(34)]
    np.testing.assert_array_equal(data.y, np.array(officers).astype(int))


def test_a16_ring_sends_to_the_next_of_its_own_ring():
    data = synthetic.ring(10, 2)
    np.testing.assert_array_equal(data.graph.indices, [4, 0, 1, 2, 3, 9, 5, 6, 7, 8])
    with pytest.raises(UserError, match="10 vertices in 3 rings"):
        synthetic.ring(10, 3)


def test_hand_drawn_has_every_oddity():
    data = synthetic.hand_drawn()
    source, destination = data.graph.edge_index()
    pairs, counts = np.unique(np.stack([source, destination]), axis=1, return_counts=True)
    assert counts.max() == 3
    assert (source == destination).sum() == 1
    degree_in, degree_out = data.graph.degree_in(), data.graph.degree_out()
    assert degree_in[10] == 0 < degree_out[10]
    assert degree_in[11] == degree_out[11] == 0
    assert degree_in[4] == 10
    assert data.y[9] == -1 and data.num_classes == 3
    reverse = set(zip(destination.tolist(), source.tolist(), strict=True))
    assert reverse != set(zip(source.tolist(), destination.tolist(), strict=True))
    assert data.graph.edge_weight is None
    weighted = synthetic.hand_drawn(with_weights=True).graph
    np.testing.assert_array_equal(weighted.edge_weight, 0.5 + np.arange(weighted.num_edges) % 4 / 4)


@pytest.mark.parametrize(
    "make", [lambda: synthetic.rmat(0), lambda: synthetic.rmat(31), lambda: synthetic.sbm(1)]
)
def test_sizes_out_of_range(make):
    with pytest.raises(UserError, match="got"):
        make()
