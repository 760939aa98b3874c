"""Logarithms in fixed point, by integers alone: the same bits in torch and in Triton, on any device.

Weighted sampling without replacement takes the K smallest of -log(u) / w, which is the order of
log2(-log2 u) - log2(w). Both terms are computed here from integers, by linear interpolation in tables of 4097
entries, so that no decision rests on a device's floats.

Errors: `log2_fixed` under 2^-26, `log2_exponential` under 2^-24: a probability is off by 1e-7 of itself at
most, about what float32 weights are known to.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

# Fraction bits: of the tables and of log2_fixed, of a random logarithm, of a weight's logarithm.
FRACTION, EXPONENTIAL_FRACTION, WEIGHT_FRACTION = 30, 24, 23
# Tables have 2^CELL_BITS cells; between two entries REST_BITS more bits are interpolated.
CELL_BITS, REST_BITS = 12, 24
CELLS = 1 << CELL_BITS
# The logarithm of a weight of 0: what has it is never drawn.
NEVER = -(1 << 31)


@functools.cache
def _entries() -> tuple[list[int], list[int]]:
    """log2(1 + i / 4096) and log2(-log2(1 - u) / u) at u = i / 8192, i = 0 .. 4096, times 2^30 and rounded.

    No entry is so near to a half that a C library's last bits could change it; a test holds the distance.
    """
    logs = [math.log2(1 + i / CELLS) for i in range(CELLS + 1)]
    shares = (i / (2 * CELLS) for i in range(1, CELLS + 1))
    ratios = [math.log2(1 / math.log(2)), *(math.log2(-math.log1p(-u) / (u * math.log(2))) for u in shares)]
    return [round(x * (1 << FRACTION)) for x in logs], [round(x * (1 << FRACTION)) for x in ratios]


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two tables of this module on a device: int32 [4097] each."""
    logs, ratios = (torch.tensor(entries, dtype=torch.int32, device=device) for entries in _entries())
    return logs, ratios


def top_bit(n: Tensor) -> Tensor:
    """The number of the highest bit of every n >= 1: floor(log2 n); int64."""
    # Without the bit below the highest, rounding to a float64 cannot reach the next power of two.
    return ((n & ~(n >> 1)).to(torch.float64).view(torch.int64) >> 52) - 1023


def _interpolated(table: Tensor, x: Tensor, bits: int) -> Tensor:
    """The table's value at x / 2^bits, x in [0, 2^bits): int64."""
    cell = x >> (bits - CELL_BITS)
    rest = (x >> (bits - CELL_BITS - REST_BITS)) & ((1 << REST_BITS) - 1)
    low, high = _entries_at(table, cell), _entries_at(table, cell + 1)
    return low + ((high - low) * rest >> REST_BITS)


def _entries_at(table: Tensor, cell: Tensor) -> Tensor:
    # index_select: half the time of take, a third of brackets on a CPU.
    return table.index_select(0, cell.reshape(-1)).view(cell.shape).to(torch.int64)


def log2_fixed(n: Tensor) -> Tensor:
    """log2 of every n (int64, at least 1) with 30 fraction bits: int64.

    >>> log2_fixed(torch.tensor([1, 2, 8])) >> FRACTION
    tensor([0, 1, 3])
    """
    exponent = top_bit(n)
    mantissa = (n << (62 - exponent)) & ((1 << 62) - 1)
    return (exponent << FRACTION) + _interpolated(tables(n.device)[0], mantissa, 62)


def log2_exponential(bits: Tensor) -> Tensor:
    """log2(-log2(1 - u)) for u = bits / 2^64 (int64 as unsigned) with 24 fraction bits: int64 in [-64, 6] x 2^24.

    Random bits give the binary logarithm of an exponential variable, accurate relative to the variable on both ends:
    for u < 1/2 it is log2(u) plus a smooth function, else -log2(1 - u) is at least 1.
    """
    upper = bits < 0
    least = torch.where(upper, ~bits, bits).clamp_(min=1)  # of u and 1 - u
    log = log2_fixed(least) - (64 << FRACTION)
    lower_half = log + _interpolated(tables(bits.device)[1], least, 63)
    upper_half = log2_fixed(-log) - (FRACTION << FRACTION)
    return torch.where(upper, upper_half, lower_half) >> (FRACTION - EXPONENTIAL_FRACTION)


def split_float(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(m, e), int64 both, with weight = m x 2^e exactly and m in [0, 2^24); weight float32, finite, not negative."""
    bits = weight.contiguous().view(torch.int32).to(torch.int64)
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    return torch.where(exponent > 0, fraction | 0x800000, fraction), exponent.clamp(min=1) - 150


def log2_weight(weight: Tensor) -> Tensor:
    """log2 of float32 weights with 23 fraction bits: int32, `NEVER` for 0."""
    mantissa, exponent = split_float(weight)
    log = log2_fixed(mantissa.clamp(min=1)) + (exponent << FRACTION)
    shift = FRACTION - WEIGHT_FRACTION
    log = (log + (1 << (shift - 1))) >> shift
    return torch.where(mantissa > 0, log, NEVER).to(torch.int32)
