"""rng_triton and fixed_log_triton: the bits of their torch counterparts, over random and extreme numbers."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import fixed_log, rng

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from tgnn.kernels import fixed_log_triton, rng_triton  # noqa: E402

EXTREMES = [
    0,
    1,
    -1,
    2,
    -2,
    1 << 31,
    -(1 << 31),
    (1 << 32) - 1,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    1 - (1 << 63),
]
BLOCK = 256


@triton.jit
def numbers_kernel(
    x, bound, key, mixed, keyed, drawn, below, word, top, log, random, logs, ratios, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i)
    tl.store(mixed + i, rng_triton.mix(value))
    tl.store(keyed + i, rng_triton.keyed(tl.load(key), value))
    tl.store(drawn + i, rng_triton.draw(value, 3))
    tl.store(drawn + BLOCK + i, rng_triton.draw(value, i))
    tl.store(below + i, rng_triton.below(value, tl.load(bound + i)))
    tl.store(word + i, rng_triton.lane(value, i % 4).to(tl.int16))
    positive = tl.maximum(value & 0x7FFFFFFFFFFFFFFF, 1)
    tl.store(top + i, fixed_log_triton.top_bit(positive))
    tl.store(log + i, fixed_log_triton.log2_fixed(positive, logs))
    tl.store(random + i, fixed_log_triton.log2_exponential(value, logs, ratios))


@pytest.mark.parametrize("key", [0, 1, -1, (1 << 63) - 1, -(1 << 63), rng.stream(5, 1, 2)])
def test_same_bits_as_torch(key: int, device: str):
    generator = torch.Generator().manual_seed(key & 0xFF)
    x = torch.randint(-(1 << 63), (1 << 63) - 1, (BLOCK,), generator=generator)
    x >>= torch.arange(BLOCK) % 64  # of every magnitude
    x[: len(EXTREMES)] = torch.tensor(EXTREMES)
    bound = (rng.keyed(9, x) & (1 << 62) - 1).clamp(min=1)
    bound[::2] = (bound[::2] >> 32).clamp(min=1)
    bound[:4] = torch.tensor([1, (1 << 31) - 1, (1 << 62) - 1, 3])
    outputs = {name: torch.zeros(BLOCK, dtype=torch.int64, device=device) for name in
               ("mixed", "keyed", "below", "top", "log", "random")}  # fmt: skip
    drawn = torch.zeros(2, BLOCK, dtype=torch.int64, device=device)
    word = torch.zeros(BLOCK, dtype=torch.int16, device=device)
    logs, ratios = fixed_log.tables(torch.device(device))
    numbers_kernel[(1,)](
        x.to(device), bound.to(device), torch.tensor([key], device=device), outputs["mixed"], outputs["keyed"], drawn,
        outputs["below"], word, outputs["top"], outputs["log"], outputs["random"], logs, ratios, BLOCK=BLOCK,
    )  # fmt: skip
    positive = (x & (1 << 63) - 1).clamp(min=1)
    index = torch.arange(BLOCK)
    expected = {
        "mixed": rng.mix_(x.clone()),
        "keyed": rng.keyed(key, x),
        "below": rng.below_wide(x, bound),
        "top": fixed_log.top_bit(positive),
        "log": fixed_log.log2_fixed(positive),
        "random": fixed_log.log2_exponential(x),
    }
    for name, right in expected.items():
        assert torch.equal(outputs[name].cpu(), right), name
    assert torch.equal(drawn.cpu(), torch.stack([rng.draw(x, 3), rng.draw(x, index)]))
    small = bound < 1 << 31
    assert torch.equal(outputs["below"].cpu()[small], rng.below(x, bound)[small])
    lanes = (x >> 16 * (index % 4)).to(torch.int16)
    assert torch.equal(word.cpu(), lanes)
    state = x[:8]
    assert torch.equal(rng.lanes(state, 4)[:, 1], (rng.draw(state, 0) >> 16).to(torch.int16))
