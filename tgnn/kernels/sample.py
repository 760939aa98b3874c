"""sample_neighbors: draw up to K in-edges of every given row, as a pure function of a key and the rows' ids.

`uniform` without replacement draws a uniform K-subset by Floyd's algorithm (Bentley and Floyd, "A sample of
brilliance", CACM 1987): for j = d-K .. d-1 draw t in [0, j]; take t, or j if t is taken already. With
replacement each of K draws is uniform over the row. `weighted` draws by edge weights (sample_weighted.py), LABOR
keeps sources by numbers of their own, so that rows share them (labor.py). A row of at most K in-edges gives all
of them (without replacement), K = -1 gives every row all of its in-edges, K = 0 none. Edges come in position
order. Every decision compares integers.

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
from tgnn.kernels.labor import labor_candidates
from tgnn.kernels.sample_host import draw_uniform
from tgnn.kernels.sample_weighted import DrawWeights, draw_by_weight
from tgnn.kernels.segment import chunk_limit


@dataclass(eq=False)
class Sample:
    """Drawn in-edges of n rows in CSR form.

    indptr [n + 1] int64; src [n_edges]: entries of `indices`; position [n_edges] int64: rank in the row's
    full list; edge [n_edges] int64: offset of the edge in `indices`; degree [n] int64: edges of the full list.
    """

    indptr: Tensor
    src: Tensor
    position: Tensor
    edge: Tensor
    degree: Tensor


def sample_neighbors(
    indptr: Tensor, indices: Tensor, rows: Tensor, ids: Tensor, fanout: int, key: int, replace: bool = False, *,
    weights: DrawWeights | None = None, source_id: Tensor | None = None,
) -> Sample:  # fmt: skip
    """Draw in-edges of `rows` (two device syncs).

    Args:
        indptr [N + 1] int64, indices [E]: in-edge CSR.
        rows [n] integer in [0, N): which rows of it; repeats are allowed.
        ids [n] integer: the rows' original vertex ids, which key the choice.
        fanout: K, or -1 for all in-edges (each once, whatever `replace` says).
        key: of this hop, from `rng.stream`.
        replace: draw with replacement.
        weights: draw by the edges' weights; edges of weight 0 are never drawn, not by -1 either.
        source_id [above every entry of indices]: original id by entry of `indices`, draws by LABOR-0: source u is
            kept in a row of d in-edges where its number below 1 is under K / d. The sources' ids key the choice.

    Raises: UserError for a fanout below -1, and for LABOR with replacement or weights. In-degrees must be below 2^31.
    """
    if fanout < -1:
        raise wrong("fanout", fanout, "a number of in-edges >= 0, or -1 for all", "correct the fanout")
    if source_id is not None and (replace or weights is not None):
        got = "replacement" if replace else "edge weights"
        raise wrong("LABOR sampling", got, "neither replacement nor edge weights", "choose another sampler")
    if choose("sample_neighbors", indptr, rows) == "triton":
        from tgnn.kernels import sample_triton

        sample = sample_triton.sample_neighbors_triton
    else:
        sample = sample_neighbors_torch
    return sample(indptr, indices, rows, ids, fanout, key, replace, weights=weights, source_id=source_id)


def sample_neighbors_torch(
    indptr: Tensor, indices: Tensor, rows: Tensor, ids: Tensor, fanout: int, key: int, replace: bool = False, *,
    weights: DrawWeights | None = None, source_id: Tensor | None = None,
) -> Sample:  # fmt: skip
    """`sample_neighbors` on torch's own operations; the reference of the Triton path."""
    # index_select throughout: it is several times faster than indexing with brackets on a CPU.
    rows = rows.to(torch.int64)
    start = indptr.index_select(0, rows)
    degree = indptr.index_select(0, rows + 1) - start
    if source_id is not None and fanout != -1:
        out, row, position = labor_candidates(indices, source_id, start, degree, fanout, key)
    else:
        drawable = degree if weights is None else weights.drawable.index_select(0, rows)
        count = how_many(drawable, fanout, replace)
        if weights is None and _on_cpu(rows):
            # NumPy takes what it is told to without asking.
            if int(indptr[-1]) > indices.numel():
                raise IndexError(
                    f"indptr: got an end of {int(indptr[-1])}, expected {indices.numel()}, one per edge"
                )
            found = draw_uniform(indices, ids, start, degree, count, fanout, key, replace)
            return Sample(*found, degree)
        out = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
        torch.cumsum(count, 0, out=out[1:])
        row = torch.repeat_interleave(count, output_size=int(out[-1]))
        position = torch.arange(row.numel(), device=rows.device)
        position -= out.index_select(0, row)
        chosen = torch.nonzero(count > 0 if replace and fanout != -1 else count < degree).view(-1)
        first, states = out.index_select(0, chosen), rng.keyed(key, ids.index_select(0, chosen))
        start_of, degree_of = start.index_select(0, chosen), degree.index_select(0, chosen)
        if weights is not None:
            count_of = count.index_select(0, chosen)
            draw_by_weight(weights, start_of, degree_of, count_of, states, fanout, replace, first, position)
        elif fanout > 0 and chosen.numel():
            picks = (with_replacement if replace else floyd)(states, degree_of, fanout)
            places = first[:, None] + torch.arange(fanout, device=rows.device)
            position.index_copy_(0, places.view(-1), picks.reshape(-1).to(torch.int64))
    edge = start.index_select(0, row)
    edge += position
    return Sample(out, indices.index_select(0, edge), position, edge, degree)


