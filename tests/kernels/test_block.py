"""Block: derived arrays, the transposed view and moving."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import Block
from tgnn.kernels.block import transpose_by_sort


def transposed_reference(block: Block) -> list[list[tuple[int, int]]]:
    """For every source, its (destination row, edge) pairs in edge order."""
    out: list[list[tuple[int, int]]] = [[] for _ in range(block.n_src)]
    for v in range(block.n_dst):
        for e in range(int(block.indptr[v]), int(block.indptr[v + 1])):
            out[int(block.indices[e])].append((v, e))
    return out


def test_docstring_example():
    block = Block(indptr=torch.tensor([0, 2, 2]), indices=torch.tensor([1, 2]), n_src=3)
    assert (block.n_dst, block.n_edges) == (2, 2)
    assert block.degrees.tolist() == [2, 0]
    assert block.dst_rows.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(4))
def test_transposed_keeps_repeated_edges_in_order(random_block, dtype, seed):
    block = random_block(n_dst=9, n_src=4, most=5, seed=seed, dtype=dtype)
    back = block.transposed
    assert back.indptr.dtype == back.indices.dtype == back.edge.dtype == torch.int64
    pairs = list(zip(back.indices.tolist(), back.edge.tolist(), strict=True))
    found = [pairs[a:b] for a, b in zip(back.indptr[:-1].tolist(), back.indptr[1:].tolist(), strict=True)]
    assert found == transposed_reference(block)
    assert block.transposed is back


def test_a07_empty_blocks(empty_blocks):
    for block in empty_blocks:
        assert block.n_edges == 0
        assert block.degrees.tolist() == [0] * block.n_dst
        assert block.dst_rows.tolist() == []
        assert block.transposed.indptr.tolist() == [0] * (block.n_src + 1)
        assert block.transposed.indices.numel() == block.transposed.edge.numel() == 0


def test_strided_indices(random_block):
    block = random_block()
    wide = torch.stack([block.indices, block.indices.flip(0)], 1)
    strided = Block(indptr=block.indptr, indices=wide[:, 0], n_src=block.n_src)
    assert torch.equal(strided.transposed.edge, block.transposed.edge)


def test_to_moves_every_tensor_and_keeps_the_rest(random_block):
    block = random_block()
    block.weight = torch.rand(block.n_edges)
    block.degree_out = torch.arange(block.n_src)
    there = block.to("meta")
    assert (there.n_src, there.n_dst) == (block.n_src, block.n_dst)
    for name in ("indptr", "indices", "weight", "position", "dst_id", "degree_out"):
        assert getattr(there, name).device.type == "meta"
    assert there.degree_in is None
    here = block.to(torch.device("cpu"))
    for name in ("indptr", "indices", "weight", "position", "dst_id", "degree_out"):
        assert torch.equal(getattr(here, name), getattr(block, name))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_way_of_other_devices_gives_the_same(random_block, empty_blocks, dtype):
    for block in [random_block(seed=3, dtype=dtype), *empty_blocks]:
        ours, theirs = transpose_by_sort(block.indptr, block.indices, block.n_src), block.transposed
        for name in ("indptr", "indices", "edge"):
            assert getattr(ours, name).dtype == torch.int64
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("n_near", [0, 1, 4, 9])
def test_halves_have_every_edge_once_in_order(random_block, n_near):
    block = random_block(n_dst=6, n_src=9, seed=3)
    near, far = block.halves(n_near)
    assert torch.cat([near.edge, far.edge]).sort().values.tolist() == list(range(block.n_edges))
    for half, first, n_src in ((near, 0, n_near), (far, n_near, 9 - n_near)):
        assert (half.block.n_src, half.block.n_dst) == (n_src, 6)
        assert (half.block.indices + first).tolist() == block.indices[half.edge].tolist()
        assert half.block.dst_rows.tolist() == block.dst_rows[half.edge].tolist()
        assert (half.edge.diff() > 0).all()
    assert block.halves(n_near)[0] is near
