"""sample_neighbors on Triton: every sample equals the torch path's bit for bit, order included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tgnn.kernels import last_ran, rng, sample_neighbors, use_backend
from tgnn.kernels.sample_weighted import DrawWeights

KEY = rng.stream(0, rng.SAMPLING, 0, 0, 0)
KINDS = ("uniform", "replace", "labor", "weighted", "weighted-replace")
NAMES = ("indptr", "src", "position", "edge")


def random_csr(n: int = 40, most: int = 12, hub: int = 60, dtype=torch.int64):
    generator = torch.Generator().manual_seed(0)
    degrees = torch.randint(0, most + 1, (n,), generator=generator)
    degrees[3], degrees[4], degrees[5] = 0, hub, 1
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, n, (int(indptr[-1]),), generator=generator).to(dtype)
    weight = torch.rand(len(indices), generator=generator)
    weight[torch.rand(len(indices), generator=generator) < 0.3] = 0
    if n > 7:
        weight[indptr[7] : indptr[8]] = 0
    return indptr, indices, weight


def both(
    kind: str, indptr, indices, weight, rows, ids, fanout: int, device: str, source_id=None, key: int = KEY
):
    """The sample by torch on the CPU and by Triton on the device."""
    found = []
    for place, backend in (("cpu", "torch"), (device, "triton")):
        on = [x.to(place) for x in (indptr, indices, rows, ids)]
        more = {}
        if kind.startswith("weighted"):
            more["weights"] = DrawWeights.of(on[0], weight.to(place), kind == "weighted-replace")
        if kind == "labor":
            more["source_id"] = (
                torch.arange(len(indptr) + 1) * 10**9 if source_id is None else source_id
            ).to(place)
        with use_backend(backend):
            found.append(sample_neighbors(*on, fanout, key, kind.endswith("replace"), **more))
        assert last_ran("sample_neighbors") == backend
    return found


def check_equal(found) -> None:
    for name in NAMES:
        right, got = (getattr(sample, name) for sample in found)
        assert got.dtype == right.dtype
        assert torch.equal(got.cpu(), right), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fanout", [-1, 0, 1, 2, 5, 12, 17])
def test_equals_torch(kind: str, fanout: int, device: str):
    dtype = torch.int32 if fanout % 2 else torch.int64
    indptr, indices, weight = random_csr(dtype=dtype)
    rows = torch.tensor([4, 0, 3, 39, 7, 7, 21, 5, 12]).to(dtype)
    ids = torch.tensor([2**40, 5, 6, 0, 1, 2, 2**31, 9, 17])
    check_equal(both(kind, indptr, indices, weight, rows, ids, fanout, device))


@pytest.mark.parametrize("kind", ["uniform", "replace", "weighted", "weighted-replace"])
def test_wide_tiles(kind: str, device: str):
    """More draws than fit in the narrow tiles: one row a program."""
    indptr, indices, weight = random_csr(n=9, hub=150)
    rows = torch.tensor([4, 3, 1])
    check_equal(both(kind, indptr, indices, weight, rows, rows + 7, 70, device))


@pytest.mark.parametrize("fanout", [1, 3, 8])
def test_pieces_of_a_hub_are_merged(fanout: int, device: str, monkeypatch: pytest.MonkeyPatch):
    from tgnn.kernels import sample_weighted_triton

    monkeypatch.setattr(sample_weighted_triton, "PIECE", 16)
    indptr, indices, weight = random_csr(hub=100)
    rows = torch.tensor([1, 4, 3, 4, 7, 9])
    check_equal(both("weighted", indptr, indices, weight, rows, torch.arange(6), fanout, device))


@pytest.mark.parametrize("kind", KINDS)
def test_a07_no_rows_no_edges(kind: str, device: str):
    none = torch.zeros(0, dtype=torch.int64)
    for fanout in (-1, 0, 3):
        for indptr, rows in (
            (torch.zeros(5, dtype=torch.int64), torch.arange(4)),
            (torch.tensor([0, 0]), none),
        ):
            found = both(kind, indptr, none, torch.zeros(0), rows, rows, fanout, device)
            check_equal(found)
            assert found[1].indptr.tolist() == [0] * (len(rows) + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a10_strided_inputs(kind: str, device: str):
    def strided(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x.flip(0)], 1)[:, 0]

    indptr, indices, weight = random_csr()
    rows = torch.tensor([4, 3, 9, 2])
    parts = (strided(indptr), strided(indices), strided(weight), strided(rows), strided(rows))
    check_equal(both(kind, *parts, 3, device, source_id=strided(torch.arange(40) * 3)))


@pytest.mark.parametrize("key", [1, 16, -5, (1 << 63) - 1])
def test_keys_of_any_size(key: int, device: str):
    indptr, indices, weight = random_csr()
    rows = torch.tensor([4, 9, 2])
    for kind in KINDS:
        check_equal(both(kind, indptr, indices, weight, rows, rows, 3, device, key=key))


@pytest.mark.parametrize("kind", ["uniform", "replace", "labor"])
def test_a08_edges_beyond_32_bits(kind: str, device: str):
    """Two rows whose in-edges start past 2^31: offsets are 64-bit. The array is never touched elsewhere."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of GPU memory")
    start = (1 << 31) + 5
    indices = torch.from_numpy(np.zeros(start + 20, dtype=np.int32))
    indices[start:] = torch.arange(20, dtype=torch.int32) % 3
    indptr = torch.tensor([0, 0, start, start + 12, start + 20])
    rows, source_id = torch.tensor([2, 0, 3]), torch.arange(4) + (1 << 40)
    for fanout in (-1, 4):
        found = both(kind, indptr, indices, None, rows, rows + (1 << 33), fanout, device, source_id)
        check_equal(found)
        assert found[1].edge.min() >= start and found[1].src.max() == 2


