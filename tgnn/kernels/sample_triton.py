"""Triton kernels of sample_neighbors: counts per row, one device sync for the number of edges, then the edges.

Uniform and replacing draws take a tile of ROWS rows by the next power of two of K, kept in registers, and a rolled loop
over the draws. Weighted draws without replacement stream over a row's in-edges and keep the K smallest keys in such a
tile (sample_weighted_triton.py). What depends on every in-edge alone, LABOR and all in-edges, runs over in-edges and
not over rows, so that a hub is no program's work. Numbers and results are those of the torch path, bit for bit: no
floats are involved.

Running sums, the compaction of flags and the search for the rows' ends are torch's (`cumsum`, `nonzero`,
`searchsorted`): on a GPU those are library kernels at the speed of memory. Draws of a fanout above `WIDEST` lie in
global memory (sample_wide_triton.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels import sample, sample_weighted_triton, sample_wide_triton
from tgnn.kernels.rng_triton import below, draw, keyed
from tgnn.kernels.sample_rows_triton import (
    BLOCKS,
    BYTE,
    LOOSE,
    OF_GRAPH,
    OF_ROWS,
    OUTPUTS,
    WIDE,
    by_flags,
    config_of,
    counts,
    edges_of,
    launch_flat,
    running_sum,
    spec_of,
    store_edges,
    tile_configs,
)
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.segment_triton import launch, row_holding
from tgnn.kernels.tuning import KernelSpec

# Draws per row that fit in registers: 1024 x (4 + 4) bytes over 128 threads.
WIDEST = 1024


@triton.jit(do_not_specialize=LOOSE)
def floyd_kernel(
    indptr, indices, rows, ids, out, src, position, edge, n_rows, fanout, key, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Uniform draws without replacement; out [n + 1] says where a row's edges go, WIDTH >= fanout.

    Each step compares the new pick with the tile: how many are less gives its rank, one that is equal makes the step's
    largest number the pick instead, which is above all others. So ranks grow with the picks and nothing is sorted.

    Example: in-degree 5, fanout 2, numbers 2 of [0, 4) and 2 of [0, 5): picks 2, then 4 as 2 is taken.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = i < n_rows
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    start = tl.load(indptr + row, mask=live, other=0)
    degree = (tl.load(indptr + row + 1, mask=live, other=0) - start).to(tl.int32)
    state = keyed(key, tl.load(ids + i, mask=live, other=0))
    column = tl.arange(0, WIDTH)[None, :]
    picks = tl.full([ROWS, WIDTH], 0x7FFFFFFF, tl.int32)
    ranks = tl.zeros([ROWS, WIDTH], tl.int32)
    for j in range(fanout):
        top = degree - fanout + j
        pick = below(draw(state, j), top + 1).to(tl.int32)[:, None]
        found = tl.sum((picks < pick).to(tl.int32) + (picks == pick).to(tl.int32) * 65536, 1)[:, None]
        taken = found >= 65536
        pick = tl.where(taken, top[:, None], pick)
        ranks += (picks > pick).to(tl.int32)
        here = column == j
        ranks = tl.where(here, tl.where(taken, j, found), ranks)
        picks = tl.where(here, pick, picks)
    whole = (degree <= fanout)[:, None]
    picks = tl.where(whole, column, picks)
    place = tl.load(out + i, mask=live, other=0)[:, None] + tl.where(whole, column, ranks)
    mask = live[:, None] & (column < tl.minimum(degree, fanout)[:, None])
    store_edges(indices, src, position, edge, place, start[:, None], picks, mask)


@triton.jit(do_not_specialize=LOOSE)
def replace_kernel(
    indptr, indices, rows, ids, running, out, src, position, edge, n_rows, fanout, key,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draws with replacement: uniform, or by `running` [E], the rows' running sums of weights.

    Example: running 0, 2, 4 and numbers 3, 0, 2 of [0, 4): picks 2, 1, 2, in order 1, 2, 2.
    """
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = i < n_rows
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    start = tl.load(indptr + row, mask=live, other=0)
    degree = tl.load(indptr + row + 1, mask=live, other=0) - start
    state = keyed(key, tl.load(ids + i, mask=live, other=0))
    column = tl.arange(0, WIDTH)[None, :]
    bits = draw(state[:, None], column)
    first = tl.load(out + i, mask=live, other=0)
    mask = live & (tl.load(out + i + 1, mask=live, other=0) > first)
    mask = mask[:, None] & (column < fanout)
    if running is None:
        picks = below(bits, degree[:, None])
    else:
        total = tl.load(running + start + degree - 1, mask=live & (degree > 0), other=1)
        target = below(bits, total[:, None])
        picks = tl.zeros([ROWS, WIDTH], tl.int32)
        high = tl.where(mask, degree[:, None] - 1, 0).to(tl.int32)
        while tl.max(tl.max(high - picks, 1), 0) > 0:
            middle = (picks + high) >> 1
            passed = tl.load(running + start[:, None] + middle, mask=mask, other=0) <= target
            picks = tl.where(passed & (picks < high), middle + 1, picks)
            high = tl.where(passed, high, middle)
    picks = tl.sort(tl.where(mask, picks, 0x7FFFFFFF).to(tl.int32), 1)
    store_edges(indices, src, position, edge, first[:, None] + column, start[:, None], picks, mask)


