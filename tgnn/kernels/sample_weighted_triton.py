"""Triton kernel of weighted sampling without replacement: the K smallest keys of a row, in one stream over its edges.

A lane of a tile [ROWS, WIDTH] holds the K smallest keys met so far; a step makes the keys of EDGES more in-edges a row
and puts those below the row's largest held key in its place, one a turn and row. The more edges were met the fewer
turns are needed, some K + K log(d / K) in all. Rows of more than `PIECE` in-edges are streamed in pieces by several
lanes, whose keys a second launch merges; keys are distinct, so the result does not depend on the cut.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.fixed_log import tables
from tgnn.kernels.fixed_log_triton import log2_exponential
from tgnn.kernels.rng_triton import draw as draw_bits
from tgnn.kernels.rng_triton import keyed
from tgnn.kernels.sample import Sample
from tgnn.kernels.sample_rows_triton import (
    LOOSE,
    OF_ROWS,
    OUTPUTS,
    WIDE,
    config_of,
    counts,
    edges_of,
    running_sum,
    spec_of,
    store_edges,
)
from tgnn.kernels.sample_weighted import DrawWeights
from tgnn.kernels.segment_triton import launch, row_holding
from tgnn.kernels.tuning import Config

# In-edges that one lane streams over.
PIECE = 1024


@triton.jit
def edge_keys(log2, logs, ratios, state, start, place, inside):
    """`sample_weighted._keys` of the in-edges at `place` of rows that start at `start`."""
    log = tl.load(log2 + start + place, mask=inside, other=-2147483648).to(tl.int64)
    random = log2_exponential(draw_bits(state, place), logs, ratios)
    keys = ((random - (log << 1)) << 31) + place
    return tl.where(log == -2147483648, 0x7FFFFFFFFFFFFFFF, keys)


@triton.jit(do_not_specialize=(*LOOSE, "n_pieces"))
def weighted_kernel(
    indptr, indices, rows, ids, log2, logs, ratios, piece_ends, scratch, out, src, position, edge,
    n_rows, n_pieces, fanout, key, steps,
    READ: tl.constexpr, WRITE: tl.constexpr, PIECE: tl.constexpr,
    ROWS: tl.constexpr, EDGES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw `fanout` in-edges of every row, or leave the keys of its pieces in scratch [n_pieces, fanout] (WRITE), or
    draw from the keys that are there (READ). piece_ends [n_rows + 1]: running sum of the rows' numbers of pieces.

    Example: keys 5, 3, 9, 4 and fanout 2, EDGES = 2: holds 5, 3, then 3, 4; the edges are at positions 1 and 3.
    """
    lane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if WRITE:
        live = lane < n_pieces
        i = row_holding(piece_ends, tl.where(live, lane, 0), n_rows, steps)
        offset = (lane - tl.load(piece_ends + i)) * PIECE
    else:
        live = lane < n_rows
        i = tl.where(live, lane, 0)
        offset = lane * 0
    row = tl.load(rows + i).to(tl.int64)
    start = tl.load(indptr + row)
    if READ:
        first = tl.load(piece_ends + i) * fanout
        length = tl.load(piece_ends + i + 1) * fanout - first
    else:
        length = tl.load(indptr + row + 1) - start - offset
        state = keyed(key, tl.load(ids + i))
    if WRITE:
        length = tl.minimum(length, PIECE)
    length = tl.where(live, length, 0)

    # Lanes that hold no key yet are told apart, so that a turn fills one of them.
    column = tl.arange(0, WIDTH)[None, :]
    free = tl.where(column < fanout, 0x7FFFFFFFFFFFFFFE - column.to(tl.int64), -0x8000000000000000)
    held = tl.zeros([ROWS, 1], tl.int64) + free
    largest = tl.max(held, 1)
    for begin in range(0, tl.max(length, 0), EDGES):
        at = begin + tl.arange(0, EDGES)[None, :]
        inside = at < length[:, None]
        if READ:
            keys = tl.load(scratch + first[:, None] + at, mask=inside, other=0x7FFFFFFFFFFFFFFF)
        else:
            keys = edge_keys(log2, logs, ratios, state[:, None], start[:, None], offset[:, None] + at, inside)
        least = tl.min(keys, 1)
        while tl.max((least < largest).to(tl.int32), 0) > 0:
            put = (least < largest)[:, None] & (held == largest[:, None])
            held = tl.where(put, least[:, None], held)
            keys = tl.where(keys == least[:, None], 0x7FFFFFFFFFFFFFFF, keys)
            largest = tl.max(held, 1)
            least = tl.min(keys, 1)

    drawn = (held < 0x7FFFFFFFFFFF0000) & (column < fanout)
    if WRITE:
        keys = tl.where(drawn, held, 0x7FFFFFFFFFFFFFFF)
        tl.store(scratch + (lane * fanout)[:, None] + column, keys, mask=live[:, None] & (column < fanout))
    else:
        picks = tl.sort(tl.where(drawn, held & 0x7FFFFFFF, 0x7FFFFFFF).to(tl.int32), 1)
        place = tl.load(out + i)
        count = tl.load(out + i + 1) - place
        mask = live[:, None] & (column < count[:, None])
        store_edges(indices, src, position, edge, place[:, None] + column, start[:, None], picks, mask)