NO_LABOR = [kind for kind in KINDS if kind != "labor"]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fanout counts as one whose draws do not fit in registers."""
    from tgnn.kernels import sample_triton

    monkeypatch.setattr(sample_triton, "WIDEST", 0)
    for name in ("launch_rows", "sample_weighted_triton"):
        monkeypatch.setattr(sample_triton, name, None)


@pytest.mark.parametrize("kind", NO_LABOR)
@pytest.mark.parametrize("fanout", [1, 2, 5, 12, 17, 59])
def test_draws_in_global_memory_equal_torch(kind: str, fanout: int, device: str, wide):
    """The hub has 60 in-edges: at a fanout of 59 most of Floyd's draws meet earlier ones, step after step."""
    dtype = torch.int32 if fanout % 2 else torch.int64
    indptr, indices, weight = random_csr(dtype=dtype)
    rows = torch.tensor([4, 0, 3, 39, 7, 7, 21, 5, 12, 4, 4, 4]).to(dtype)
    ids = torch.tensor([2**40, 5, 6, 0, 1, 2, 2**31, 9, 17, 1, 2, 3])
    check_equal(both(kind, indptr, indices, weight, rows, ids, fanout, device))


@pytest.mark.parametrize("kind", NO_LABOR)
def test_a07_draws_in_global_memory_without_rows_or_edges(kind: str, device: str, wide):
    none = torch.zeros(0, dtype=torch.int64)
    for indptr, rows in ((torch.zeros(5, dtype=torch.int64), torch.arange(4)), (torch.tensor([0, 0]), none)):
        check_equal(both(kind, indptr, none, torch.zeros(0), rows, rows, 3, device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fanout", [1025, 1600])
def test_a_fanout_wider_than_registers_equals_torch(kind: str, fanout: int, device: str):
    indptr, indices, weight = random_csr(n=9, hub=1601)
    rows = torch.tensor([4, 3, 1, 4])
    check_equal(both(kind, indptr, indices, weight, rows, rows + torch.arange(4), fanout, device))


@pytest.mark.parametrize("kind", ["uniform", "weighted", "labor"])
def test_a_fanout_of_any_size_gives_all_in_edges(kind: str, device: str):
    indptr, indices, weight = random_csr(n=9)
    found = both(kind, indptr, indices, weight, torch.arange(9), torch.arange(9), (1 << 31) - 1, device)
    check_equal(found)
    assert len(found[1].edge) == (int((weight > 0).sum()) if kind == "weighted" else len(indices))


def test_floyds_steps_follow_earlier_ones(device: str):
    """The docstring's example: in-degree 5, three draws."""
    from tgnn.kernels import sample_wide_triton

    indptr, zero = torch.tensor([0, 5], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    draws = torch.tensor([1, 1, 3], dtype=torch.int32, device=device)
    picks = sample_wide_triton._floyd((indptr, zero, zero, zero), draws, 3)
    assert picks.tolist() == [1, 3, 4]