def _on_cpu(rows: Tensor) -> bool:
    return rows.device.type == "cpu"


def how_many(drawable: Tensor, fanout: int, replace: bool) -> Tensor:
    """How many edges each row of `drawable` [n] edges gives: int64 [n]."""
    if fanout == -1:
        return drawable
    return torch.where(drawable > 0, fanout, 0) if replace else drawable.clamp(max=fanout)


def floyd(state: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """A uniform `fanout`-subset of range(degree) per row, ascending: int32 [n, fanout]; degree > fanout."""
    rows = chunk_limit(state.device, fanout)
    if state.numel() <= rows:
        return _floyd(state, degree, fanout)
    pieces = zip(state.split(rows), degree.split(rows), strict=True)
    return torch.cat([_floyd(some, degrees, fanout) for some, degrees in pieces])


def _floyd(state: Tensor, degree: Tensor, fanout: int) -> Tensor:
    # Draws outermost: each comparison then runs over contiguous memory.
    draws = torch.arange(fanout, device=state.device)[:, None]
    bound = (degree - (fanout - 1)) + draws
    picks = rng.below(rng.draw(state, draws), bound).to(torch.int32)
    last = bound.sub_(1).to(torch.int32)
    for j in range(1, fanout):
        _replace_taken(picks, last, j)
    return _sorted_columns(picks)


def _replace_taken(picks: Tensor, last: Tensor, j: int) -> None:
    """Where an earlier row of `picks` [K, n] holds what row j holds, put `last` [K, n] there."""
    if picks.device.type == "cpu":  # numpy's reduction over rows is some four times as fast as torch's
        chosen = picks.numpy()
        np.copyto(chosen[j], last[j].numpy(), where=(chosen[:j] == chosen[j]).any(0))
    else:
        picks[j] = torch.where((picks[:j] == picks[j]).any(0), last[j], picks[j])


def with_replacement(state: Tensor, degree: Tensor, fanout: int) -> Tensor:
    """`fanout` uniform draws of range(degree) per row, ascending: int32 [n, fanout]; every degree > 0."""
    draws = torch.arange(fanout, device=state.device)
    return _sorted_columns(rng.below(rng.draw(state, draws[:, None]), degree).to(torch.int32))


def _sorted_columns(picks: Tensor) -> Tensor:
    """The columns of `picks` [K, n], each ascending, as rows: [n, K]."""
    if picks.device.type == "cpu":  # half the time of torch's sort for rows this short
        return torch.from_numpy(np.sort(picks.numpy().T, axis=1))
    return picks.t().sort(1).values
