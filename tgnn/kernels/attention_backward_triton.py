"""Backward of the Triton attention, from the saved log-sum-exp; no tensor of edges, no atomics.

With a = exp(score - lse), keep = dropout's factor and g the gradient of out,

    d score = a (keep <g[v], value[u]> - delta[v]),    delta[v] = <g[v], out[v]>

One kernel goes over the destinations: it writes delta and adds up the gradients of dst and, over several
destinations in a program, of att, whose partial sums torch adds. The other goes over the transposed block:
the gradients of value and src of a source row. Both compute scores and weights again, which costs no rows
that are not read anyway. Long rows go in pieces, see segment_triton.py.

Example: one destination with scores 0 and log 2, values 2 and 5, out = 4, and g = 1: delta = 4, d score =
1/3 (2 - 4) and 2/3 (5 - 4), d value = 1/3 and 2/3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.attention_forward_triton import HALF, KINDS, SIZES, Launch, build_spec
from tgnn.kernels.attention_tiles_triton import (
    WHOLE_ROW,
    kept,
    load_att,
    load_end,
    load_ends,
    load_heads,
    load_row,
    load_rows,
    piece_of,
    scores,
    slope_of,
    store_row,
)
from tgnn.kernels.block import Block
from tgnn.kernels.segment_triton import Cut
from tgnn.kernels.segment_triton import launch as run
from tgnn.kernels.spmm_triton import finish_sum

# Programs that share the destinations of GATv2, each with a partial sum of att's gradient.
ATT_PROGRAMS = 4096


@triton.jit
def store_end(
    table, row, head, tile, KIND: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """table[row] = the gradient of one end of the scores: [BLOCK_H] for gat, else [BLOCK_H, BLOCK_D]."""
    if KIND == "gat":
        tl.store(table + row * HEADS + head, tile.to(table.dtype.element_ty), mask=head < HEADS)
    else:
        store_row(table, row, head, tile, HEADS, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def attention_backward_rows(
    value, src, dst, att, indptr, indices, dst_id, position, out, lse, grad, delta,
    grad_dst, part_dst, grad_att, n_rows, n_edges, search_steps, key, places, rows,
    KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr, SHARED: tl.constexpr,
    PIECE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """delta and grad_dst of up to `rows` of the `places` rows and pieces; grad_att [programs, H, D']."""
    ACC: tl.constexpr = lse.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    one = tl.arange(0, 1)
    att_tile = load_att(att, head, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    if KIND == "gatv2":
        of_att = tl.zeros((BLOCK_H, BLOCK_S), ACC)
    if KIND == "gatv2":
        begin = program * rows
        stop = tl.minimum(begin + rows, places)
    else:  # one row: the compiler then drops the loop
        begin = program
        stop = program + 1
    for place in range(begin, stop):
        row, start, end, slot = piece_of(indptr, place, n_rows, n_edges, search_steps, PIECE)
        grad_tile = load_row(grad, row, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        out_tile = load_row(out, row, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
        of_out = tl.sum(grad_tile * out_tile, 2)
        delta_at = delta + row * HEADS + (one * 0)[:, None] + head[None, :]
        if place < n_rows:  # of the pieces of a row the first one writes it
            tl.store(delta_at, of_out, mask=(head < HEADS)[None, :])
        row_lse = load_heads(lse, row + one, one == 0, head, HEADS, HEADS, ACC)
        dst_tile = load_end(
            dst, row, head, HEADS * SCORE_WIDTH, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC
        )
        if KIND == "gat":
            of_dst = tl.zeros((BLOCK_H,), ACC)
        else:
            of_dst = tl.zeros((BLOCK_H, BLOCK_S), ACC)
        if DROP > 0:
            ids = tl.load(dst_id + row)
        for first in range(start, end, BLOCK_E):
            edge = first + tl.arange(0, BLOCK_E)
            valid = edge < end
            source = tl.load(indices + edge, mask=valid, other=0).to(tl.int64)
            value_tile = load_rows(
                value, source, valid, head, VALUE_STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC
            )
            if SHARED:
                src_tile = value_tile
            else:
                src_tile = load_ends(
                    src, source, valid, head, SRC_STRIDE, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC
                )
            weight = tl.exp(scores(dst_tile, src_tile, att_tile, KIND, SLOPE, SCALE) - row_lse)
            of_weight = tl.sum(grad_tile * value_tile, 2)
            if DROP > 0:
                of_weight *= kept(
                    key, ids, tl.load(position + edge, mask=valid, other=0), head, DROP, BLOCK_H, ACC
                )
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
        if KIND == "gatv2":
            of_dst *= tl.sum(att_tile, 0)
        elif KIND == "dot":
            of_dst *= SCALE
        if slot == WHOLE_ROW:
            store_end(grad_dst, row, head, of_dst, KIND, HEADS, SCORE_WIDTH, BLOCK_S)
        elif slot >= 0:
            store_end(part_dst, slot, head, of_dst, KIND, HEADS, SCORE_WIDTH, BLOCK_S)
    if KIND == "gatv2":
        store_row(grad_att, program, head, of_att, HEADS, SCORE_WIDTH, BLOCK_S)


@triton.jit(do_not_specialize=SIZES)
def attention_backward_sources(
    value, src, dst, att, indptr, indices, edges, dst_id, position, lse, grad, delta,
    grad_value, grad_src, part_value, part_src, n_rows, n_edges, search_steps, key,
    KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr, DROP: tl.constexpr, SHARED: tl.constexpr,
    PIECE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    VALUE_STRIDE: tl.constexpr, SRC_STRIDE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """grad_value and grad_src of one row or piece of the transposed block (indptr, indices, edges).

    SHARED: grad_value gets the sum of both.
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row, start, end, slot = piece_of(indptr, place, n_rows, n_edges, search_steps, PIECE)
    value_tile = load_row(value, row, head, VALUE_STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)
    att_tile = load_att(att, head, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    if SHARED:
        src_tile = value_tile
    else:
        src_tile = load_end(src, row, head, SRC_STRIDE, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    of_value = tl.zeros((BLOCK_H, BLOCK_D), ACC)
    if KIND == "gat":
        of_src = tl.zeros((BLOCK_H,), ACC)
    else:
        of_src = tl.zeros((BLOCK_H, BLOCK_S), ACC)
    for first in range(start, end, BLOCK_E):
        at = first + tl.arange(0, BLOCK_E)
        valid = at < end
        destination = tl.load(indices + at, mask=valid, other=0).to(tl.int64)
        grad_tile = load_rows(
            grad, destination, valid, head, HEADS * WIDTH, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC
        )
        dst_tile = load_ends(
            dst, destination, valid, head, HEADS * SCORE_WIDTH, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC,
        )  # fmt: skip
        score = scores(dst_tile, src_tile, att_tile, KIND, SLOPE, SCALE)
        weight = tl.exp(score - load_heads(lse, destination, valid, head, HEADS, HEADS, ACC))
        # After the exponential, which may overflow for edges that are not there: before it costs registers.
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
        of_value += of_src
    if slot == WHOLE_ROW:
        store_row(grad_value, row, head, of_value, HEADS, WIDTH, BLOCK_D)
        if not SHARED:
            store_end(grad_src, row, head, of_src, KIND, HEADS, SCORE_WIDTH, BLOCK_S)
    elif slot >= 0:
        store_row(part_value, slot, head, of_value, HEADS, WIDTH, BLOCK_D)
        if not SHARED:
            store_end(part_src, slot, head, of_src, KIND, HEADS, SCORE_WIDTH, BLOCK_S)


# Tiles of four heads of 64 columns take Triton 3.6 more than 128 registers a thread, 3.9 fewer.
EDGE_ELEMENTS = 256 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 128
# Numbers of dropout for more than 4 narrow edges at a time spill on sm_80.
ROWS = {
    (kind, drop): build_spec(attention_backward_rows, kind, 512, drop, 4 if drop else 8, EDGE_ELEMENTS)
    for kind in KINDS
    for drop in (0, HALF)
}
SOURCES = {
    (kind, drop): build_spec(attention_backward_sources, kind, 512, drop, edge_elements=EDGE_ELEMENTS)
    for kind in KINDS
    for drop in (0, HALF)
}
SPECS = (*ROWS.values(), *SOURCES.values())


def run_backward(
    launch: Launch, block: Block, value: Tensor, src: Tensor | None, dst: Tensor, att: Tensor | None,
    out: Tensor, lse: Tensor, grad: Tensor, needs: dict[str, bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of value, src, dst and att, None where not needed. src is None where it is the value."""
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
    cut = Cut.of(block.indptr, block.n_edges)
    spec, config, head_tiles = launch.choose(ROWS, value, cut)
    # A program for every few destinations, so that att's partial sums stay a small part of dst's gradient.
    places = cut.n_rows + cut.n_windows
    rows = 1 if att is None else min(32, triton.cdiv(places, ATT_PROGRAMS))
    programs = triton.cdiv(places, rows)
    wide = saved[-1]
    grad_dst = torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)
    part_dst = cut.scratch(wide, dst[0].numel(), wide.dtype)
    of_att = None if att is None else wide.new_empty(programs, *att.shape)
    run(
        spec, config, (programs, head_tiles),
        *inputs, block.indptr, block.indices, *launch.keys(block), *saved, grad_dst, part_dst, of_att,
        cut.n_rows, cut.n_edges, cut.search_steps, launch.key, places, rows, **launch.constants,
        PIECE=cut.piece,
    )  # fmt: skip
    finish_sum(cut, block.indptr, part_dst, grad_dst.view(len(dst), -1), mean=False)
    return grad_dst, None if of_att is None else of_att.sum(0).to(att.dtype)


def _of_sources(
    launch: Launch, block: Block, inputs: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """Gradients of value and src; where they are one tensor, their sum and None."""
    back = block.transposed
    cut = Cut.of(back.indptr, block.n_edges)
    spec, config, head_tiles = launch.choose(SOURCES, inputs[0], cut)
    targets, absent = (inputs[:1], (None,)) if launch.shared else (inputs[:2], ())
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in targets]
    parts = [cut.scratch(saved[0], x[0].numel(), saved[0].dtype) for x in targets]
    run(
        spec, config, (cut.n_rows + cut.n_windows, head_tiles),
        *inputs, back.indptr, back.indices, back.edge, *launch.keys(block), *saved, *grads, *absent, *parts,
        *absent, cut.n_rows, cut.n_edges, cut.search_steps, launch.key, **launch.constants, PIECE=cut.piece,
    )  # fmt: skip
    for part, grad in zip(parts, grads, strict=True):
        finish_sum(cut, back.indptr, part, grad.view(len(grad), -1), mean=False)
    return (*grads, *absent)
