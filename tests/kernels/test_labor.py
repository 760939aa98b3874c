"""LABOR-0: the rule edge by edge, expected counts, shared choices, fewer sources, independence."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from tgnn.errors import UserError
from tgnn.kernels import rng, sample_neighbors
from tgnn.kernels.sample_weighted import DrawWeights

KEY = rng.stream(0, rng.SAMPLING, 0, 0, 0)


def random_csr(n: int = 60, n_src: int = 60, most: int = 12, seed: int = 0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, most + 1, (n,), generator=generator)
    degrees[3], degrees[4] = 0, 5 * most
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    return indptr, torch.randint(0, n_src, (int(indptr[-1]),), generator=generator).to(dtype)


def labor(indptr, indices, rows, source_id, fanout, key=KEY):
    return sample_neighbors(
        indptr, indices, rows, torch.full_like(rows, 77), fanout, key, source_id=source_id
    )


def kept_of(sample, row: int) -> list[int]:
    return sample.src[int(sample.indptr[row]) : int(sample.indptr[row + 1])].tolist()


def test_docstring_example():
    indptr, indices = torch.tensor([0, 2, 6, 10]), torch.tensor([4, 5, 4, 5, 6, 7, 4, 5, 6, 7])
    sample = labor(indptr, indices, torch.arange(3), torch.arange(8), 2)
    assert kept_of(sample, 0) == [4, 5]
    assert kept_of(sample, 1) == kept_of(sample, 2)
    numbers = {u: rng.mix_int(KEY + u * rng.GOLDEN) / 2**64 for u in range(4, 8)}
    assert kept_of(sample, 1) == [u for u in range(4, 8) if numbers[u] < 0.5]


@pytest.mark.parametrize("fanout", [-1, 0, 1, 4, 30, 100])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_edge_against_the_rule(fanout, dtype):
    indptr, indices = random_csr(dtype=dtype)
    rows = torch.tensor([4, 0, 3, 39, 7, 7, 59, 12]).to(dtype)
    source_id = torch.randperm(60, generator=torch.Generator().manual_seed(1)) * 10**10
    sample = labor(indptr, indices, rows, source_id, fanout)
    assert sample.src.dtype == dtype and sample.position.dtype == sample.edge.dtype == torch.int64
    ends = sample.indptr.tolist()
    for i, row in enumerate(rows.tolist()):
        first, degree = int(indptr[row]), int(indptr[row + 1] - indptr[row])
        expected = []
        for position in range(degree):
            vertex = int(source_id[int(indices[first + position])])
            number = rng.mix_int(KEY + vertex * rng.GOLDEN)
            if fanout == -1 or number * degree < fanout << 64:
                expected.append(position)
        here = slice(ends[i], ends[i + 1])
        assert sample.position[here].tolist() == expected
        assert sample.edge[here].tolist() == [first + p for p in expected]
        assert sample.src[here].tolist() == [int(indices[first + p]) for p in expected]


def test_counts_are_binomial_and_rows_of_at_most_k_keep_all():
    """Disjoint sources: K expected of d, each with probability K / d on its own."""
    n, degree, fanout = 4000, 9, 4
    indptr, indices = torch.arange(0, n * degree + 1, degree), torch.arange(n * degree)
    counts = labor(indptr, indices, torch.arange(n), indices, fanout).indptr.diff()
    deviation = (degree * (fanout / degree) * (1 - fanout / degree) / n) ** 0.5
    assert abs(counts.double().mean().item() - fanout) < 5 * deviation
    expected = [n * stats.binom.pmf(k, degree, fanout / degree) for k in range(degree + 1)]
    assert stats.chisquare(torch.bincount(counts, minlength=degree + 1).tolist(), expected).pvalue > 1e-4
    assert (labor(indptr, indices, torch.arange(n), indices, degree).indptr.diff() == degree).all()


def test_rows_of_equal_degree_share_their_choices():
    """A source is kept by all rows of one degree or by none; a row of fewer in-edges keeps what fuller ones do."""
    indptr, indices = random_csr(n=200, n_src=50, most=20, seed=2)
    sample = labor(indptr, indices, torch.arange(200), torch.arange(50), 5)
    degrees, reach = indptr.diff(), {}
    for row in range(200):
        kept = set(kept_of(sample, row))
        for u in set(indices[int(indptr[row]) : int(indptr[row + 1])].tolist()):
            reach.setdefault(u, []).append((int(degrees[row]), u in kept))
    for meetings in reach.values():
        kept = [degree for degree, is_kept in meetings if is_kept]
        dropped = [degree for degree, is_kept in meetings if not is_kept]
        assert max(kept, default=0) < min(dropped, default=10**9)
    # Copies of an edge go together.
    indptr, indices = torch.tensor([0, 8]), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for seed in range(20):
        sample = labor(
            indptr, indices, torch.zeros(1, dtype=torch.int64), torch.arange(4), 4, rng.stream(seed)
        )
        assert (torch.bincount(sample.src, minlength=4) % 2 == 0).all()


def test_fewer_distinct_sources_than_uniform_for_as_many_edges():
    generator = torch.Generator().manual_seed(3)
    n, degree, fanout = 1000, 40, 5
    indptr = torch.arange(0, n * degree + 1, degree)
    indices = torch.randint(0, 2000, (n * degree,), generator=generator)
    rows = torch.arange(n)
    shared = labor(indptr, indices, rows, torch.arange(2000), fanout)
    uniform = sample_neighbors(indptr, indices, rows, rows, fanout, KEY)
    assert abs(len(shared.src) / len(uniform.src) - 1) < 0.2
    # One in eight sources is kept at all; uniform draws meet nearly all.
    assert len(shared.src.unique()) < 0.2 * len(uniform.src.unique())


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_a14_other_seeds_epochs_steps_and_hops_keep_independently(other):
    n, degree = 4000, 4
    indptr, indices = torch.arange(0, n * degree + 1, degree), torch.arange(n * degree)
    seed, *words = other
    kept = []
    for key in (KEY, rng.stream(seed, rng.SAMPLING, *words)):
        mask = torch.zeros(n * degree, dtype=torch.int64)
        mask[labor(indptr, indices, torch.arange(n), indices, 2, key).edge] = 1
        kept.append(mask)
    table = torch.bincount(kept[0] * 2 + kept[1], minlength=4).view(2, 2)
    assert stats.chi2_contingency(table.tolist()).pvalue > 1e-4
    # Neighbouring ids too.
    table = torch.bincount(kept[0][1:] * 2 + kept[0][:-1], minlength=4).view(2, 2)
    assert stats.chi2_contingency(table.tolist()).pvalue > 1e-4


def test_a14_keyed_by_the_source_not_by_row_order_or_company():
    indptr, indices = random_csr(n=100, seed=5)
    source_id = torch.randperm(60) + 1000
    whole = labor(indptr, indices, torch.arange(100), source_id, 3)
    rows = torch.randperm(100)[:30]
    part = labor(indptr, indices, rows, source_id, 3)
    edges = [whole.edge[int(whole.indptr[row]) : int(whole.indptr[row + 1])] for row in rows.tolist()]
    assert torch.equal(part.edge, torch.cat(edges))
    # New numbers for the sources, the same original ids: the same choice.
    order = torch.randperm(60)
    renamed = labor(indptr, order[indices], torch.arange(100), source_id[torch.argsort(order)], 3)
    assert torch.equal(renamed.edge, whole.edge)


def test_a07_no_rows_no_edges():
    none = torch.zeros(0, dtype=torch.int64)
    for indptr, rows in ((torch.zeros(4, dtype=torch.int64), torch.arange(3)), (torch.tensor([0]), none)):
        sample = labor(indptr, none, rows, none, 3)
        assert sample.indptr.tolist() == [0] * (len(rows) + 1) and len(sample.src) == 0


def test_replacement_and_weights_are_refused():
    indptr, indices = random_csr()
    rows, ids = torch.arange(4), torch.arange(60)
    with pytest.raises(UserError, match="replacement"):
        sample_neighbors(indptr, indices, rows, rows, 2, KEY, True, source_id=ids)
    weights = DrawWeights.of(indptr, torch.ones(len(indices)))
    with pytest.raises(UserError, match="edge weights"):
        sample_neighbors(indptr, indices, rows, rows, 2, KEY, weights=weights, source_id=ids)
