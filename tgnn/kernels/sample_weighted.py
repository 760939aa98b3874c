"""Weighted sampling of in-edges, with and without replacement, by integers alone.

Without replacement edge e of weight w gets the key log2(-log2 u_e) - log2 w, u_e uniform, and a row draws its K
smallest keys: the first is edge e with probability w / sum of w, and so on among the rest (Efraimidis, Spirakis:
"Weighted random sampling with a reservoir", IPL 2006, whose keys u^(1/w) have the same order). Keys are fixed-point
numbers (fixed_log.py); equal ones go by position. With replacement each draw takes the edge in whose share of the
running sum of weights a random number falls. Edges of weight 0 are never drawn.

An edge e drawn with probability w_e / W, W the sum of its row's d weights, carries the weight W / d: its expectation
sum_e (w_e / W) (W / d) x_e = (sum_e w_e x_e) / d is the mean over all in-edges, and so is that of a mean of K draws
with replacement. Its own weight would count twice. Without replacement the mean is biased, towards W / d times x's.
Where all m <= d edges of positive weight are drawn, each once, nothing is estimated: edge e carries w_e m / d, so that
a mean over the m drawn edges, sum_e (w_e m / d) x_e / m, is the exact one, of all d. Sums over drawn edges are m / d of
the full sum then, as they are the drawn share of it in every sample.

Example: weights 0, 2, 2: K = 2 draws positions 1 and 2, which carry 4/3 each; K = 1 either with probability 1/2, and it
carries 4/3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.fixed_log import (
    EXPONENTIAL_FRACTION,
    NEVER,
    WEIGHT_FRACTION,
    log2_exponential,
    log2_weight,
    split_float,
    top_bit,
)
from tgnn.kernels.gather import gather
from tgnn.kernels.segment import chunk_limit, edge_chunks, segment_max

# A key and a position in one number that sorts by key, then position: 33 and 31 bits.
POSITION_BITS = 31
POSITION_MASK = (1 << POSITION_BITS) - 1
LAST = (1 << 63) - 1  # sorts behind every key
# Running sums of a row stay below 2^SUM_BITS.
SUM_BITS = 62


@dataclass(eq=False)
class DrawWeights:
    """Edge weights as sampling reads them, made once per graph by `DrawWeights.of`.

    weight [E]: the weights themselves; log2 [E] int32: logarithm with 23 fraction bits, `fixed_log.NEVER` for weight 0;
    drawable [N] int64: in-edges of positive weight; share [N] float32: these by all in-edges; mean [N] float32: mean
    weight of all in-edges; running [E] int64: sum of the row's weights up to this edge, scaled row by row; None unless
    edges are drawn with replacement.
    """

    weight: Tensor
    log2: Tensor
    drawable: Tensor
    share: Tensor
    mean: Tensor
    running: Tensor | None = None

    @classmethod
    def of(cls, indptr: Tensor, weight: Tensor, replace: bool = False) -> DrawWeights:
        """Of a CSR's weights ([E] float32); with indptr on a GPU they may lie in pinned memory: what is kept of edges
        does too then. Raises UserError for a negative, infinite or missing (NaN) weight.
        """
        drawable = torch.empty(indptr.numel() - 1, dtype=torch.int64, device=indptr.device)
        share = torch.empty(drawable.shape, dtype=torch.float32, device=indptr.device)
        mean, log2 = torch.empty_like(share), _beside(weight, torch.int32)
        running = _beside(weight, torch.int64) if replace else None
        for rows, edges in edge_chunks(indptr, 1):
            some = weight[edges].to(indptr.device, torch.float32)
            unfit = ~((some >= 0) & (some < torch.inf))
            if bool(unfit.any()):
                do = "correct the weights, or draw with --sampler uniform"
                got = f"{some[unfit][0].item():g}"
                raise wrong("edge weights of the weighted sampler", got, "finite numbers, none negative", do)
            ends = indptr[rows.start : rows.stop + 1] - edges.start
            log2[edges] = log2_weight(some)
            degree = ends.diff().clamp(min=1)
            drawable[rows] = _sums(some > 0, ends)[1]
            share[rows] = drawable[rows].to(torch.float32) / degree.to(torch.float32)
            # A column, as each of its segments is added in order on any device: equal in every partitioning.
            total = torch.segment_reduce(some.to(torch.float64)[:, None], "sum", offsets=ends, axis=0)[:, 0]
            mean[rows] = (total / degree).to(torch.float32)
            if running is not None:
                running[edges] = _sums(_scaled(some, ends), ends)[0]
        return cls(weight, log2, drawable, share, mean, running)

    def of_drawn(self, rows: Tensor, fanout: int, indptr: Tensor, edge: Tensor) -> Tensor:
        """Weights [n_edges] that the edges of a sample (indptr [n + 1], edge [n_edges]) of `rows` [n] carry.

        The mean of the row's in-edges; the edge's own, times the share of drawable in-edges, where all of those were
        taken, each once, as nothing is estimated there.
        """
        count = indptr.diff()
        row = torch.repeat_interleave(rows, count, output_size=edge.numel())
        if self.weight.device == edge.device:
            own = self.weight.index_select(0, edge)
        else:
            own = gather(self.weight.new_empty(0, device=edge.device), edge, self.weight)
        exact = own * self.share.index_select(0, row).to(own.dtype)
        if fanout == -1:
            return exact
        estimated = count > 0 if self.running is not None else count < self.drawable.index_select(0, rows)
        estimated = torch.repeat_interleave(estimated, count, output_size=edge.numel())
        return torch.where(estimated, self.mean.index_select(0, row).to(own.dtype), exact)


def _beside(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a number of each edge where `weight` [E] lies, in pinned memory if that does."""
    return torch.empty(weight.shape, dtype=dtype, device=weight.device, pin_memory=weight.is_pinned())


