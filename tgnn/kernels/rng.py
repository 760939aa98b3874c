"""Keyed random numbers: a pure function of integers, with the same bits in torch and in Triton.

A 64-bit *key* stands for everything that names a random choice but the vertex itself (seed, epoch, step, hop,
...); `keyed(key, ids)` gives every vertex id its own 64 random bits and `draw(state, i)` the i-th further
number behind them. Nothing here has a state, so a number depends on no rank, device, thread or call order.

The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
generators", OOPSLA 2014) and counters step by its odd constant, so `keyed(key, i)` is the i-th output (i = 1,
2, ...) of SplitMix64 seeded with `key`. All arithmetic is modulo 2^64, held in int64.

Example: SplitMix64 seeded with 1234567 starts 6457827717110365317, 3203168211198807973, 9817491932198370423
(the last stands as 9817491932198370423 - 2^64 in int64): `keyed(1234567, [1, 2, 3])`.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# What a key is for: the first word after the seed, so that no two uses share their numbers.
PERMUTATION, SAMPLING, FEATURE_DROPOUT, ATTENTION_DROPOUT = 1, 2, 3, 4


def signed(value: int) -> int:
    """`value` modulo 2^64 as a signed 64-bit integer."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def mix_int(value: int) -> int:
    """SplitMix64's finaliser on one Python integer; same bits as `mix`."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def stream(seed: int, *words: int) -> int:
    """The key of one stream of random numbers, a signed 64-bit integer: a hash of seed and words, in order.

    >>> stream(0, SAMPLING, 0, 0) == stream(0, SAMPLING, 0, 1)
    False
    """
    # Mixed twice: a seed mixed as a word is would cancel with a first word of the same value.
    key = mix_int(mix_int(seed + GOLDEN) + GOLDEN)
    for word in words:
        key = mix_int((key ^ mix_int(word + GOLDEN)) + GOLDEN)
    return signed(key)


def _xor_shift_(x: Tensor, bits: int) -> Tensor:
    # int64 shifts keep the sign: the mask makes the shift a logical one.
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1
    return x.bitwise_xor_(shifted)


def mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on every element of an int64 tensor, in place."""
    _xor_shift_(x, 30).mul_(signed(MULTIPLIER_1))
    _xor_shift_(x, 27).mul_(signed(MULTIPLIER_2))
    return _xor_shift_(x, 31)


def keyed(key: int, ids: Tensor) -> Tensor:
    """64 random bits for every id: int64, same shape as `ids` (any integer dtype)."""
    return mix_(ids.to(torch.int64) * signed(GOLDEN) + key)


def draw(state: Tensor, index: int | Tensor) -> Tensor:
    """The `index`-th (0 .. ) further 64 random bits of every state in `state` (int64); broadcasts."""
    if isinstance(index, int):
        return mix_(state + signed((index + 1) * GOLDEN))
    return mix_(state + (index.to(torch.int64) + 1) * signed(GOLDEN))


def below(bits: Tensor, bound: Tensor) -> Tensor:
    """A uniform integer in [0, bound) from 64 random bits: the high half of the 128-bit product bits x bound.

    Args: bits int64 (as unsigned), bound int64 in [1, 2^31); they broadcast. The bias is under bound / 2^64.
    """
    low = (bits & 0xFFFFFFFF) * bound
    low >>= 32  # below 2^31: not negative, so the shift is a logical one
    high = ((bits >> 32) & 0xFFFFFFFF) * bound
    high += low
    # (2^32 - 1)(2^31 - 1) + 2^31 < 2^63: the sum keeps its sign.
    high >>= 32
    return high


def below_wide(bits: Tensor, bound: Tensor) -> Tensor:
    """`below` for an int64 bound in [1, 2^62)."""
    word = 0xFFFFFFFF
    high, low, bound_high, bound_low = (bits >> 32) & word, bits & word, bound >> 32, bound & word
    # Products up to 2^64 wrap, but their bits are right, and the masks make the shifts logical ones.
    cross, other = high * bound_low, low * bound_high
    carry = (((low * bound_low) >> 32) & word) + (cross & word) + (other & word)
    return high * bound_high + ((cross >> 32) & word) + ((other >> 32) & word) + (carry >> 32)


def lanes(state: Tensor, width: int) -> Tensor:
    """`width` uniform signed 16-bit numbers for every state: int16 [n, width] from int64 [n].

    Column c is bits 16 (c mod 4) .. of the (c // 4)-th draw, so one 64-bit draw serves four columns.
    """
    words = torch.arange(1, (width + 3) // 4 + 1, device=state.device, dtype=torch.int64) * signed(GOLDEN)
    # Allocated rather than left to broadcasting, whose strides for empty shapes have no 16-bit view.
    bits = torch.empty(state.numel(), words.numel(), dtype=torch.int64, device=state.device)
    torch.add(state[:, None], words, out=bits)
    return mix_(bits).view(torch.int16)[:, :width]
