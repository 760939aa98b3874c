"""Weighted sampling: fixed-point logarithms, exact inclusion probabilities, zero and extreme weights, purity."""

from __future__ import annotations

import math
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from itertools import combinations, permutations

import numpy as np
import pytest
import torch
from scipy import stats

from tgnn.errors import UserError
from tgnn.kernels import fixed_log, rng, sample_neighbors
from tgnn.kernels.sample_weighted import SUM_BITS, DrawWeights
from tgnn.sampling.neighbor import NeighborSampler
from tgnn.sampling.topology import Topology

KEY = rng.stream(0, rng.SAMPLING, 0, 0, 0)
SMALL = [1.0, 2.0, 0.0, 4.0, 0.5]


def draws_of(weight: list[float], n: int, fanout: int, key: int = KEY, replace: bool = False) -> torch.Tensor:
    """Positions that vertices 0 .. n-1, each with in-edges of these weights, draw: [n, drawn]."""
    indptr, indices = torch.tensor([0, len(weight)]), torch.arange(len(weight))
    weights = DrawWeights.of(indptr, torch.tensor(weight), replace)
    rows = torch.zeros(n, dtype=torch.int64)
    sample = sample_neighbors(indptr, indices, rows, torch.arange(n), fanout, key, replace, weights=weights)
    return sample.position.view(n, -1)


def subset_probabilities(weight: list[float], k: int) -> dict[tuple[int, ...], float]:
    """Every k-subset's probability under draws without replacement, each in proportion to the weights left."""
    total: dict[tuple[int, ...], float] = {}
    for order in permutations([i for i, w in enumerate(weight) if w > 0], k):
        left, probability = sum(weight), 1.0
        for i in order:
            probability, left = probability * weight[i] / left, left - weight[i]
        total[tuple(sorted(order))] = total.get(tuple(sorted(order)), 0.0) + probability
    return total


