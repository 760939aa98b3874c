"""Traffic models against counting by hand, and against what an op's own tensors hold."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import Block, traffic
from tgnn.kernels.traffic import Traffic


def test_the_example_of_the_docstring():
    block = Block(indptr=torch.tensor([0, 1, 2]), indices=torch.tensor([1, 2]), n_src=3)
    assert traffic.spmm(block, 1, torch.float32) == Traffic(56, 2)


def bytes_of(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_spmm_counts_what_a_gather_and_its_sum_move(random_block, dtype, index):
    block = random_block(dtype=index)
    x, weight = torch.ones(block.n_src, 2, 5, dtype=dtype), torch.ones(block.n_edges, 2, dtype=dtype)
    rows, out = x[block.indices.long()], torch.ones(block.n_dst, 2, 5, dtype=dtype)
    moved = bytes_of(rows, block.indices, block.indptr, out)
    assert traffic.spmm(block, 5, dtype, heads=2).bytes == moved
    assert traffic.spmm(block, 5, dtype, heads=2, weighted=True).bytes == moved + bytes_of(weight)
    assert traffic.spmm(block, 5, dtype, heads=2, indirect=True).bytes == moved + 8 * block.n_edges
    back = block.transposed
    moved = bytes_of(torch.ones(block.n_edges, 10, dtype=dtype), x, back.indptr, back.indices)
    assert traffic.spmm_backward(block, 5, dtype, heads=2).bytes == moved
    weighted = traffic.spmm_backward(block, 5, dtype, heads=2, weighted=True).bytes
    assert weighted == moved + bytes_of(back.edge, weight)


def test_sddmm_and_softmax_count_their_tensors(random_block):
    block, dtype = random_block(), torch.float32
    edges, dst = torch.ones(block.n_edges, 3), torch.ones(block.n_dst, 3, 4)
    rows = torch.ones(block.n_edges, 3, 4)
    dot = traffic.sddmm(block, 4, dtype, heads=3)
    assert dot == Traffic(bytes_of(rows, block.indices, edges, dst, block.indptr), 2 * rows.numel())
    add = traffic.sddmm(block, 4, dtype, heads=3, op="add")
    assert add.bytes == bytes_of(edges, edges, block.indices, dst[..., 0], block.indptr)
    assert traffic.edge_softmax(block, 3, dtype).bytes == bytes_of(edges, edges, block.indptr)


def test_attention_counts_the_rows_at_both_ends_once(random_block):
    block, dtype = random_block(), torch.bfloat16
    rows, dst = torch.ones(block.n_edges, 3, 4, dtype=dtype), torch.ones(block.n_dst, 3, 4, dtype=dtype)
    lse = torch.ones(block.n_dst, 3)
    shared = bytes_of(rows, block.indices, block.indptr, dst, dst, lse)
    assert traffic.attention(block, "gatv2", 3, 4, dtype).bytes == shared
    assert traffic.attention(block, "dot", 3, 4, dtype).bytes == shared + bytes_of(rows)
    gat = bytes_of(rows, rows[..., 0], block.indices, block.indptr, dst, dst[..., 0], lse)
    assert traffic.attention(block, "gat", 3, 4, dtype).bytes == gat
    with_dropout = traffic.attention(block, "gat", 3, 4, dtype, dropout=True).bytes
    assert with_dropout == gat + bytes_of(block.position, block.dst_id)
    assert traffic.attention_backward(block, "gat", 3, 4, dtype).bytes > 2 * gat


def test_gather_dropout_and_unique_count_in_and_out():
    rows = torch.arange(7, dtype=torch.int32)
    assert traffic.gather(rows, 5, torch.float16).bytes == 2 * 7 * 5 * 2 + 7 * 4
    assert traffic.dropout(7, 5, torch.float32) == Traffic(2 * 7 * 5 * 4 + 7 * 8, 35)
    assert traffic.unique(rows, 3).bytes == 4 * 10


def test_empty_blocks_move_only_their_pointers(empty_blocks):
    for block in empty_blocks:
        assert traffic.spmm(block, 0, torch.float32).bytes == 8 * (block.n_dst + 1)
        assert traffic.spmm_backward(block, 4, torch.float32).flops == 0
