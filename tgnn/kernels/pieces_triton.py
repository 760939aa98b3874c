"""Long CSR rows cut into pieces, without a plan: what keeps a hub from being the work of one program.

The E edges of a CSR are cut at every multiple of `LIMIT` into windows. A row of more than LIMIT edges is *long*, and
its part in one window is a *piece*. At most two long rows have a piece in window t: the row of the window's first edge
(slot 2 t), and the row of its last edge where that row starts inside the window (slot 2 t + 1). Programs find their
row by bisection in `indptr`, so there is nothing to compute beforehand, no device sync and no more than 2 ceil(E /
LIMIT) slots. An op launches its row kernel over all rows (a long one returns at once), and, where E > LIMIT, its piece
kernel over the slots, which leaves partial results there, and a merge over the windows, each for the long row that
starts in it: in order, so deterministic.

Example, LIMIT = 4: rows of 1, 9 and 2 edges, indptr = [0, 1, 10, 12], windows [0, 4), [4, 8) and [8, 12). Row 1 is
long: its pieces are edges 1 .. 3 in slot 1, 4 .. 7 in slot 2 and 8 .. 9 in slot 4. Slots 0, 3 and 5 have none. Window
0 merges slots 1, 2 and 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Edges of a piece. One program reads a few edges at a time, some microseconds' worth of this many.
LIMIT = 256


def windows(n_edges: int, limit: int) -> int:
    """How many windows the edges have; 0 where no row can be long. The slots are twice as many."""
    return triton.cdiv(n_edges, limit) if n_edges > limit else 0


@triton.jit
def row_of(indptr, n_rows, edge):
    """The row of an edge number: the largest v with indptr[v] <= edge, by bisection."""
    low = tl.zeros((), tl.int64)
    high = low + n_rows
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(indptr + middle) <= edge
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def piece(indptr, n_rows, n_edges, slot, LIMIT: tl.constexpr):
    """(row, first edge, end, whether there is one) of the piece in a slot; no edges where there is none."""
    side = slot % 2
    first = (slot // 2).to(tl.int64) * LIMIT
    end = tl.minimum(first + LIMIT, n_edges)
    row = row_of(indptr, n_rows, tl.where(side == 0, first, end - 1))
    row_first = tl.load(indptr + row)
    row_end = tl.load(indptr + row + 1)
    live = (row_end - row_first > LIMIT) & ((side == 0) | (row_first > first))
    start = tl.maximum(row_first, first)
    return row, start, tl.where(live, tl.minimum(row_end, end), start), live


@triton.jit
def short_row(indptr, n_rows, row, LIMIT: tl.constexpr):
    """(first edge, end, whether it is a short one) of a row; no edges if it is long or past the last."""
    live = row < n_rows
    row = tl.minimum(row, n_rows - 1)
    start = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    live = live & (end - start <= LIMIT)
    return start, tl.where(live, end, start), live


@triton.jit
def long_row(indptr, n_rows, n_edges, window, LIMIT: tl.constexpr):
    """(row, first slot, last window, whether there is one) of the long row that starts in a window.

    Its pieces are in the first slot and in the even slots of the windows after this one up to the last.
    """
    first = window.to(tl.int64) * LIMIT
    end = tl.minimum(first + LIMIT, n_edges)
    row = row_of(indptr, n_rows, end - 1)
    row_first = tl.load(indptr + row)
    row_end = tl.load(indptr + row + 1)
    live = (row_end - row_first > LIMIT) & (row_first >= first)
    slot = 2 * window + tl.where(row_first > first, 1, 0)
    return row, slot, tl.where(live, (row_end - 1) // LIMIT, window - 1), live


@triton.jit
def merge_sums(
    part, out, indptr, n_rows, n_edges, SIZE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = sum of part over the row's pieces, for the long row of every window.

    part [slots, SIZE] of the accumulator's type, out [n_rows, SIZE]; grid (windows, SIZE / BLOCK).
    """
    window = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    row, slot, last, live = long_row(indptr, n_rows, n_edges, window, LIMIT)
    total = tl.load(part + slot.to(tl.int64) * SIZE + column, mask=inside & live, other=0.0)
    for later in range(window + 1, last + 1):
        total += tl.load(part + later.to(tl.int64) * 2 * SIZE + column, mask=inside, other=0.0)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=inside & live)
