"""Loader: from a store's seeds to ready mini-batches, the same global batches on any number of ranks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.parallel.comm import Comm, current
from tgnn.partition.store import Store
from tgnn.sampling.cooperative import CooperativeSampler
from tgnn.sampling.features import open_columns
from tgnn.sampling.minibatch import MiniBatch, Stage, no_stage
from tgnn.sampling.neighbor import Hop, NeighborSampler
from tgnn.sampling.samplers import check_sampler, uses_sources
from tgnn.sampling.topology import Topology

MODES = ("split", "data")


class Loader:
    """Iterates over one epoch's mini-batches; each `for` loop is the next epoch.

    Global batches are cut from one keyed permutation of the split's vertices per epoch. In `split` mode a rank takes
    the seeds it owns and all ranks sample together; in `data` mode it takes its contiguous share and samples alone.
    Every rank yields the same number of batches, empty ones included.
    """

    def __init__(
        self, store: Store | str | os.PathLike, fanouts: Sequence[int], batch_size: int = 1024, *, split: str = "train",
        parallel: str = "split", sampler: str = "uniform", replace: bool = False, shuffle: bool = True, seed: int = 0,
        prefetch: int = 1, comm: Comm | None = None, stage: Stage = no_stage,
    ) -> None:  # fmt: skip
        """
        Args:
            store: a store or its path, of as many parts as there are ranks.
            fanouts: in-edges per vertex and hop, seeds outward; -1 for all.
            batch_size: global, seeds per step over all ranks.
            split: `train`, `val` or `test`.
            parallel: `split` or `data`.
            sampler: how in-edges are drawn: `uniform`, `labor`, `labor-dependent` or `weighted`; see NeighborSampler.
                A block keeps the weights of the edges that `weighted` draws, so layers that use weights do so.
            replace: draw in-edges with replacement.
            shuffle: permute the seeds anew each epoch; else they come in order of original id.
            prefetch: batches prepared ahead of the one that is handed out.
            comm: process group; default the current one.
        """
        self.comm = comm or current()
        store = opened_store(store, self.comm)
        self.store, self.fanouts, self.batch_size = store, fanouts, batch_size
        self.parallel, self.shuffle, self.seed, self.prefetch, self.stage = (
            parallel,
            shuffle,
            seed,
            prefetch,
            stage,
        )
        self.epoch = 0
        self._check()
        check_sampler(sampler, replace, store.has_edge_weight)
        rank, device = self.comm.rank, self.comm.device
        drawing = {"sampler": sampler, "replace": replace, "seed": seed, "stage": stage}
        if parallel == "split":
            self.topology = Topology.of_part(store, rank, device, source_ids=uses_sources(sampler))
            self.sampler = CooperativeSampler(self.topology, self.comm, **drawing)
            self._exchange_comm, parts = self.comm, [rank]
        else:
            self.topology = Topology.of_whole(store, device)
            self.sampler = NeighborSampler(self.topology, **drawing)
            self._exchange_comm, parts = Comm(device=device), list(range(store.num_parts))
        self._features, self._labels = open_columns(store, parts)
        self._seed_ids, self._seed_new = seeds_of(store, split)

    def _check(self) -> None:
        if self.parallel not in MODES:
            raise wrong("parallel", repr(self.parallel), "'split' or 'data'", "choose one of these")
        fanouts = tuple(self.fanouts) if isinstance(self.fanouts, Iterable) else ()
        if not fanouts or any(not isinstance(f, Integral) or f < -1 for f in fanouts):
            expected = "a list of one or more whole numbers, each -1 (all) or more"
            raise wrong("fanouts", self.fanouts, expected, "correct the list")
        if max(fanouts) >= 2**31:
            raise wrong("fanouts", max(fanouts), "numbers below 2^31", "write -1 for every in-edge")
        self.fanouts = tuple(int(fanout) for fanout in fanouts)
        whole = isinstance(self.batch_size, Integral) and isinstance(self.prefetch, Integral)
        if not whole or self.batch_size < 1 or self.prefetch < 0:
            got = f"batch_size {self.batch_size}, prefetch {self.prefetch}"
            raise wrong(
                "Loader", got, "whole numbers, batch_size >= 1 and prefetch >= 0", "correct the number"
            )
        self.batch_size = int(self.batch_size)
        if self.batch_size >= 2**62:
            raise wrong("batch_size", self.batch_size, "a number below 2^62", "choose a smaller one")

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return -(-self._seed_ids.numel() // self.batch_size)

    @property
    def num_seeds(self) -> int:
        """Seeds of an epoch, over all ranks."""
        return self._seed_ids.numel()

    def __iter__(self) -> Iterator[MiniBatch]:
        self.epoch += 1
        return self.iterate(self.epoch - 1)

    def iterate(self, epoch: int, start: int = 0) -> Iterator[MiniBatch]:
        """The mini-batches of `epoch` (counted from 0) from step `start` on."""
        ready: deque[MiniBatch] = deque()
        order = self._order(epoch)
        for step in range(start, len(self)):
            ready.append(self._prepare(order, epoch, step))
            if len(ready) > self.prefetch:
                yield ready.popleft()
        yield from ready

    def _order(self, epoch: int) -> Tensor:
        """A permutation of the seeds' indices: by keyed number, which is the same on every rank."""
        if not self.shuffle:
            return torch.arange(self._seed_ids.numel())
        return torch.argsort(
            rng.keyed(rng.stream(self.seed, rng.PERMUTATION, epoch), self._seed_ids), stable=True
        )

    def _prepare(self, order: Tensor, epoch: int, step: int) -> MiniBatch:
        batch, sent = order[step * self.batch_size : (step + 1) * self.batch_size], self.comm.bytes_sent
        with self.stage("sample"):
            new = self._seed_new[batch]
            if self.parallel == "split":
                new = new[(new >= self.topology.first) & (new < self.topology.end)]
            else:
                new = new.tensor_split(self.comm.ranks)[self.comm.rank]
            rows = (new - self.topology.first).to(self.comm.device)
        hops = self.sampler.sample(rows, self.fanouts, epoch, step)
        ready = self._load(hops, rows, batch.numel(), epoch, step)
        ready.work["exchange_bytes"] = self.comm.bytes_sent - sent
        return ready

    def _load(self, hops: list[Hop], seeds: Tensor, global_seeds: int, epoch: int, step: int) -> MiniBatch:
        device = self.comm.device
        with self.stage("load"):
            ids = [self.topology.original_id[rows] for rows in (*(hop.rows for hop in hops), seeds)]
            x = None if self._features is None else self._features.load(hops[0].rows, device)
            y = None if self._labels is None else self._labels.load(seeds, device)
        work = {
            "seeds": seeds.numel(),
            "edges": sum(hop.block.n_edges for hop in hops),
            "input_rows": hops[0].block.n_src,
            "feature_rows_loaded": 0 if x is None else x.shape[0],
            "halo_rows": sum(hop.plan.n_halo for hop in hops),
        }
        blocks, plans = [hop.block for hop in hops], [hop.plan for hop in hops]
        return MiniBatch(
            blocks,
            plans,
            ids,
            x,
            y,
            global_seeds,
            self._exchange_comm,
            self.seed,
            epoch,
            step,
            work,
            self.stage,
        )


