"""What steps cost when they are split over P parts, counted on one rank and without training.

One rank samples whole steps; who would aggregate which in-edge, load or compute which row, and receive which halo
row follows from the owners alone. A layer is counted by its number, 0 nearest the input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tgnn.data.graph import Dataset
from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.partition.store import Store
from tgnn.sampling.neighbor import Hop, NeighborSampler
from tgnn.sampling.samplers import uses_sources
from tgnn.sampling.topology import Topology


@dataclass(eq=False)
class _Counts:
    """Counts summed over `steps` steps; `+` adds steps."""

    steps: int

    def __add__(self, other: _Counts) -> _Counts:
        """The counts of the steps of both."""
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __radd__(self, other: int) -> _Counts:
        # sum() starts from the number 0.
        return self if other == 0 else NotImplemented


@dataclass(eq=False)
class SplitCounts(_Counts):
    """Split mode: int64 arrays over L layers and P parts, summed over the steps."""

    seeds: np.ndarray
    """[P] seeds by owner."""
    edges: np.ndarray
    """[L, P] in-edges aggregated, by owner of the destination."""
    dst: np.ndarray
    """[L, P] destination rows, by owner."""
    rows: np.ndarray
    """[L, P] distinct source rows that the step needs of their owner: loaded at layer 0, computed above it."""
    halo: np.ndarray
    """[L, P, P] distinct source rows that requester p (second axis) needs of owner q (last axis)."""
    partial: np.ndarray
    """[L, P, P] distinct (destination of p, source part q) pairs: rows that partial aggregates would send instead."""
    cached: np.ndarray
    """[P, P] rows of halo[0] that requester p holds a copy of (0 without caches)."""
    loaded: np.ndarray
    """[P] rows of layer 0 that their owner reads; less than rows[0] where all who need a row hold a copy."""

    @property
    def exchanged(self) -> np.ndarray:
        """[L] rows that travel: halo rows less those a requester holds."""
        total = self.halo.sum(axis=(1, 2))
        total[0] -= self.cached.sum()
        return total

    @property
    def balance(self) -> float:
        """Largest over mean of the parts' in-edges, all layers together and averaged over the steps' sum."""
        return _balance(self.edges.sum(axis=0))


@dataclass(eq=False)
class DataCounts(_Counts):
    """Data mode: what each of P ranks samples, loads and computes for its share of every batch alone."""

    seeds: np.ndarray
    """[P]."""
    edges: np.ndarray
    """[L, P] in-edges aggregated."""
    dst: np.ndarray
    """[L, P] destination rows."""
    rows: np.ndarray
    """[L, P] source rows."""

    @property
    def balance(self) -> float:
        """Largest over mean of the ranks' in-edges."""
        return _balance(self.edges.sum(axis=0))


def count_split(
    hops: Sequence[Hop], part_of: np.ndarray, num_parts: int, cached: np.ndarray | None = None
) -> SplitCounts:
    """Count one step that a single rank sampled.

    Args:
        hops: of a NeighborSampler over a whole graph, input layer first.
        part_of: integer [N], owner of each of its rows.
        num_parts: P.
        cached: bool [P, N], which rows of other parts' raw features each part holds a copy of.
    """
    layers = [LayerOwners(hop, part_of, num_parts) for hop in hops]
    first = layers[0]
    held = np.zeros((num_parts, num_parts), np.int64)
    loaded = first.rows
    if cached is not None:
        here = cached[:, first.row_ids]
        held = first.by_pair(first.halo_flag & here)
        missed = (first.halo_flag & ~here).any(axis=0)
        missed |= first.owner_flag.any(axis=0)
        loaded = np.bincount(first.owner[missed], minlength=num_parts)
    return SplitCounts(
        steps=1,
        seeds=layers[-1].dst,
        edges=np.stack([layer.edges for layer in layers]),
        dst=np.stack([layer.dst for layer in layers]),
        rows=np.stack([layer.rows for layer in layers]),
        halo=np.stack([layer.by_pair(layer.halo_flag) for layer in layers]),
        partial=np.stack([layer.partial for layer in layers]),
        cached=held,
        loaded=loaded,
    )


class LayerOwners:
    """One layer of a step, by owner. Flags are bool [P, n_src]: which sources which part needs."""

    def __init__(self, hop: Hop, part_of: np.ndarray, num_parts: int) -> None:
        block, self.num_parts = hop.block, num_parts
        self.row_ids = hop.rows.cpu().numpy()
        self.owner = part_of[self.row_ids].astype(np.int64)
        dst_owner = self.owner[: block.n_dst]
        degrees, source = block.degrees.cpu().numpy(), block.indices.cpu().numpy()
        requester = np.repeat(dst_owner, degrees)
        self.edges = np.bincount(requester, minlength=num_parts)
        self.dst = np.bincount(dst_owner, minlength=num_parts)
        self.rows = np.bincount(self.owner, minlength=num_parts)
        needed = np.zeros((num_parts, len(self.owner)), bool)
        needed[requester, source] = True
        own = np.arange(num_parts)[:, None] == self.owner
        self.halo_flag = needed & ~own
        # A destination's own row is needed by its owner, whoever samples it.
        self.owner_flag = needed & own
        self.owner_flag[dst_owner, np.arange(block.n_dst)] = True
        self.partial = self._partial(np.repeat(np.arange(block.n_dst), degrees), source, dst_owner)

    def by_pair(self, flag: np.ndarray) -> np.ndarray:
        """int64 [P, P]: flagged sources by (requester, owner)."""
        return np.stack([np.bincount(self.owner[row], minlength=self.num_parts) for row in flag])

    def _partial(self, dst: np.ndarray, source: np.ndarray, dst_owner: np.ndarray) -> np.ndarray:
        met = np.zeros((len(dst_owner), self.num_parts), bool)
        met[dst, self.owner[source]] = True
        met[np.arange(len(dst_owner)), dst_owner] = False
        pairs = np.zeros((self.num_parts, self.num_parts), np.int64)
        for part in range(self.num_parts):
            pairs[part] = met[dst_owner == part].sum(axis=0)
        return pairs


