"""edge_softmax: softmax over each destination's in-edges.

    out[e, h] = exp(score[e, h]) / sum over the edges e' of the same destination of exp(score[e', h])

computed from the differences to each destination's largest score, in float32 at least. A destination without
edges has nothing to give, so there is no NaN.

Example: edges of scores 0 and log 2 into one row, none into another: 1/3 and 2/3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels.backend import choose
from tgnn.kernels.block import Block
from tgnn.kernels.segment import segment_max, segment_sum, widened


def edge_softmax(block: Block, score: Tensor) -> Tensor:
    """Softmax of `score` [n_edges, H] over each destination's in-edges: [n_edges, H] in its dtype.

    Computed in float32 at least; differentiable. Example: edges of scores 0 and log 2 into one row, none into
    another: 1/3 and 2/3. Raises: UserError for a shape that does not fit.
    """
    if score.dim() != 2 or score.shape[0] != block.n_edges:
        raise wrong(
            "edge_softmax score", tuple(score.shape), f"({block.n_edges}, H)", "give one row per edge"
        )
    if choose("edge_softmax", score) == "triton":
        from tgnn.kernels.edge_softmax_triton import edge_softmax_triton

        return edge_softmax_triton(block, score)
    return edge_softmax_torch(block, score)


def edge_softmax_torch(block: Block, score: Tensor) -> Tensor:
    """`edge_softmax` on torch's own operations; the reference of the Triton path."""
    return _EdgeSoftmax.apply(block, score)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, score):
        wide = widened(score)
        rows = block.dst_rows
        power = torch.exp(wide - segment_max(wide, block.indptr).index_select(0, rows))
        weight = power.div_(segment_sum(power, block.indptr).index_select(0, rows))
        ctx.block, ctx.dtype = block, score.dtype
        ctx.save_for_backward(weight)
        return weight.to(score.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        block, (weight,) = ctx.block, ctx.saved_tensors
        product = weight * grad
        total = segment_sum(product, block.indptr).index_select(0, block.dst_rows)
        return None, (product - weight * total).to(ctx.dtype)
