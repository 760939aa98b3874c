"""attention: softmax over each destination's in-edges, then a weighted sum of the sources' values.

    out[v, h] = sum over u -> v of drop(softmax over u -> v of score[u -> v, h]) * value[u, h]

    gat:   score = LeakyReLU(dst[v, h] + src[u, h])
    gatv2: score = sum over d of att[h, d] * LeakyReLU(dst[v, h, d] + src[u, h, d])
    dot:   score = <dst[v, h], src[u, h]> / sqrt(D)

gat is Velickovic et al. 2018, eq. 3 (its product with the attention vector split in two halves), gatv2 is
Brody et al. 2022, eq. 7, dot is Vaswani et al. 2017, eq. 1.

A destination without edges gets 0, never NaN. Half types are computed in float32 throughout and cast once.
Attention dropout is keyed by the edge (original destination id, position) and the head.

Example: edges 1 -> 0 and 2 -> 0, none into row 1, gat with all scores 0, value = [[[7]], [[2]], [[5]]]:
out = [[[3.5]], [[0]]]; with src = [[0], [0], [log 2]] the weights are 1/3 and 2/3 and out = [[[4]], [[0]]].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.backend import choose
from tgnn.kernels.block import Block
from tgnn.kernels.dropout import keep_mask, threshold
from tgnn.kernels.edge_softmax import edge_softmax_torch
from tgnn.kernels.sddmm import sddmm_torch
from tgnn.kernels.segment import edge_runs, edge_slices, segment_sum, widened
from tgnn.kernels.spmm import spmm_torch

# (gradient, input, slope, whether the input is the result): several times as fast as torch.where on a CPU.
leaky_relu_backward = torch.ops.aten.leaky_relu_backward

KINDS = ("gat", "gatv2", "dot")


def attention(
    block: Block, value: Tensor, kind: str, src: Tensor, dst: Tensor, att: Tensor | None = None, *,
    slope: float = 0.2, dropout: float = 0.0, key: int = 0,
) -> Tensor:  # fmt: skip
    """Attention over in-edges; differentiable in value, src, dst and att.

    Args:
        value: [n_src, H, D].
        kind: `gat`, `gatv2` or `dot`, the score of the module's docstring.
        src, dst: [n_src, H] and [n_dst, H] for gat; [n_src, H, D'] and [n_dst, H, D'] for gatv2 and dot.
        att: [H, D'] for gatv2, else None.
        slope: of LeakyReLU for negative inputs.
        dropout: probability of dropping an edge's weight, per head; needs block.dst_id and block.position.
        key: of the dropout, from `rng.stream`.

    Returns: [n_dst, H, D]. Raises: UserError for an unknown kind, shapes that do not fit, or dropout on a
    block without keys.
    """
    _check(block, value, kind, src, dst, att, dropout)
    if choose("attention", value, src, dst) == "triton":
        from tgnn.kernels.attention_triton import attention_triton

        return attention_triton(block, value, kind, src, dst, att, slope=slope, dropout=dropout, key=key)
    return attention_torch(block, value, kind, src, dst, att, slope=slope, dropout=dropout, key=key)


def _check(
    block: Block, value: Tensor, kind: str, src: Tensor, dst: Tensor, att: Tensor | None, p: float
) -> None:
    if kind not in KINDS:
        raise wrong("attention kind", repr(kind), f"one of {', '.join(KINDS)}", "choose one of these")
    tail = src.shape[1:]
    fits = value.dim() == 3 and len(value) == block.n_src and src.dim() == (2 if kind == "gat" else 3)
    fits = fits and src.shape == (block.n_src, *tail) and dst.shape == (block.n_dst, *tail)
    fits = fits and value.shape[1] == src.shape[1]
    if not fits or (kind == "gatv2" and (att is None or att.shape != tail)):
        shapes = {"value": value, "src": src, "dst": dst, "att": att}
        got = ", ".join(f"{name} {None if t is None else tuple(t.shape)}" for name, t in shapes.items())
        ends = "H" if kind == "gat" else "H, D'"
        expected = f"value [{block.n_src}, H, D], src [{block.n_src}, {ends}], dst [{block.n_dst}, {ends}]"
        expected += " and att [H, D']" if kind == "gatv2" else ""
        raise wrong(
            f"attention {kind}", got, expected, "give one row per vertex and the same heads everywhere"
        )
    if threshold(p) and (block.dst_id is None or block.position is None):
        expected = "a block with dst_id and position"
        raise wrong(
            "attention dropout", "a block without keys", expected, "set them or turn attention dropout off"
        )


def attention_torch(
    block: Block, value: Tensor, kind: str, src: Tensor, dst: Tensor, att: Tensor | None = None, *,
    slope: float = 0.2, dropout: float = 0.0, key: int = 0,
) -> Tensor:  # fmt: skip
    """`attention` on torch's own operations; the reference of the Triton path."""
    out_dtype = value.dtype
    value, src, dst = widened(value), widened(src), widened(dst)
    if kind == "gat":
        score = F.leaky_relu(sddmm_torch(block, dst, src, "add"), slope)
    elif kind == "gatv2":
        score = _Gatv2Score.apply(block, dst, src, widened(att), slope)
    else:
        score = sddmm_torch(block, dst, src, "dot") * src.shape[-1] ** -0.5
    weight = edge_softmax_torch(block, score)
    if threshold(dropout) and block.n_edges:
        weight = weight * edge_keep(block, weight.shape[1], dropout, key, weight.dtype)
    return spmm_torch(block, value, weight).to(out_dtype)


def edge_keep(block: Block, heads: int, p: float, key: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[n_edges, H] of `dtype`: 1 / (1 - p) where attention dropout keeps an edge and head, else 0.

    p is rounded as in `dropout`; the choice is keyed by the edge, so an edge drawn twice is kept or dropped
    twice.
    """
    edge_state = rng.draw(rng.keyed(key, block.dst_id).index_select(0, block.dst_rows), block.position)
    return keep_mask(edge_state, heads, p).to(dtype) * (65536 / (65536 - threshold(p)))


class _Gatv2Score(torch.autograd.Function):
    """GATv2's score without a [n_edges, H, D] tensor: edge sums in bounded runs, here and backward."""

    @staticmethod
    def forward(ctx, block, dst, src, att, slope):
        ctx.block, ctx.slope = block, slope
        ctx.save_for_backward(dst, src, att)
        out = src.new_empty(block.n_edges, src.shape[1])
        for edges in edge_slices(block.n_edges, src.device, att.numel()):
            sums = _ends_added(block.dst_rows[edges], dst, block.indices[edges], src)
            torch.sum(F.leaky_relu_(sums, slope).mul_(att), -1, out=out[edges])
        return out

    @staticmethod
    def backward(ctx, grad):
        block, (dst, src, att), back = ctx.block, ctx.saved_tensors, ctx.block.transposed
        grad_dst, grad_src, grad_att = torch.zeros_like(dst), torch.zeros_like(src), torch.zeros_like(att)
        width = att.numel()
        for rows, edges, ends in edge_runs(block.indptr, block.n_edges, width):
            sums = _ends_added(block.dst_rows[edges], dst, block.indices[edges], src)
            of_edge = grad[edges, :, None]
            share = leaky_relu_backward(of_edge * att, sums, ctx.slope, False)
            grad_dst[rows] += segment_sum(share, ends)
            grad_att += F.leaky_relu_(sums, ctx.slope).mul_(of_edge).sum(0)
        if ctx.needs_input_grad[2]:
            own = torch.repeat_interleave(back.indptr.diff(), output_size=block.n_edges)
            for rows, edges, ends in edge_runs(back.indptr, block.n_edges, width):
                sums = _ends_added(own[edges], src, back.indices[edges], dst)
                of_edge = grad.index_select(0, back.edge[edges])[..., None]
                share = leaky_relu_backward(of_edge * att, sums, ctx.slope, False)
                grad_src[rows] += segment_sum(share, ends)
        return None, grad_dst, grad_src, grad_att, None


def _ends_added(own_rows: Tensor, own: Tensor, other_rows: Tensor, other: Tensor) -> Tensor:
    """own[own_rows] + other[other_rows]: [e, H, D] for e edges."""
    sums = other.index_select(0, other_rows)
    sums += own.index_select(0, own_rows)
    return sums
