"""What is DGL's alone: blocks, layers made there, and options of theirs that tgnn does not have."""

from __future__ import annotations

import pytest
import torch

from tests.export.comparing import SIDES, close, rows
from tests.export.conftest import IN, OUT, make_model
from tgnn.errors import UserError
from tgnn.export import from_dgl, to_dgl
from tgnn.nn.gat import GATConv

DGL_SIDE = SIDES["dgl"]


@pytest.mark.parametrize(
    "layer", ["sage-mean", "sage-max", "sage-pool", "sage-gcn", "gcn", "gat", "gatv2", "gin", "transformer"]
)
def test_blocks_of_all_in_edges_equal_the_whole_graph(dgl, example, layer: str):
    model, x, g = make_model(layer, "residual"), rows(example), DGL_SIDE.graph(example)
    theirs, seeds = to_dgl(model), torch.tensor([29, 28, 27, 3, 1])
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(3)
    inputs, _, blocks = sampler.sample(g, seeds)
    more = {"degrees": (g.in_degrees(), g.out_degrees())} if layer == "gcn" else {}
    close(theirs(blocks, x[inputs], **more), theirs(g, x)[seeds], 1e-5)
    if layer == "gcn":
        with pytest.raises(ValueError, match="degrees"):
            theirs(blocks, x[inputs])


def test_layers_made_in_dgl(dgl, example):
    nn, x = dgl.nn, rows(example)
    layers = [nn.GATConv(IN, 4, 2, allow_zero_in_degree=True), nn.SAGEConv(8, OUT, "gcn")]
    model, g = from_dgl(layers, activation="elu").eval(), DGL_SIDE.graph(example)
    expected = layers[1](g, torch.nn.functional.elu(layers[0](g, x).flatten(1)))
    close(example.ours(model, x), expected, 1e-5)
    assert isinstance(from_dgl(nn.GATConv(IN, 4, 2)).layers[0], GATConv)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda nn: nn.SAGEConv(4, 4, "lstm"), "order of edges"),
        (lambda nn: nn.SAGEConv((4, 3), 4, "mean"), "one width"),
        (lambda nn: nn.GraphConv(4, 4, norm="left"), 'norm="both"'),
        (lambda nn: nn.GATConv(4, 4, 2, residual=True), "GNN's residual"),
        (lambda nn: nn.GATConv(4, 4, 2, feat_drop=0.5), "GNN's dropout"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, share_weights=True), "share_weights=False"),
        (lambda nn: nn.GINConv(torch.nn.Linear(4, 4)), "linear, ReLU, linear"),
        (lambda nn: nn.SAGEConv(4, 4, "mean", activation=torch.relu), "GNN's activation"),
        (lambda nn: nn.SGConv(4, 4), "SGConv"),
    ],
)
def test_what_tgnn_does_not_have_is_refused_on_the_way_back(dgl, make, why: str):
    with pytest.raises(UserError, match=why):
        from_dgl([make(dgl.nn)])
