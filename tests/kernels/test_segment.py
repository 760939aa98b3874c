"""Segment sums, maxima and the cutting into runs."""

from __future__ import annotations

import pytest
import torch

from tgnn.kernels import segment, tuning

INDPTR = torch.tensor([0, 0, 3, 3, 4, 9, 9])


def rows_of(indptr: torch.Tensor) -> list[range]:
    return [range(a, b) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 31, 64, 100])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chosen", segment.SUM_STRATEGIES)
def test_bag_sum_equals_loops(dtype, index, width, weighted, chosen):
    generator = torch.Generator().manual_seed(width)
    table = torch.randn(5, width, generator=generator, dtype=torch.float64).to(dtype)
    rows = torch.randint(0, 5, (9,), generator=generator).to(index)
    weight = torch.rand(9, generator=generator) if weighted else None
    expected = torch.zeros(6, width, dtype=torch.float64)
    for s, edges in enumerate(rows_of(INDPTR)):
        for e in edges:
            expected[s] += table[rows[e]].double() * (1 if weight is None else weight[e].double())
    with tuning.trial({"bag_sum": chosen}) as asked:
        out = segment.bag_sum(table, rows, INDPTR, weight)
    assert len(asked) == 1
    assert out.dtype == dtype
    # One rounding at the end: half a unit in the last place, and float32's sums before it.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), expected, rtol=eps if eps > 1e-4 else 8 * eps, atol=1e-6 * (eps > 1e-10)
    )


@pytest.mark.parametrize("tail", [(), (1,), (3,), (2, 5), (2, 0)])
def test_segment_sum_of_any_shape_with_and_without_edges(tail):
    values = torch.randn(9, *tail, dtype=torch.float64)
    order = torch.randperm(9)
    out = segment.segment_sum(values, INDPTR, order)
    expected = torch.stack([values[order[list(edges)]].sum(0) for edges in rows_of(INDPTR)])
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)
    none = segment.segment_sum(values[:0], torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(none, torch.zeros(3, *tail, dtype=torch.float64), rtol=0, atol=0)


def test_segment_max_of_empty_segments_is_minus_infinity():
    values = torch.randn(9, 2)
    out = segment.segment_max(values, INDPTR)
    for s, edges in enumerate(rows_of(INDPTR)):
        expected = values[list(edges)].amax(0) if edges else torch.full((2,), float("-inf"))
        assert torch.equal(out[s], expected)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_row_chunks_cover_all_segments_within_the_bound(monkeypatch, limit, width):
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", limit)
    runs = segment.row_chunks(INDPTR, width)
    assert runs[0][0] == 0 and runs[-1][1] == 6
    assert all(before[1] == after[0] for before, after in zip(runs[:-1], runs[1:], strict=True))
    for first, end in runs:
        edges = int(INDPTR[end] - INDPTR[first])
        assert end > first
        assert edges <= max(1, limit // max(1, width)) or end - first == 1
    assert [rows.start for rows, _ in segment.edge_chunks(INDPTR, width)] == [first for first, _ in runs]
    assert sum(edges.stop - edges.start for _, edges in segment.edge_chunks(INDPTR, width)) == 9
    assert segment.row_chunks(torch.zeros(1, dtype=torch.int64), width) == []


def test_edge_runs_docstring_example(monkeypatch):
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", 3)
    runs = segment.edge_runs(torch.tensor([0, 1, 4, 5]), 5, 1)
    assert [(rows, edges, ends.tolist()) for rows, edges, ends in runs] == [
        (slice(0, 2), slice(0, 3), [0, 1, 3]), (slice(1, 3), slice(3, 5), [0, 1, 2])
    ]  # fmt: skip


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 8, 100])
@pytest.mark.parametrize("width", [0, 1, 2])
def test_edge_runs_are_bounded_and_add_up(monkeypatch, limit, width):
    monkeypatch.setattr(segment, "CHUNK_ELEMENTS", limit)
    values, total = torch.arange(1, 10), torch.zeros(6, dtype=torch.int64)
    for rows, edges, ends in segment.edge_runs(INDPTR, 9, width):
        assert 0 < edges.stop - edges.start <= max(1, limit // max(1, width))
        assert ends[0] == 0 and ends[-1] == edges.stop - edges.start
        parts = torch.split(values[edges], ends.diff().tolist())
        total[rows] += torch.stack([part.sum() for part in parts])
    assert total.tolist() == [sum(values[e] for e in edges) for edges in rows_of(INDPTR)]
    assert segment.edge_runs(torch.zeros(4, dtype=torch.int64), 0, width) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_a09_half_sums_do_not_saturate(dtype, weighted):
    weight = torch.ones(4096) if weighted else None
    for width in (1, 3, 64):
        table = torch.ones(4096, width, dtype=dtype)
        out = segment.bag_sum(table, torch.arange(4096), torch.tensor([0, 4096]), weight)
        assert torch.equal(out, torch.full((1, width), 4096.0, dtype=dtype))
