"""The stack: what it computes layer by layer, a user's own layer in it, its errors, bfloat16."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.nn.test_layers import one_sentence
from tgnn.data.graph import Dataset, Graph
from tgnn.data.synthetic import hand_drawn
from tgnn.errors import UserError
from tgnn.kernels import rng
from tgnn.kernels.block import Block
from tgnn.kernels.dropout import dropout
from tgnn.kernels.spmm import spmm
from tgnn.nn import GNN, GCNConv, GINConv, SAGEConv, SyncBatchNorm
from tgnn.nn.products import Linear
from tgnn.partition.store import Store, write_store
from tgnn.sampling.loader import Loader
from tgnn.sampling.minibatch import MiniBatch

MODELS = ("sage", "gcn", "gat", "gatv2", "gin")
ONE_PART = np.zeros(12, dtype=np.int64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_store(hand_drawn(with_weights=True), ONE_PART, tmp_path_factory.mktemp("model") / "store")


def first_batch(
    store: Store, fanouts: tuple[int, ...] = (3, 2), dtype: torch.dtype = torch.float64
) -> MiniBatch:
    batch = next(iter(Loader(store, fanouts, batch_size=5, seed=1)))
    batch.x = batch.x.to(dtype)
    return batch


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("residual", [False, True])
def test_stack_is_what_its_docstring_says(store: Store, norm: str, residual: bool):
    """Dropout of each layer's input; residual, norm and activation after every layer but the last."""
    torch.manual_seed(0)
    model = GNN.build(
        "sage", 5, 4, 3, 3, dropout=0.4, norm=norm, residual=residual, activation="elu"
    ).double()
    batch = first_batch(store, (3, 2, 2))
    alike = copy.deepcopy(model)
    out = model(batch)
    x = batch.x
    for number, layer in enumerate(alike.layers):
        key = rng.stream(batch.seed, rng.FEATURE_DROPOUT, batch.epoch, batch.step, number)
        x = dropout(x, 0.4, key, batch.ids[number])
        block = batch.blocks[number]
        h = layer(block, x)
        if number < 2:
            if residual:
                h = h + alike.residuals[number](x[: block.n_dst])
            if norm != "none":
                h = alike.norms[number](h)
            h = F.elu(h)
        x = h
    torch.testing.assert_close(out, x, rtol=1e-12, atol=1e-12)
    assert out.shape == (5, 3)
    # Widths 5 -> 4 need a linear map, 4 -> 4 none.
    if residual:
        assert [type(shortcut) for shortcut in model.residuals] == [Linear, nn.Identity]
    assert not torch.equal(model.eval()(batch), out)
    torch.testing.assert_close(model(batch), model(batch), rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_build_has_the_widths_asked_for(store: Store, model: str):
    """Attention joins hidden heads and averages the last; every parameter gets a finite gradient."""
    torch.manual_seed(0)
    stack = GNN.build(model, 5, 6, 3, 2, heads=2, output_heads=3, attention_dropout=0.2, dropout=0.2).double()
    assert [layer.out_features for layer in stack.layers] == [12 if "gat" in model else 6, 3]
    batch = first_batch(store)
    out = stack(batch)
    assert out.shape == (5, 3) and out.dtype == torch.float64
    F.cross_entropy(out, batch.y).backward()
    assert all(parameter.grad.isfinite().all() for parameter in stack.parameters())


class OwnMean(nn.Module):
    """A user's layer: knows nothing of ranks or protocols."""

    def __init__(self, like: SAGEConv) -> None:
        super().__init__()
        self.own, self.neighbours = like.fc_self, like.fc_neigh

    def forward(self, block: Block, x: Tensor) -> Tensor:
        return self.own(x[: block.n_dst]) + self.neighbours(spmm(block, x, block.weight, "mean"))


def test_a_users_own_layer_in_the_stack(store: Store):
    torch.manual_seed(0)
    sages = [SAGEConv(5, 4).double(), SAGEConv(4, 3).double()]
    theirs, batch = GNN([OwnMean(layer) for layer in sages], dropout=0.3), first_batch(store)
    torch.testing.assert_close(theirs(batch), GNN(sages, dropout=0.3)(batch), rtol=1e-12, atol=1e-12)
    mixed = GNN([sages[0], OwnMean(sages[1])], norm="layer", residual=True).double()
    assert mixed(batch).shape == (5, 3)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: GNN([]), "at least one layer"),
        (lambda: GNN([SAGEConv(2, 2)], activation="swish"), "'swish'"),
        (lambda: GNN([SAGEConv(2, 2)], dropout=1.0), "dropout"),
        (lambda: GNN([SAGEConv(2, 2)], dropout=-0.1), "dropout"),
        (lambda: GNN([SAGEConv(2, 2)], norm="group"), "'group'"),
        (lambda: GNN([SAGEConv(2, 2), SAGEConv(2, 2)], norm="group"), "'group'"),
        (lambda: GNN([nn.Module(), SAGEConv(2, 2)], norm="layer"), "out_features"),
        (lambda: GNN([nn.Module(), SAGEConv(2, 2)], residual=True), "in_features"),
        (lambda: GNN.build("sgc", 2, 2, 2), "'sgc'"),
        (lambda: GNN.build("sage", 2, 2, 2, aggregator="lstm"), "'lstm'"),
        (lambda: GNN.build("sage", 2, 2, 2, 0), "at least one layer"),
    ],
)
def test_errors_when_made(make, named: str):
    with pytest.raises(UserError) as caught:
        make()
    assert named in one_sentence(caught.value)


