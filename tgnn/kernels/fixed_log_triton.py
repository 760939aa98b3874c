"""Logarithms in fixed point in Triton, with the bits of fixed_log.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def top_bit(n):
    """The number of the highest bit of every n >= 1: int64."""
    bit = n * 0
    for step in tl.static_range(6):
        half = 32 >> step
        above = (n >> half) > 0
        n = tl.where(above, n >> half, n)
        bit += tl.where(above, half, 0)
    return bit


@triton.jit
def interpolated(table, x, BITS: tl.constexpr):
    """The table's value at x / 2^BITS: 2^12 cells, 24 bits between two entries."""
    cell = x >> (BITS - 12)
    rest = (x >> (BITS - 36)) & 0xFFFFFF
    low = tl.load(table + cell).to(tl.int64)
    high = tl.load(table + cell + 1).to(tl.int64)
    return low + (((high - low) * rest) >> 24)


@triton.jit
def log2_fixed(n, logs):
    """log2 of every n (int64, at least 1) with 30 fraction bits."""
    exponent = top_bit(n)
    mantissa = (n << (62 - exponent)) & 0x3FFFFFFFFFFFFFFF
    return (exponent << 30) + interpolated(logs, mantissa, 62)


@triton.jit
def log2_exponential(bits, logs, ratios):
    """log2(-log2(1 - u)) for u = bits / 2^64 (as unsigned) with 24 fraction bits; logs, ratios: `fixed_log.tables`."""
    upper = bits < 0
    least = tl.maximum(tl.where(upper, ~bits, bits), 1)
    log = log2_fixed(least, logs) - (64 << 30)
    lower_half = log + interpolated(ratios, least, 63)
    upper_half = log2_fixed(-log, logs) - (30 << 30)
    return tl.where(upper, upper_half, lower_half) >> 6
