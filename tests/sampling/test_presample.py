"""Presampling: what is counted, that it is repeatable and shared, and what it does to a partition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist.ranks import run_ranks
from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn, sbm
from tgnn.errors import UserError
from tgnn.parallel.comm import Comm, current
from tgnn.partition import assign
from tgnn.sampling.presample import Presampled, halo_requests, planned_steps, presample
from tgnn.sampling.replay import count_split, replay
from tgnn.training import partitioning
from tgnn.training.partitioning import PresampleOptions, partitioned

FANOUTS = [3, 2]
ARRAYS = ("vertex_edges", "inputs", "draws", "appearances")


def counted(dataset: Dataset, batch_size: int, steps: int) -> dict[str, np.ndarray]:
    """The same counts, edge by edge."""
    planned = planned_steps(dataset.graph, dataset.train, FANOUTS, batch_size)
    found = {name: np.zeros(dataset.num_vertices) for name in ARRAYS}
    for (epoch, step, seeds), _ in zip(planned.batches(), range(steps), strict=False):
        hops = planned.sample(seeds, epoch, step)
        for hop in hops:
            rows = hop.rows.tolist()
            sources = [rows[s] for s in hop.block.indices.tolist()]
            for number, degree in enumerate(hop.block.degrees.tolist()):
                found["vertex_edges"][rows[number]] += degree
            for source in sources:
                found["draws"][source] += 1
            for source in set(sources):
                found["appearances"][source] += 1
        found["inputs"][hops[0].rows.numpy()] += 1
    return {name: array / steps for name, array in found.items()}


def test_counts_are_those_of_the_sampled_blocks() -> None:
    dataset = hand_drawn()
    found = presample(dataset.graph, dataset.train, FANOUTS, 3, epochs=2)
    assert found.steps == 6 and found.options["fanouts"] == FANOUTS
    for name, expected in counted(dataset, 3, 6).items():
        array = getattr(found, name)
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, expected, rtol=1e-6)


def test_steps_are_bounded_and_the_seed_decides() -> None:
    dataset = sbm(300, num_features=1)
    first = presample(dataset.graph, dataset.train, FANOUTS, 10, most_steps=4)
    assert first.steps == first.options["steps"] == 4
    again = presample(dataset.graph, dataset.train, FANOUTS, 10, most_steps=4)
    other = presample(dataset.graph, dataset.train, FANOUTS, 10, most_steps=4, seed=1)
    np.testing.assert_array_equal(first.inputs, again.inputs)
    assert (first.inputs != other.inputs).any()


def test_with_every_in_edge_drawn_the_expected_draws_are_the_visits() -> None:
    """Ring 0 -> 1 -> 2 -> 3 -> 0, seeds {2} each step, two hops of all in-edges: 1 -> 2 and 0 -> 1 are drawn."""
    ring = Graph.from_edge_index(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    found = presample(ring, np.array([2]), [-1, -1], 1, epochs=3)
    # Hop 1's frontier holds the seed again: its in-edge is drawn once in each hop.
    np.testing.assert_array_equal(found.edge_draws(ring), [0, 1, 2, 0])
    np.testing.assert_array_equal(found.inputs, [1, 1, 1, 0])


def test_draws_follow_the_edge_weights_of_the_weighted_sampler() -> None:
    graph = Graph.from_edge_index(np.array([[1, 2], [0, 0]]), 3, np.array([3.0, 1.0]))
    found = presample(graph, np.array([0]), [1], 1, sampler="weighted", replace=True, epochs=5)
    np.testing.assert_allclose(found.edge_draws(graph), [0.75, 0.25])


def test_the_cost_of_a_hubs_out_edges_is_how_often_its_row_travels_at_most() -> None:
    """A hub drawn by ten destinations in each step is one row, whoever else needs it."""
    star = Graph.from_edge_index(np.stack([np.zeros(10, int), np.arange(1, 11)]), 11)
    found = presample(star, np.arange(1, 11), [-1], 10, epochs=50)
    assert found.draws[0] == 10 and found.appearances[0] == 1
    weights = found.edge_factors(star).weights(star.indptr, star.indices)
    np.testing.assert_allclose(weights.sum(), 1, atol=0.05)
    np.testing.assert_allclose(weights, weights[0])


def test_requests_for_halo_rows_are_counted_by_part() -> None:
    dataset = sbm(200, num_features=1)
    part_of = np.arange(200) % 3
    planned = planned_steps(dataset.graph, dataset.train, FANOUTS, 20)
    halo = halo_requests(planned, 4, part_of, 3)
    total = 0
    for (epoch, step, seeds), _ in zip(planned.batches(), range(4), strict=False):
        total += count_split(planned.sample(seeds, epoch, step), part_of, 3).halo[0].sum(axis=1)
    for part, (ids, requests) in enumerate(halo):
        assert (part_of[ids] != part).all() and (np.diff(requests) <= 0).all() and (requests > 0).all()
        ties = np.diff(requests) == 0
        assert ties.any() and (np.diff(ids)[ties] > 0).all()
        np.testing.assert_allclose(requests.sum() * 4, total[part], rtol=1e-5)


def on_a_rank() -> list[int]:
    dataset = hand_drawn()
    found = presample(dataset.graph, dataset.train, FANOUTS, 3, epochs=2, comm=current())
    alone = presample(dataset.graph, dataset.train, FANOUTS, 3, epochs=2, comm=Comm())
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
    return current().all_gather_ints([found.steps])


def test_ranks_share_the_steps_and_get_the_same_sums() -> None:
    assert run_ranks(on_a_rank, 2) == [[6], [6]]


@pytest.mark.parametrize("options", [{"epochs": 0}, {"most_steps": 0}])
def test_nothing_to_presample_is_refused(options: dict) -> None:
    dataset = hand_drawn()
    with pytest.raises(UserError, match="at least 1"):
        presample(dataset.graph, dataset.train, FANOUTS, 3, **options)
    with pytest.raises(UserError, match="no training vertex"):
        presample(dataset.graph, np.zeros(0, np.int64), FANOUTS, 3)


COMMUNITY = np.random.Generator(np.random.PCG64(1)).integers(0, 40, 4_000)
"""Of the vertices of `sbm(4_000, seed=1)`: its first draw."""


@pytest.fixture(scope="module")
def lopsided() -> Dataset:
    """40 communities of 100; all training vertices lie in two of them."""
    dataset = sbm(4_000, seed=1, inside=0.9, num_features=1)
    return Dataset("lopsided", dataset.graph, y=dataset.y, train=np.flatnonzero(COMMUNITY < 2))


def test_a18_training_vertices_in_two_of_forty_communities(lopsided: Dataset) -> None:
    """Whole communities in turn leave most of the work to two parts; by expected work none does 15 % too much."""
    assert replay(lopsided, (10, 10), 64, COMMUNITY % 4, 4, steps=4).balance > 1.4
    made = partitioned(lopsided, 4, options=PresampleOptions(fanouts=(10, 10), batch_size=64))
    assert made.report["expected"]["partitions"]["presampled lp"]["balance"] < 1.15
    assert max(made.report["train"]) <= 1.1 * sum(made.report["train"]) / 4 + 1


def test_a_partition_by_in_edges_is_made_only_to_compare_with(
    lopsided: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as the one that is kept."""
    made: list[str] = []

    def counted(data: Dataset, parts: int, method: str = "lp", **options: object) -> np.ndarray:
        made.append(method)
        return assign(data, parts, method, **options)

    monkeypatch.setattr(partitioning, "assign", counted)
    options = PresampleOptions(fanouts=(5,), batch_size=64)
    alone = partitioned(lopsided, 4, options=options)
    assert made.count("lp") == 1
    compared = partitioned(lopsided, 4, options=options, compare=True)
    assert made.count("lp") == 3
    assert list(compared.report["expected"]["partitions"]) == ["random", "unweighted lp", "presampled lp"]
    assert np.array_equal(alone.part_of, compared.part_of)


