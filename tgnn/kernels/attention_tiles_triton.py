"""What the attention kernels share: tiles of rows [edges, heads, columns], scores and dropped weights.

A program reads `BLOCK_E` edges at a time, `BLOCK_H` heads and all columns of each: the row of a vertex lies
in one piece in memory, so a tile of several heads costs one index per edge. All arithmetic is in ACC:
float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgnn.kernels.rng_triton import draw, keyed
from tgnn.kernels.segment_triton import later_piece

WHOLE_ROW = tl.constexpr(-1)
NOTHING = tl.constexpr(-2)


@triton.jit
def piece_of(indptr, place, n_rows, n_edges, search_steps, PIECE: tl.constexpr):
    """(row, first edge, end, slot) of program `place` (int64), as `segment_triton.lanes` for one row.

    Programs below n_rows take a row, or its first piece; the others the later piece that starts in a window.
    slot: of a piece; WHOLE_ROW for a whole row; NOTHING where no piece starts in the window.
    """
    if place < n_rows:
        row = place
        start = tl.load(indptr + row)
        end = tl.load(indptr + row + 1)
        n_windows = (tl.cast(n_edges, tl.int64) + PIECE - 1) // PIECE
        slot = tl.where(end - start > PIECE, n_windows + start // PIECE, WHOLE_ROW)
    else:
        row, start, end, live = later_piece(indptr, place - n_rows, n_rows, n_edges, search_steps, PIECE)
        slot = tl.where(live, place - n_rows, NOTHING)
        end = tl.where(live, end, start)
    return row, start, tl.minimum(end, start + PIECE), slot


@triton.jit
def load_rows(
    table, rows, valid, head, STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rows `rows` ([E] int64) of table [n, HEADS, WIDTH], STRIDE apart: [E, BLOCK_H, BLOCK_D]; else 0."""
    column = tl.arange(0, BLOCK_D)
    at = table + rows[:, None, None] * STRIDE + (head * WIDTH)[None, :, None] + column[None, None, :]
    inside = valid[:, None, None]
    # Masks only where a tile can overhang, so that all else stays one 128-bit load.
    if HEADS % BLOCK_H != 0:
        inside = inside & (head < HEADS)[None, :, None]
    if WIDTH != BLOCK_D:
        inside = inside & (column < WIDTH)[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(ACC)


@triton.jit
def load_row(
    table, row, head, STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Row `row` (int64) of table [n, HEADS, WIDTH], STRIDE elements apart: [1, BLOCK_H, BLOCK_D]."""
    one = tl.arange(0, 1)
    return load_rows(table, row + one, one == 0, head, STRIDE, HEADS, WIDTH, BLOCK_H, BLOCK_D, ACC)


@triton.jit
def load_heads(table, rows, valid, head, STRIDE: tl.constexpr, HEADS: tl.constexpr, ACC: tl.constexpr):
    """Rows `rows` ([E] int64) of table [n, HEADS]: [E, BLOCK_H]; 0 if not `valid` or past the last head."""
    inside = valid[:, None] & (head < HEADS)[None, :]
    return tl.load(table + rows[:, None] * STRIDE + head[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def load_ends(
    table, rows, valid, head, STRIDE: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr,
    SCORE_WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What an edge's score takes of rows `rows` of src or dst: as `load_heads` (gat) or `load_rows`."""
    if KIND == "gat":
        return load_heads(table, rows, valid, head, STRIDE, HEADS, ACC)
    else:
        return load_rows(table, rows, valid, head, STRIDE, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)


@triton.jit
def load_end(
    table, row, head, STRIDE: tl.constexpr, KIND: tl.constexpr, HEADS: tl.constexpr, SCORE_WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """`load_ends` of one row (int64), first axis 1."""
    one = tl.arange(0, 1)
    return load_ends(
        table, row + one, one == 0, head, STRIDE, KIND, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC
    )


@triton.jit
def load_att(
    att, head, KIND: tl.constexpr, HEADS: tl.constexpr, SCORE_WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """GATv2's att [H, D']: [1, BLOCK_H, BLOCK_S]; the other kinds have none."""
    if KIND == "gatv2":
        row = tl.program_id(0).to(tl.int64) * 0
        return load_row(att, row, head, HEADS * SCORE_WIDTH, HEADS, SCORE_WIDTH, BLOCK_H, BLOCK_S, ACC)
    else:
        return 0.0


@triton.jit
def store_row(table, row, head, tile, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """table[row] = tile [BLOCK_H, BLOCK_D], table [n, HEADS, WIDTH] contiguous."""
    column = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    at = table + row * (HEADS * WIDTH) + (head * WIDTH)[:, None] + column[None, :]
    tl.store(at, tile.to(table.dtype.element_ty), mask=inside)


@triton.jit
def slope_of(pre, SLOPE: tl.constexpr):
    """The derivative of LeakyReLU, which times `pre` is also its value."""
    return tl.where(pre > 0, tl.full((), 1.0, pre.dtype), tl.full((), SLOPE, pre.dtype))


@triton.jit
def scores(dst, src, att, KIND: tl.constexpr, SLOPE: tl.constexpr, SCALE: tl.constexpr):
    """Scores [E, BLOCK_H] of tiles dst and src, broadcast to [E, BLOCK_H] (gat) or [E, BLOCK_H, BLOCK_S]."""
    if KIND == "gat":
        pre = dst + src
        return pre * slope_of(pre, SLOPE)
    elif KIND == "gatv2":
        pre = dst + src
        return tl.sum(pre * slope_of(pre, SLOPE) * att, 2)
    else:
        return tl.sum(dst * src, 2) * SCALE


@triton.jit
def kept(key, ids, position, head, DROP: tl.constexpr, BLOCK_H: tl.constexpr, ACC: tl.constexpr):
    """The factor [E, BLOCK_H] of dropout: 65536 / (65536 - DROP) or 0, the bits of `attention.edge_keep`.

    ids: original ids of the edges' destinations, [E] or a scalar; position [E]. The second axis of the grid
    counts tiles of BLOCK_H heads.
    """
    edge_state = draw(keyed(key, ids), position)
    if BLOCK_H <= 4:  # one 64-bit number serves the four heads
        bits = draw(edge_state, tl.program_id(1) * BLOCK_H // 4)[:, None]
    else:
        bits = draw(edge_state[:, None], (head // 4)[None, :])
    lane = (bits >> (16 * (head % 4))[None, :].to(tl.int64)) & 0xFFFF
    # The 16 bits are a signed number: the flipped sign bit makes it count from 0.
    return tl.where((lane ^ 0x8000) >= DROP, tl.full((), 65536 / (65536 - DROP), ACC), tl.full((), 0, ACC))
