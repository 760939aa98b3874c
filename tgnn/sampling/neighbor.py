"""Multi-hop neighbour sampling on one rank (Hamilton et al. 2017, algorithm 2), over all in-edges that it can see.

Hop 0 draws in-edges of the seeds; the distinct rows met so far are the next hop's frontier, the former frontier first.
A sample is a pure function of (seed, epoch, step, hop, original destination id, draw). LABOR's (kernels/labor.py) is
one of (seed, epoch, step, hop, original source id); its layer-dependent form leaves out the hop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgnn.kernels import rng
from tgnn.kernels.block import Block
from tgnn.kernels.sample import Sample, sample_neighbors
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.unique import DirectTable
from tgnn.parallel.exchange import ExchangePlan
from tgnn.sampling.minibatch import Stage, no_stage
from tgnn.sampling.samplers import check_sampler, uses_sources
from tgnn.sampling.topology import Topology


@dataclass(eq=False)
class Hop:
    """One hop: its block, how the block's halo rows arrive, and the rows that feed it (local rows, int64)."""

    block: Block
    plan: ExchangePlan
    rows: Tensor


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
                same, and hops share their choices); `weighted` (by edge weight; 0 is never drawn, not by -1 either).
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

    def sample(self, rows: Tensor, fanouts: Sequence[int], epoch: int, step: int) -> list[Hop]:
        """Sample from seeds `rows` (distinct local rows, int64) outward; returns the hops, input layer first."""
        hops: list[Hop] = []
        for number, fanout in enumerate(fanouts):
            of_hop = () if self.sampler == "labor-dependent" else (number,)
            hop = self.hop(rows, fanout, rng.stream(self.seed, rng.SAMPLING, epoch, step, *of_hop))
            hops.insert(0, hop)
            rows = hop.rows
        return hops

    def hop(self, frontier: Tensor, fanout: int, key: int) -> Hop:
        """Draw in-edges of `frontier` (distinct local rows, int64), -1 for all, and number their sources."""
        topology = self.topology
        with self.stage("sample"):
            ids = topology.original_id[frontier]
            drawn = sample_neighbors(
                topology.indptr, topology.indices, frontier, ids, fanout, key, self.replace, weights=self._weights,
                source_id=self._source_id,
            )  # fmt: skip
            rows, indices, plan, halo = self._connect(frontier, drawn)
            degree_out = topology.degree_out[rows + topology.first]
            if halo is not None:
                degree_out = torch.cat([degree_out, topology.degree_out[halo]])
            block = Block(
                indptr=drawn.indptr,
                indices=indices,
                n_src=degree_out.numel(),
                weight=None if topology.edge_weight is None else topology.edge_weight[drawn.edge],
                position=drawn.position,
                dst_id=ids,
                degree_in=topology.indptr[frontier + 1] - topology.indptr[frontier],
                degree_out=degree_out,
            )
        return Hop(block, plan, rows)

    def _connect(self, frontier: Tensor, drawn: Sample) -> tuple[Tensor, Tensor, ExchangePlan, Tensor | None]:
        """Number the sources. Returns (rows by number, source number of every edge, plan, new ids of the halo)."""
        sources = drawn.src - self.topology.first
        rows = self._table.number(frontier, sources)
        return rows, self._table.lookup(sources), ExchangePlan.none(rows.numel()), None
