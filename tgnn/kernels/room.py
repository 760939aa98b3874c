"""Room behind the rows of a matrix, so that dense products meet few numbers of rows.

Libraries that make a program for every shape (oneDNN) spend more time on that than on the product where a mini-batch
has another number of rows in every step. Ops that allocate rows on a CPU round their number up; a product reads past
the end of the rows into their room, and drops what it gets there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Fewer rows have no room: their products take less than an allocation, and small tensors stay small.
LEAST_ROWS = 512


def rounded_rows(rows: int) -> int:
    """`rows` rounded up to a few sizes: by at most 1/32, and not where there are less than LEAST_ROWS."""
    return -(-rows // _step(rows)) * _step(rows)


def rounded_down(rows: int) -> int:
    """`rows` rounded down as `rounded_rows` rounds up."""
    return rows - rows % _step(rows)


def _step(rows: int) -> int:
    return 1 << (rows.bit_length() - 6) if rows >= LEAST_ROWS else 1


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are strided tensors on a CPU whose memory may be used directly: nothing traces, transforms or
    records what is done to them (torch.compile, torch.func, forward-mode gradients, modes that see every operation).
    """
    return not (
        torch.compiler.is_compiling()
        or any(type(t) not in (Tensor, nn.Parameter) for t in tensors)
        or any(t.device.type != "cpu" or t.layout != torch.strided or t.is_quantized for t in tensors)
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.jit.is_tracing()
        or any(not _has_memory(t) for t in tensors)
    )


def _has_memory(t: Tensor) -> bool:
    try:
        t.untyped_storage()
    except RuntimeError:  # it stands for several (is_grads_batched)
        return False
    return True


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


def rows_with_room(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    """New rows [rows, D] of the width and type of `like` [any, D], with room of zeros behind them; not yet written."""
    table = like.new_empty(rounded_rows(rows), like.shape[1], dtype=dtype or like.dtype)
    table[rows:].zero_()
    return first_rows(table, rows)
