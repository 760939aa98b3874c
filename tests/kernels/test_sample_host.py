"""The CPU's sampler in NumPy against the path over torch's operations, which other devices without Triton take."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest
import torch

from tgnn.kernels import host, rng, sample_host, sample_neighbors
from tgnn.kernels.sample import sample_neighbors_torch

SAMPLE = sys.modules["tgnn.kernels.sample"]
KEY = rng.stream(5, rng.SAMPLING, 1, 2, 0)


def graph(dtype: torch.dtype, n: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """In-degrees from 0 to about 200, many of them small."""
    generator = torch.Generator().manual_seed(7)
    degrees = (torch.rand(n, generator=generator) ** 4 * 200).long()
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, torch.randint(0, n, (int(indptr[-1]),), generator=generator).to(dtype)


@pytest.mark.parametrize("most_draws", [1, 100, 1 << 17])
@pytest.mark.parametrize("fanout", [-1, 0, 1, 2, 7, 15, 64])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_same_bits_as_torchs_operations(monkeypatch, dtype, replace, fanout, most_draws):
    monkeypatch.setattr(sample_host, "MOST_DRAWS", most_draws)
    indptr, indices = graph(dtype)
    generator = torch.Generator().manual_seed(fanout + 2)
    rows = torch.randint(0, 300, (400,), generator=generator).to(dtype)
    ids = torch.randint(0, 2**62, (400,), generator=generator)
    calls = []
    original = sample_host.draw_uniform
    monkeypatch.setattr(SAMPLE, "draw_uniform", lambda *args: calls.append(1) or original(*args))
    ours = sample_neighbors(indptr, indices, rows, ids, fanout, KEY, replace)
    monkeypatch.setattr(SAMPLE, "_on_cpu", lambda rows: False)
    theirs = sample_neighbors_torch(indptr, indices, rows, ids, fanout, KEY, replace)
    assert calls == [1]
    for name in ("indptr", "src", "position", "edge", "degree"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and torch.equal(a, b), name


def test_each_keeps_the_order_and_raises():
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert host.each(lambda n: n * n, range(20)) == [n * n for n in range(20)]
            with pytest.raises(ZeroDivisionError):
                host.each(lambda n: 1 // (n - 7), range(20))
    finally:
        torch.set_num_threads(before)


def nested() -> list[list[int]]:
    return host.each(lambda n: host.each(lambda m: n * m, range(3)), range(4))


def test_each_works_inside_itself_and_in_a_forked_child():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert nested() == [[n * m for m in range(3)] for n in range(4)]
        child = os.fork()
        if child == 0:
            os._exit(0 if nested()[3] == [0, 3, 6] else 1)
        for _ in range(200):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
        assert ended and status == 0
    finally:
        torch.set_num_threads(before)


def test_a_graph_whose_rows_end_beyond_its_edges_is_refused():
    indptr, indices = graph(torch.int32)
    with pytest.raises(IndexError, match="one per edge"):
        rows = torch.arange(3)
        sample_neighbors(indptr, indices[:-1], rows, rows, 2, KEY)


def test_numbers_below_large_bounds_are_those_of_rng():
    """The low half of a product decides in one case of two only where the bound is near 2^31."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**63), 2**63 - 1, (4000,), generator=generator)
    bound = torch.tensor([1, 2, 1000, 2**31 - 1]).repeat(1000)
    found = sample_host._below(bits.numpy().view(np.uint64).copy(), bound.numpy().astype(np.uint64))
    assert torch.equal(torch.from_numpy(found.astype(np.int64)), rng.below(bits, bound))
    ids = torch.randint(0, 2**62, (50,), generator=generator)
    drawn = torch.from_numpy(sample_host._draws(KEY, ids.numpy(), 7).view(np.int64))
    assert torch.equal(drawn, rng.draw(rng.keyed(KEY, ids), torch.arange(7)[:, None]))
