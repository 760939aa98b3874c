"""What export cannot represent is refused with the reason; needs neither DGL nor PyG."""

from __future__ import annotations

import importlib.metadata
import types

import pytest
import torch
from torch import nn

from tests.export.conftest import LAYERS, STACKS, make_model
from tgnn.errors import UserError
from tgnn.export import from_dgl, from_pyg, to_dgl, to_pyg
from tgnn.export.folder import BRIDGES
from tgnn.export.frameworks import DGL, PYG, import_framework
from tgnn.nn.model import GNN
from tgnn.nn.sage import SAGEConv


class Own(nn.Module):
    """A user's layer."""

    in_features = out_features = 4

    def forward(self, block, x):
        return x[: block.n_dst]


class OwnSAGE(SAGEConv):
    """A user's variant of a layer of ours."""


class OwnGNN(GNN):
    """A user's variant of the stack."""


def with_norm(module: nn.Module) -> GNN:
    model = GNN([SAGEConv(4, 4), SAGEConv(4, 2)], norm="layer")
    model.norms[0] = module
    return model


def other_mlp() -> GNN:
    model = make_model("gin")
    model.layers[0].mlp = nn.Sequential(nn.Linear(9, 6))
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GNN([SAGEConv(4, 4), Own()]), "layer 1 of type Own"),
        (lambda: GNN([OwnSAGE(4, 4)]), "layer 0 of type OwnSAGE"),
        (lambda: OwnGNN([SAGEConv(4, 4)]), "a OwnGNN"),
        (lambda: nn.Linear(4, 4), "a Linear"),
        (lambda: with_norm(nn.InstanceNorm1d(4)), "InstanceNorm1d between layers"),
        (lambda: GNN([SAGEConv(4, 4)]).half(), "float16"),
        (lambda: GNN([SAGEConv(4, 4), SAGEConv(4, 2).double()]), "float32 and float64"),
        (other_mlp, "another mlp"),
    ],
)
@pytest.mark.parametrize("export", [to_dgl, to_pyg])
def test_what_has_no_counterpart(export, make, why: str):
    with pytest.raises(UserError, match=why):
        export(make())


@pytest.mark.parametrize("read_back", [from_dgl, from_pyg])
def test_a_module_with_its_own_code_cannot_be_read_back(read_back):
    with pytest.raises(UserError, match="give its layers as a list"):
        read_back(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UserError, match="a Linear, expected one of"):
        read_back([nn.Linear(2, 2)])


@pytest.mark.parametrize("bridge", BRIDGES.values(), ids=BRIDGES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_code_can_be_written_without_the_framework(bridge, layer: str, weighted: bool):
    for name in STACKS:
        stack = bridge.take_apart(make_model(layer, name))
        text = bridge.source("A model.", stack, weighted, ["add_self_loops"])
        compile(text, "model.py", "exec")
        assert max(map(len, text.splitlines())) <= 120
        for made in bridge.write(stack, weighted):
            assert made.make in text


def test_versions():
    for version in ("1.1.0", "1.1.3", "2.0.0", "2.4.0+cu121"):
        DGL.check(version)
    PYG.check("2.8.1")
    for framework, version in ((DGL, "1.0.4"), (DGL, "0.9.1"), (DGL, "3.0"), (PYG, "2.4.0"), (PYG, "1.7.2")):
        with pytest.raises(UserError, match=f"version {version}, expected version {framework.versions}"):
            framework.check(version)


@pytest.mark.parametrize(("framework", "version"), [(DGL, "1.1.3"), (PYG, None)])
def test_what_is_installed_can_be_imported(framework, version: str | None):
    """A framework that is there but broken would make every test of it skip."""
    try:
        installed = importlib.metadata.version(framework.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{framework.title} is not installed")
    if version not in (None, installed):
        pytest.skip(f"{framework.title} {installed} may not fit this torch")
    assert import_framework(framework).__version__ == installed


def test_an_old_framework_is_refused_in_memory(monkeypatch):
    import tgnn.export.frameworks as frameworks

    old = types.SimpleNamespace(__version__="0.9.1")
    monkeypatch.setattr(frameworks.importlib, "import_module", lambda name: old)
    monkeypatch.setattr(frameworks, "add_setuptools_extern", lambda: None)
    with pytest.raises(UserError, match="version 0.9.1"):
        to_dgl(make_model("gcn"))

    def broken(name: str):
        raise OSError("libdgl.so: undefined symbol")

    monkeypatch.setattr(frameworks.importlib, "import_module", broken)
    with pytest.raises(UserError, match="undefined symbol.*pip install dgl"):
        to_dgl(make_model("gcn"))


def test_weights_are_copies():
    model = make_model("gcn")
    for bridge in BRIDGES.values():
        state = bridge.weights(bridge.take_apart(model))
        before = model.layers[0].weight.clone()
        for value in state.values():
            value.zero_()
        torch.testing.assert_close(model.layers[0].weight, before, rtol=0, atol=0)
