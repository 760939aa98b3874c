"""What is PyG's alone: layers made there, and options of theirs that tgnn does not have."""

from __future__ import annotations

import pytest
import torch

from tests.export.comparing import close, rows
from tests.export.conftest import IN, OUT
from tgnn.errors import UserError
from tgnn.export import from_pyg


def test_layers_made_in_pyg(pyg, example):
    from torch_geometric import nn

    layers = [nn.GATv2Conv(IN, 4, 2, add_self_loops=False, bias=False), nn.SAGEConv(8, OUT)]
    model, x = from_pyg(layers, activation="elu").eval(), rows(example)
    expected = layers[1](torch.nn.functional.elu(layers[0](x, example.edges)), example.edges)
    close(example.ours(model, x), expected, 1e-5)


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("concat", [False, True])
def test_transformer_layers_made_in_pyg_merge_their_heads_themselves(pyg, example, concat: bool, beta: bool):
    from torch_geometric import nn

    layers = [
        nn.TransformerConv(IN, 6, 2, concat=concat, beta=beta),
        nn.TransformerConv(12 if concat else 6, OUT),
    ]
    model, x = from_pyg(layers, activation="elu").eval(), rows(example)
    expected = layers[1](torch.nn.functional.elu(layers[0](x, example.edges)), example.edges)
    close(example.ours(model, x), expected, 1e-5)


def without_key_bias(layer: torch.nn.Module) -> torch.nn.Module:
    """As `bias=False` makes it in newer versions of PyG; in older ones it drops the own term's bias only."""
    layer.lin_key.bias = None
    return layer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda nn: nn.GCNConv(4, 4), "in-degrees at both ends"),
        (lambda nn: nn.GATConv(4, 4, 2), "self-loops in the data"),
        (lambda nn: nn.GATConv(4, 4, 2, add_self_loops=False, concat=False), "heads averaged after the bias"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, add_self_loops=False), "a bias at its output"),
        (lambda nn: nn.GATv2Conv(4, 4, 2, add_self_loops=False, share_weights=True), "share_weights=False"),
        (lambda nn: nn.SAGEConv(4, 4, normalize=True), "normalize=False"),
        (lambda nn: nn.SAGEConv(4, 4, aggr="sum"), "mean, max"),
        (lambda nn: nn.GINConv(torch.nn.Linear(4, 4)), "linear, ReLU, linear"),
        (lambda nn: nn.TransformerConv(4, 4, 2, root_weight=False), "root_weight=True"),
        (lambda nn: nn.TransformerConv(4, 4, 2, edge_dim=3), "edge_dim=None"),
        (lambda nn: nn.TransformerConv((4, 3), 4, 2), "one width"),
        (lambda nn: without_key_bias(nn.TransformerConv(4, 4, 2)), "keys, queries and values have biases"),
        (lambda nn: nn.SGConv(4, 4), "SGConv"),
    ],
)
def test_what_tgnn_does_not_have_is_refused_on_the_way_back(pyg, make, why: str):
    from torch_geometric import nn

    with pytest.raises(UserError, match=why):
        from_pyg([make(nn)])
