"""The generated `prepare` does to a graph what `tgnn.data` did before training; needs neither DGL nor PyG."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tgnn.data import edits, transforms
from tgnn.data.graph import Dataset, Graph
from tgnn.data.options import DataOptions
from tgnn.export import parts_data
from tgnn.export.folder import preparation

STEPS = {
    "merge_parallel_edges": edits.merge_parallel_edges,
    "add_reverse_edges": edits.add_reverse_edges,
    "remove_self_loops": edits.remove_self_loops,
    "add_self_loops": edits.add_self_loops,
}


def same_graph(edges: torch.Tensor, weight: torch.Tensor | None, expected: Graph) -> None:
    got = Graph.from_edge_index(edges, expected.num_vertices, weight)
    np.testing.assert_array_equal(got.indptr, expected.indptr)
    np.testing.assert_array_equal(got.indices, expected.indices)
    if weight is None:
        assert expected.edge_weight is None
        return
    # Weights of parallel edges may change places with each other.
    weights = [
        g.edge_weight[np.lexsort((g.edge_weight, g.indices, g.destinations()))] for g in (got, expected)
    ]
    np.testing.assert_allclose(*weights, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_edits(example, step: str, weighted: bool):
    weight = example.weight if weighted else None
    graph = Graph.from_edge_index(example.edges, example.num_vertices, weight)
    got = getattr(parts_data, step)(example.edges, example.num_vertices, weight)
    same_graph(*got, STEPS[step](graph))


def test_add_reverse_edges_worked_example():
    edges = torch.tensor([[0, 0, 1, 2], [1, 1, 0, 2]])
    got, _ = parts_data.add_reverse_edges(edges, 3)
    assert sorted(zip(*got.tolist(), strict=True)) == [(0, 1), (0, 1), (1, 0), (1, 0), (2, 2)]


def test_edits_of_no_edges():
    for step in STEPS:
        edges, weight = getattr(parts_data, step)(torch.zeros(2, 0, dtype=torch.int64), 3, torch.zeros(0))
        assert edges.shape[1] == (3 if step == "add_self_loops" else 0) == len(weight)


@pytest.mark.parametrize("how", ["row", "column"])
def test_feature_norms(how: str):
    x = np.random.default_rng(0).random((20, 5), np.float32)
    x[3], x[:, 2] = 0, 1
    graph = Graph.from_edge_index(np.zeros((2, 0), np.int64), 20)
    dataset = Dataset(name="d", graph=graph, x=x, y=None)
    expected = transforms.feature_norm(dataset, how).x
    got = {"row": parts_data.normalise_rows, "column": parts_data.normalise_columns}[how](torch.from_numpy(x))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_the_order_is_that_of_load():
    options = partial(DataOptions, duplicates="merge", add_reverse=True, feature_norm="row")
    loops = ["merge_parallel_edges", "add_reverse_edges", "add_self_loops", "normalise_rows"]
    assert preparation(options(self_loops="add").as_dict()) == loops
    assert preparation(options(self_loops="remove").as_dict())[2] == "remove_self_loops"
    assert preparation(DataOptions().as_dict()) == []