def draw(graph: list[Tensor], fanout: int, key: int, weights: DrawWeights) -> Sample:
    """Draw by weight without replacement (one device sync). graph: indptr, indices, rows, ids."""
    n = graph[2].numel()
    out = running_sum(counts(graph, fanout, False, weights.drawable))
    pieces = (counts(graph, -1) + (PIECE - 1)) // PIECE
    ends = running_sum(pieces)
    most = pieces.max() if n else ends[-1]
    n_edges, n_pieces, longest = torch.stack([out[-1], ends[-1], most]).tolist()
    drawn = edges_of(graph, out, n_edges)
    if n_edges == 0:
        return drawn
    inputs = (*graph, weights.log2, *tables(out.device))
    outputs = (drawn.indptr, drawn.src, drawn.position, drawn.edge)
    scratch = None
    if longest > 1:
        scratch = torch.empty(n_pieces * fanout, dtype=torch.int64, device=out.device)
        _launch(PIECES, n_pieces, inputs, ends, scratch, outputs, n, n_pieces, fanout, key)
    _launch(MERGED if longest > 1 else WEIGHTED, n, inputs, ends, scratch, outputs, n, n_pieces, fanout, key)
    return drawn


def _launch(spec, lanes, inputs, ends, scratch, outputs, n, n_pieces, fanout, key) -> None:
    config = config_of(spec, fanout, ends.device)
    launch(
        spec, config, (triton.cdiv(lanes, config.tiles["ROWS"]),), *inputs, ends, scratch, *outputs,
        n, n_pieces, fanout, key, n.bit_length(),
        **{name: value for name, value in spec.constants(fanout).items() if value is not None} | {"PIECE": PIECE},
    )  # fmt: skip


def _configs(width: int) -> tuple[Config, ...]:
    wide = triton.next_power_of_2(max(1, width))
    edges = max(32, min(128, wide))
    rows = max(1, min(4, 64 // wide))
    choices = ((rows, edges), (2 * rows, edges), (max(1, rows // 2), 2 * edges))
    return tuple(Config({"ROWS": r, "EDGES": e}, max(1, min(8, wide // 128)), 1) for r, e in choices)


def _spec(name: str, read: bool, write: bool) -> object:
    tensors = {**OF_ROWS, "log2": torch.int32, "logs": torch.int32, "ratios": torch.int32, "piece_ends": WIDE}
    tensors |= {"scratch": WIDE if read or write else None, **OUTPUTS}
    constants = {"READ": read, "WRITE": write, "PIECE": PIECE}
    return spec_of(name, weighted_kernel, tensors, "n_rows n_pieces fanout key steps", constants, _configs)


WEIGHTED = _spec("sample_weighted", False, False)
PIECES, MERGED = _spec("sample_weighted_pieces", False, True), _spec("sample_weighted_merge", True, False)
SPECS = (WEIGHTED, PIECES, MERGED)
