"""rng against Python's big integers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tgnn.kernels import rng

MASK = (1 << 64) - 1
EDGES = [0, 1, -1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**63) + 1, -(2**32), 12345]


def mix_reference(value: int) -> int:
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def random_int64(n: int, seed: int = 0) -> list[int]:
    numbers = np.random.default_rng(seed).integers(-(2**63), 2**63, n, dtype=np.int64)
    return EDGES + [int(x) for x in numbers]


def unsigned(x: torch.Tensor) -> list[int]:
    return [value & MASK for value in x.tolist()]


def test_docstring_example_is_the_published_splitmix64_sequence():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert unsigned(rng.keyed(1234567, torch.tensor([1, 2, 3, 4]))) == published


def test_mix_equals_big_integers_also_for_negative_numbers():
    numbers = random_int64(2000)
    expected = [mix_reference(x) for x in numbers]
    assert unsigned(rng.mix_(torch.tensor(numbers))) == expected
    assert [rng.mix_int(x) for x in numbers] == expected


def test_signed_is_two_complement():
    for value in [*EDGES, 2**64, 2**64 + 5, -(2**64) - 3, 3 * 2**70 + 1]:
        assert rng.signed(value) % 2**64 == value % 2**64
        assert -(2**63) <= rng.signed(value) < 2**63


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_keyed_equals_big_integers(key):
    ids = [0, 1, 5, 2**31 - 1, 2**40, 2**62, -7]
    expected = [mix_reference(key + i * 0x9E3779B97F4A7C15) for i in ids]
    assert unsigned(rng.keyed(key, torch.tensor(ids))) == expected
    small = torch.tensor(ids[:4], dtype=torch.int32)
    assert unsigned(rng.keyed(key, small)) == expected[:4]


def test_keyed_and_draw_leave_their_inputs_alone():
    ids = torch.arange(5)
    state = rng.keyed(3, ids)
    before = state.clone()
    rng.draw(state, 0)
    rng.draw(state, torch.tensor(1))
    rng.lanes(state, 5)
    assert torch.equal(ids, torch.arange(5))
    assert torch.equal(state, before)


def test_draw_equals_big_integers_for_numbers_and_tensors():
    state = random_int64(50)
    draws = [0, 1, 63, 2**31]
    for j in draws:
        expected = [mix_reference(s + (j + 1) * 0x9E3779B97F4A7C15) for s in state]
        assert unsigned(rng.draw(torch.tensor(state), j)) == expected
    grid = rng.draw(torch.tensor(state)[:, None], torch.tensor(draws))
    for k, j in enumerate(draws):
        assert torch.equal(grid[:, k], rng.draw(torch.tensor(state), j))


def test_below_equals_the_high_half_of_the_big_product():
    bits, bounds = random_int64(1000), [1, 2, 3, 5, 1000, 2**16, 2**30 + 7, 2**31 - 1]
    for bound in bounds:
        expected = [((b & MASK) * bound) >> 64 for b in bits]
        assert rng.below(torch.tensor(bits), torch.tensor(bound)).tolist() == expected
    grid = rng.below(torch.tensor(bits)[:, None], torch.tensor(bounds))
    assert grid.shape == (len(bits), len(bounds))
    assert grid[:, 4].tolist() == [((b & MASK) * 1000) >> 64 for b in bits]
    one_state = rng.below(torch.tensor(bits[-1:]), torch.tensor(bounds))
    assert one_state.tolist() == [((bits[-1] & MASK) * b) >> 64 for b in bounds]


@pytest.mark.parametrize("width", [0, 1, 3, 4, 5, 31, 64, 100])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_lanes_are_the_sixteen_bit_parts_of_the_draws(n, width):
    state = rng.keyed(9, torch.arange(n))
    lanes = rng.lanes(state, width)
    assert lanes.shape == (n, width)
    assert lanes.dtype == torch.int16
    for row, column in itertools.product(range(n), range(width)):
        word = mix_reference(state[row].item() + (column // 4 + 1) * 0x9E3779B97F4A7C15)
        assert lanes[row, column].item() % 65536 == (word >> 16 * (column % 4)) % 65536


def test_streams_differ_in_every_word_and_in_their_order():
    keys = {
        rng.stream(seed, *words) for seed in range(-3, 4) for words in itertools.product(range(6), repeat=3)
    }
    assert len(keys) == 7 * 6**3
    assert rng.stream(0) != rng.stream(0, 0) != rng.stream(0, 0, 0)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert rng.stream(2**70, -1) == rng.stream(2**70, -1)


def test_bits_are_balanced_and_neighbouring_keys_unrelated():
    n = 20000
    bits = torch.stack([(rng.keyed(rng.stream(0, 1), torch.arange(n)) >> b) & 1 for b in range(64)]).double()
    other = torch.stack([(rng.keyed(rng.stream(0, 2), torch.arange(n)) >> b) & 1 for b in range(64)]).double()
    # Five standard deviations of a mean of n fair bits.
    bound = 5 * 0.5 / n**0.5
    assert (bits.mean(1) - 0.5).abs().max() < bound
    assert ((bits == other).double().mean(1) - 0.5).abs().max() < bound
    assert ((bits[:, 1:] == bits[:, :-1]).double().mean(1) - 0.5).abs().max() < bound
