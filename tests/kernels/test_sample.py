"""sample_neighbors: exact edges against Python's integers, uniformity, independence, purity."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from scipy import stats

from tgnn.errors import UserError
from tgnn.kernels import last_ran, rng, sample_neighbors

KEY = rng.stream(0, rng.SAMPLING, 0, 0, 0)
MASK = (1 << 64) - 1


def random_csr(n: int = 40, most: int = 12, seed: int = 0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, most + 1, (n,), generator=generator)
    degrees[3], degrees[4] = 0, 5 * most
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, torch.randint(0, n, (int(indptr[-1]),), generator=generator).to(dtype)


def positions_reference(degree: int, vertex: int, fanout: int, key: int, replace: bool) -> list[int]:
    """Which positions of one row are drawn: Floyd's algorithm or draws with replacement, in Python."""
    if fanout == -1 or (degree <= fanout and not replace):
        return list(range(degree))
    if degree == 0:
        return []
    state = rng.mix_int(key + vertex * rng.GOLDEN)
    chosen: list[int] = []
    for j in range(fanout):
        bits = rng.mix_int(state + (j + 1) * rng.GOLDEN)
        bound = degree if replace else degree - fanout + j + 1
        pick = (bits & MASK) * bound >> 64
        chosen.append(bound - 1 if not replace and pick in chosen else pick)
    return sorted(chosen)


def one_degree(degree: int, n: int, fanout: int, key: int, replace: bool = False) -> torch.Tensor:
    """Positions [n, fanout] that vertices 0 .. n-1, each with `degree` in-edges, draw."""
    indptr = torch.tensor([0, degree])
    rows = torch.zeros(n, dtype=torch.int64)
    sample = sample_neighbors(indptr, torch.arange(degree), rows, torch.arange(n), fanout, key, replace)
    return sample.position.view(n, -1)


def test_docstring_example():
    sample = sample_neighbors(
        torch.tensor([0, 3]), torch.tensor([4, 5, 6]), torch.tensor([0]), torch.tensor([9]), -1, KEY
    )
    assert sample.src.tolist() == [4, 5, 6]
    assert sample.position.tolist() == [0, 1, 2]
    assert last_ran("sample_neighbors") == "torch"


@pytest.mark.parametrize("fanout", [-1, 0, 1, 2, 3, 5, 11, 12, 13, 70])
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_edge_equals_the_reference(fanout, replace, dtype):
    indptr, indices = random_csr(dtype=dtype)
    rows = torch.tensor([4, 0, 3, 39, 7, 7, 21, 3, 12]).to(dtype)
    ids = torch.tensor([2**40, 5, 6, 0, 1, 2, 2**31, 9, 17])
    sample = sample_neighbors(indptr, indices, rows, ids, fanout, KEY, replace)
    assert sample.src.dtype == dtype
    assert sample.indptr.dtype == sample.position.dtype == sample.edge.dtype == torch.int64
    ends = sample.indptr.tolist()
    assert ends[0] == 0 and ends[-1] == len(sample.src)
    for i, (row, vertex) in enumerate(zip(rows.tolist(), ids.tolist(), strict=True)):
        first, degree = int(indptr[row]), int(indptr[row + 1] - indptr[row])
        expected = positions_reference(degree, vertex, fanout, KEY, replace)
        here = slice(ends[i], ends[i + 1])
        assert sample.position[here].tolist() == expected
        assert sample.edge[here].tolist() == [first + p for p in expected]
        assert sample.src[here].tolist() == [int(indices[first + p]) for p in expected]


@pytest.mark.parametrize("fanout", [-1, 0, 3])
@pytest.mark.parametrize("replace", [False, True])
def test_a07_no_rows_no_edges(fanout, replace):
    none = torch.zeros(0, dtype=torch.int64)
    indptr, indices = random_csr()
    sample = sample_neighbors(indptr, indices, none, none, fanout, KEY, replace)
    assert sample.indptr.tolist() == [0]
    assert len(sample.src) == len(sample.position) == len(sample.edge) == 0
    bare = torch.zeros(5, dtype=torch.int64)
    sample = sample_neighbors(bare, none, torch.arange(4), torch.arange(4), fanout, KEY, replace)
    assert sample.indptr.tolist() == [0] * 5
    assert len(sample.src) == len(sample.position) == len(sample.edge) == 0


def test_wrong_fanout_is_refused():
    indptr, indices = random_csr()
    with pytest.raises(UserError, match="-1 for all"):
        sample_neighbors(indptr, indices, torch.arange(2), torch.arange(2), -2, KEY)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a15_pairs_of_five_neighbours_are_uniform(seed):
    picks = one_degree(5, 10_000, 2, rng.stream(seed, rng.SAMPLING))
    counts = [int(((picks[:, 0] == a) & (picks[:, 1] == b)).sum()) for a, b in combinations(range(5), 2)]
    assert sum(counts) == 10_000
    assert all(abs(count - 1000) <= 150 for count in counts)
    assert stats.chisquare(counts).pvalue > 1e-4
    share = torch.bincount(picks.reshape(-1), minlength=5) / 10_000
    # Five standard deviations of a proportion of 2/5.
    assert (share - 0.4).abs().max() < 5 * (0.4 * 0.6 / 10_000) ** 0.5


