"""Which part every vertex goes to: balance, cut, degenerate requests."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn, karate, sbm
from tgnn.errors import UserError
from tgnn.partition import assign, report
from tgnn.partition.balance import Requests


def symmetric(source: np.ndarray, destination: np.ndarray, num_vertices: int) -> Graph:
    both = np.stack([np.concatenate([source, destination]), np.concatenate([destination, source])])
    return Graph.from_edge_index(both, num_vertices)


def cliques(*sizes: int) -> Graph:
    """Separate cliques, one after the other."""
    ends, start = [], 0
    for size in sizes:
        ends.append(start + np.stack(np.triu_indices(size, 1)))
        start += size
    return symmetric(*np.concatenate(ends, axis=1), start)


@pytest.fixture(scope="module")
def communities() -> Dataset:
    """The community graph at a fiftieth of its size: 40 communities, 85 % of the pairs inside."""
    return sbm(4_000, seed=3, num_communities=40, pairs_per_vertex=12.5, inside=0.85, train_share=0.1)


@pytest.mark.parametrize("method", ["lp", "random"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 12, 50])
def test_every_vertex_gets_a_part(method: str, num_parts: int) -> None:
    part_of = assign(hand_drawn(), num_parts, method)
    assert part_of.dtype == np.int32 and part_of.shape == (12,)
    assert part_of.min() >= 0 and part_of.max() < num_parts


@pytest.mark.parametrize("method", ["lp", "random"])
def test_the_seed_decides(method: str, communities: Dataset) -> None:
    first = assign(communities, 3, method, seed=1)
    np.testing.assert_array_equal(first, assign(communities, 3, method, seed=1))
    assert (first != assign(communities, 3, method, seed=2)).any()


@pytest.mark.parametrize("num_parts", [2, 3, 7])
def test_random_deals_every_kind_evenly(num_parts: int, communities: Dataset) -> None:
    found = report(communities, assign(communities, num_parts, "random"), num_parts)
    for what in ("vertices", "train", "val", "test"):
        assert max(found[what]) - min(found[what]) <= 1


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_lp_keeps_its_caps(num_parts: int, communities: Dataset) -> None:
    found = report(communities, assign(communities, num_parts), num_parts)
    for what, slack in (("vertices", 1.05), ("edges", 1.05), ("train", 1.05), ("val", 1.10), ("test", 1.10)):
        counts = np.array(found[what])
        assert counts.max() <= max(slack * counts.mean(), np.ceil(counts.mean())) + 1e-6, what


def test_lp_cuts_little_more_than_metis(communities: Dataset) -> None:
    pymetis = pytest.importorskip("pymetis", reason="pymetis is not installed (pip install tgnn[metis])")
    graph = communities.graph
    adjacency = pymetis.CSRAdjacency(graph.indptr, graph.indices.astype(np.int64))
    metis_cut = report(graph, np.array(pymetis.part_graph(4, adjacency)[1]), 4)["cut_fraction"]
    cuts = [report(graph, assign(communities, 4, seed=seed), 4)["cut_fraction"] for seed in range(3)]
    assert np.median(cuts) <= 1.1 * metis_cut
    assert np.median(cuts) <= 0.15 < 0.7 <= report(graph, assign(communities, 4, "random"), 4)["cut_fraction"]


def test_metis_keeps_the_caps_too(communities: Dataset) -> None:
    pytest.importorskip("pymetis", reason="pymetis is not installed (pip install tgnn[metis])")
    part_of = assign(communities, 4, "metis", seed=5)
    np.testing.assert_array_equal(part_of, assign(communities, 4, "metis", seed=5))
    found = report(communities, part_of, 4)
    assert max(found["balance"].values()) <= 1.051
    assert found["cut_fraction"] <= 0.15
    assert set(assign(hand_drawn(), 20, "metis")) <= set(range(20))


def test_without_pymetis_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(UserError, match=r"pip install tgnn\[metis\]"):
        assign(karate(), 2, "metis")
    assign(karate(), 2, "lp")


def test_a18_training_vertices_all_in_one_clique() -> None:
    dataset = Dataset(
        "cliques", cliques(8, 8), y=np.arange(16) % 2, train=np.arange(8), val=[8, 9], test=[10, 11]
    )
    found = report(dataset, assign(dataset, 2), 2)
    assert found["train"] == [4, 4]
    assert max(found["edges"]) <= 63, "one vertex more than half at most"
    assert found["warnings"] == []
    apart = report(dataset, np.repeat([0, 1], 8), 2)
    assert apart["warnings"] == [
        "training vertices are uneven: 8, 0 per part, 2.00 times the mean at most.",
        "part 1 owns no training vertex: 8, 0 training vertices per part.",
    ]


def test_two_cliques_come_apart_where_training_allows_it() -> None:
    part_of = assign(cliques(8, 8), 2)
    assert len(set(part_of[:8])) == len(set(part_of[8:])) == 1 and part_of[0] != part_of[8]


@pytest.mark.parametrize("method", ["lp", "metis", "random"])
def test_without_edges_vertices_and_seeds_are_dealt_evenly(method: str) -> None:
    graph = Graph.from_edge_index(np.zeros((2, 0), np.int64), 50)
    dataset = Dataset("no edges", graph, train=np.arange(7), val=np.arange(7, 15), test=np.arange(15, 20))
    found = report(dataset, assign(dataset, 4, method), 4)
    for what in ("vertices", "train", "val", "test"):
        assert max(found[what]) - min(found[what]) <= 1


def test_isolated_vertices_are_spread() -> None:
    """Twelve cliques of ten among 300 vertices without an edge (self-loops do not count)."""
    clique_edges = cliques(*[10] * 12).edge_index()
    loops = np.arange(120, 170)
    graph = Graph.from_edge_index(np.concatenate([clique_edges, np.stack([loops, loops])], axis=1), 420)
    dataset = Dataset("mostly isolated", graph, train=np.arange(100, 160))
    found = report(dataset, assign(dataset, 4), 4)
    assert found["cut_edges"] == 0
    assert max(found["vertices"]) - min(found["vertices"]) <= 1
    assert max(found["train"]) - min(found["train"]) <= 1


@pytest.mark.parametrize("name", ["star", "pairs", "path", "two components"])
def test_shapes_that_resist_clustering(name: str) -> None:
    ends = {
        "star": (np.zeros(3000, np.int64), np.arange(1, 3001)),
        "pairs": (np.arange(1500) * 2, np.arange(1500) * 2 + 1),
        "path": (np.arange(3000), np.arange(1, 3001)),
        "two components": (np.r_[0:1400, 1500:3000], np.r_[1:1401, 1501:3001]),
    }[name]
    found = report(graph := symmetric(*ends, 3001), assign(graph, 3), 3)
    assert sum(found["vertices"]) == 3001
    if name == "star":
        # Nearly all in-edges are the hub's, so leaves stay with other parts.
        assert max(found["vertices"]) <= 1600
    else:
        assert found["balance"]["edges"] <= 1.06 and found["balance"]["vertices"] <= 1.06
        assert found["cut_edges"] <= 12


def test_work_given_by_weights_is_balanced_column_by_column() -> None:
    graph = sbm(1_000, seed=1).graph
    rng = np.random.default_rng(0)
    work = rng.integers(0, 9, (1_000, 2)) * rng.integers(0, 2, (1_000, 2))
    part_of = assign(graph, 3, vertex_weight=work)
    for column in work.T:
        loads = np.bincount(part_of, weights=column, minlength=3)
        assert loads.max() <= 1.05 * loads.mean() + column.max()
    assert assign(graph, 3, vertex_weight=work[:, 0]).shape == (1_000,)


def test_heavy_edges_are_not_cut() -> None:
    """A ring whose edges all weigh little but for four pairs: the pairs stay together."""
    source = np.arange(40)
    graph = symmetric(source, (source + 1) % 40, 40)
    ends = graph.edge_index()
    heavy = (ends.min(axis=0) % 10 == 4) & (ends.max(axis=0) % 10 == 5)
    part_of = assign(graph, 2, edge_weight=np.where(heavy, 100.0, 1.0))
    source, destination = ends[:, heavy]
    np.testing.assert_array_equal(part_of[source], part_of[destination])


def test_no_vertices() -> None:
    graph = Graph.from_edge_index(np.zeros((2, 0), np.int64), 0)
    for method in ("lp", "random", "metis"):
        assert assign(graph, 3, method).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_parts": 0}, "number of parts"),
        ({"num_parts": 2, "method": "best"}, "lp or metis or random"),
        ({"num_parts": 2, "train": np.ones(12, bool)}, "train"),
        ({"num_parts": 2, "val": np.array([12])}, "val"),
        ({"num_parts": 2, "vertex_weight": np.ones(11)}, "vertex_weight"),
        ({"num_parts": 2, "vertex_weight": np.full(12, np.nan)}, "vertex_weight"),
        ({"num_parts": 2, "edge_weight": -np.ones(36)}, "edge_weight"),
        ({"num_parts": 2, "edge_weight": np.ones((36, 2))}, "edge_weight"),
    ],
)
def test_bad_requests_are_refused(arguments: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        assign(hand_drawn(), **arguments)


def test_granted_requests_stay_within_the_room() -> None:
    rng = np.random.default_rng(0)
    target, gain = rng.integers(0, 4, 500), rng.random(500)
    weights = rng.integers(0, 3, (2, 500)).astype(np.float64)
    room = np.array([[30.0, 0.0, 9.0, 1e9], [20.0, 50.0, 9.0, 1e9]])
    granted = Requests(target, gain).within(weights, room)
    for part in range(4):
        mine = granted[target[granted] == part]
        assert (weights[:, mine].sum(axis=1) <= room[:, part]).all()
    assert (target[granted] == 3).sum() == (target == 3).sum()
    assert (target[granted] == 0).any() and (weights[0, granted[target[granted] == 1]] == 0).all()


def test_far_more_parts_than_vertices_are_refused():
    assert assign(hand_drawn(), 1024).max() < 1024
    with pytest.raises(
        UserError, match="number of parts: got 100000000, expected at most 1024 for 12 vertices"
    ):
        assign(hand_drawn(), 10**8)
