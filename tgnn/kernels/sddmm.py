"""sddmm: one value per edge and head from the rows at its two ends.

    dot: out[e, h] = sum over d of dst[v, h, d] * src[u, h, d]          add: out[e, h] = dst[v, h] + src[u, h]

for every edge e = u -> v. Example: edges 1 -> 0 and 2 -> 0, dst = [[10]], src = [[1], [2], [5]]: add [[12],
[15]].
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels.backend import choose
from tgnn.kernels.block import Block
from tgnn.kernels.segment import segment_sum
from tgnn.kernels.spmm import edge_dot, weighted_sum


def sddmm(block: Block, dst: Tensor, src: Tensor, op: str = "dot") -> Tensor:
    """One value per edge and head; differentiable in `dst` and `src`.

    Args: dst [n_dst, H, D] and src [n_src, H, D] for `dot`; dst [n_dst, H] and src [n_src, H] for `add`.
    Returns: [n_edges, H] in src's dtype. Raises: UserError for an unknown op or shapes that do not fit.
    """
    dims = {"dot": 3, "add": 2}
    if op not in dims:
        raise wrong("sddmm op", repr(op), "'dot' or 'add'", "choose one of these")
    fits = dst.dim() == src.dim() == dims[op] and dst.shape[1:] == src.shape[1:]
    if not fits or dst.shape[0] != block.n_dst or src.shape[0] != block.n_src:
        tail = "H, D" if op == "dot" else "H"
        expected = f"dst [{block.n_dst}, {tail}] and src [{block.n_src}, {tail}]"
        raise wrong(
            f"sddmm {op}",
            f"dst {tuple(dst.shape)}, src {tuple(src.shape)}",
            expected,
            "give one row per vertex",
        )
    if choose("sddmm", dst, src) == "triton":
        from tgnn.kernels import sddmm_triton

        return sddmm_triton.sddmm_triton(block, dst, src, op)
    return sddmm_torch(block, dst, src, op)


def sddmm_torch(block: Block, dst: Tensor, src: Tensor, op: str = "dot") -> Tensor:
    """`sddmm` on torch's own operations; the reference of the Triton path."""
    return (_Dot if op == "dot" else _Add).apply(block, dst, src)


class _Dot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, dst, src):
        ctx.block = block
        ctx.save_for_backward(dst, src)
        return edge_dot(block, dst, src).to(src.dtype)

    @staticmethod
    def backward(ctx, grad):
        block, (dst, src), back = ctx.block, ctx.saved_tensors, ctx.block.transposed
        grad_dst = weighted_sum(block.indices, block.indptr, src, grad) if ctx.needs_input_grad[1] else None
        grad_src = (
            weighted_sum(back.indices, back.indptr, dst, grad[back.edge]) if ctx.needs_input_grad[2] else None
        )
        return None, grad_dst, grad_src


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, dst, src):
        ctx.block = block
        return dst.index_select(0, block.dst_rows) + src.index_select(0, block.indices)

    @staticmethod
    def backward(ctx, grad):
        block, back = ctx.block, ctx.block.transposed
        return None, segment_sum(grad, block.indptr), segment_sum(grad, back.indptr, back.edge)
