"""Counting split and data steps on one rank: against sets of pairs, and against what ranks really exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.ranks import run_ranks
from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn, sbm
from tgnn.errors import UserError
from tgnn.parallel.comm import Comm, current
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.sampling.replay import Steps, count_split, replay
from tgnn.sampling.topology import Topology

FANOUTS, BATCH, PARTS = [3, 2], 5, 3


def sampled(dataset: Dataset, batch_size: int = BATCH) -> list[list]:
    """The hops of every step of one epoch."""
    steps = Steps(Topology.of_graph(dataset.graph), dataset.train, dataset.train, FANOUTS, batch_size)
    found = []
    for epoch, step, seeds in steps.batches():
        if epoch:
            return found
        found.append(steps.sample(seeds, epoch, step))
    return found


def pairs_by_hand(hop: Any, part_of: np.ndarray) -> tuple[set, set]:
    """(requester, source) pairs across parts, and (destination, source part) pairs across parts."""
    rows, degrees = hop.rows.tolist(), hop.block.degrees.tolist()
    destinations = np.repeat(np.arange(hop.block.n_dst), degrees).tolist()
    halo, partial = set(), set()
    for d, s in zip(destinations, hop.block.indices.tolist(), strict=True):
        dst, src = rows[d], rows[s]
        if part_of[dst] != part_of[src]:
            halo.add((int(part_of[dst]), src))
            partial.add((dst, int(part_of[src])))
    return halo, partial


def matrix(pairs: list[tuple[int, int]]) -> np.ndarray:
    counts = np.zeros((PARTS, PARTS), np.int64)
    for requester, owner in pairs:
        counts[requester, owner] += 1
    return counts


def test_a_step_of_the_hand_drawn_graph_is_counted_pair_by_pair() -> None:
    dataset = hand_drawn()
    part_of = np.arange(12) % PARTS
    for hops in sampled(dataset):
        found = count_split(hops, part_of, PARTS)
        for layer, hop in enumerate(hops):
            halo, partial = pairs_by_hand(hop, part_of)
            np.testing.assert_array_equal(found.halo[layer], matrix([(p, part_of[u]) for p, u in halo]))
            np.testing.assert_array_equal(found.partial[layer], matrix([(part_of[v], q) for v, q in partial]))
            owner = part_of[hop.rows.numpy()]
            np.testing.assert_array_equal(found.rows[layer], np.bincount(owner, minlength=PARTS))
            dst_owner = owner[: hop.block.n_dst]
            np.testing.assert_array_equal(found.dst[layer], np.bincount(dst_owner, minlength=PARTS))
            edges = np.bincount(dst_owner, weights=hop.block.degrees.numpy(), minlength=PARTS)
            np.testing.assert_array_equal(found.edges[layer], edges)
        assert found.cached.sum() == 0 and found.exchanged.tolist() == found.halo.sum((1, 2)).tolist()
        np.testing.assert_array_equal(found.loaded, found.rows[0])


def test_partial_aggregates_pay_where_many_sources_of_a_part_meet_in_one_destination() -> None:
    """Five sources of part 1 feed vertex 0 of part 0: five halo rows, one partial sum."""
    graph = Graph.from_edge_index(np.array([[1, 2, 3, 4, 5], [0, 0, 0, 0, 0]]), 6)
    steps = Steps(Topology.of_graph(graph), np.array([0]), np.array([0]), [-1], 1)
    epoch, step, seeds = next(steps.batches())
    found = count_split(steps.sample(seeds, epoch, step), np.array([0, 1, 1, 1, 1, 1]), 2)
    assert found.halo[0].tolist() == [[0, 5], [0, 0]] and found.partial[0].tolist() == [[0, 1], [0, 0]]


def test_a_copied_row_does_not_travel_and_is_not_read_by_its_owner() -> None:
    """Sources 1 and 2 belong to part 1; part 0 holds a copy of 1, and part 1 needs 2 itself."""
    graph = Graph.from_edge_index(np.array([[1, 2, 2], [0, 0, 3]]), 4)
    steps = Steps(Topology.of_graph(graph), np.array([0, 3]), np.array([0, 3]), [-1], 2)
    epoch, step, seeds = next(steps.batches())
    cached = np.zeros((2, 4), bool)
    cached[0, 1] = True
    found = count_split(steps.sample(seeds, epoch, step), np.array([0, 1, 1, 1]), 2, cached)
    assert found.halo[0, 0, 1] == 2 and found.cached.tolist() == [[0, 1], [0, 0]]
    assert found.exchanged.tolist() == [1]
    assert found.rows[0].tolist() == [1, 3] and found.loaded.tolist() == [1, 2]


def split_work(path: str) -> list[list[int]]:
    """On every rank: what one epoch's steps count, [rank][seeds, edges, rows loaded, halo rows]."""
    loader = Loader(Store.open(path), FANOUTS, 64, seed=7, prefetch=0)
    names = ("seeds", "edges", "feature_rows_loaded", "halo_rows")
    totals = np.sum([[batch.work[name] for name in names] for batch in loader.iterate(2)], axis=0)
    return current().all_gather_ints(totals.tolist())


def test_the_replay_of_a_store_is_what_its_ranks_do(tmp_path: Path) -> None:
    dataset = sbm(400, num_features=2)
    part_of = np.random.default_rng(0).integers(0, 2, 400)
    store = write_store(dataset, part_of, tmp_path / "store")
    ranks = np.array(run_ranks(split_work, 2, str(store.path)))
    found = replay(store, FANOUTS, 64, None, 2, seed=7, epoch=2)
    assert found.steps == 4
    counted = [found.seeds, found.edges.sum(0), found.loaded, found.halo.sum((0, 2))]
    np.testing.assert_array_equal(np.stack(counted, axis=1), ranks)
    # The same from the dataset, in original ids.
    again = replay(dataset, FANOUTS, 64, part_of, 2, seed=7, epoch=2)
    np.testing.assert_array_equal(again.halo, found.halo)


def test_data_mode_counts_each_rank_alone(tmp_path: Path) -> None:
    dataset = sbm(400, num_features=2)
    store = write_store(dataset, np.arange(400) % 2, tmp_path / "store")
    found = replay(dataset, FANOUTS, 64, None, 2, mode="data", seed=7, steps=1)
    for rank in range(2):
        loader = Loader(
            store, FANOUTS, 64, parallel="data", seed=7, prefetch=0, comm=Comm(rank=rank, ranks=2)
        )
        work = next(iter(loader)).work
        assert (found.seeds[rank], found.edges[:, rank].sum()) == (work["seeds"], work["edges"])
        assert found.rows[0, rank] == work["input_rows"]


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(UserError, match="'split' or 'data'"):
        replay(hand_drawn(), FANOUTS, BATCH, np.zeros(12, int), 1, mode="both")
    graph = hand_drawn().graph
    with pytest.raises(UserError, match="no training vertex"):
        replay(Dataset("no seeds", graph), FANOUTS, BATCH, np.zeros(12, int), 1)
