"""Uniform neighbour sampling on a CPU: the draws of `sample_neighbors`, bit for bit, in NumPy.

NumPy's passes over some thousand numbers are cheaper than PyTorch's, whose team of threads is called for each, and it
computes without sign, which halves the steps of a random number.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tgnn.kernels.rng import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

# Numbers drawn at once, so that every pass finds them in the cache.
MOST_DRAWS = 1 << 17
_HALF = np.uint64(32)


def draw_uniform(
    indices: Tensor,
    ids: Tensor,
    start: Tensor,
    degree: Tensor,
    count: Tensor,
    fanout: int,
    key: int,
    replace: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(indptr, src, position, edge) of `Sample`; on the CPU.

    Args: start, degree, count int64 [n]: of each row the first edge, how many there are, and how many it gives; the
    others as `sample_neighbors`'.
    """
    names, degrees, counts = (each.numpy() for each in (ids, degree, count))
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    # Only rows with more edges than they give are decided by a draw; the others give all of theirs, or none.
    is_drawn = np.zeros(len(counts), bool)
    if fanout > 0:
        is_drawn = counts > 0 if replace else counts < degrees
    position = np.arange(out[-1])
    position -= np.repeat(out[:-1], counts)
    if is_drawn.any():
        picks = _picks(key, names[is_drawn], degrees[is_drawn], fanout, replace)
        position[np.repeat(is_drawn, counts)] = picks.reshape(-1)
    edge = np.repeat(start.numpy(), counts)
    edge += position
    found = tuple(torch.from_numpy(one) for one in (out, position, edge))
    # PyTorch's threads wait for memory together.
    return found[0], indices.index_select(0, found[2]), found[1], found[2]


def _picks(key: int, ids: np.ndarray, degree: np.ndarray, fanout: int, replace: bool) -> np.ndarray:
    """`fanout` positions of every row, ascending: int32 [n, fanout]."""
    draw = _with_replacement if replace else _floyd
    picks, rows = np.empty((len(ids), fanout), np.int32), max(1, MOST_DRAWS // fanout)
    for at in range(0, len(ids), rows):
        some = slice(at, at + rows)
        picks[some] = np.sort(draw(key, ids[some], degree[some], fanout).T, axis=1)
    return picks


def _floyd(key: int, ids: np.ndarray, degree: np.ndarray, fanout: int) -> np.ndarray:
    """A uniform `fanout`-subset of range(degree) per row: int32 [fanout, n]; degree > fanout."""
    # Draws outermost: each comparison then runs over contiguous memory.
    last = np.add.outer(np.arange(-fanout, 0, dtype=np.int32), degree.astype(np.int32))
    picks = _below(_draws(key, ids, fanout), (last + 1).astype(np.uint64)).astype(np.int32)
    same = np.empty(picks.shape, bool)
    for j in range(1, fanout):
        np.equal(picks[:j], picks[j], out=same[:j])
        taken = np.bitwise_or.reduce(same[:j].view(np.uint8), axis=0)
        # Whatever is taken is no larger than the last that stands in for it.
        np.maximum(picks[j], taken * last[j], out=picks[j])
    return picks


def _with_replacement(key: int, ids: np.ndarray, degree: np.ndarray, fanout: int) -> np.ndarray:
    """`fanout` uniform draws of range(degree) per row: int32 [fanout, n]; every degree > 0."""
    return _below(_draws(key, ids, fanout), degree.astype(np.uint64)).astype(np.int32)


def _draws(key: int, ids: np.ndarray, count: int) -> np.ndarray:
    """64 random bits for every draw and id, uint64 [count, n]: `rng.draw` of `rng.keyed`."""
    golden = np.uint64(GOLDEN)
    state = ids.astype(np.uint64)
    state *= golden
    state += np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    _mix(state)
    steps = np.arange(1, count + 1, dtype=np.uint64)[:, None] * golden
    return _mix(state + steps)


def _mix(bits: np.ndarray) -> np.ndarray:
    """`rng.mix_` on uint64, in place."""
    shifted = np.empty_like(bits)
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2), (31, None)):
        np.right_shift(bits, np.uint64(shift), out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        if multiplier is not None:
            np.multiply(bits, np.uint64(multiplier), out=bits)
    return bits


def _below(bits: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """`rng.below`: uniform integers in [0, bound) from uint64 bits; bound uint64 in [1, 2^31); changes `bits`."""
    low = np.bitwise_and(bits, np.uint64(0xFFFFFFFF))
    low *= bound
    low >>= _HALF
    bits >>= _HALF
    bits *= bound
    bits += low
    bits >>= _HALF
    return bits
