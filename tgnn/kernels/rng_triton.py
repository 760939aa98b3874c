"""Keyed random numbers in Triton, with the bits of rng.py; int64 in and out.

Example: `keyed(1234567, 1)` is 6457827717110365317, the first output of SplitMix64 seeded with 1234567.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """SplitMix64's finaliser of an int64 value."""
    x = x.to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return (x ^ (x >> 31)).to(tl.int64, bitcast=True)


@triton.jit
def keyed(key, ids):
    """64 random bits for every id."""
    return mix(ids.to(tl.int64) * (0x9E3779B97F4A7C15 - (1 << 64)) + key)


@triton.jit
def draw(state, index):
    """The `index`-th further 64 random bits of every state; they broadcast."""
    return mix(state + (tl.cast(index, tl.int64) + 1) * (0x9E3779B97F4A7C15 - (1 << 64)))


@triton.jit
def below(bits, bound):
    """A uniform integer in [0, bound) from 64 random bits: int64; bound int64 in [1, 2^63); they broadcast."""
    high = tl.umulhi(bits.to(tl.uint64, bitcast=True), bound.to(tl.int64).to(tl.uint64, bitcast=True))
    return high.to(tl.int64, bitcast=True)


@triton.jit
def lane(word, number):
    """The `number`-th (0 .. 3) uniform signed 16 bits of 64 random ones: int32; they broadcast.

    Column c of `rng.lanes` is `lane(draw(state, c // 4), c % 4)`.
    """
    return (word >> (16 * number).to(tl.int64)).to(tl.int16).to(tl.int32)
