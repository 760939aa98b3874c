"""Triton path of sample_neighbors for fanouts whose draws do not fit in registers: they lie in global memory.

A program takes draws, or in-edges, one by one and whatever their row, so no row is too long and no fanout too wide.
Sorts are torch's, on a GPU a library's; the samples are those of the other kernels, bit for bit.

Floyd's steps wait for each other only where numbers meet. Step j of a row draws t_j in [0, top_j], top_j = d - K + j,
and t_j is taken already if an earlier step drew the same number, or if it is the top_i of an earlier step i whose own
number was taken. So a draw follows i = t_j - (d - K) from step to step: taken where it meets a number that was drawn
before, free where the number is below d - K or leads to no earlier step. Hardly any draw follows more than one step.

Weighted draws without replacement sort the keys of all in-edges of the rows and keep the K smallest of each row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.fixed_log import tables
from tgnn.kernels.rng_triton import below, draw, keyed
from tgnn.kernels.sample import Sample
from tgnn.kernels.sample_rows_triton import (
    BLOCKS,
    BYTE,
    LOOSE,
    OF_GRAPH,
    OF_ROWS,
    OUTPUTS,
    WIDE,
    by_flags,
    counts,
    edges_of,
    launch_flat,
    running_sum,
    spec_of,
    store_edges,
)
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.sample_weighted_triton import edge_keys
from tgnn.kernels.segment_triton import row_holding

LOOSE_HERE = (*LOOSE, "n_draws")


@triton.jit(do_not_specialize=LOOSE_HERE)
def wide_draw_kernel(
    indptr, rows, ids, chosen, running, draws, n_draws, fanout, key, REPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """draws [m * fanout] int32: what each draw of the rows `chosen` [m] picks, Floyd's before they meet.

    running [E]: as in `replace_kernel`; None for uniform draws.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < n_draws
    j = number % fanout
    i = tl.load(chosen + number // fanout, mask=live, other=0)
    row = tl.load(rows + i).to(tl.int64)
    start = tl.load(indptr + row)
    degree = tl.load(indptr + row + 1) - start
    bits = draw(keyed(key, tl.load(ids + i)), j)
    if running is None:
        bound = degree if REPLACE else degree - fanout + j + 1
        pick = below(bits, tl.maximum(bound, 1))
    else:
        target = below(bits, tl.load(running + start + degree - 1, mask=live, other=1))
        pick = number * 0
        high = tl.where(live, degree - 1, 0)
        while tl.max(high - pick, 0) > 0:
            middle = (pick + high) >> 1
            passed = tl.load(running + start + middle, mask=live, other=0) <= target
            pick = tl.where(passed & (pick < high), middle + 1, pick)
            high = tl.where(passed, high, middle)
    tl.store(draws + number, pick.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=LOOSE_HERE)
def wide_floyd_kernel(
    indptr, rows, chosen, draws, repeated, picks, n_draws, fanout, BLOCK: tl.constexpr,
):  # fmt: skip
    """picks [m * fanout]: Floyd's choice at every step. repeated: 1 where an earlier step drew the same number.

    Example: in-degree 5, fanout 3, draws 1, 1, 3: the second is repeated and picks 3; 3 leads the third to that step,
    which picked it, so it picks 4.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < n_draws
    j = number % fanout
    first = number - j
    row = tl.load(rows + tl.load(chosen + number // fanout, mask=live, other=0)).to(tl.int64)
    lowest = tl.load(indptr + row + 1) - tl.load(indptr + row) - fanout
    own = tl.load(draws + number, mask=live, other=0).to(tl.int64)
    taken = tl.load(repeated + number, mask=live, other=0) != 0
    step, earlier = j, own - lowest
    follows = live & ~taken & (earlier >= 0) & (earlier < step)
    while tl.max(follows.to(tl.int32), 0) > 0:
        step = tl.where(follows, earlier, step)
        met = tl.load(repeated + first + step, mask=follows, other=0) != 0
        taken = taken | met
        earlier = tl.load(draws + first + step, mask=follows, other=0).to(tl.int64) - lowest
        follows = follows & ~met & (earlier >= 0) & (earlier < step)
    tl.store(picks + number, tl.where(taken, lowest + j, own).to(tl.int32), mask=live)


@triton.jit(do_not_specialize=LOOSE_HERE)
def wide_fill_kernel(
    indptr, indices, rows, slot, picks, out, src, position, edge, n_rows, n_edges, fanout, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    """The edges of all rows: of row i at row slot[i] of picks [m, fanout], or all where slot[i] is -1."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < n_edges
    i = row_holding(out, tl.where(live, number, 0), n_rows, steps)
    within = number - tl.load(out + i)
    of_row = tl.load(slot + i)
    pick = tl.load(picks + of_row * fanout + within, mask=live & (of_row >= 0), other=0).to(tl.int64)
    start = tl.load(indptr + tl.load(rows + i).to(tl.int64))
    store_edges(indices, src, position, edge, number, start, tl.where(of_row >= 0, pick, within), live)


@triton.jit(do_not_specialize=LOOSE_HERE)
def wide_keys_kernel(
    indptr, rows, ids, ends, log2, logs, ratios, keys, n_rows, n_edges, key, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    """keys [ends[n]]: `sample_weighted._keys` of the rows' in-edges; ends [n + 1]: running sum of the in-degrees."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < n_edges
    inside = tl.where(live, number, 0)
    i = row_holding(ends, inside, n_rows, steps)
    state = keyed(key, tl.load(ids + i))
    start = tl.load(indptr + tl.load(rows + i).to(tl.int64))
    place = inside - tl.load(ends + i)
    tl.store(keys + number, edge_keys(log2, logs, ratios, state, start, place, live), mask=live)


def draw_wide(
    graph: list[Tensor], fanout: int, key: int, replace: bool, weights: DrawWeights | None
) -> Sample:
    """`sample_neighbors` of any fanout > 0, but LABOR (two device syncs). graph: indptr, indices, rows, ids."""
    if weights is not None and not replace:
        return _by_weight(graph, fanout, key, weights)
    indptr, indices, rows, ids = graph
    n, drawable = rows.numel(), None if weights is None else weights.drawable
    count = counts(graph, fanout, replace, drawable)
    draws_some = count > 0 if replace else count < counts(graph, -1)
    chosen, out = torch.nonzero(draws_some).view(-1), running_sum(count)
    slot = torch.where(draws_some, draws_some.cumsum(0) - 1, -1)
    n_draws = chosen.numel() * fanout
    picks = torch.empty(n_draws, dtype=torch.int32, device=rows.device)
    if n_draws:  # torch's sort takes memory for a row even where there is none
        of_rows, running = (indptr, rows, ids, chosen), None if weights is None else weights.running
        spec = (REPLACE if replace else UNIFORM) if running is None else REPLACE_WEIGHTED
        launch_flat(spec, n_draws, *of_rows, running, picks, n_draws, fanout, key, REPLACE=replace)
        picks = picks if replace else _floyd(of_rows, picks, fanout)
        picks = picks.view(-1, fanout).sort(1).values
    drawn = edges_of(graph, out, int(out[-1]))
    n_edges = drawn.src.numel()
    launch_flat(
        FILL, n_edges, indptr, indices, rows, slot, picks, out, drawn.src, drawn.position, drawn.edge,
        n, n_edges, fanout, n.bit_length(),
    )  # fmt: skip
    return drawn


def _floyd(of_rows: tuple[Tensor, ...], draws: Tensor, fanout: int) -> Tensor:
    """What Floyd's steps pick of draws [m * fanout] int32."""
    indptr, rows, _, chosen = of_rows
    ordered = draws.view(-1, fanout).sort(dim=1, stable=True)
    repeats = torch.zeros(ordered.values.shape, dtype=torch.int8, device=draws.device)
    repeats[:, 1:] = ordered.values[:, 1:] == ordered.values[:, :-1]
    repeated = torch.empty_like(repeats).scatter_(1, ordered.indices, repeats)
    picks = torch.empty_like(draws)
    launch_flat(FLOYD, draws.numel(), indptr, rows, chosen, draws, repeated, picks, draws.numel(), fanout)
    return picks


def _by_weight(graph: list[Tensor], fanout: int, key: int, weights: DrawWeights) -> Sample:
    """Without replacement: flags of the in-edges with the smallest keys, in all rows at once."""
    indptr, _, rows, ids = graph
    count, degree = counts(graph, fanout, False, weights.drawable), counts(graph, -1)
    ends = running_sum(degree)
    n, n_in = rows.numel(), int(ends[-1])
    keys = torch.empty(n_in, dtype=torch.int64, device=rows.device)
    of_weights = (weights.log2, *tables(rows.device))
    launch_flat(KEYS, n_in, indptr, rows, ids, ends, *of_weights, keys, n, n_in, key, n.bit_length())
    row = torch.repeat_interleave(degree, output_size=n_in)
    # By row, in a row by key: rows keep their places among the in-edges, so ranks count from the rows' ends.
    order = keys.argsort()
    order = order[row[order].argsort(stable=True)]
    rank = torch.arange(n_in, device=rows.device) - ends[row]
    keep = torch.empty(n_in, dtype=torch.int8, device=rows.device)
    keep[order] = (rank < count[row]).to(torch.int8)
    return by_flags(graph, ends, keep)


def _draw(name: str, replace: bool, running: torch.dtype | None):
    tensors = {name: kind for name, kind in OF_ROWS.items() if name != "indices"}
    tensors |= {"chosen": WIDE, "running": running, "draws": torch.int32}
    return spec_of(name, wide_draw_kernel, tensors, "n_draws fanout key", {"REPLACE": replace}, BLOCKS)


UNIFORM, REPLACE = _draw("sample_wide", False, None), _draw("sample_wide_replace", True, None)
REPLACE_WEIGHTED = _draw("sample_wide_replace_weighted", True, WIDE)
FLOYD = spec_of(
    "sample_wide_floyd", wide_floyd_kernel,
    {"indptr": WIDE, "rows": WIDE, "chosen": WIDE, "draws": torch.int32, "repeated": BYTE, "picks": torch.int32},
    "n_draws fanout", {}, BLOCKS,
)  # fmt: skip
FILL = spec_of(
    "sample_wide_fill", wide_fill_kernel,
    {**OF_GRAPH, "rows": WIDE, "slot": WIDE, "picks": torch.int32, **OUTPUTS},
    "n_rows n_edges fanout steps", {}, BLOCKS,
)  # fmt: skip
_KEYS = spec_of(
    "sample_wide_keys", wide_keys_kernel,
    {"indptr": WIDE, "rows": WIDE, "ids": WIDE, "ends": WIDE, "log2": torch.int32, "logs": torch.int32,
     "ratios": torch.int32, "keys": WIDE},
    "n_rows n_edges key steps", {}, BLOCKS,
)  # fmt: skip
# Twice the warps of the others: Triton 3.6 lets threads of four keys spill on sm_100.
KEYS = replace(_KEYS, configs=lambda width: tuple(replace(c, num_warps=8) for c in BLOCKS(width)))
SPECS = (UNIFORM, REPLACE, REPLACE_WEIGHTED, FLOYD, FILL, KEYS)
