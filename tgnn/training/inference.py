"""Exact inference: every layer over all vertices, layer by layer, in bounded chunks, over any number of
ranks.

A mini-batch forward pass over all in-edges would meet most of the graph again and again; layer by layer each
vertex is computed once a layer. Every rank holds the rows of its own vertices and asks for halo rows chunk by
chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.model import GNN
from tgnn.nn.precision import mixed_precision
from tgnn.parallel.comm import Comm, current
from tgnn.parallel.exchange import start_exchange
from tgnn.partition.store import Store
from tgnn.sampling.cooperative import CooperativeSampler
from tgnn.sampling.loader import opened_store
from tgnn.sampling.neighbor import Hop
from tgnn.sampling.topology import Topology

# Rows that are projected at once.
PROJECTED_ROWS = 1 << 16


class LayerwiseInference:
    """Computes the logits of a rank's own vertices; made once, called for as many models and epochs as
    wanted.
    """

    def __init__(
        self, store: Store | str | os.PathLike, comm: Comm | None = None, *, chunk_edges: int = 2_000_000,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """
        Args:
            store: of as many parts as there are ranks.
            comm: process group; default the current one.
            chunk_edges: most in-edges in one chunk (a vertex with more is a chunk of its own); bounds the
                memory besides one row per vertex for a layer's input and output.
            dtype: of the features and the logits; bfloat16 as in `mixed_precision`.
        """
        self.comm = comm or current()
        store = opened_store(store, self.comm)
        self.part = store.part(self.comm.rank)
        if self.part.features is None:
            raise wrong(
                "inference", f"{store.name} without features", "features of every vertex", "give them"
            )
        self.dtype = dtype
        topology = Topology.of_part(store, self.comm.rank, self.comm.device)
        self._sampler = CooperativeSampler(topology, self.comm)
        self._chunks = self._cut(topology.indptr, chunk_edges)
        # A graph of one chunk needs its block built only once for all layers and calls.
        self._whole: Hop | None = None

    def _cut(self, indptr: Tensor, chunk_edges: int) -> list[tuple[int, int]]:
        """(first, end) rows of each chunk; every rank gets as many, empty ones at the end."""
        chunks, first, rows = [], 0, indptr.numel() - 1
        indptr = indptr.cpu()
        while first < rows:
            reach = int(torch.searchsorted(indptr, indptr[first] + chunk_edges, right=True)) - 1
            end = min(rows, max(first + 1, reach), first + max(1, chunk_edges))
            chunks.append((first, end))
            first = end
        most = max(count for (count,) in self.comm.all_gather_ints([len(chunks)]))
        return chunks + [(rows, rows)] * (most - len(chunks))

    @torch.no_grad()
    def __call__(self, model: GNN) -> Tensor:
        """Logits of this rank's vertices, [n, classes] in local row order, on the rank's device.
        Collective.
        """
        training = model.training
        model.eval()
        try:
            device = self.comm.device
            h = torch.from_numpy(self.part.features).to(device=device, dtype=self.dtype)
            with mixed_precision(self.dtype, device):
                for number in range(len(model.layers)):
                    h = self._layer(model, number, h)
            return h.float() if h.dtype == torch.bfloat16 else h
        finally:
            model.train(training)

    def _layer(self, model: GNN, number: int, h: Tensor) -> Tensor:
        layer = model.layers[number]
        projected = (
            h
            if type(layer).before_exchange is Layer.before_exchange
            else _in_chunks(layer.before_exchange, h)
        )
        pieces = []
        for first, end in self._chunks:
            in_place = layer.reads_rows_in_place
            hop = self._sampler.whole_rows(first, end) if in_place else self._hop(first, end)
            # With every row in the frontier the hop's rows are all rows in order: nothing to pick.
            everything = in_place or end - first == len(h)
            local = projected if everything else projected.index_select(0, hop.rows)
            own = local if projected is h else h if everything else h.index_select(0, hop.rows)
            dst = slice(first, end) if in_place else slice(0, hop.block.n_dst)
            halo = start_exchange(hop.plan, local, self.comm)
            out = layer(hop.block, Rows(own, local, halo, dst=own[dst], local_dst=local[dst]))
            pieces.append(model.after_layer(number, out, own[dst]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _hop(self, first: int, end: int) -> Hop:
        if self._whole is not None:
            return self._whole
        hop = self._sampler.hop(torch.arange(first, end, device=self.comm.device), fanout=-1, key=0)
        if len(self._chunks) == 1:
            self._whole = hop
        return hop


def _in_chunks(project: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    pieces = [project(chunk) for chunk in rows.split(PROJECTED_ROWS)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def gather_by_original_id(rows: Tensor, store: Store, comm: Comm | None = None) -> Tensor | None:
    """All ranks' rows in order of original id, [N, ...] on the CPU of rank 0; None on the others. Collective.

    Args: rows [n, ...], one per vertex this rank owns, in local row order.
    """
    comm = comm or current()
    sizes = np.diff(store.ownership.offsets).tolist()
    mine, nothing = len(rows), [0] * comm.ranks
    if comm.rank == 0:
        received = comm.all_to_all_rows(rows, [mine, *nothing[1:]], sizes)
    else:
        received = comm.all_to_all_rows(rows, [mine, *nothing[1:]], nothing)
        return None
    original = torch.cat([torch.from_numpy(store.part(part).original_id) for part in range(store.num_parts)])
    out = torch.empty(received.shape, dtype=received.dtype)
    out[original] = received.cpu()
    return out


def predict(
    model: GNN,
    store: Store | str | os.PathLike,
    *,
    chunk_edges: int = 2_000_000,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Logits of every vertex by exact layer-wise inference: [N, classes] in order of original id.

    On several ranks a collective that returns the logits on rank 0 and None on the others. `dtype` defaults
    to that of the model's parameters (float32 for a model that has none).
    """
    if not isinstance(model, GNN):
        do = "wrap its layers: tgnn.nn.GNN([layer, ...])"
        raise wrong("model", f"a {type(model).__name__}", "a tgnn.nn.GNN", do)
    store = opened_store(store, current())
    dtype = dtype or next((parameter.dtype for parameter in model.parameters()), torch.float32)
    rows = LayerwiseInference(store, chunk_edges=chunk_edges, dtype=dtype)(model)
    return gather_by_original_id(rows, store)
