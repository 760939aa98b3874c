"""Backward of the Triton attention, from the saved log-sum-exp; no tensor of edges, no atomics.

With a = exp(score - lse), keep = dropout's factor and g the gradient of out,

    d score = a (keep <g[v], value[u]> - delta[v]),    delta[v] = <g[v], out[v]>

One kernel goes over the destinations: it writes delta and adds up the gradients of dst and, over several destinations
in a program, of att, whose partial sums torch adds. The other goes over the transposed block: the gradients of value
and src of a source row. Both compute scores and weights again, which costs no rows that are not read anyway. Long rows
go in pieces, see pieces_triton.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels import pieces_triton as pieces
from tgnn.kernels.attention_tiles_triton import kept, load_heads, load_row, load_rows, scores, slope_of, store_row
from tgnn.kernels.attention_triton import SPEC_OF, Launch
from tgnn.kernels.block import Block, Transposed
from tgnn.kernels.pieces_triton import merge_sums, piece, short_row

# Programs that share the destinations of GATv2, each with a partial sum of att's gradient.
ATT_PROGRAMS = 4096


@triton.jit(do_not_specialize=["key"])
def attention_backward_rows(
    value, src, dst, att, indptr, indices, dst_id, position, out, lse, grad, delta, grad_dst, grad_att, n_dst, n_edges,
    key, rows, KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr, SHARED: tl.constexpr,
    PIECES: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """delta, and grad_dst of `rows` destinations or of one piece (in its slot); grad_att [programs, H, D'] partials."""
    ACC: tl.constexpr = lse.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    one = tl.arange(0, 1)
    att_tile = 0.0
    if KIND == "gatv2":
        att_tile = load_row(att, program * 0, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
        of_att = tl.zeros((BLOCK_H, BLOCK_S), ACC)
    for number in range(0, rows):
        if PIECES:
            row, start, end, live = piece(indptr, n_dst, n_edges, tl.program_id(0), LIMIT)
            place = program
        else:
            place = program * rows + number
            row = tl.minimum(place, n_dst - 1)
            start, end, live = short_row(indptr, n_dst, place, LIMIT)
        grad_tile = load_row(grad, row, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        out_tile = load_row(out, row, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        of_out = tl.sum(grad_tile * out_tile, 2)
        # Of the pieces of a row the first one writes it.
        first_one = live & (start == tl.load(indptr + row))
        tl.store(delta + row * HEADS + (one * 0)[:, None] + head[None, :], of_out, mask=first_one & (head < HEADS)[None, :])
        row_lse = load_heads(lse, row + one, one == 0, head, HEADS, HEADS, ACC)
        if KIND == "gat":
            dst_tile = load_heads(dst, row + one, one == 0, head, HEADS, HEADS, ACC)
            of_dst = tl.zeros((BLOCK_H,), ACC)
        else:
            dst_tile = load_row(dst, row, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
            of_dst = tl.zeros((BLOCK_H, BLOCK_S), ACC)
        if DROP > 0:
            ids = tl.load(dst_id + row)
        for first in range(start, end, BLOCK_E):
            edge = first + tl.arange(0, BLOCK_E)
            valid = edge < end
            source = tl.load(indices + edge, mask=valid, other=0).to(tl.int64)
            value_tile = load_rows(value, source, valid, head, VALUE_STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
            if SHARED:
                src_tile = value_tile
            elif KIND == "gat":
                src_tile = load_heads(src, source, valid, head, SRC_STRIDE, HEADS, ACC)
            else:
                src_tile = load_rows(src, source, valid, head, SRC_STRIDE, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
            weight = tl.exp(scores(dst_tile, src_tile, att_tile, KIND, SLOPE, SCALE) - row_lse)
            of_weight = tl.sum(grad_tile * value_tile, 2)
            if DROP > 0:
                of_weight *= kept(key, ids, tl.load(position + edge, mask=valid, other=0), head, DROP, BLOCK_H, ACC)
            of_score = tl.where(valid[:, None], weight * (of_weight - of_out), tl.zeros((), ACC))
            if KIND == "gat":
                of_dst += tl.sum(of_score * slope_of(dst_tile + src_tile, SLOPE), 0)
            elif KIND == "gatv2":
                pre = dst_tile + src_tile
                of_pre = of_score[:, :, None] * slope_of(pre, SLOPE)
                of_dst += tl.sum(of_pre, 0)
                of_att += tl.sum(of_pre * pre, 0)
            else:
                of_dst += tl.sum(of_score[:, :, None] * src_tile, 0)
        if KIND == "gat":
            tl.store(grad_dst + place * HEADS + head, of_dst.to(grad_dst.dtype.element_ty), mask=live & (head < HEADS))
        elif KIND == "gatv2":
            store_row(grad_dst, place, head, of_dst * tl.sum(att_tile, 0), live, HEADS, SCORE_WIDTH, BLOCK_S)
        else:
            store_row(grad_dst, place, head, of_dst * SCALE, live, HEADS, SCORE_WIDTH, BLOCK_S)
    if KIND == "gatv2":
        store_row(grad_att, program, head, of_att, True, HEADS, SCORE_WIDTH, BLOCK_S)


@triton.jit(do_not_specialize=["key"])
def attention_backward_sources(
    value, src, dst, att, indptr, indices, edges, dst_id, position, lse, grad, delta, grad_value, grad_src, n_src,
    n_edges, key, KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr,
    SHARED: tl.constexpr, PIECES: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SCORE_WIDTH: tl.constexpr, VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """grad_value and grad_src of one row (or piece, in its slot) of the transposed block (indptr, indices, edges).

    SHARED: grad_value gets the sum of both.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    one = tl.arange(0, 1)
    if PIECES:
        row, start, end, live = piece(indptr, n_src, n_edges, tl.program_id(0), LIMIT)
    else:
        row = place
        start, end, live = short_row(indptr, n_src, row, LIMIT)
    value_tile = load_row(value, row, head, VALUE_STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
    att_tile = 0.0
    if KIND == "gatv2":
        att_tile = load_row(att, place * 0, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    if SHARED:
        src_tile = value_tile
    elif KIND == "gat":
        src_tile = load_heads(src, row + one, one == 0, head, SRC_STRIDE, HEADS, ACC)
    else:
        src_tile = load_row(src, row, head, SRC_STRIDE, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    of_value = tl.zeros((BLOCK_H, BLOCK_D), ACC)
    if KIND == "gat":
        of_src = tl.zeros((BLOCK_H,), ACC)
    else:
        of_src = tl.zeros((BLOCK_H, BLOCK_S), ACC)
    for first in range(start, end, BLOCK_E):
        at = first + tl.arange(0, BLOCK_E)
        valid = at < end
        destination = tl.load(indices + at, mask=valid, other=0).to(tl.int64)
        grad_tile = load_rows(grad, destination, valid, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        if KIND == "gat":
            dst_tile = load_heads(dst, destination, valid, head, HEADS, HEADS, ACC)
        else:
            dst_tile = load_rows(
                dst, destination, valid, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC
            )
        score = scores(dst_tile, src_tile, att_tile, KIND, SLOPE, SCALE)
        weight = tl.exp(score - load_heads(lse, destination, valid, head, HEADS, HEADS, ACC))
        weight = tl.where(valid[:, None], weight, tl.zeros((), ACC))
        of_weight = tl.sum(grad_tile * value_tile, 2)
        dropped = weight
        if DROP > 0:
            edge = tl.load(edges + at, mask=valid, other=0)
            ids = tl.load(dst_id + destination, mask=valid, other=0)
            keep = kept(key, ids, tl.load(position + edge, mask=valid, other=0), head, DROP, BLOCK_H, ACC)
            of_weight *= keep
            dropped *= keep
        of_value += tl.sum(dropped[:, :, None] * grad_tile, 0)
        of_score = weight * (of_weight - load_heads(delta, destination, valid, head, HEADS, HEADS, ACC))
        if KIND == "gat":
            of_src += tl.sum(of_score * slope_of(dst_tile + src_tile, SLOPE), 0)
        elif KIND == "gatv2":
            of_src += tl.sum(of_score[:, :, None] * slope_of(dst_tile + src_tile, SLOPE), 0)
        else:
            of_src += tl.sum(of_score[:, :, None] * dst_tile, 0)
    if KIND == "gatv2":
        of_src *= tl.sum(att_tile, 0)
    elif KIND == "dot":
        of_src *= SCALE
    if SHARED:
        store_row(grad_value, place, head, of_value + of_src, live, HEADS, WIDTH, BLOCK_D)
    else:
        store_row(grad_value, place, head, of_value, live, HEADS, WIDTH, BLOCK_D)
        if KIND == "gat":
            tl.store(grad_src + place * HEADS + head, of_src.to(grad_src.dtype.element_ty), mask=live & (head < HEADS))
        else:
            store_row(grad_src, place, head, of_src, live, HEADS, SCORE_WIDTH, BLOCK_S)


def run_backward(
    launch: Launch, block: Block, value: Tensor, src: Tensor | None, dst: Tensor, att: Tensor | None, out: Tensor,
    lse: Tensor, grad: Tensor, needs: dict[str, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of value, src, dst and att; None for one that is not needed. src is None where it is the value."""
    if not block.n_edges or not out.numel():
        inputs = {"value": value, "src": src, "dst": dst, "att": att}
        return tuple(torch.zeros_like(x) if needs[name] else None for name, x in inputs.items())
    src = value if src is None else src
    inputs, delta = (value, src, dst, att), torch.empty_like(lse)
    # The sources need delta, which the destinations' kernel writes.
    grad_dst, grad_att = _of_rows(launch, block, inputs, (out, lse, grad, delta))
    grad_value = grad_src = None
    if needs["value"] or needs["src"]:
        grad_value, grad_src = _of_sources(launch, block, inputs, (lse, grad, delta))
    return grad_value, grad_src, grad_dst if needs["dst"] else None, grad_att if needs["att"] else None


def _of_rows(
    launch: Launch, block: Block, inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """Gradients of dst and att; fills delta, the last of `saved`."""
    value, _, dst, att = inputs
    head_tiles, options = launch.tiles(SPEC_OF["attention_backward_rows", launch.kind], value, block.n_dst, block.n_edges)
    options |= launch.constants
    ids, position = (block.dst_id, block.position) if launch.drop else (None, None)
    arguments = (*inputs, block.indptr, block.indices, ids, position, *saved)
    # A program for every few destinations, so that att's partial sums stay a small part of dst's gradient.
    rows = 1 if att is None else min(32, triton.cdiv(block.n_dst, ATT_PROGRAMS))
    programs = triton.cdiv(block.n_dst, rows)
    slots = 2 * pieces.windows(block.n_edges, pieces.LIMIT)
    lse, grad_dst = saved[1], torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)
    of_att = None if att is None else lse.new_empty(programs + slots, *att.shape)
    counts = (block.n_dst, block.n_edges, launch.key)
    attention_backward_rows[programs, head_tiles](*arguments, grad_dst, of_att, *counts, rows, PIECES=False, **options)
    if slots:
        part = lse.new_empty(slots, *dst.shape[1:])
        part_att = None if of_att is None else of_att[programs:]
        attention_backward_rows[slots, head_tiles](*arguments, part, part_att, *counts, 1, PIECES=True, **options)
        _merge(part, grad_dst, block.indptr, block.n_edges)
    return grad_dst, None if of_att is None else of_att.sum(0).to(att.dtype)


def _of_sources(
    launch: Launch, block: Block, inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """Gradients of value and src; where they are one tensor, their sum and None."""
    value, src, *_ = inputs
    back: Transposed = block.transposed
    spec = SPEC_OF["attention_backward_sources", launch.kind]
    head_tiles, options = launch.tiles(spec, value, block.n_src, block.n_edges)
    options |= launch.constants
    ids, position = (block.dst_id, block.position) if launch.drop else (None, None)
    arguments = (*inputs, back.indptr, back.indices, back.edge, ids, position, *saved)
    counts = (block.n_src, block.n_edges, launch.key)
    slots = 2 * pieces.windows(block.n_edges, pieces.LIMIT)
    targets = [value] if launch.shared else [value, src]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in targets]
    parts = [saved[0].new_empty(slots, *x.shape[1:]) for x in targets if slots]
    pad = [None] * (2 - len(targets))
    kernel = attention_backward_sources
    kernel[block.n_src, head_tiles](*arguments, *grads, *pad, *counts, PIECES=False, **options)
    if slots:
        kernel[slots, head_tiles](*arguments, *parts, *pad, *counts, PIECES=True, **options)
        for part, target in zip(parts, grads, strict=True):
            _merge(part, target, back.indptr, block.n_edges)
    return grads[0], grads[1] if len(grads) > 1 else None


def _merge(part: Tensor, out: Tensor, indptr: Tensor, n_edges: int) -> None:
    """out[row] = sum of `part` over the pieces of every long row."""
    size = part[0].numel()
    block = min(1024, triton.next_power_of_2(size))
    grid = (len(part) // 2, triton.cdiv(size, block))
    merge_sums[grid](part, out, indptr, len(out), n_edges, SIZE=size, LIMIT=pieces.LIMIT, BLOCK=block)
