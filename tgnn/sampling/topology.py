"""Topology: the in-edges that one rank can sample, and what is known of their vertices.

In split mode that is the rank's own part. In data mode it is the whole graph: every rank keeps a copy of all parts'
in-edges in memory, as data-parallel trainers do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tgnn.data.graph import Graph
from tgnn.partition.rows import degree_out
from tgnn.partition.store import Part, Store
from tgnn.sampling.placement import placement_of_edges


@dataclass(eq=False)
class Topology:
    """In-edge CSR of the vertices with new ids [first, end), row by row.

    indptr [n + 1] int64; indices [E]: new ids of the sources, rows in position order; original_id [n] int64;
    degree_out [N] int32 or int64 by new id: out-degrees in the full graph, also of vertices that others own;
    edge_weight [E] float32 or None; offsets: first new id of every part and N at the end; source_id [N] int64: original
    ids by new id, also of vertices that others own, None where they were not asked for.
    """

    first: int
    end: int
    indptr: Tensor
    indices: Tensor
    original_id: Tensor
    degree_out: Tensor
    edge_weight: Tensor | None
    offsets: tuple[int, ...]
    source_id: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Vertices whose in-edges are here."""
        return self.end - self.first

    @property
    def is_pinned(self) -> bool:
        """Whether the edges lie in host memory that a GPU reads."""
        return self.indptr.is_cuda and not self.indices.is_cuda

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        arrays = (
            self.indptr, self.indices, self.original_id, self.degree_out, self.edge_weight, self.source_id,
        )  # fmt: skip
        distinct = {array.data_ptr(): array for array in arrays if array is not None}
        return sum(array.numel() * array.element_size() for array in distinct.values())

    @classmethod
    def of_part(
        cls, store: Store, part: int, device: torch.device | str = "cpu", *, source_ids: bool = False,
        placement: str = "device",
    ) -> Topology:  # fmt: skip
        """What the owner of `part` can sample: its own vertices' in-edges; with `source_ids` all original ids too.

        `placement` of the edges: `device`, `pinned` host memory, or `auto`, which is the device where they take no
        more than a share of its free memory.
        """
        mine = store.part(part)
        offsets = _offsets(store)
        made = cls._make(offsets[part], offsets[part + 1], [mine], store, device, placement)
        if source_ids:
            parts = range(store.num_parts)
            made.source_id = _tensor([store.part(number).original_id for number in parts], device)
        return made

    @classmethod
    def of_whole(
        cls, store: Store, device: torch.device | str = "cpu", *, placement: str = "device"
    ) -> Topology:
        """The whole graph, its parts one after the other; `placement` as in `of_part`."""
        parts = [store.part(p) for p in range(store.num_parts)]
        made = cls._make(0, store.num_vertices, parts, store, device, placement)
        made.source_id = made.original_id
        return made

    @classmethod
    def of_graph(
        cls, graph: Graph, device: torch.device | str = "cpu", *, source_ids: bool = False
    ) -> Topology:
        """A graph that is not partitioned, its new ids the original ones; on the CPU it shares the graph's arrays."""
        ids = torch.arange(graph.num_vertices, device=device)
        return cls(
            first=0,
            end=graph.num_vertices,
            indptr=_tensor([graph.indptr], device),
            indices=_tensor([graph.indices], device),
            original_id=ids,
            degree_out=_tensor([degree_out(graph)], device),
            edge_weight=None if graph.edge_weight is None else _tensor([graph.edge_weight], device),
            offsets=(0, graph.num_vertices),
            source_id=ids if source_ids else None,
        )

    @classmethod
    def _make(
        cls, first: int, end: int, parts: list[Part], store: Store, device: torch.device | str, placement: str
    ) -> Topology:
        num_edges, per_edge = sum(part.num_edges for part in parts), 8 if store.has_edge_weight else 4
        pinned = placement_of_edges(placement, num_edges * per_edge, device) == "pinned"
        every_part = [store.part(p) for p in range(store.num_parts)]
        edges_before = np.cumsum([0] + [part.num_edges for part in parts])
        starts = [part.indptr[:-1] + before for part, before in zip(parts, edges_before, strict=False)]
        indptr = parts[0].indptr if len(parts) == 1 else np.concatenate([*starts, edges_before[-1:]])
        weights = [part.edge_weight for part in parts]
        return cls(
            first=first,
            end=end,
            indptr=_tensor([indptr], device),
            indices=_tensor([part.indices for part in parts], device, pinned),
            original_id=_tensor([part.original_id for part in parts], device),
            degree_out=_tensor([part.degree_out for part in every_part], device),
            edge_weight=_tensor(weights, device, pinned) if store.has_edge_weight else None,
            offsets=_offsets(store),
        )


def _offsets(store: Store) -> tuple[int, ...]:
    return tuple(int(offset) for offset in store.ownership.offsets)


def _tensor(arrays: list[np.ndarray], device: torch.device | str, pinned: bool = False) -> Tensor:
    # One array stays the memory map that it is; several are copied together.
    array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    tensor = torch.from_numpy(np.asarray(array))
    return tensor.pin_memory() if pinned else tensor.to(device)
