"""What the tests of export share: the graph they run on, the models, and the frameworks where they can be
imported.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.frameworks import imported
from tgnn.data import save_npz
from tgnn.data.graph import Dataset, Graph
from tgnn.data.options import DataOptions
from tgnn.export.frameworks import DGL, PYG
from tgnn.kernels.block import Block
from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv
from tgnn.nn.transformer import TransformerConv
from tgnn.training.checkpoint import CheckpointState, dataset_fingerprint
from tgnn.training.config import TrainConfig
from tgnn.training.metrics import RunLog
from tgnn.training.prepare import prepare
from tgnn.training.resolve import Resolved
from tgnn.training.trainer import build_model


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


@pytest.fixture(params=["dgl", "pyg"])
def side(request):
    """Each framework in turn, as `comparing` has it."""
    from tests.export.comparing import SIDES

    request.getfixturevalue(request.param)
    return SIDES[request.param]


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
    "transformer": lambda i, o, last: TransformerConv(i, o, 3, concat=not last, attention_dropout=0.3),
    "transformer-gate": lambda i, o, last: TransformerConv(i, o, 2, concat=not last, beta=True),
    "transformer-no-bias": lambda i, o, last: TransformerConv(i, o, 1, concat=last, beta=last, bias=False),
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


PREPARED = DataOptions(add_reverse=True, self_loops="add", feature_norm="row")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """A cache of stores of the test's own."""
    monkeypatch.setenv("TGNN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def make_run(tmp_path, example, cache):
    """A function that writes a run directory as training does, its weights random: (model, weighted, ...) ->
    path.
    """

    def make(
        model: str = "gcn", weighted: bool = False, options: DataOptions = PREPARED, **more: object
    ) -> Path:
        data = tmp_path / "data.npz"
        save_npz(dataset_of(example, weighted), data)
        more = {"dropout": 0.5, "ranks": 1, "device": "cpu", "heads": 2, "output_heads": 2, **more}
        config = TrainConfig(model=model, hidden=6, fanouts=(-1, -1), **more)
        resolved = Resolved(str(data), config, options, frozenset())
        store = prepare(str(data), 1, data_options=options)
        trained = build_model(config, store)
        torch.manual_seed(4)
        with torch.no_grad():
            for value in trained.parameters():
                value.copy_(torch.randn_like(value))
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        log = RunLog(run)
        log.write_config(resolved.record())
        log.append(
            {"epoch": 3, "metric": "accuracy", "train_acc": 1.0, "val_acc": 0.5, "test_acc": 0.25, "ranks": 1}
        )
        state = CheckpointState(
            model=trained.state_dict(), optimizer={}, epoch=4, config=resolved.record(),
            dataset=dataset_fingerprint(store),
        )  # fmt: skip
        state.save(run / "best.pt")
        return run

    return make


def dataset_of(example: Example, weighted: bool) -> Dataset:
    graph = Graph.from_edge_index(example.edges, example.num_vertices, example.weight if weighted else None)
    rng = np.random.default_rng(1)
    n = example.num_vertices
    return Dataset(
        name="small", graph=graph, x=rng.random((n, 5), np.float32), y=rng.integers(0, 3, n), num_classes=3,
        train=np.arange(10), val=np.arange(10, 20), test=np.arange(20, n),
    )  # fmt: skip
