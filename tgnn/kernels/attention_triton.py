"""Triton path of attention: forward, backward, and what the tools need to know of their kernels.

See attention_forward_triton.py and attention_backward_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.kernels import attention_backward_triton as backward
from tgnn.kernels import attention_forward_triton as forward
from tgnn.kernels.block import Block
from tgnn.kernels.dropout import threshold
from tgnn.kernels.segment_triton import wide_type

SPECS = forward.SPECS + backward.SPECS


def in_rows(x: Tensor) -> Tensor:
    """x [n, H, D] or [n, H] itself if each of its rows lies in one piece, else a contiguous copy."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x


def attention_triton(
    block: Block, value: Tensor, kind: str, src: Tensor, dst: Tensor, att: Tensor | None = None, *,
    slope: float = 0.2, dropout: float = 0.0, key: int = 0,
) -> Tensor:  # fmt: skip
    """`attention.attention` on Triton kernels; the arguments are checked by the caller."""
    shared = kind == "gatv2" and src is value
    return _Attention.apply(
        block, value, None if shared else src, dst, att, kind, slope, threshold(dropout), key
    )


class _Attention(torch.autograd.Function):
    """src is None where it is the value. Saves the inputs, out and lse."""

    @staticmethod
    def forward(ctx, block, value, src, dst, att, kind, slope, drop, key):
        value, dst = in_rows(value), dst.contiguous()
        src = value if src is None else in_rows(src)
        att = None if att is None else att.contiguous()
        launch = forward.Launch(
            kind, value.shape[1], value.shape[2], 1 if kind == "gat" else src.shape[2], value.stride(0),
            src.stride(0), src is value, slope, drop, key,
        )  # fmt: skip
        # The backward needs what the sums were before the cast.
        keeps = any(ctx.needs_input_grad)
        shape = (block.n_dst, *value.shape[1:])
        out = value.new_empty(shape, dtype=wide_type(value.dtype) if keeps else value.dtype)
        lse = value.new_empty(shape[:2], dtype=wide_type(value.dtype))
        if block.n_edges and out.numel():
            forward.run_forward(launch, block, value, src, dst, att, out, lse)
        else:
            out.zero_()
        ctx.block, ctx.launch = block, launch
        ctx.save_for_backward(value, None if src is value else src, dst, att, out, lse)
        return out.to(value.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        value, src, dst, att, out, lse = ctx.saved_tensors
        needs = dict(zip(("value", "src", "dst", "att"), ctx.needs_input_grad[1:5], strict=True))
        grads = backward.run_backward(
            ctx.launch, ctx.block, value, src, dst, att, out, lse, grad.contiguous(), needs
        )
        return None, *grads, None, None, None, None
