"""Room behind the rows of a matrix, so that dense products meet few numbers of rows.

Libraries that make a program for every shape (oneDNN) spend more time on that than on the product where a mini-batch
has another number of rows in every step. Ops that allocate rows on a CPU round their number up; a product reads past
the end of the rows into their room, and drops what it gets there.
"""

from __future__ import annotations

from torch import Tensor


def rounded_rows(rows: int) -> int:
    """`rows` rounded up to a few sizes: by at most 1/32, or to a multiple of 32."""
    step = max(32, 1 << max(0, rows.bit_length() - 6))
    return -(-rows // step) * step


def first_rows(table: Tensor, rows: int) -> Tensor:
    """The first `rows` of a contiguous matrix on the same memory; not a view of it to autograd: it may be changed."""
    shape = (rows, table.shape[1])
    return table.new_empty(0).set_(
        table.untyped_storage(), table.storage_offset(), shape, (table.shape[1], 1)
    )


def with_room(x: Tensor) -> Tensor | None:
    """x [n, D], contiguous, and what lies behind it in its memory: [rounded_rows(n), D]; None if there is no room.

    What the further rows hold is arbitrary.
    """
    rows, width = rounded_rows(len(x)), x.shape[1]
    if x.untyped_storage().nbytes() < (x.storage_offset() + rows * width) * x.element_size():
        return None
    return x.detach().as_strided((rows, width), (width, 1))


def rows_with_room(like: Tensor, rows: int) -> Tensor:
    """New rows [rows, D] of the width and type of `like` [any, D], with room of zeros behind them; not yet written."""
    table = like.new_empty(rounded_rows(rows), like.shape[1])
    table[rows:].zero_()
    return first_rows(table, rows)
