"""The numbers and the table of a partition."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn
from tgnn.errors import UserError
from tgnn.partition import assign, format_report, report


def by_hand(dataset: Dataset, part_of: np.ndarray, num_parts: int) -> dict:
    """The same counts, edge by edge."""
    source, destination = dataset.graph.edge_index()
    crossing = [(u, v) for u, v in zip(source, destination, strict=True) if part_of[u] != part_of[v]]
    halo = [len({u for u, v in crossing if part_of[v] == part}) for part in range(num_parts)]
    return {
        "cut_edges": len(crossing),
        "vertices": [int((part_of == part).sum()) for part in range(num_parts)],
        "edges": [int((part_of[destination] == part).sum()) for part in range(num_parts)],
        "train": [int((part_of[dataset.train] == part).sum()) for part in range(num_parts)],
        "val": [int((part_of[dataset.val] == part).sum()) for part in range(num_parts)],
        "test": [int((part_of[dataset.test] == part).sum()) for part in range(num_parts)],
        "halo_vertices": halo,
    }


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_counts_equal_those_by_hand(num_parts: int) -> None:
    dataset = hand_drawn()
    part_of = np.random.default_rng(num_parts).integers(0, num_parts, dataset.num_vertices)
    found = report(dataset, part_of, num_parts)
    expected = by_hand(dataset, part_of, num_parts)
    assert {key: found[key] for key in expected} == expected
    assert found["cut_fraction"] == pytest.approx(expected["cut_edges"] / dataset.graph.num_edges)
    own_and_halo = np.add(expected["vertices"], expected["halo_vertices"])
    np.testing.assert_allclose(
        found["halo_share"], np.divide(expected["halo_vertices"], np.maximum(1, own_and_halo))
    )
    assert found["balance"]["edges"] == pytest.approx(max(expected["edges"]) / np.mean(expected["edges"]))
    assert json.loads(json.dumps(found)) == found


def test_a_graph_with_given_splits_equals_the_dataset() -> None:
    dataset = hand_drawn()
    part_of = np.arange(12) % 3
    splits = {"train": dataset.train, "val": dataset.val, "test": dataset.test}
    assert report(dataset.graph, part_of, 3, **splits) == report(dataset, part_of, 3)


def test_the_table_is_aligned_and_whole() -> None:
    dataset = hand_drawn()
    found = report(dataset, assign(dataset, 3), 3)
    lines = format_report(found).splitlines()
    table = lines[:5]
    assert table[0].split() == [
        "part",
        "vertices",
        "in-edges",
        "train",
        "val",
        "test",
        "halo",
        "halo",
        "share",
    ]
    assert [line.split()[0] for line in table[1:]] == ["0", "1", "2", "max/mean"]
    assert len({len(line) for line in table[:4]}) == 1
    assert lines[5].startswith(f"cut: {found['cut_edges']} of 36 in-edges")


def test_uneven_parts_and_parts_without_seeds_are_warned_about() -> None:
    dataset = hand_drawn()
    found = report(dataset, np.zeros(12, np.int32), 3)
    text = format_report(found)
    assert "warning: vertices are uneven: 12, 0, 0 per part, 3.00 times the mean at most." in text
    assert "warning: parts 1, 2 own no training vertex: 7, 0, 0 training vertices per part." in text
    assert report(dataset, np.arange(12) % 2, 2)["warnings"] == []


def test_nothing_to_count() -> None:
    empty = Graph.from_edge_index(np.zeros((2, 0), np.int64), 3)
    found = report(empty, np.array([0, 1, 2]), 4)
    assert found["cut_edges"] == 0 and found["cut_fraction"] == 0.0 and found["halo_share"] == [0.0] * 4
    assert found["balance"] == {"vertices": pytest.approx(4 / 3), "edges": 1.0, "train": 1.0}
    assert found["warnings"] == []
    assert "cut: 0 of 0 in-edges (0.0 %)" in format_report(found)


def test_an_assignment_of_another_length_is_refused() -> None:
    with pytest.raises(UserError, match="assignment"):
        report(hand_drawn(), np.zeros(11, np.int32), 2)


def test_what_presampling_expects_is_a_table_of_the_partitions_that_were_tried() -> None:
    found = report(hand_drawn(), np.zeros(12, int), 1)
    found["expected"] = {
        "steps": 8,
        "redundancy": {"input_rows": 2.5, "edges": 1.25},
        "partitions": {
            "random": {"exchange_rows": [2000.4, 300.0], "balance": 1.01},
            "presampled lp": {"exchange_rows": [500.0, 100.0], "balance": 1.049},
        },
    }
    lines = format_report(json.loads(json.dumps(found))).splitlines()
    assert "2.50 times the input rows, 1.25 times the in-edges" in lines[-4]
    assert lines[-3].split("  ")[0] == "expected per step" and "layer 1" in lines[-3]
    assert lines[-2].split() == ["random", "2,300", "2,000", "300", "1.010"]
    assert lines[-1].split() == ["presampled", "lp", "600", "500", "100", "1.049"]
