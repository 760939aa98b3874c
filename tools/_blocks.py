"""Blocks to measure on: cut from a partition store by sampling, or made with skewed degrees."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgnn.kernels.block import Block
from tgnn.partition.store import Store
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

# Seeds of a batch that is sampled from a store.
BATCH_ROWS = 1024


def made_block(n_dst: int, degree: float, seed: int = 0) -> Block:
    """`n_dst` destinations of `degree` in-edges on average, from twice as many sources.

    Degrees are skewed (Pareto, exponent 2.5, so that some rows are empty and some long), sources skewed too.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = (1 - torch.rand(n_dst, generator=generator, dtype=torch.float64)) ** (-1 / 2.5) - 1
    degrees = (weight * (degree * n_dst / weight.sum())).round().to(torch.int64)
    indptr = torch.zeros(n_dst + 1, dtype=torch.int64)
    torch.cumsum(degrees, 0, out=indptr[1:])
    n_src, n_edges = 2 * n_dst, int(indptr[-1])
    chosen = torch.rand(n_edges, generator=generator, dtype=torch.float64) ** 1.5 * n_src
    position = torch.arange(n_edges) - torch.repeat_interleave(indptr[:-1], degrees)
    ids = torch.randperm(n_src, generator=generator)[:n_dst]
    return Block(indptr, chosen.to(torch.int64).clamp_(max=n_src - 1), n_src, position=position, dst_id=ids)


def sampled_blocks(path: str, fanouts: Sequence[int], seed: int = 0) -> list[Block]:
    """The blocks of one mini-batch of random seeds, drawn on one rank from a store."""
    topology = Topology.of_whole(Store.open(path))
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randperm(topology.num_rows, generator=generator)[:BATCH_ROWS]
    hops = NeighborSampler(topology, seed=seed).sample(seeds, fanouts, epoch=1, step=1)
    return [hop.block for hop in hops]


def feature_width(path: str) -> int:
    """Columns of a store's features."""
    return Store.open(path).num_features


def mean_degree(block: Block) -> float:
    """In-edges of a destination on average."""
    return block.n_edges / max(1, block.n_dst)
