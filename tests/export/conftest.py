"""What the tests of export share: the graph they run on, the models, and the frameworks where they can be
imported.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tgnn.data.graph import Graph
from tgnn.errors import UserError
from tgnn.export.frameworks import DGL, PYG, Framework, import_framework
from tgnn.kernels.block import Block
from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv


def imported(framework: Framework) -> types.ModuleType:
    try:
        return import_framework(framework)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def dgl() -> types.ModuleType:
    """DGL, imported beside a newer setuptools where it must be; tests that need it skip, saying why, without
    it.
    """
    return imported(DGL)


@pytest.fixture
def pyg() -> types.ModuleType:
    """PyG; tests that need it skip, saying why, without it."""
    return imported(PYG)


@dataclass
class Example:
    """A directed graph with parallel edges, a self-loop, an isolated vertex and one without in-edges."""

    edges: torch.Tensor
    """int64 [2, E], shuffled."""
    weight: torch.Tensor
    num_vertices: int

    def block(self, dtype: torch.dtype, weighted: bool) -> Block:
        """All in-edges of all vertices, for our layers."""
        graph = Graph.from_edge_index(self.edges.numpy(), self.num_vertices, self.weight.numpy())
        tensors = [torch.from_numpy(array) for array in (graph.indptr, graph.indices)]
        weight = torch.from_numpy(graph.edge_weight).to(dtype) if weighted else None
        degrees = {"degree_in": graph.degree_in(), "degree_out": graph.degree_out()}
        degrees = {name: torch.from_numpy(np.asarray(values)) for name, values in degrees.items()}
        return Block(*tensors, n_src=self.num_vertices, weight=weight, **degrees)

    def ours(self, model: GNN, x: torch.Tensor, weighted: bool = False) -> torch.Tensor:
        """The model's logits of every vertex, from rows x [N, F]."""
        block = self.block(x.dtype, weighted)
        for number, layer in enumerate(model.layers):
            x = model.after_layer(number, layer(block, x), x)
        return x


@pytest.fixture
def example() -> Example:
    generator = torch.Generator().manual_seed(5)
    n = 30
    edges = torch.randint(0, n - 3, (2, 110), generator=generator)
    # Vertex n - 3 sends only, n - 2 receives only, n - 1 is isolated; some edges are there twice.
    edges = torch.cat([edges, edges[:, :6], torch.tensor([[n - 3, n - 3, 4, 0], [1, 2, n - 2, 0]])], 1)
    weight = torch.rand(edges.shape[1], generator=generator) + 0.25
    return Example(edges, weight, n)


LAYERS = {
    "sage-mean": lambda i, o, last: SAGEConv(i, o, "mean"),
    "sage-max": lambda i, o, last: SAGEConv(i, o, "max"),
    "sage-pool": lambda i, o, last: SAGEConv(i, o, "pool"),
    "sage-gcn": lambda i, o, last: SAGEConv(i, o, "gcn"),
    "sage-mean-no-bias": lambda i, o, last: SAGEConv(i, o, "mean", bias=False),
    "sage-gcn-no-bias": lambda i, o, last: SAGEConv(i, o, "gcn", bias=False),
    "gcn": lambda i, o, last: GCNConv(i, o),
    "gcn-no-bias": lambda i, o, last: GCNConv(i, o, bias=False),
    "gat": lambda i, o, last: GATConv(i, o, 3, concat=not last, attention_dropout=0.3),
    "gat-slope-no-bias": lambda i, o, last: GATConv(i, o, 2, concat=not last, slope=0.1, bias=False),
    "gat-one-head": lambda i, o, last: GATConv(i, o, 1, concat=not last),
    "gatv2": lambda i, o, last: GATv2Conv(i, o, 3, concat=not last),
    "gatv2-no-bias": lambda i, o, last: GATv2Conv(i, o, 2, concat=not last, bias=False),
    "gin": lambda i, o, last: GINConv(i, o, eps=0.3),
    "gin-fixed-eps": lambda i, o, last: GINConv(i, o, eps=-0.2, learn_eps=False),
}  # fmt: skip
STACKS = {
    "plain": {},
    "layer-norm": {"norm": "layer", "activation": "elu", "dropout": 0.5},
    "batch-norm-residual": {"norm": "batch", "residual": True, "activation": "leaky_relu"},
    "residual": {"residual": True, "activation": "tanh"},
}
IN, HIDDEN, OUT = 9, 6, 7


def make_model(layer: str, stack: str = "plain", dtype: torch.dtype = torch.float32, depth: int = 3) -> GNN:
    """A model of one kind of layer with random weights everywhere: biases, norms and running statistics
    too.
    """
    torch.manual_seed(11)
    layers, width = [], IN
    for number in range(depth):
        last = number == depth - 1
        # The middle layer is as wide as the first, so that a residual is an identity there.
        layers.append(LAYERS[layer](width, OUT if last else HIDDEN, last))
        width = layers[-1].out_features
    model = GNN(layers, **STACKS[stack])
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point():
                value.copy_(
                    torch.rand_like(value) + 0.5 if "running_var" in name else torch.randn_like(value) * 0.5
                )
    return model.to(dtype).eval()
