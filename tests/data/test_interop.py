"""Data sets from PyG's and DGL's objects: small stand-ins, and the real ones where they are installed."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from tests.frameworks import imported
from tgnn.data import dataset_from_dgl, from_pyg, graph_from_dgl
from tgnn.errors import UserError
from tgnn.export.frameworks import DGL, PYG

EDGES = torch.tensor([[0, 0, 2, 3, 3], [1, 1, 1, 3, 0]])
WEIGHT = torch.arange(5.0) + 0.5
X = torch.arange(10.0).reshape(5, 2)
Y = torch.tensor([0, 1, -1, 2, 0])
TRAIN = torch.tensor([True, True, False, False, False])
TRIPLES = [(0, 1, 0.5), (0, 1, 1.5), (2, 1, 2.5), (3, 0, 4.5), (3, 3, 3.5)]


class Data(types.SimpleNamespace):
    """What a PyG Data looks like from here."""

    def to_dict(self):
        return vars(self)


class DGLGraph:
    """What a DGL graph looks like from here: edges come in any order, with their ids."""

    is_block = False
    ntypes, etypes = ["_N"], ["_E"]

    def __init__(self, ndata=None, edata=None):
        self.ndata, self.edata = ndata or {}, edata or {}

    def num_nodes(self):
        return 5

    def edges(self, form, order):
        assert form == "all"
        return (*EDGES.flip(1), torch.arange(4, -1, -1))


def triples(graph):
    return sorted(zip(*graph.edge_index().tolist(), graph.edge_weight.tolist(), strict=True))


def full_data(make=Data, **more):
    return make(edge_index=EDGES, edge_weight=WEIGHT, x=X, y=Y, train_mask=TRAIN, **more)


def check_full(data):
    assert triples(data.graph) == TRIPLES and data.num_vertices == 5
    np.testing.assert_array_equal(data.x, X)
    np.testing.assert_array_equal(data.y, Y)
    np.testing.assert_array_equal(data.train, [0, 1])
    assert len(data.val) == 0 and data.options["weighted"] is True


def test_from_pyg():
    check_full(from_pyg(full_data()))
    check_full(from_pyg(types.SimpleNamespace(**vars(full_data()))))


def test_a02_the_number_of_vertices_is_never_taken_from_the_edges():
    with pytest.raises(UserError, match="number of vertices"):
        from_pyg(Data(edge_index=EDGES))
    assert from_pyg(Data(edge_index=EDGES, num_nodes=7)).num_vertices == 7
    assert from_pyg(Data(edge_index=EDGES), num_vertices=6).num_vertices == 6
    assert from_pyg(Data(edge_index=EDGES, train_mask=TRAIN)).num_vertices == 5


def test_pyg_masks_of_several_splits():
    data = full_data()
    data.train_mask = torch.stack([TRAIN, ~TRAIN & (Y >= 0)], 1)
    with pytest.raises(UserError, match="train_mask: got 2 splits and no split"):
        from_pyg(data)
    np.testing.assert_array_equal(from_pyg(data, split=1).train, [3, 4])
    with pytest.raises(UserError, match="split 2, expected a split from 0 to 1"):
        from_pyg(data, split=2)


def test_a04_pyg_labels():
    nan = float("nan")
    data = from_pyg(Data(edge_index=EDGES, x=X, y=torch.tensor([[0], [nan], [1], [-1], [2]])))
    np.testing.assert_array_equal(data.y, [0, -1, 1, -1, 2])
    several = from_pyg(Data(edge_index=EDGES, x=X, y=torch.eye(5)))
    assert several.task == "multi-label"


def test_pyg_refusals():
    with pytest.raises(UserError, match="no edge_index and no adj_t"):
        from_pyg(Data(x=X))
    with pytest.raises(UserError, match="several vertex and edge types"):
        from_pyg(types.SimpleNamespace(node_types=["a"], edge_types=[]))
    with pytest.raises(UserError, match=r"edge 3 = \(3, 3\)"):
        from_pyg(Data(edge_index=EDGES, num_nodes=3))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_pyg_transposed_matrices():
    # Row v of the transposed matrix lists the sources of v.
    transposed = types.SimpleNamespace(coo=lambda: (EDGES[1], EDGES[0], WEIGHT))
    assert triples(from_pyg(Data(adj_t=transposed, x=X)).graph) == TRIPLES
    matrix = torch.sparse_coo_tensor(EDGES[:, 1:].flip(0), WEIGHT[1:], (5, 5))
    for form in (matrix, matrix.to_sparse_csr()):
        assert triples(from_pyg(Data(adj_t=form, x=X)).graph) == TRIPLES[1:]


def test_from_dgl():
    g = DGLGraph({"feat": X, "label": Y, "train_mask": TRAIN.to(torch.uint8)}, {"weight": WEIGHT})
    check_full(dataset_from_dgl(g))
    assert triples(graph_from_dgl(g, weight="weight")) == TRIPLES
    assert graph_from_dgl(g).edge_weight is None
    assert dataset_from_dgl(DGLGraph()).x is None


def test_a03_dgl_names_are_kept():
    names = torch.tensor([7, 10, 500, 2**40, -1])
    number = torch.tensor([4, 3, 2, 1, 0])
    assert dataset_from_dgl(DGLGraph({"orig_id": number})).original_names.tolist() == number.tolist()
    both = dataset_from_dgl(DGLGraph({"orig_id": number, "orig_name": names}))
    assert both.original_names.tolist() == names.tolist()


def test_dgl_refusals():
    with pytest.raises(UserError, match="edge data none, expected 'w'"):
        graph_from_dgl(DGLGraph(), weight="w")
    typed = DGLGraph()
    typed.ntypes = ["user", "item"]
    with pytest.raises(UserError, match="user, item.*to_homogeneous"):
        graph_from_dgl(typed)
    block = DGLGraph()
    block.is_block = True
    with pytest.raises(UserError, match="one type each"):
        graph_from_dgl(block)


def test_real_pyg():
    geometric = imported(PYG)
    check_full(from_pyg(full_data(geometric.data.Data)))
    with pytest.raises(UserError, match="number of vertices"):
        from_pyg(geometric.data.Data(edge_index=EDGES))
    data = geometric.data.Data(edge_index=EDGES, num_nodes=9)
    assert from_pyg(data).num_vertices == 9
    with pytest.raises(UserError, match="several vertex and edge types"):
        from_pyg(geometric.data.HeteroData())


def test_real_dgl():
    dgl = imported(DGL)
    g = dgl.graph(tuple(EDGES), num_nodes=5)
    g.ndata.update({"feat": X, "label": Y, "train_mask": TRAIN})
    g.edata["weight"] = WEIGHT
    check_full(dataset_from_dgl(g))
    for layout in ("coo", "csr", "csc"):
        check_full(dataset_from_dgl(g.formats(layout)))
    typed = dgl.heterograph({("a", "r", "b"): ([0], [0]), ("b", "s", "a"): ([0], [0])})
    with pytest.raises(UserError, match="a, b and edge types r, s"):
        graph_from_dgl(typed)
    bipartite = dgl.heterograph({("a", "r", "b"): ([0], [0])})
    with pytest.raises(UserError, match="one type each"):
        graph_from_dgl(bipartite)
    with pytest.raises(UserError, match="one type each"):
        graph_from_dgl(dgl.to_block(g))
