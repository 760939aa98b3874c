"""Loader: from a store's seeds to ready mini-batches, the same global batches on any number of ranks."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.backend import choose
from tgnn.parallel.comm import Comm, current
from tgnn.partition.store import Store
from tgnn.sampling.cooperative import CooperativeSampler
from tgnn.sampling.features import HaloCache, open_columns
from tgnn.sampling.minibatch import MiniBatch, Stage, no_stage
from tgnn.sampling.neighbor import Hop, NeighborSampler
from tgnn.sampling.placement import Budget, device_memory_left, feature_budget, halo_budget
from tgnn.sampling.samplers import check_sampler, uses_sources
from tgnn.sampling.topology import Topology

MODES = ("split", "data")
PLACEMENTS = ("auto", "device", "pinned")


class Loader:
    """Iterates over one epoch's mini-batches; each `for` loop is the next epoch.

    Global batches are cut from one keyed permutation of the split's vertices per epoch. In `split` mode a rank takes
    the seeds it owns and all ranks sample together; in `data` mode it takes its contiguous share and samples alone.
    Every rank yields the same number of batches, empty ones included.
    """

    def __init__(
        self, store: Store | str | os.PathLike, fanouts: Sequence[int], batch_size: int = 1024, *, split: str = "train",
        parallel: str = "split", replicas: int = 1, sampler: str = "uniform", replace: bool = False,
        shuffle: bool = True, seed: int = 0, prefetch: int = 1, feature_cache: int | None = None,
        halo_cache: int | None = 0, dtype: torch.dtype = torch.float32, exchange_dtype: torch.dtype | None = None,
        graph_placement: str = "auto", in_place: bool = False, comm: Comm | None = None,
        stage: Stage = no_stage,
    ) -> None:  # fmt: skip
        """
        Args:
            store: a store or its path, of as many parts as there are ranks (in a group).
            fanouts: in-edges per vertex and hop, seeds outward; -1 for all.
            batch_size: global, seeds per step over all ranks.
            split: `train`, `val` or `test`.
            parallel: `split` or `data`.
            replicas: groups of equal size that the ranks form: a global batch is dealt out to the groups, in `split`
                mode the ranks of a group share its piece.
            sampler: how in-edges are drawn: `uniform`, `labor`, `labor-dependent` or `weighted`; see NeighborSampler.
                Edges that `weighted` draws carry the mean weight of their row, as the draw counted their own already;
                where a row gives all its in-edges they keep their own.
            replace: draw in-edges with replacement.
            shuffle: permute the seeds anew each epoch; else they come in order of original id.
            prefetch: batches prepared ahead of the one that is handed out.
            feature_cache: bytes for copies of the rank's own feature rows in its device's memory; None: a share of
                what is free.
            halo_cache: bytes for copies of other ranks' feature rows in split mode; None: a share of what is free.
            dtype: floating type of the feature rows.
            exchange_dtype: floating type of halo rows on the wire, for example torch.bfloat16; None: the rows' own.
            graph_placement: `device`, `pinned` (host memory that a GPU reads) or `auto`: device where it fits.
            in_place: where one CPU rank holds all features, hand out the whole table instead of a copy of the input
                rows, for models that aggregate straight from it (`GNN.reads_in_place`); elsewhere it changes nothing.
            comm: process group; default the current one.
        """
        self.comm = comm or current()
        self.group = self.comm.replica(replicas)
        self.store, self.fanouts, self.batch_size = opened_store(store, self.group), fanouts, batch_size
        self.parallel, self.replicas, self.shuffle, self.seed = parallel, replicas, shuffle, seed
        self.prefetch, self.stage, self.dtype, self.exchange_dtype = prefetch, stage, dtype, exchange_dtype
        self.epoch = 0
        self._check()
        check_sampler(sampler, replace, self.store.has_edge_weight)
        drawing = {"sampler": sampler, "replace": replace, "seed": seed, "stage": stage}
        # Batches that are prepared on a stream of their own need collectives that do not queue behind the step's.
        self._stream = None
        if self.comm.device.type == "cuda" and prefetch > 0:
            self._stream = torch.cuda.Stream(self.comm.device)
        self._sampling_comm = self.group if self._stream is None else self.group.duplicate()
        self._auto = (feature_cache is None, halo_cache is None)
        self._place(drawing, feature_cache, halo_cache, graph_placement)
        alone = self.comm.device.type == "cpu" and self.topology.num_rows == self.store.num_vertices
        reads = in_place and alone and self._features is not None
        self._table = self._features.whole(self.comm.device) if reads else None
        self._seed_ids, self._seed_new = seeds_of(self.store, split)

    def _place(
        self, drawing: dict[str, Any], feature_cache: int | None, halo_cache: int | None, graph_placement: str
    ) -> None:
        """Open what this rank samples and reads, and put it where it belongs."""
        store, group, device, rank = self.store, self.group, self.comm.device, self.group.rank
        self.halo_cache = None
        if graph_placement not in PLACEMENTS:
            raise wrong(
                "graph_placement", repr(graph_placement), " or ".join(PLACEMENTS), "choose one of these"
            )
        if graph_placement == "pinned" and device.type == "cpu":
            do = "leave it out, or run on GPUs"
            raise wrong("graph_placement", "pinned for ranks on the CPU", "auto or device", do)
        if self.parallel == "split":
            by_source = uses_sources(drawing["sampler"])
            self.topology = Topology.of_part(
                store, rank, device, source_ids=by_source, placement=graph_placement
            )
            size = halo_budget(halo_cache, device, self.comm.ranks)
            if size and group.ranks > 1 and store.num_features:
                self.halo_cache = HaloCache(store, rank, size, device, self.dtype)
            self.sampler = CooperativeSampler(
                self.topology, self._sampling_comm, halo_cache=self.halo_cache, **drawing
            )
            self._exchange_comm, parts = group, [rank]
        else:
            self.topology = Topology.of_whole(store, device, placement=graph_placement)
            self.sampler = NeighborSampler(self.topology, **drawing)
            self._exchange_comm, parts = Comm(device=device), list(range(store.num_parts))
        if self.topology.is_pinned and choose("sample_neighbors", self.topology.indptr) == "torch":
            do = "use --backend auto or triton, or --graph-placement device"
            expected = "Triton's sampling kernels, which read host memory"
            raise wrong("graph_placement", "pinned with torch's sampling", expected, do)
        self._features, self._labels = open_columns(store, parts, self.dtype)
        if self._features is not None:
            self._features.place(feature_budget(feature_cache, device, self.comm.ranks), device)

    def fill_device(self) -> None:
        """On a GPU, where a cache's size was left to be found: give it what a measured step has left of the memory.

        To be called once, after a step. A rank's caches are its own matter: the others need not do the same.
        """
        device, features = self.comm.device, self._features
        if device.type != "cuda" or features is None or not any(self._auto):
            return
        # A batch that is being prepared may still read the rows that are about to move.
        torch.cuda.synchronize(device)
        left = device_memory_left(device)
        if self._auto[0]:
            budget = feature_budget(None, device, self.comm.ranks)
            features.place(Budget(left, budget.pinned_bytes), device)
            left -= features.cached_rows * features.row_bytes
        if self._auto[1] and self.parallel == "split" and self.group.ranks > 1:
            self.halo_cache = HaloCache(self.store, self.group.rank, left, device, self.dtype)
            self.sampler.halo_cache = self.halo_cache

    def placement(self) -> dict[str, Any]:
        """Where this rank's data lie, and how many bytes they take there."""
        features, halo = self._features, self.halo_cache
        row = 0 if features is None else features.row_bytes
        cached, pinned = (0, 0) if features is None else (features.cached_rows, features.pinned_rows)
        return {
            "graph": "pinned" if self.topology.is_pinned else self.topology.indices.device.type,
            "graph_bytes": self.topology.num_bytes,
            "feature_cache_bytes": cached * row,
            "pinned_feature_bytes": pinned * row,
            "halo_cache_bytes": 0 if halo is None else halo.rows.numel() * halo.rows.element_size(),
        }

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
            ready.append(self._prepare_aside(order, epoch, step))
            if len(ready) > self.prefetch:
                yield self._handed_out(ready.popleft())
        while ready:
            yield self._handed_out(ready.popleft())

    def _prepare_aside(self, order: Tensor, epoch: int, step: int) -> MiniBatch:
        """`_prepare`, on a GPU on the stream of its own: the step under way goes on meanwhile."""
        if self._stream is None:
            return self._prepare(order, epoch, step)
        with torch.cuda.stream(self._stream):
            batch = self._prepare(order, epoch, step)
            batch.ready = self._stream.record_event()
        return batch

    def _handed_out(self, batch: MiniBatch) -> MiniBatch:
        """The batch, for the current stream to use."""
        if self._stream is not None:
            with self.stage("wait"):
                stream = torch.cuda.current_stream(self.comm.device)
                stream.wait_event(batch.ready)
                for tensor in batch.tensors():
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
        return batch

    def _order(self, epoch: int) -> Tensor:
        """A permutation of the seeds' indices: by keyed number, which is the same on every rank."""
        if not self.shuffle:
            return torch.arange(self._seed_ids.numel())
        return torch.argsort(
            rng.keyed(rng.stream(self.seed, rng.PERMUTATION, epoch), self._seed_ids), stable=True
        )

    def _prepare(self, order: Tensor, epoch: int, step: int) -> MiniBatch:
        batch, sent = (
            order[step * self.batch_size : (step + 1) * self.batch_size],
            self._sampling_comm.bytes_sent,
        )
        with self.stage("sample"):
            new = self._seed_new[batch]
            if self.parallel == "split":
                new = new.tensor_split(self.replicas)[self.comm.rank // self.group.ranks]
                new = new[(new >= self.topology.first) & (new < self.topology.end)]
            else:
                new = new.tensor_split(self.comm.ranks)[self.comm.rank]
            rows = (new - self.topology.first).to(self.comm.device)
        hops = self.sampler.sample(rows, self.fanouts, epoch, step, self._table is not None)
        ready = self._load(hops, rows, batch.numel(), epoch, step)
        ready.work["exchange_bytes"] = self._sampling_comm.bytes_sent - sent
        return ready

    def _load(self, hops: list[Hop], seeds: Tensor, global_seeds: int, epoch: int, step: int) -> MiniBatch:
        with self.stage("load"):
            given = self._input(hops[0])
            y = None if self._labels is None else self._labels.load(seeds, self.comm.device)
        plans, cached, dst_rows = [hop.plan for hop in hops], hops[0].cached.numel(), given.dst_rows
        read = 0 if given.x is None else hops[0].used - plans[0].n_halo - cached
        work = {
            "seeds": seeds.numel(),
            "edges": sum(hop.block.n_edges for hop in hops),
            "input_rows": hops[0].used,
            "feature_rows_loaded": read,
            "feature_cache_rows": given.hits if dst_rows is None else read * bool(self._features.cached_rows),
            "halo_rows": sum(plan.n_halo for plan in plans),
            "halo_cache_rows": cached,
        }
        ids = [given.ids, *(hop.block.dst_id for hop in hops)]
        return MiniBatch(
            [hop.block for hop in hops], plans, ids, given.x, y, global_seeds, self._exchange_comm, self.seed, epoch,
            step, work, self.stage, self.exchange_dtype, dst_rows, given.room,
        )  # fmt: skip

    def _input(self, hop: Hop) -> _Input:
        """The input rows: this rank's own, then copies of other ranks'; or the whole table."""
        features, original, device = self._features, self.topology.original_id, self.comm.device
        if self._table is not None:
            return _Input(self._table, original, dst_rows=hop.rows)
        ids = original.index_select(0, hop.rows)
        own, cached = hop.rows.numel(), hop.cached.numel()
        if cached:
            ids = torch.cat([ids, self.halo_cache.original_id[hop.cached]])
        if features is None:
            return _Input(None, ids)
        hits = features.hits(hop.rows)
        spare = hop.plan.n_halo if self._exchange_comm.shares_memory else 0
        if not cached and not spare:
            return _Input(features.load(hop.rows, device), ids, hits)
        room = features.empty(own + cached + spare, device)
        features.load(hop.rows, device, out=room[:own])
        if cached:
            torch.index_select(self.halo_cache.rows, 0, hop.cached, out=room[own : own + cached])
        # `.data`: what is written behind x later is no change of x to autograd.
        return _Input(room[: own + cached].data, ids, hits, room=room if spare else None)


class _Input(NamedTuple):
    """Rows of the input layer (features, original ids), how many were cached; `MiniBatch` has the rest."""

    x: Tensor | None
    ids: Tensor
    hits: int = 0
    room: Tensor | None = None
    dst_rows: Tensor | None = None


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
