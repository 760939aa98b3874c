"""Multi-hop neighbour sampling on one rank (Hamilton et al. 2017, algorithm 2), over all in-edges that it can see.

Hop 0 draws in-edges of the seeds; the distinct rows met so far are the next hop's frontier, the former frontier first.
A sample is a pure function of (seed, epoch, step, hop, original destination id, draw). LABOR's (kernels/labor.py) is
one of (seed, epoch, step, hop, original source id); its layer-dependent form leaves out the hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tgnn.kernels import rng
from tgnn.kernels.block import Block
from tgnn.kernels.gather import gather
from tgnn.kernels.sample import Sample, sample_neighbors
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.unique import DirectTable
from tgnn.parallel.exchange import ExchangePlan
from tgnn.sampling.minibatch import Stage, no_stage
from tgnn.sampling.samplers import check_sampler, uses_sources
from tgnn.sampling.topology import Topology


@dataclass(eq=False)
class Hop:
    """One hop: its block, how the block's halo rows arrive, and the rows that feed it.

    Sources of the block: `rows` (local rows, int64), then rows `cached` of the halo cache (int64), then what arrives.
    `used` of them are sources of edges or destinations: all, but for a hop in place.
    """

    block: Block
    plan: ExchangePlan
    rows: Tensor
    cached: Tensor
    used: int


@dataclass(eq=False)
class Connection:
    """The sources of drawn edges, numbered: `indices` int32 [edges] are the numbers, `new_id` int64 [n_src] the new ids
    by number; the others as in `Hop`.
    """

    rows: Tensor
    indices: Tensor
    plan: ExchangePlan
    new_id: Tensor
    cached: Tensor


class NeighborSampler:
    """Samples blocks out of a topology whose sources are all rows of its own."""

    def __init__(
        self, topology: Topology, *, sampler: str = "uniform", replace: bool = False, seed: int = 0,
        stage: Stage = no_stage,
    ) -> None:  # fmt: skip
        """
        Args:
            topology: with source_id for LABOR, with edge_weight for `weighted`.
            sampler: `uniform`; `labor` (as many in-edges on average, fewer distinct sources); `labor-dependent` (the
                same, and hops share their choices); `weighted` (by edge weight; 0 is never drawn, not by -1 either;
                what weight the drawn edges carry: kernels/sample_weighted.py).
            replace: draw with replacement.
        """
        check_sampler(sampler, replace, topology.edge_weight is not None)
        self.topology = topology
        self.sampler = sampler
        self.replace = replace
        self.seed = seed
        self.stage = stage
        self._table = DirectTable(topology.num_rows, topology.indptr.device)
        self._source_id = topology.source_id if uses_sources(sampler) else None
        self._weights = None
        if sampler == "weighted":
            self._weights = DrawWeights.of(topology.indptr, topology.edge_weight, replace)

    def sample(
        self, rows: Tensor, fanouts: Sequence[int], epoch: int, step: int, in_place: bool = False
    ) -> list[Hop]:
        """Sample from seeds `rows` (distinct local rows, int64) outward; returns the hops, input layer first.

        `in_place`: the input layer's sources are all rows of the topology, instead of those that it draws.
        """
        hops: list[Hop] = []
        for number, fanout in enumerate(fanouts):
            of_hop = () if self.sampler == "labor-dependent" else (number,)
            key = rng.stream(self.seed, rng.SAMPLING, epoch, step, *of_hop)
            is_input = number == len(fanouts) - 1
            hop = self.hop(rows, fanout, key, is_input, in_place and is_input)
            hops.insert(0, hop)
            rows = hop.rows
        return hops

    def hop(
        self, frontier: Tensor, fanout: int, key: int, is_input: bool = False, in_place: bool = False
    ) -> Hop:
        """Draw in-edges of `frontier` (distinct local rows, int64), -1 for all, and number their sources.

        The sources of the input hop (`is_input`) are read as features: no further in-edges of theirs are drawn.
        `in_place` numbers nothing: a source is called by its row, and the destinations are rows `frontier`.
        """
        topology = self.topology
        with self.stage("sample"):
            ids = topology.original_id.index_select(0, frontier)
            drawn = sample_neighbors(
                topology.indptr, topology.indices, frontier, ids, fanout, key, self.replace, weights=self._weights,
                source_id=self._source_id,
            )  # fmt: skip
            if in_place:
                found, degree_out = self._connect_in_place(frontier, drawn), topology.degree_out
                used = self._table.count(frontier, drawn.src)
            else:
                found = self._connect(frontier, drawn, is_input)
                degree_out = topology.degree_out.index_select(0, found.new_id)
                used = degree_out.numel()
            weight = self._edge_weight(drawn.edge)
            if self._weights is not None:  # the draw counted the edges' own weights already
                weight = self._weights.of_drawn(frontier, fanout, drawn.indptr, drawn.edge)
            block = Block(
                indptr=drawn.indptr,
                indices=found.indices,
                n_src=degree_out.numel(),
                weight=weight,
                position=drawn.position,
                dst_id=ids,
                degree_in=drawn.degree,
                degree_out=degree_out,
            )
        return Hop(block, found.plan, found.rows, found.cached, used)

    def _edge_weight(self, edge: Tensor) -> Tensor | None:
        weight = self.topology.edge_weight
        if weight is None or not self.topology.is_pinned:
            return None if weight is None else weight.index_select(0, edge)
        return gather(weight.new_empty(0, device=edge.device), edge, weight)

    def _connect_in_place(self, frontier: Tensor, drawn: Sample) -> Connection:
        topology = self.topology
        if topology.num_rows != topology.offsets[-1]:
            raise ValueError("a hop in place: got one part of several, expected the whole graph")
        plan, none = ExchangePlan.none(topology.num_rows), frontier[:0]
        return Connection(frontier, drawn.src, plan, none, none)

    def _connect(self, frontier: Tensor, drawn: Sample, is_input: bool) -> Connection:
        first = self.topology.first
        sources = drawn.src - first if first else drawn.src
        rows = self._table.number(frontier, sources)
        indices, plan = self._table.lookup(sources), ExchangePlan.none(rows.numel())
        return Connection(rows, indices, plan, rows + first if first else rows, rows.new_empty(0))