def random_csr(n: int = 30, most: int = 20, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    degrees = torch.randint(0, most + 1, (n,), generator=generator)
    degrees[3], degrees[4] = 0, 10 * most
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    weight = torch.rand(int(indptr[-1]), generator=generator) * 3
    weight[torch.rand(len(weight), generator=generator) < 0.3] = 0
    weight[indptr[7] : indptr[8]] = 0
    return indptr, torch.randint(0, n, (int(indptr[-1]),), generator=generator), weight


def test_no_table_entry_is_near_a_half():
    """So that a C library whose last bits differ rounds to the same entries."""
    with localcontext(Context(prec=24)):
        ln2, one = Decimal(2).ln(), Decimal(1)
        logs = [(one + Decimal(i) / 4096).ln() / ln2 for i in range(4097)]
        shares = [Decimal(i) / 8192 for i in range(1, 4097)]
        ratios = [(1 / ln2).ln() / ln2, *((-(one - u).ln() / ln2 / u).ln() / ln2 for u in shares)]
        for table, exact in zip(fixed_log.tables(torch.device("cpu")), (logs, ratios), strict=True):
            scaled = [x * (1 << fixed_log.FRACTION) for x in exact]
            assert table.tolist() == [int(x.to_integral_value()) for x in scaled]
            # A float64 is off by some 1e-7 of such a unit.
            assert min(abs(abs(x - int(x)) - Decimal("0.5")) for x in scaled) > Decimal("1e-4")


def test_logarithms_against_long_floats():
    powers = torch.tensor([1 << i for i in range(63)])
    n = torch.cat([powers, (powers - 1).clamp(min=1), powers + powers // 2, torch.arange(1, 3000)])
    assert fixed_log.top_bit(n).tolist() == [int(x).bit_length() - 1 for x in n.tolist()]
    expected = np.log2(n.numpy().astype(np.longdouble))
    found = fixed_log.log2_fixed(n).numpy() / 2.0**fixed_log.FRACTION
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-26)
    random = rng.keyed(KEY, torch.arange(30_000))
    shift = torch.arange(30_000) % 30
    small = (random >> 1 & (1 << 62) - 1) >> shift
    bits = torch.cat([random, small, ~small])  # u anywhere, near 0 and near 1
    u = bits.numpy().view(np.uint64).astype(np.longdouble) / np.longdouble(2) ** 64
    expected = np.log2(-np.log1p(-u) / np.log(np.longdouble(2)))
    found = fixed_log.log2_exponential(bits).numpy() / 2.0**fixed_log.EXPONENTIAL_FRACTION
    np.testing.assert_allclose(found, expected.astype(np.float64), rtol=0, atol=2**-23)
    ordered = fixed_log.log2_exponential(torch.arange(1 << 14) << 50)  # ascending as unsigned
    assert (ordered.diff() >= 0).all()


def test_logarithms_of_weights():
    weight = torch.tensor([1.0, 2.0, 0.75, 3.4028235e38, 1e-45, 1.17549435e-38, 5e-40, 0.0])
    log = fixed_log.log2_weight(weight)
    assert log.dtype == torch.int32 and log[-1] == fixed_log.NEVER
    assert log[:2].tolist() == [0, 1 << fixed_log.WEIGHT_FRACTION]
    expected = [math.log2(w) for w in weight[:-1].tolist()]
    np.testing.assert_allclose(
        log[:-1].double() / 2.0**fixed_log.WEIGHT_FRACTION, expected, rtol=0, atol=2**-22
    )
    mantissa, exponent = fixed_log.split_float(weight)
    exact = [
        Fraction(m) * Fraction(2) ** e for m, e in zip(mantissa.tolist(), exponent.tolist(), strict=True)
    ]
    assert exact == [Fraction(w) for w in weight.tolist()]


def test_docstring_example():
    assert draws_of([0, 2, 2], 50, 2).tolist() == [[1, 2]] * 50
    share = (draws_of([0, 2, 2], 10_000, 1) == 1).double().mean().item()
    assert abs(share - 0.5) < 5 * 0.5 / 100
    weights = DrawWeights.of(torch.tensor([0, 3]), torch.tensor([0.0, 2.0, 2.0]))
    for fanout, edges in ((2, [1, 2]), (1, [2]), (-1, [1, 2])):
        ends = torch.tensor([0, len(edges)])
        carried = weights.of_drawn(torch.tensor([0]), fanout, ends, torch.tensor(edges))
        torch.testing.assert_close(carried, torch.full((len(edges),), 4 / 3))


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_subsets_and_inclusions_are_exact(seed, k):
    n = 20_000
    picks = draws_of(SMALL, n, k, rng.stream(seed, rng.SAMPLING))
    expected = subset_probabilities(SMALL, k)
    counts = {subset: 0 for subset in combinations(range(len(SMALL)), k)}
    for subset, count in zip(*np.unique(picks.numpy(), axis=0, return_counts=True), strict=True):
        counts[tuple(subset.tolist())] = int(count)
    assert {subset for subset, count in counts.items() if count} <= set(expected)
    observed = [counts[subset] for subset in expected]
    assert stats.chisquare(observed, [n * p for p in expected.values()]).pvalue > 1e-4
    share = torch.bincount(picks.reshape(-1), minlength=len(SMALL)) / n
    for i in range(len(SMALL)):
        inclusion = sum(p for subset, p in expected.items() if i in subset)
        deviation = max(1e-12, inclusion * (1 - inclusion) / n) ** 0.5
        assert abs(share[i].item() - inclusion) <= 5 * deviation


def test_equal_weights_draw_uniform_pairs():
    picks = draws_of([0.3] * 5, 10_000, 2)
    counts = [int(((picks[:, 0] == a) & (picks[:, 1] == b)).sum()) for a, b in combinations(range(5), 2)]
    assert sum(counts) == 10_000
    assert stats.chisquare(counts).pvalue > 1e-4


def test_a_hub_is_drawn_by_weight():
    weight = [1.0] * 900 + [9.0] * 100
    picks = draws_of(weight, 2000, 5)
    heavy = (picks >= 900).double().mean().item()
    assert abs(heavy - 0.5) < 0.03  # exactly 1/2 for the first of five, a little less after
    counts = torch.bincount(picks[picks < 900] // 100, minlength=9)
    assert stats.chisquare(counts.tolist()).pvalue > 1e-4


def test_with_replacement_follows_the_weights():
    n = 20_000
    picks = draws_of(SMALL, n, 2, replace=True)
    p = torch.tensor(SMALL) / sum(SMALL)
    pairs = torch.bincount(picks[:, 0] * 5 + picks[:, 1], minlength=25)
    expected = (torch.triu(torch.outer(p, p), 1) * 2 + torch.diag(p * p)).view(-1) * n
    assert int(pairs[expected == 0].sum()) == 0
    drawn = expected > 0
    expected = expected[drawn].double()
    assert stats.chisquare(pairs[drawn].tolist(), (expected * n / expected.sum()).tolist()).pvalue > 1e-4


@pytest.mark.parametrize("replace", [False, True])
def test_extreme_weights(replace):
    """Whatever the range, the largest wins by its share and zero is never drawn."""
    picks = draws_of([1e-45, 3e38, 0.0, 3e38], 4000, 1, replace=replace).view(-1)
    assert set(picks.tolist()) == {1, 3}
    assert abs((picks == 1).double().mean().item() - 0.5) < 5 * 0.5 / 4000**0.5
    picks = draws_of([1e-40, 3e-40], 8000, 1, replace=replace).view(-1)  # below the smallest normal number
    assert abs((picks == 1).double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / 8000) ** 0.5


@pytest.mark.parametrize("fanout", [-1, 0, 1, 3, 7, 500])
@pytest.mark.parametrize("replace", [False, True])
def test_every_edge_against_float_keys(fanout, replace):
    """The K smallest of -ln(u) / w, or inverse running sums, computed in Python row by row."""
    indptr, indices, weight = random_csr()
    rows = torch.tensor([4, 0, 3, 7, 29, 7, 11, 4, 5])
    ids = torch.arange(len(rows)) * 10**9
    weights = DrawWeights.of(indptr, weight, replace)
    sample = sample_neighbors(indptr, indices, rows, ids, fanout, KEY, replace, weights=weights)
    ends = sample.indptr.tolist()
    for i, (row, vertex) in enumerate(zip(rows.tolist(), ids.tolist(), strict=True)):
        first, last = int(indptr[row]), int(indptr[row + 1])
        state = rng.mix_int(KEY + vertex * rng.GOLDEN)
        expected = reference(weight[first:last].tolist(), state, fanout, replace)
        here = slice(ends[i], ends[i + 1])
        assert sample.position[here].tolist() == expected
        assert sample.edge[here].tolist() == [first + p for p in expected]
        assert sample.src[here].tolist() == [int(indices[first + p]) for p in expected]


def reference(weight: list[float], state: int, fanout: int, replace: bool) -> list[int]:
    positive = [i for i, w in enumerate(weight) if w > 0]
    if fanout == -1 or not positive:
        return positive

    def u(index: int) -> Fraction:
        return Fraction(rng.mix_int(state + (index + 1) * rng.GOLDEN), 1 << 64)

    if replace:
        shares = np.cumsum([Fraction(w) for w in weight]) / sum(Fraction(w) for w in weight)
        return sorted(next(i for i, share in enumerate(shares) if share > u(j)) for j in range(fanout))
    keys = {i: -math.log1p(-float(u(i))) / weight[i] for i in positive}
    return sorted(sorted(positive, key=keys.get)[:fanout])


def test_scaling_all_weights_by_a_power_of_two_changes_nothing():
    weight = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
    for replace in (False, True):
        plain = draws_of(weight, 300, 6, replace=replace)
        assert torch.equal(plain, draws_of([w * 2**-30 for w in weight], 300, 6, replace=replace))


def test_a14_rows_draw_the_same_in_any_company():
    indptr, indices, weight = random_csr(n=300, seed=2)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    for replace in (False, True):
        weights = DrawWeights.of(indptr, weight, replace)
        whole = sample_neighbors(indptr, indices, rows, rows, 4, KEY, replace, weights=weights)
        some = rows[40:60].flip(0)
        part = sample_neighbors(indptr, indices, some, some, 4, KEY, replace, weights=weights)
        places = [int((rows == row).nonzero()) for row in some]
        edges = torch.cat([whole.edge[int(whole.indptr[i]) : int(whole.indptr[i + 1])] for i in places])
        assert torch.equal(part.edge, edges)


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_a14_other_seeds_epochs_steps_and_hops_draw_independently(other):
    seed, *words = other
    first = draws_of([1, 2, 3], 10_000, 1).view(-1)
    second = draws_of([1, 2, 3], 10_000, 1, rng.stream(seed, rng.SAMPLING, *words)).view(-1)
    table = torch.bincount(first * 3 + second, minlength=9).view(3, 3)
    assert stats.chi2_contingency(table.tolist()).pvalue > 1e-4


def weighted_mean(weight: torch.Tensor, x: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Sum of weight * x over each row's edges by the number of edges, as layers compute it."""
    return torch.segment_reduce((weight * x).double()[:, None], "mean", offsets=indptr, axis=0)[:, 0]


@pytest.mark.parametrize("k", [1, 3])
def test_a_mean_of_draws_with_replacement_estimates_that_of_all_edges(k):
    """The weights that drawn edges carry make it so; their own would square the weights."""
    n, weight, x = 20_000, torch.tensor(SMALL), torch.tensor([3.0, -1.0, 7.0, 2.0, 10.0])
    indptr, rows = torch.tensor([0, len(SMALL)]), torch.zeros(n, dtype=torch.int64)
    weights = DrawWeights.of(indptr, weight, True)
    drawn = sample_neighbors(indptr, torch.arange(5), rows, torch.arange(n), k, KEY, True, weights=weights)
    carried = weights.of_drawn(rows, k, drawn.indptr, drawn.edge)
    means = weighted_mean(carried, x[drawn.edge], drawn.indptr)
    exact = weighted_mean(weight, x, indptr).item()
    assert abs(means.mean().item() - exact) < 5 * means.std().item() / n**0.5
    own = weighted_mean(weight[drawn.edge], x[drawn.edge], drawn.indptr)
    assert abs(own.mean().item() - exact) > 20 * own.std().item() / n**0.5


@pytest.mark.parametrize("fanout", [-1, 4, 20, 500])
@pytest.mark.parametrize("replace", [False, True])
def test_rows_that_give_all_they_can_are_exact_and_others_carry_means(fanout, replace):
    """Exact also where edges of weight 0, which are not drawn, count in the mean over all in-edges."""
    indptr, indices, weight = random_csr()
    topology = Topology(
        0, 30, indptr, indices, torch.arange(30) * 7, torch.zeros(30, dtype=torch.int64), weight, (0, 30)
    )
    sampler = NeighborSampler(topology, sampler="weighted", replace=replace)
    frontier = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    block = sampler.hop(frontier, fanout, KEY).block
    x = torch.rand(30, generator=torch.Generator().manual_seed(1)).double() - 0.5
    shares = set()
    for i, row in enumerate(frontier.tolist()):
        mine = weight[indptr[row] : indptr[row + 1]]
        here = slice(int(block.indptr[i]), int(block.indptr[i + 1]))
        positive, degree = int((mine > 0).sum()), len(mine)
        if fanout == -1 or not replace and fanout >= positive:
            drawn = block.position[here]
            assert drawn.tolist() == mine.nonzero().view(-1).tolist()
            sources = indices[indptr[row] : indptr[row + 1]]
            exact = (mine * x[sources]).sum() / max(1, degree)
            found = (block.weight[here] * x[sources[drawn]]).sum() / max(1, len(drawn))
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)
            if positive == degree:  # not a bit of them changes
                assert block.weight[here].tolist() == mine.tolist()
            shares.add(positive < degree)
        else:
            mean = (mine.double().sum() / max(1, degree)).float()
            assert block.weight[here].tolist() == [mean] * (fanout if mean > 0 else 0)
    assert shares == {False, True} or replace and fanout != -1


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_unfit_weights_are_refused_in_one_sentence(bad):
    with pytest.raises(UserError, match=r"^edge weights of the weighted sampler: got .*\.$"):
        DrawWeights.of(torch.tensor([0, 2]), torch.tensor([1.0, bad]))


def test_a07_no_rows_no_edges():
    none = torch.zeros(0, dtype=torch.int64)
    for indptr, rows in ((torch.zeros(4, dtype=torch.int64), torch.arange(3)), (torch.tensor([0]), none)):
        for replace in (False, True):
            weights = DrawWeights.of(indptr, torch.zeros(0), replace)
            sample = sample_neighbors(indptr, none, rows, rows, 3, KEY, replace, weights=weights)
            assert sample.indptr.tolist() == [0] * (len(rows) + 1) and len(sample.src) == 0


def test_running_sums_stay_in_bounds_and_true():
    weight = torch.tensor([3e38] * 1000 + [1.0, 0.0, 3.0, 1e-45])
    indptr = torch.tensor([0, 1000, 1003, 1004])
    running = DrawWeights.of(indptr, weight, True).running
    assert 0 < running[0] and running.max() < 1 << SUM_BITS and running.min() > 0
    assert (running[:1000].diff() == running[0]).all()
    assert running[1001] == running[1000] and running[1002] == 4 * running[1000]


def test_below_wide_is_the_high_half_of_the_product():
    bits = torch.cat([rng.keyed(1, torch.arange(200)), torch.tensor([0, -1, 1 << 62, -(1 << 63)])])
    bounds = (rng.keyed(2, torch.arange(200)) & (1 << 62) - 1).clamp(min=1)
    bounds = torch.cat([bounds, torch.tensor([1, (1 << 62) - 1, 3, 1 << 61])])
    expected = [(b & (1 << 64) - 1) * c >> 64 for b, c in zip(bits.tolist(), bounds.tolist(), strict=True)]
    assert rng.below_wide(bits, bounds).tolist() == expected
