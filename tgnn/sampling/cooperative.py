"""Cooperative sampling: P ranks together draw the sample that one rank would draw alone.

Every rank draws the in-edges of the frontier it owns and asks the owners of remote sources for them, each vertex once
per asking rank. What a rank is asked for joins its next frontier, so no vertex is sampled, loaded or computed twice.
The requests are the layer's exchange plan: the answers arrive later in the order asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.kernels.sample import Sample
from tgnn.kernels.unique import position_in, unique
from tgnn.parallel.comm import Comm
from tgnn.parallel.exchange import ExchangePlan
from tgnn.sampling.minibatch import Stage, no_stage
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology


class CooperativeSampler(NeighborSampler):
    """A `NeighborSampler` over one part, which reaches the sources of other parts through their owners.

    Every call is collective: all ranks call it, in the same order, also those with an empty frontier.
    """

    def __init__(
        self, topology: Topology, comm: Comm, *, sampler: str = "uniform", replace: bool = False, seed: int = 0,
        stage: Stage = no_stage,
    ) -> None:  # fmt: skip
        super().__init__(topology, sampler=sampler, replace=replace, seed=seed, stage=stage)
        self.comm = comm
        self._offsets = torch.tensor(topology.offsets, device=topology.indices.device)

    def _connect(self, frontier: Tensor, drawn: Sample) -> tuple[Tensor, Tensor, ExchangePlan, Tensor | None]:
        if self.comm.ranks == 1:
            return super()._connect(frontier, drawn)
        topology, table = self.topology, self._table
        with self.stage("split"):
            is_local = (drawn.src >= topology.first) & (drawn.src < topology.end)
            local = drawn.src[is_local] - topology.first
            remote = drawn.src[~is_local]
            # Parts own contiguous ranges of new ids, so ascending ids are grouped by owner.
            halo = unique(remote)
            ask_counts = torch.searchsorted(halo, self._offsets).diff().tolist()
            asked_counts = self.comm.all_to_all_counts(ask_counts)
            asked, _ = self.comm.all_to_all_rows(halo, ask_counts, asked_counts)
            asked = asked - topology.first
        rows = table.number(frontier, torch.cat([local, asked]))
        indices = torch.empty_like(drawn.src, dtype=torch.int32)
        indices[is_local] = table.lookup(local)
        indices[~is_local] = (position_in(halo, remote) + rows.numel()).to(torch.int32)
        plan = ExchangePlan(table.lookup(asked).to(torch.int64), asked_counts, ask_counts, rows.numel())
        return rows, indices, plan, halo