def _sums(values: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """(running sum within the segment, sum of each segment) of integers, exact below 2^63 per segment."""
    # A sum over all segments may wrap around; what a segment adds to it does not.
    total = torch.zeros(values.numel() + 1, dtype=torch.int64, device=values.device)
    torch.cumsum(values, 0, dtype=torch.int64, out=total[1:])
    before = total.index_select(0, ends)
    within = total[1:] - torch.repeat_interleave(before[:-1], ends.diff(), output_size=values.numel())
    return within, before.diff()


def _scaled(weight: Tensor, ends: Tensor) -> Tensor:
    """Weights as integers, a row's largest as large as its sum's bound allows; positive ones are 1 at least."""
    degree = ends.diff()
    largest = segment_max(weight[:, None], ends)[:, 0].clamp(min=0)
    mantissa, exponent = split_float(largest)
    reach = exponent + top_bit(mantissa.clamp(min=1)) + 1  # largest < 2^reach
    room = SUM_BITS - 1 - top_bit(degree.clamp(min=1))
    shift = torch.repeat_interleave(room - reach, degree, output_size=weight.numel())
    mantissa, exponent = split_float(weight)
    shift += exponent
    scaled = torch.where(shift >= 0, mantissa << shift.clamp(0, 62), mantissa >> (-shift).clamp(0, 62))
    return torch.where(mantissa > 0, scaled.clamp(min=1), 0)


def draw_by_weight(
    weights: DrawWeights, start: Tensor, degree: Tensor, count: Tensor, state: Tensor, fanout: int, replace: bool,
    first: Tensor, position: Tensor,
) -> None:  # fmt: skip
    """Write the positions that rows draw, ascending, to position[first .. first + count) of each.

    Args: start, degree, count, state (random bits), first: int64 [n], a row each. Device syncs: a few per power of two
    among the degrees.
    """
    if start.numel() == 0 or fanout == 0:
        return
    if replace and fanout != -1:
        picks = weighted_with_replacement(weights.running, start, degree, state, fanout)
        position[first[:, None] + torch.arange(fanout, device=start.device)] = picks
        return
    kinds = top_bit(2 * degree - 1)  # the power of two that holds the degree
    for kind in torch.unique(kinds).tolist():
        width, rows = 1 << kind, torch.nonzero(kinds == kind).view(-1)
        k = width if fanout == -1 else min(fanout, width)
        # Keys take some forty passes over memory: best in runs that stay in cache.
        for run in rows.split(chunk_limit(start.device, 16 * width)):
            keys = _keys(weights, start[run], degree[run], state[run], width)
            best = keys if k == width else keys.topk(k, largest=False, sorted=False).values
            picks = torch.where(best == LAST, LAST, best & POSITION_MASK).sort(1).values
            column = torch.arange(k, device=start.device)
            drawn = column < count[run][:, None]
            position[(first[run][:, None] + column)[drawn]] = picks[drawn]


def _keys(weights: DrawWeights, start: Tensor, degree: Tensor, state: Tensor, width: int) -> Tensor:
    """Key and position of every in-edge of rows of at most `width`: int64 [n, width], `LAST` where none is drawable."""
    place = torch.arange(width, device=start.device)
    inside = place < degree[:, None]
    edge = torch.where(inside, start[:, None] + place, start[:, None])
    log = weights.log2.index_select(0, edge.view(-1)).view(edge.shape)
    random = log2_exponential(rng.draw(state[:, None], place))
    keys = (
        (random - (log.to(torch.int64) << (EXPONENTIAL_FRACTION - WEIGHT_FRACTION))) << POSITION_BITS
    ) + place
    return torch.where(inside & (log != NEVER), keys, LAST)


def weighted_with_replacement(
    running: Tensor, start: Tensor, degree: Tensor, state: Tensor, fanout: int
) -> Tensor:
    """`fanout` positions per row, ascending, each by weight: int64 [n, fanout]; every row has a positive weight."""
    total = running.index_select(0, start + degree - 1)
    draws = rng.draw(state[:, None], torch.arange(fanout, device=start.device))
    target = rng.below_wide(draws, total[:, None])
    low, high = torch.zeros_like(target), (degree[:, None] - 1).expand_as(target)
    # The first edge whose running sum is above the target.
    for _ in range(int(degree.max()).bit_length()):
        middle = (low + high) >> 1
        value = running.index_select(0, (start[:, None] + middle).view(-1)).view(middle.shape)
        low, high = torch.where(value <= target, middle + 1, low), torch.where(value <= target, high, middle)
    return low.sort(1).values