def test_errors_with_a_batch(store: Store):
    model, batch = GNN.build("sage", 5, 4, 3, 3), first_batch(store, (2, 2), torch.float32)
    with pytest.raises(UserError) as caught:
        model(batch)
    assert "2 blocks" in one_sentence(caught.value) and "3 layers" in str(caught.value)
    batch.x = None
    with pytest.raises(UserError) as caught:
        GNN.build("sage", 5, 4, 3, 2)(batch)
    assert "no features" in one_sentence(caught.value)


def star(num_leaves: int) -> Dataset:
    """Vertex 0 has one in-edge from each leaf; all features are 1."""
    leaves = np.arange(1, num_leaves + 1)
    graph = Graph.from_edge_index(np.stack([leaves, np.zeros_like(leaves)]), num_leaves + 1)
    x = np.ones((num_leaves + 1, 2), np.float32)
    return Dataset("star", graph, x, np.zeros(num_leaves + 1, int), [0], [1], [2], num_classes=2)


def test_a09_sums_at_a_hub_do_not_saturate(tmp_path):
    """4096 ones in bfloat16, whose own sums stop at 256: sum, mean and GCN's sum, forward and backward."""
    store = write_store(star(4096), np.zeros(4097, int), tmp_path / "store")
    batch = next(iter(Loader(store, [-1])))
    block, x = batch.blocks[0], batch.x.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total = GINConv(2, 2)
        total.mlp = nn.Identity()
        assert (total(block, x) - 4096).abs().max() <= 16  # one step of bfloat16 there
        mean, gcn = SAGEConv(2, 3, bias=False), GCNConv(2, 3, bias=False)
        with torch.no_grad():
            for parameter in (*mean.parameters(), *gcn.parameters()):
                parameter.fill_(0.5)
        torch.testing.assert_close(mean(block, x).float(), torch.full((1, 3), 2.0), rtol=1e-2, atol=0)
        # 4096 in-edges of degree_out 1 into degree_in 4096: 4096 / 64.
        torch.testing.assert_close(gcn(block, x).float(), torch.full((1, 3), 64.0), rtol=1e-2, atol=0)
        gcn(block, x).sum().backward()
    # Every leaf sends ones @ weight.T / 64 = 1.5 / 64; the parameter sums 4096 of them.
    torch.testing.assert_close(x.grad[1:].float(), torch.full((4096, 2), 1.5 / 64), rtol=1e-2, atol=0)
    torch.testing.assert_close(gcn.weight.grad.float(), torch.full((2, 3), 64.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("model", MODELS)
def test_a09_bfloat16_is_close_to_float32(store: Store, model: str, norm: str):
    """Training in autocast as the trainer does it: bfloat16 rows over float32 weights."""
    torch.manual_seed(0)
    stack = GNN.build(
        model, 5, 8, 3, 2, heads=2, norm=norm, residual=True, dropout=0.2, attention_dropout=0.2
    )
    batch, half = first_batch(store, dtype=torch.float32), first_batch(store, dtype=torch.bfloat16)
    expected = stack(batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = stack(half).float()
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * scale)
    found.square().sum().backward()
    for parameter in stack.parameters():
        assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()


def test_batch_norm_is_part_of_the_state(store: Store):
    model = GNN.build("gcn", 5, 4, 3, 2, norm="batch")
    assert isinstance(model.norms[0], SyncBatchNorm) and len(model.norms) == 1
    assert "norms.0.running_mean" in model.state_dict()
