"""Presampling: run the sampler before training and count how often vertices and edges are used.

The counts weigh the partition (the work of a vertex, the cost of cutting an edge) and order the caches. What is
counted is per vertex; the use of an edge is the expectation that follows from it, which is less noisy than its own
count and needs no array of E entries: of the in-edges drawn at a destination, each had the same share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from tgnn.data.graph import Graph
from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.parallel.comm import Comm
from tgnn.partition.edge_factors import EdgeFactors
from tgnn.sampling.neighbor import Hop
from tgnn.sampling.replay import LayerOwners, Steps
from tgnn.sampling.samplers import uses_sources
from tgnn.sampling.topology import Topology

MOST_STEPS = 64
"""Steps after which further ones would change the partition by less than its own noise."""
STREAM = 0x70726573616D706C
"""Keeps presampling's random numbers apart from those of runs."""


@dataclass(eq=False)
class Presampled:
    """How often each vertex is used, per step, in original ids; float32 [N] each.

    `vertex_edges`: in-edges aggregated at it, over all hops. `inputs`: appearances as an input row of layer 0, its
    hotness. `draws`: draws of its out-edges, over all hops. `appearances`: appearances as a distinct source of drawn
    in-edges, summed over hops; never more than draws. `options` (JSON-able) made these; `steps` were sampled.
    """

    options: dict[str, Any]
    steps: int
    vertex_edges: np.ndarray
    inputs: np.ndarray
    draws: np.ndarray
    appearances: np.ndarray

    def edge_draws(self, graph: Graph) -> np.ndarray:
        """Expected draws of every in-edge per step, float32 [E], given how many are drawn at its destination."""
        return self._factors(graph, np.ones(graph.num_vertices, np.float32)).weights(
            graph.indptr, graph.indices
        )

    def edge_factors(self, graph: Graph) -> EdgeFactors:
        """What cutting each in-edge costs: its expected draws, scaled so that those of a source's out-edges sum to
        its appearances. However often a hub is drawn in a step, its row travels once to each part.
        """
        # One more of each: a source that was hardly met counts as one that repeats nothing.
        tiny = 1 / max(1, self.steps)
        return self._factors(graph, (self.appearances + tiny) / (self.draws + tiny))

    def _factors(self, graph: Graph, source: np.ndarray) -> EdgeFactors:
        if self.options["sampler"] != "weighted":
            degree = np.maximum(graph.degree_in(), 1).astype(np.float32)
            return EdgeFactors(source.astype(np.float32), self.vertex_edges / degree)
        # In proportion to the weights: exact for draws with replacement, near it for few draws without.
        total = np.concatenate([[0.0], np.cumsum(graph.edge_weight, dtype=np.float64)])
        in_row = (total[graph.indptr[1:]] - total[graph.indptr[:-1]]).astype(np.float32)
        share = np.divide(self.vertex_edges, in_row, out=np.zeros_like(in_row), where=in_row > 0)
        return EdgeFactors(source.astype(np.float32), share, graph.edge_weight)


def presample(
    graph: Graph, train: np.ndarray, fanouts: Sequence[int], batch_size: int = 1024, *, sampler: str = "uniform",
    replace: bool = False, seed: int = 0, epochs: int = 1, most_steps: int = MOST_STEPS, comm: Comm | None = None,
    progress: bool = False,
) -> Presampled:  # fmt: skip
    """Sample `epochs` epochs, but `most_steps` steps at most, and count.

    Over ranks each takes every P-th step and all get the sums; every rank calls this with the same arguments. Beside
    the graph it holds about 45 bytes per vertex and one step. The batches are not those of any run.

    Args:
        graph: the whole graph, with edge weights for the sampler `weighted`.
        train: ids of the seeds, ascending, at least one.
        fanouts, batch_size (global), sampler, replace: of the run to come.
        seed: another one gives other samples.
        epochs, most_steps: at least 1.
        comm: default: this rank alone.
        progress: show a bar where stderr is a terminal and it lasts.
    """
    _check(train, epochs, most_steps)
    planned = planned_steps(graph, train, fanouts, batch_size, sampler, replace, seed)
    count = min(epochs * len(planned), most_steps)
    rank, ranks = (comm.rank, comm.ranks) if comm else (0, 1)
    tally = _Tally(graph.num_vertices)
    mine = islice(planned.batches(), rank, count, ranks)
    hidden = None if progress else True
    bar = tqdm(
        mine,
        "presampling",
        len(range(rank, count, ranks)),
        unit=" steps",
        leave=False,
        delay=2,
        disable=hidden,
    )
    for epoch, step, seeds in bar:
        tally.add(planned.sample(seeds, epoch, step))
    if comm is not None and comm.ranks > 1:
        comm.all_reduce(tally.counts)
    options = {
        "fanouts": list(fanouts), "batch_size": batch_size, "sampler": sampler, "replace": replace, "seed": seed,
        "epochs": epochs, "steps": count,
    }  # fmt: skip
    return Presampled(
        options, count, *(np.divide(row, count, dtype=np.float32) for row in tally.counts.numpy())
    )


def planned_steps(
    graph: Graph, train: np.ndarray, fanouts: Sequence[int], batch_size: int = 1024, sampler: str = "uniform",
    replace: bool = False, seed: int = 0,
) -> Steps:  # fmt: skip
    """The steps that `presample` with these arguments takes, and those that follow them."""
    topology = Topology.of_graph(graph, source_ids=uses_sources(sampler))
    own = rng.mix_int(STREAM + seed)
    return Steps(topology, train, train, fanouts, batch_size, sampler=sampler, replace=replace, seed=own)


def halo_requests(
    planned: Steps, count: int, part_of: np.ndarray, num_parts: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """How often each part asks for which remote input rows in the first `count` steps, as Hotness.halo has it.

    Takes one to two bytes per vertex and part.
    """
    asked = np.zeros((num_parts, len(part_of)), np.min_scalar_type(count))
    for epoch, step, seeds in islice(planned.batches(), count):
        first = LayerOwners(planned.sample(seeds, epoch, step)[0], part_of, num_parts)
        for part, flags in enumerate(first.halo_flag):
            asked[part, first.row_ids[flags]] += 1
    found = []
    for row in asked:
        ids = np.flatnonzero(row)
        ids = ids[np.argsort(-row[ids].astype(np.int32), kind="stable")]
        found.append((ids, row[ids].astype(np.float32) / np.float32(count)))
    return found


class _Tally:
    """Counts of one rank's steps: `counts` int32 [4, N], rows in the order of Presampled's arrays."""

    def __init__(self, num_vertices: int) -> None:
        self.counts = torch.zeros(4, num_vertices, dtype=torch.int32)
        self._edges, self._inputs, self._draws, self._appearances = self.counts.numpy()

    def add(self, hops: list[Hop]) -> None:
        # Rows of a hop are distinct, so each += reaches every one of them.
        for hop in hops:
            rows, block = hop.rows.numpy(), hop.block
            drawn = np.bincount(block.indices.numpy(), minlength=len(rows))
            self._edges[rows[: block.n_dst]] += block.degrees.numpy().astype(np.int32)
            self._draws[rows] += drawn.astype(np.int32)
            self._appearances[rows] += drawn > 0
        self._inputs[hops[0].rows.numpy()] += 1


def _check(train: np.ndarray, epochs: int, most_steps: int) -> None:
    if len(train) == 0:
        raise wrong("presampling", "no training vertex", "seeds to sample from", "give a train split")
    for name, value in (("epochs", epochs), ("most_steps", most_steps)):
        if value < 1:
            raise wrong(f"presampling {name}", value, "at least 1", "give a positive whole number")