def test_presampled_parts_exchange_less_where_use_is_uneven(lopsided: Dataset) -> None:
    made = partitioned(lopsided, 4, options=PresampleOptions(fanouts=(5, 5), batch_size=64))
    found = made.report["expected"]["partitions"]
    rows = {name: sum(counts["exchange_rows"]) for name, counts in found.items()}
    assert rows["presampled lp"] < rows["random"]
    assert made.report["expected"]["redundancy"]["input_rows"] > 1


@pytest.mark.parametrize("method", ["lp", "metis"])
def test_partitioners_take_the_weights_as_factors_and_as_numbers(method: str, lopsided: Dataset) -> None:
    if method == "metis":
        pytest.importorskip("pymetis")
    graph = lopsided.graph
    used: Presampled = presample(graph, lopsided.train, [5, 5], 64)
    factors = used.edge_factors(graph)
    one = assign(lopsided, 4, method, vertex_weight=used.vertex_edges, edge_weight=factors)
    weights = factors.weights(graph.indptr, graph.indices)
    other = assign(lopsided, 4, method, vertex_weight=used.vertex_edges, edge_weight=weights)
    for part_of in (one, other):
        work = np.bincount(part_of, weights=used.vertex_edges, minlength=4)
        assert work.max() <= 1.06 * work.mean()