@pytest.mark.parametrize(("degree", "fanout"), [(6, 3), (7, 1), (6, 5), (4, 2)])
def test_a15_all_subsets_are_uniform(degree, fanout):
    n = 20_000
    picks = one_degree(degree, n, fanout, KEY)
    assert (picks.diff(dim=1) > 0).all()
    codes = (1 << picks).sum(1)
    subsets = [sum(1 << p for p in chosen) for chosen in combinations(range(degree), fanout)]
    counts = torch.bincount(codes, minlength=1 << degree)[subsets]
    assert int(counts.sum()) == n
    assert stats.chisquare(counts.tolist()).pvalue > 1e-4


def test_a15_a_hub_of_100000_neighbours_is_drawn_evenly():
    picks = one_degree(100_000, 4000, 10, KEY)
    assert (picks.diff(dim=1) > 0).all()
    assert picks.min() >= 0 and picks.max() < 100_000
    counts = torch.bincount(picks.reshape(-1) // 1000, minlength=100)
    assert stats.chisquare(counts.tolist()).pvalue > 1e-4


def test_with_replacement_is_uniform_and_independent_between_draws():
    n = 20_000
    # Sorted pairs of two draws out of 3: 1/9 for equal ones, 2/9 for the others.
    picks = one_degree(3, n, 2, KEY, replace=True)
    pairs = torch.bincount(picks[:, 0] * 3 + picks[:, 1], minlength=9)
    expected = torch.tensor([1, 2, 2, 0, 1, 2, 0, 0, 1]).double() * n / 9
    drawn = expected > 0
    assert int(pairs[~drawn].sum()) == 0
    assert stats.chisquare(pairs[drawn].tolist(), expected[drawn].tolist()).pvalue > 1e-4
    assert one_degree(1, 3, 4, KEY, replace=True).tolist() == [[0] * 4] * 3


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_a14_other_seeds_epochs_steps_and_hops_draw_independently(other):
    n = 10_000
    seed, *words = other
    first = one_degree(5, n, 1, rng.stream(0, rng.SAMPLING, 0, 0, 0)).view(-1)
    second = one_degree(5, n, 1, rng.stream(seed, rng.SAMPLING, *words)).view(-1)
    table = torch.bincount(first * 5 + second, minlength=25).view(5, 5)
    assert stats.chi2_contingency(table.tolist()).pvalue > 1e-4
    assert abs(torch.corrcoef(torch.stack([first, second]).double())[0, 1].item()) < 5 / n**0.5
    # Neighbouring vertex ids draw independently too.
    table = torch.bincount(first[1:] * 5 + first[:-1], minlength=25).view(5, 5)
    assert stats.chi2_contingency(table.tolist()).pvalue > 1e-4


def test_a14_a_row_draws_the_same_in_any_company_order_and_number_of_threads():
    indptr, indices = random_csr(n=2000, most=30, seed=3)
    rows = torch.randperm(2000)
    ids = rows * 11 + 1
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(sample_neighbors(indptr, indices, rows, ids, 7, KEY))
    finally:
        torch.set_num_threads(before)
    for name in ("indptr", "src", "position", "edge"):
        assert torch.equal(getattr(found[0], name), getattr(found[1], name))
    whole = found[0]
    for chosen in (rows[:1], rows[100:120].flip(0)):
        part = sample_neighbors(indptr, indices, chosen, chosen * 11 + 1, 7, KEY)
        places = [int((rows == row).nonzero()) for row in chosen]
        edges = torch.cat([whole.edge[int(whole.indptr[i]) : int(whole.indptr[i + 1])] for i in places])
        assert torch.equal(part.edge, edges)


def test_a14_the_draw_is_keyed_by_the_id_not_by_the_row():
    indptr = torch.arange(0, 101 * 9, 9)
    indices = torch.arange(900) % 9
    ids = torch.randperm(100)
    here = sample_neighbors(indptr, indices, torch.arange(100), ids, 4, KEY).position.view(100, 4)
    there = sample_neighbors(indptr, indices, torch.arange(100), torch.arange(100), 4, KEY).position.view(
        100, 4
    )
    assert torch.equal(here, there[ids])


def test_a10_strided_inputs():
    indptr, indices = random_csr()
    rows = torch.arange(20)
    plain = sample_neighbors(indptr, indices, rows, rows, 4, KEY)

    def strided(x):
        return torch.stack([x, x.flip(0)], 1)[:, 0]

    other = sample_neighbors(strided(indptr), strided(indices), strided(rows), strided(rows), 4, KEY)
    assert torch.equal(plain.edge, other.edge)
    assert torch.equal(plain.src, other.src)
