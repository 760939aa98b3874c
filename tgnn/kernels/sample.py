"""sample_neighbors: draw up to K in-edges of every given row, as a pure function of a key and the rows' ids.

`uniform` without replacement draws a uniform K-subset by Floyd's algorithm (Bentley and Floyd, "A sample of
brilliance", CACM 1987): for j = d-K .. d-1 draw t in [0, j]; take t, or j if t is taken already. With
replacement each of K draws is uniform over the row. A row of at most K in-edges gives all of them (without
replacement), K = -1 gives every row all of its in-edges, K = 0 none. Edges come in position order.

Example: a row with in-edges from 4, 5, 6 and K = -1: src [4, 5, 6], position [0, 1, 2].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.backend import choose


@dataclass(eq=False)
class Sample:
    """Drawn in-edges of n rows in CSR form.

    indptr [n + 1] int64; src [n_edges]: entries of `indices`; position [n_edges] int64: rank in the row's
    full list; edge [n_edges] int64: offset of the edge in `indices`.
    """

    indptr: Tensor
    src: Tensor
    position: Tensor
    edge: Tensor


def sample_neighbors(
    indptr: Tensor, indices: Tensor, rows: Tensor, ids: Tensor, fanout: int, key: int, replace: bool = False
) -> Sample:
    """Draw in-edges of `rows` (two device syncs).

    Args:
        indptr [N + 1] int64, indices [E]: in-edge CSR.
        rows [n] integer in [0, N): which rows of it; repeats are allowed.
        ids [n] integer: the rows' original vertex ids, which key the choice.
        fanout: K, or -1 for all in-edges (each once, whatever `replace` says).
        key: of this hop, from `rng.stream`.
        replace: draw with replacement.

    Raises: UserError for a fanout below -1. In-degrees must be below 2^31.
    """
    if fanout < -1:
        raise wrong("fanout", fanout, "a number of in-edges >= 0, or -1 for all", "correct the fanout")
    choose("sample_neighbors", indptr, rows)
    return sample_neighbors_torch(indptr, indices, rows, ids, fanout, key, replace)


def sample_neighbors_torch(
    indptr: Tensor, indices: Tensor, rows: Tensor, ids: Tensor, fanout: int, key: int, replace: bool = False
) -> Sample:
    """`sample_neighbors` on torch's own operations; the reference of the Triton path."""
    # index_select throughout: it is several times faster than indexing with brackets on a CPU.
    rows = rows.to(torch.int64)
    start = indptr.index_select(0, rows)
    degree = indptr.index_select(0, rows + 1) - start
    if fanout == -1:
        count = degree
    elif replace:
        count = torch.where(degree > 0, fanout, 0)
    else:
        count = degree.clamp(max=fanout)
    out = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(count, 0, out=out[1:])
    n_edges = int(out[-1])
    row = torch.repeat_interleave(count, output_size=n_edges)
    position = torch.arange(n_edges, device=rows.device)
    position -= out.index_select(0, row)
    if fanout > 0:
        chosen = torch.nonzero(degree > 0 if replace else degree > fanout).view(-1)
        draws = _with_replacement if replace else _floyd
        picks = draws(rng.keyed(key, ids.index_select(0, chosen)), degree.index_select(0, chosen), fanout)
        places = out.index_select(0, chosen)[:, None] + torch.arange(fanout, device=rows.device)
        position.index_copy_(0, places.view(-1), picks.reshape(-1).to(torch.int64))
    edge = start.index_select(0, row)
    edge += position
    return Sample(out, indices.index_select(0, edge), position, edge)


def _floyd(state: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """A uniform `fanout`-subset of range(degree) per row, ascending: int32 [n, fanout]; degree > fanout."""
    # One column of draws at a time, draws outermost: each comparison then runs over contiguous memory.
    picks = torch.empty(fanout, state.numel(), dtype=torch.int32, device=state.device)
    for j in range(fanout):
        bound = degree - (fanout - j - 1)
        pick = rng.below(rng.draw(state, j), bound).to(torch.int32)
        taken = _any_row_equal(picks[:j], pick)
        picks[j] = torch.where(taken, bound.sub_(1).to(torch.int32), pick)
    return _sorted_columns(picks)


def _with_replacement(state: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """`fanout` uniform draws of range(degree) per row, ascending: int32 [n, fanout]; every degree > 0."""
    draws = torch.arange(fanout, device=state.device)
    return _sorted_columns(rng.below(rng.draw(state, draws[:, None]), degree).to(torch.int32))


def _any_row_equal(table: Tensor, row: Tensor) -> Tensor:
    """Which columns of `table` [k, n] hold the value of `row` [n] there: bool [n]."""
    if table.device.type == "cpu":  # numpy's reduction over rows is some four times as fast as torch's
        return torch.from_numpy((table.numpy() == row.numpy()).any(0))
    return (table == row).any(0)


def _sorted_columns(picks: Tensor) -> Tensor:
    """The columns of `picks` [K, n], each ascending, as rows: [n, K]."""
    if picks.device.type == "cpu":  # half the time of torch's sort for rows this short
        return torch.from_numpy(np.sort(picks.numpy().T, axis=1))
    return picks.t().sort(1).values
