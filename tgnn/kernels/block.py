"""Block: one layer's bipartite sampled graph in CSR form, destination by destination."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from tgnn.kernels.unique import true_places


@dataclass(eq=False)
class Transposed:
    """A block seen from its sources: row u lists the edges that leave source row u.

    indptr [n_src + 1] int64; indices [n_edges]: destination rows, ascending in each row; edge [n_edges]
    int64: for each entry the number of that edge in the block.
    """

    indptr: Tensor
    indices: Tensor
    edge: Tensor


@dataclass(frozen=True, eq=False)
class Half:
    """The edges of a block whose sources lie on one side of a row: a block of them, and their numbers (int64)."""

    block: Block
    edge: Tensor


def transpose(indptr: Tensor, indices: Tensor, n_src: int) -> Transposed:
    """The CSR (indptr, indices) seen from its `n_src` columns; equal columns keep the order of their edges.

    In O(n_src + n_edges) on a CPU, by a stable sort elsewhere.
    """
    if indices.device.type == "cpu":
        edges = np.arange(indices.numel())
        shape = (indptr.numel() - 1, n_src)
        csc = scipy.sparse.csr_array((edges, indices.numpy(), indptr.numpy()), shape=shape).tocsc()
        back = (csc.indptr, csc.indices, csc.data)
        return Transposed(*(torch.from_numpy(array.astype(np.int64, copy=False)) for array in back))
    return transpose_by_sort(indptr, indices, n_src)


def transpose_by_sort(indptr: Tensor, indices: Tensor, n_src: int) -> Transposed:
    """`transpose` on any device; no device sync."""
    ordered, edge = torch.sort(indices, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(n_src + 1, dtype=ordered.dtype, device=ordered.device))
    rows = torch.repeat_interleave(indptr.diff(), output_size=indices.numel())
    return Transposed(starts, rows[edge], edge)


@dataclass(eq=False)
class Block:
    """In-edges of `n_dst` destination rows, from `n_src` source rows; destinations are the first source rows.

    A row's edges are in order of their position (rank in the destination's full in-edge list).

    >>> block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3)
    >>> block.n_dst, block.n_edges, block.degrees.tolist(), block.dst_rows.tolist()
    (2, 2, [2, 0], [0, 0])
    """

    indptr: Tensor
    """[n_dst + 1] int64."""
    indices: Tensor
    """[n_edges] int32 or int64: source rows."""
    n_src: int
    weight: Tensor | None = None
    """[n_edges] float: the data's edge weights."""
    position: Tensor | None = None
    """[n_edges] int64: rank of the edge in its destination's full in-edge list."""
    dst_id: Tensor | None = None
    """[n_dst] int64: original ids of the destinations."""
    degree_in: Tensor | None = None
    """[n_dst] int64: in-degree of the destinations in the full graph."""
    degree_out: Tensor | None = None
    """[n_src] int64: out-degree of the sources in the full graph."""
    n_dst: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_dst = self.indptr.numel() - 1
        self._halves: dict[int, tuple[Half, Half]] = {}

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return self.indices.numel()

    @cached_property
    def degrees(self) -> Tensor:
        """[n_dst] int64: edges of every destination in this block."""
        return self.indptr.diff()

    @cached_property
    def dst_rows(self) -> Tensor:
        """[n_edges] int64: destination row of every edge."""
        return torch.repeat_interleave(self.degrees, output_size=self.n_edges)

    @cached_property
    def transposed(self) -> Transposed:
        """The block seen from its sources; built once."""
        return transpose(self.indptr, self.indices, self.n_src)

    def halves(self, n_near: int) -> tuple[Half, Half]:
        """The edges from the first `n_near` source rows, and those from the others, whose rows count from 0 again.

        Both have every destination and keep the order of edges; nothing but the edges is carried over. Kept for
        the next call with the same `n_near`.
        """
        if n_near not in self._halves:
            is_near = self.indices < n_near
            before = torch.zeros(self.n_edges + 1, dtype=torch.int64, device=self.indices.device)
            torch.cumsum(is_near, 0, out=before[1:])
            ends = before[self.indptr]
            near, far = true_places(is_near), true_places(~is_near)
            from_near, from_far = self.indices[near], self.indices[far] - n_near
            self._halves = {
                n_near: (
                    Half(Block(ends, from_near, n_near), near),
                    Half(Block(self.indptr - ends, from_far, self.n_src - n_near), far),
                )
            }
        return self._halves[n_near]

    def to(self, device: torch.device | str) -> Block:
        """This block with every tensor on `device`."""
        # A copy to the CPU that does not block may be read before it has arrived.
        device = torch.device(device)
        overlap = device.type != "cpu"
        moved = {
            f.name: value.to(device, non_blocking=overlap) if isinstance(value, Tensor) else value
            for f in fields(self)
            if f.init and (value := getattr(self, f.name)) is not None
        }
        return Block(**moved)