class Steps:
    """A run's steps, sampled whole on one rank: the global batches and samples of that seed."""

    def __init__(
        self, topology: Topology, seed_ids: np.ndarray, seed_rows: np.ndarray, fanouts: Sequence[int],
        batch_size: int, *, sampler: str = "uniform", replace: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            topology: a whole graph, with source_id for LABOR.
            seed_ids, seed_rows: original ids of the seeds, ascending, and their rows in `topology`.
            fanouts, batch_size, sampler, replace, seed: as in Loader.
        """
        self._ids = torch.from_numpy(np.asarray(seed_ids, np.int64))
        self._rows = torch.from_numpy(np.asarray(seed_rows, np.int64))
        self._fanouts, self._batch_size, self._seed = tuple(fanouts), batch_size, seed
        self._sampler = NeighborSampler(topology, sampler=sampler, replace=replace, seed=seed)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return -(-len(self._ids) // self._batch_size)

    def batches(self, epoch: int = 0) -> Iterator[tuple[int, int, Tensor]]:
        """(epoch, step, rows of the seeds) of that and all later epochs; ends only where there is no seed."""
        while len(self._ids):
            key = rng.stream(self._seed, rng.PERMUTATION, epoch)
            order = torch.argsort(rng.keyed(key, self._ids), stable=True)
            for step, some in enumerate(order.split(self._batch_size)):
                yield epoch, step, self._rows[some]
            epoch += 1

    def sample(self, rows: Tensor, epoch: int, step: int) -> list[Hop]:
        """The hops of one step from seeds `rows`, input layer first."""
        return self._sampler.sample(rows, self._fanouts, epoch, step)


def replay(
    data: Dataset | Store, fanouts: Sequence[int], batch_size: int, part_of: np.ndarray | None, num_parts: int,
    *, mode: str = "split", sampler: str = "uniform", replace: bool = False, seed: int = 0, epoch: int = 0,
    steps: int | None = None, cached: np.ndarray | None = None,
) -> SplitCounts | DataCounts:  # fmt: skip
    """Counts of `steps` steps (default: one epoch's) from the start of `epoch`, those that a run of `seed` takes.

    Args:
        data: a Dataset, its rows the original ids, or a Store, its rows the new ids.
        part_of: integer [N], owner of each row; None for a store's own parts, and in data mode.
        num_parts: P.
        mode: "split" or "data".
        cached: as in count_split; split mode only.
        The others: as in Loader.
    """
    if mode not in ("split", "data"):
        raise wrong("mode", repr(mode), "'split' or 'data'", "choose one of these")
    drawing = {"sampler": sampler, "replace": replace, "seed": seed}
    if isinstance(data, Store):
        topology, ids = Topology.of_whole(data), data.split_ids("train")
        rows = data.new_of_original()[ids]
        if part_of is None:
            part_of = np.repeat(np.arange(data.num_parts), data.ownership.sizes())
    else:
        topology = Topology.of_graph(data.graph, source_ids=uses_sources(sampler))
        ids = rows = data.train
    if len(ids) == 0:
        raise wrong("replay", "no training vertex", "seeds to sample from", "give the dataset a train split")
    planned = Steps(topology, ids, rows, fanouts, batch_size, **drawing)
    count = len(planned) if steps is None else steps
    if mode == "data":
        return sum(count_data(planned, *batch, num_parts) for batch in islice(planned.batches(epoch), count))
    taken = (planned.sample(seeds, *when) for *when, seeds in islice(planned.batches(epoch), count))
    return sum(count_split(hops, part_of, num_parts, cached) for hops in taken)


def count_data(planned: Steps, epoch: int, step: int, seeds: Tensor, num_parts: int) -> DataCounts:
    """Count one step in data mode: every rank's contiguous share of `seeds` sampled alone."""
    shares = seeds.tensor_split(num_parts)
    edges, dst, rows = [], [], []
    for share in shares:
        blocks = [hop.block for hop in planned.sample(share, epoch, step)]
        edges.append([block.n_edges for block in blocks])
        dst.append([block.n_dst for block in blocks])
        rows.append([block.n_src for block in blocks])
    counted = (np.array(column, np.int64).T for column in (edges, dst, rows))
    return DataCounts(1, np.array([len(share) for share in shares]), *counted)


def _balance(load: np.ndarray) -> float:
    total = int(load.sum())
    return float(load.max() * len(load) / total) if total else 1.0
