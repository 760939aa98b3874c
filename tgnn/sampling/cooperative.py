"""Cooperative sampling: P ranks together draw the sample that one rank would draw alone.

Every rank draws the in-edges of the frontier it owns and asks the owners of remote sources for them, each vertex once
per asking rank. What a rank is asked for joins its next frontier, so no vertex is sampled, loaded or computed twice.
The requests are the layer's exchange plan: the answers arrive later in the order asked for. Input rows that a halo
cache holds are not asked for.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tgnn.kernels.block import Block
from tgnn.kernels.sample import Sample
from tgnn.kernels.unique import DirectTable, position_in, unique
from tgnn.parallel.comm import Comm
from tgnn.parallel.exchange import ExchangePlan
from tgnn.sampling.features import HaloCache
from tgnn.sampling.minibatch import Stage, no_stage
from tgnn.sampling.neighbor import Connection, Hop, NeighborSampler
from tgnn.sampling.topology import Topology

# A rank's table over all vertices of the graph; above it remote vertices are sorted.
MOST_TABLE_BYTES = 1 << 29


class CooperativeSampler(NeighborSampler):
    """A `NeighborSampler` over one part, which reaches the sources of other parts through their owners.

    Every call is collective: all ranks call it, in the same order, also those with an empty frontier.
    """

    def __init__(
        self, topology: Topology, comm: Comm, *, sampler: str = "uniform", replace: bool = False, seed: int = 0,
        stage: Stage = no_stage, halo_cache: HaloCache | None = None,
    ) -> None:  # fmt: skip
        """Arguments as NeighborSampler's; `comm`: the group that samples together; `halo_cache`: input rows of other
        ranks that are not asked for.
        """
        super().__init__(topology, sampler=sampler, replace=replace, seed=seed, stage=stage)
        self.comm, self.halo_cache = comm, halo_cache
        self._offsets = torch.tensor(topology.offsets, device=topology.indptr.device)
        self._sources = _sources_table(topology.offsets[-1], topology.indptr.device)

    def _connect(self, frontier: Tensor, drawn: Sample, is_input: bool) -> Connection:
        if self.comm.ranks == 1:
            return super()._connect(frontier, drawn, is_input)
        first, rank, table = self.topology.first, self.comm.rank, self._table
        distinct = self._sources.distinct(drawn.src)
        with self.stage("split"):
            ends = torch.searchsorted(distinct, self._offsets[rank : rank + 2]).tolist()
            own = distinct[ends[0] : ends[1]]
            asking, ask_counts = self._remote(distinct)
            cached_id, cached = asking[:0], asking[:0]
            if self.halo_cache is not None and is_input:
                is_cached, cached = self.halo_cache.find(asking)
                cached_id, asking = asking[is_cached], asking[~is_cached]
                ask_counts = torch.searchsorted(asking, self._offsets).diff().tolist()
            asked, asked_counts = self._ask(asking, ask_counts, drawn.src.dtype)
        rows = table.number(frontier, torch.cat([own - first, asked]))
        new_id = torch.cat([rows + first, cached_id, asking])
        indices = self._sources.lookup_among(new_id, drawn.src)
        plan = ExchangePlan(table.lookup(asked).to(torch.int64), asked_counts, ask_counts, rows.numel())
        return Connection(rows, indices, plan, new_id, cached)

    def whole_rows(self, first: int, end: int) -> Hop:
        """All in-edges of rows first .. end - 1; sources are *all* rows of this rank in order, then halo rows.

        Destinations are not the first sources, as in other hops, and no position is told: for inference. Collective.
        """
        topology, start = self.topology, self.topology.first
        edges = slice(int(topology.indptr[first]), int(topology.indptr[end]))
        indices, rows = topology.indices[edges], topology.num_rows
        plan, degree_out = ExchangePlan.none(rows), topology.degree_out
        if self.comm.ranks > 1:
            asking, ask_counts = self._remote(self._sources.distinct(indices))
            asked, asked_counts = self._ask(asking, ask_counts, indices.dtype)
            new_id = torch.cat([torch.arange(start, start + rows, device=asking.device), asking])
            indices = self._sources.lookup_among(new_id, indices)
            plan = ExchangePlan(asked, asked_counts, ask_counts, rows)
            degree_out = degree_out.index_select(0, new_id)
        block = Block(
            indptr=topology.indptr[first : end + 1] - edges.start,
            indices=indices,
            n_src=degree_out.numel(),
            weight=None if topology.edge_weight is None else topology.edge_weight[edges],
            dst_id=topology.original_id[first:end],
            degree_in=topology.indptr[first : end + 1].diff(),
            degree_out=degree_out,
        )
        return Hop(block, plan, torch.arange(rows, device=indices.device), indices[:0], block.n_src)

    def _remote(self, distinct: Tensor) -> tuple[Tensor, list[int]]:
        """The ids in `distinct` (ascending) that others own, and how many each of them does."""
        # Parts own contiguous ranges of new ids, so ascending ids are grouped by owner.
        rank, ends = self.comm.rank, torch.searchsorted(distinct, self._offsets).tolist()
        counts = [end - start for start, end in itertools.pairwise(ends)]
        counts[rank] = 0
        return torch.cat([distinct[: ends[rank]], distinct[ends[rank + 1] :]]), counts

    def _ask(self, asking: Tensor, counts: list[int], dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Ask the owners for `asking` (new ids by owner); returns the local rows that this rank is asked for, int64,
        and how many each rank asks for. Ids travel as `dtype`, the store's.
        """
        asked, asked_counts = self.comm.all_to_all_lists(asking.to(dtype), counts)
        return asked.to(torch.int64) - self.topology.first, asked_counts


def _sources_table(num_vertices: int, device: torch.device) -> _DirectSources | _SortedSources:
    """How to number sources of any part: by direct address where a table of all vertices is small enough."""
    small = num_vertices * DirectTable.BYTES_PER_ID <= MOST_TABLE_BYTES
    return _DirectSources(num_vertices, device) if small else _SortedSources()


class _DirectSources(DirectTable):
    """New ids of the whole graph, numbered by direct address: no edge is compared, sorted or searched for."""

    def lookup_among(self, numbered: Tensor, ids: Tensor) -> Tensor:
        """Where each of `ids` stands among the distinct `numbered`, which has them all: int32."""
        self.number_as(numbered)
        return self.lookup(ids)


class _SortedSources:
    """The same by sorting and binary search, in memory that does not grow with the graph."""

    def distinct(self, ids: Tensor) -> Tensor:
        """The distinct values, ascending: int64."""
        return unique(ids).to(torch.int64)

    def lookup_among(self, numbered: Tensor, ids: Tensor) -> Tensor:
        """Where each of `ids` stands among the distinct `numbered`, which has them all: int32."""
        ascending, order = numbered.sort()
        return order.to(torch.int32)[position_in(ascending, ids.to(torch.int64))]