@triton.jit(do_not_specialize=LOOSE)
def keep_kernel(
    indptr, indices, rows, ends, source_id, log2, keep, n_rows, n_edges, fanout, key, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which of the rows' in-edges are kept: those of positive weight, or (log2 None) by LABOR-0.

    ends [n + 1]: running sum of the rows' in-degrees; keep [ends[n]] int8: 1 where kept; steps: of the bisection.
    """
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = number < n_edges
    inside = tl.where(live, number, 0)
    i = row_holding(ends, inside, n_rows, steps)
    first = tl.load(ends + i)
    edge = tl.load(indptr + tl.load(rows + i).to(tl.int64)) + inside - first
    if log2 is None:
        degree = tl.load(ends + i + 1) - first
        asked = live & (degree > fanout)
        source = tl.load(indices + edge, mask=asked, other=0).to(tl.int64)
        bits = keyed(key, tl.load(source_id + source, mask=asked, other=0))
        kept = (degree <= fanout) | (below(bits, degree) < fanout)
    else:
        kept = tl.load(log2 + edge, mask=live, other=0) != -2147483648
    tl.store(keep + number, kept.to(tl.int8), mask=live)


def sample_neighbors_triton(
    indptr: Tensor, indices: Tensor, rows: Tensor, ids: Tensor, fanout: int, key: int, replace: bool = False, *,
    weights: DrawWeights | None = None, source_id: Tensor | None = None,
) -> sample.Sample:  # fmt: skip
    """`sample_neighbors` by Triton kernels (one device sync; LABOR, all in-edges of positive weight, and fanouts above
    `WIDEST`: two).
    """
    graph = [x.contiguous() for x in (indptr, indices, rows, ids)]
    if source_id is not None and fanout != -1:
        return _all_kept(graph, fanout, key, source_id.contiguous(), None)
    if fanout == -1:
        return _all_kept(graph, -1, key, None, None if weights is None else weights.log2)
    if fanout > WIDEST:
        return sample_wide_triton.draw_wide(graph, fanout, key, replace, weights)
    if weights is not None and not replace:
        return sample_weighted_triton.draw(graph, fanout, key, weights)
    out = running_sum(counts(graph, fanout, replace, None if weights is None else weights.drawable))
    drawn = edges_of(graph, out, int(out[-1]))
    if replace:
        running = None if weights is None else weights.running
        launch_rows(REPLACE if running is None else REPLACE_WEIGHTED, graph, (running,), drawn, fanout, key)
    else:
        launch_rows(FLOYD, graph, (), drawn, fanout, key)
    return drawn


def _all_kept(
    graph: list[Tensor], fanout: int, key: int, source_id: Tensor | None, log2: Tensor | None
) -> sample.Sample:
    """All in-edges of the rows, or those that `keep_kernel` keeps."""
    indptr, indices, rows, _ = graph
    ends = running_sum(counts(graph, -1))
    if source_id is None and log2 is None:
        return by_flags(graph, ends, None)
    n_in, n = int(ends[-1]), rows.numel()
    keep = torch.empty(n_in, dtype=torch.int8, device=rows.device)
    launch_flat(
        KEEP if log2 is None else KEEP_DRAWABLE, n_in, indptr, indices, rows, ends, source_id, log2, keep,
        n, n_in, fanout, key, n.bit_length(),
    )  # fmt: skip
    return by_flags(graph, ends, keep)


def launch_rows(
    spec: KernelSpec, graph: list[Tensor], extra: tuple[Tensor | None, ...], drawn: sample.Sample, fanout: int, key: int
) -> None:  # fmt: skip
    """Launch a kernel over tiles of rows by draws."""
    config, n = config_of(spec, fanout, graph[2].device), graph[2].numel()
    launch(
        spec, config, (triton.cdiv(n, config.tiles["ROWS"]),), *graph, *extra, drawn.indptr, drawn.src, drawn.position,
        drawn.edge, n, fanout, key, WIDTH=triton.next_power_of_2(max(1, fanout)),
    )  # fmt: skip


TILES = tile_configs((512, 256, 1024), 4)


def _keep(name: str, source_id: torch.dtype | None, log2: torch.dtype | None) -> KernelSpec:
    tensors = {**OF_GRAPH, "rows": WIDE, "ends": WIDE, "source_id": source_id, "log2": log2, "keep": BYTE}
    return spec_of(name, keep_kernel, tensors, "n_rows n_edges fanout key steps", {}, BLOCKS)


def _replace(name: str, running: torch.dtype | None) -> KernelSpec:
    tensors = {**OF_ROWS, "running": running, **OUTPUTS}
    tiles = TILES if running is None else tile_configs((256, 512, 128), 4)
    return spec_of(name, replace_kernel, tensors, "n_rows fanout key", {}, tiles)


KEEP, KEEP_DRAWABLE = _keep("sample_labor", WIDE, None), _keep("sample_drawable", None, torch.int32)
REPLACE, REPLACE_WEIGHTED = _replace("sample_replace", None), _replace("sample_replace_weighted", WIDE)
FLOYD = spec_of("sample_floyd", floyd_kernel, {**OF_ROWS, **OUTPUTS}, "n_rows fanout key", {}, TILES)
SPECS = (KEEP, KEEP_DRAWABLE, REPLACE, REPLACE_WEIGHTED, FLOYD)