def opened_store(store: Store | str | os.PathLike, comm: Comm) -> Store:
    """The store, opened where it is a path, if it has a part for each rank; else UserError."""
    if isinstance(store, (str, os.PathLike)):
        store = Store.open(store)
    if not isinstance(store, Store):
        do = "give what tgnn.prepare or Store.open returns"
        raise wrong("store", f"a {type(store).__name__}", "a Store or the path of one", do)
    if comm.ranks == 1 and store.num_parts > 1:
        parts = store.num_parts
        do = f"call this in a function fn that tgnn.launch(fn, ..., ranks={parts}) starts on {parts} ranks"
        raise wrong(f"store {store.path}", f"{parts} parts", "1, one for each rank", do)
    return store.require_parts(comm.ranks)


def seeds_of(store: Store, split: str) -> tuple[Tensor, Tensor]:
    """(original ids ascending, their new ids) of all vertices in a split: two int64 tensors."""
    if split not in ("train", "val", "test"):
        raise wrong("split", repr(split), "'train', 'val' or 'test'", "choose one of these")
    original, new = [], []
    for number in range(store.num_parts):
        part = store.part(number)
        rows = torch.from_numpy(getattr(part, split)).to(torch.int64)
        original.append(torch.from_numpy(part.original_id)[rows].to(torch.int64))
        new.append(rows + int(store.ownership.offsets[number]))
    ids, ids_new = torch.cat(original), torch.cat(new)
    order = torch.argsort(ids)
    return ids[order], ids_new[order]
