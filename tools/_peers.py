"""The systems that tgnn is compared with: what each must do for the same step, stage by stage.

Each peer is used as its own users would, in its fastest documented way: DGL samples by `sample_blocks` without
worker processes, PyG by `NeighborSampler` on a `SparseTensor`, which draws for every vertex of the frontier as we do.
`pyg-loader` is PyG's `NeighborLoader`, which its documentation leads to: it draws once per vertex and computes every
layer on all of them, other work, which a note under its times says. `torch` is the step that one writes by hand on
plain PyTorch.
"""

from __future__ import annotations

import copy
import importlib
import types
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgnn.data.graph import Dataset
from tgnn.errors import wrong
from tgnn.export.frameworks import DGL, PYG, import_framework
from tgnn.kernels.block import Block
from tgnn.nn.model import GNN


@dataclass
class Layer:
    """One layer's sampled graph, for comparison; edges in any order.

    rows int64 [n_src]: ids of the sources, the n_dst destinations first; source, destination int64 [edges]: rows.
    """

    rows: Tensor
    n_dst: int
    source: Tensor
    destination: Tensor


class Peer(ABC):
    """A system that samples and trains on one graph with a copy of our model's weights."""

    name: str
    draws_alike = True
    """Whether it draws for every vertex of each hop's frontier, as we do, so that numbers of edges can be compared."""

    def __init__(self, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> None:
        """`model` None: for sampling alone."""
        self.dataset, self.fanouts = dataset, list(fanouts)
        self.features = torch.from_numpy(dataset.x)
        self.labels = torch.from_numpy(dataset.y)
        self.is_gcn = model is not None and type(model.layers[0]).__name__ == "GCNConv"
        self.model: nn.Module | None = None if model is None else self.copy_of(model)
        self.optimizer = None
        if self.model is not None:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003, fused=True)

    @abstractmethod
    def copy_of(self, model: GNN) -> nn.Module:
        """The peer's model with our weights."""

    @abstractmethod
    def sample(self, seeds: Tensor) -> Any:
        """A step's sample from seeds (original ids)."""

    @abstractmethod
    def load(self, sampled: Any) -> tuple[Tensor, Tensor]:
        """(features of the input rows, labels of the seeds)."""

    @abstractmethod
    def forward(self, sampled: Any, x: Tensor) -> Tensor:
        """Logits of the seeds."""

    @abstractmethod
    def layers_of(self, sampled: Any) -> list[Layer]:
        """What was sampled, input layer first."""

    @abstractmethod
    def from_blocks(self, blocks: Sequence[Block], ids: Sequence[Tensor]) -> Any:
        """Our blocks as a sample of the peer's; ids[l]: original ids of block l's sources."""

    @abstractmethod
    def infer(self) -> Tensor:
        """Logits of all vertices, every in-edge of each layer once."""

    def degrees_for(self, blocks: Sequence[Block]) -> list[Block]:
        """Our blocks with the degrees that this system's GCN normalises by: those of the full graph, unless said."""
        return list(blocks)


def load_rows(table: Tensor, rows: Tensor) -> Tensor:
    """The rows of a table, the way that is fastest on a CPU."""
    return torch.index_select(table, 0, rows)


class TorchPeer(Peer):
    """A training step on plain PyTorch: Floyd's sampling on tensors, `torch.unique`, CSR products, index_add."""

    name = "torch"

    def __init__(self, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> None:
        super().__init__(dataset, fanouts, model)
        self.indptr = torch.from_numpy(dataset.graph.indptr)
        self.indices = torch.from_numpy(dataset.graph.indices).long()
        self.degree = self.indptr.diff()
        self.degree_out = torch.from_numpy(dataset.graph.degree_out()) if self.is_gcn else None
        # What torch says of CSR tensors at their first use: it is in beta, and does not check them.
        warnings.filterwarnings("ignore", message="Sparse ")
        self._row_of = torch.zeros(dataset.num_vertices, dtype=torch.int64)
        self._is_known = torch.zeros(dataset.num_vertices, dtype=torch.bool)

    def copy_of(self, model: GNN) -> nn.Module:
        kinds = {"SAGEConv": PlainSAGE, "GCNConv": PlainGCN, "GATConv": PlainGAT}
        return nn.ModuleList(kinds[type(layer).__name__](layer) for layer in model.layers)

    def sample(self, seeds: Tensor) -> list[Plain]:
        found: list[Plain] = []
        for fanout in self.fanouts:
            found.insert(0, self._hop(seeds, fanout))
            seeds = found[0].rows
        return found

    def _hop(self, frontier: Tensor, fanout: int) -> Plain:
        degree = self.degree[frontier]
        drawn = degree if fanout == -1 else degree.clamp(max=fanout)
        ends = drawn.cumsum(0)
        indptr = F.pad(ends, (1, 0))
        place = torch.arange(int(ends[-1])) - torch.repeat_interleave(indptr[:-1], drawn)
        if fanout != -1:
            many = torch.nonzero(degree > fanout).squeeze(1)
            chosen = floyd(degree[many], fanout)
            place[indptr[many][:, None] + torch.arange(fanout)] = chosen
        source = self.indices[place + torch.repeat_interleave(self.indptr[frontier], drawn)]
        self._is_known[frontier] = True
        fresh = torch.unique(source[~self._is_known[source]])
        self._is_known[frontier] = False
        rows = torch.cat([frontier, fresh])
        self._row_of[rows] = torch.arange(len(rows))
        return Plain(rows, indptr, self._row_of[source], *self._degrees(frontier, rows))

    def _degrees(self, frontier: Tensor, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if not self.is_gcn:
            return None, None
        return self.degree[frontier], self.degree_out[rows]

    def load(self, sampled: list[Plain]) -> tuple[Tensor, Tensor]:
        seeds = sampled[-1].rows[: sampled[-1].n_dst]
        return load_rows(self.features, sampled[0].rows), self.labels[seeds]

    def forward(self, sampled: list[Plain], x: Tensor) -> Tensor:
        last = len(sampled) - 1
        for number, (layer, block) in enumerate(zip(self.model, sampled, strict=True)):
            x = layer(block, x)
            x = x if number == last else F.relu(x)
        return x

    def layers_of(self, sampled: list[Plain]) -> list[Layer]:
        return [Layer(block.rows, block.n_dst, block.indices, block.destination) for block in sampled]

    def from_blocks(self, blocks: Sequence[Block], ids: Sequence[Tensor]) -> list[Plain]:
        return [
            Plain(rows, block.indptr, block.indices.long(), block.degree_in, block.degree_out)
            for block, rows in zip(blocks, ids, strict=False)
        ]

    @torch.no_grad()
    def infer(self) -> Tensor:
        everything = torch.arange(self.dataset.num_vertices)
        degrees = self._degrees(everything, everything)
        whole = Plain(everything, self.indptr, self.indices, *degrees)
        return self.forward([whole] * len(self.model), self.features)


def floyd(degree: Tensor, count: int) -> Tensor:
    """`count` different numbers below each of `degree` (all larger): int64 [n, count] (Floyd's algorithm)."""
    chosen = torch.empty(len(degree), count, dtype=torch.int64)
    for number in range(count):
        highest = degree - count + number
        draw = (torch.rand(len(degree), dtype=torch.float64) * (highest + 1)).long()
        repeated = (chosen[:, :number] == draw[:, None]).any(1)
        chosen[:, number] = torch.where(repeated, highest, draw)
    return chosen


@dataclass
class Plain:
    """A block of TorchPeer: rows [n_src] original ids, CSR over destinations, full-graph degrees for GCN."""

    rows: Tensor
    indptr: Tensor
    indices: Tensor
    degree_in: Tensor | None
    degree_out: Tensor | None

    @property
    def n_dst(self) -> int:
        """Destination rows."""
        return len(self.indptr) - 1

    @property
    def destination(self) -> Tensor:
        """Destination row of every edge."""
        return torch.repeat_interleave(self.indptr.diff())

    def sum(self, x: Tensor, weight: Tensor) -> Tensor:
        """Weighted sum of the sources' rows at each destination."""
        shape = (self.n_dst, len(self.rows))
        return torch.sparse.mm(torch.sparse_csr_tensor(self.indptr, self.indices, weight, shape), x)


def _plain(linear: nn.Linear) -> nn.Linear:
    """torch's own linear layer with a copy of the weights of ours."""
    like = {"dtype": linear.weight.dtype, "device": linear.weight.device, "bias": linear.bias is not None}
    plain = nn.utils.skip_init(nn.Linear, linear.in_features, linear.out_features, **like)
    plain.load_state_dict(linear.state_dict())
    return plain


class PlainSAGE(nn.Module):
    """Mean aggregation as one CSR product; the narrower side of the projection is aggregated."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.own, self.neighbours = _plain(layer.fc_self), _plain(layer.fc_neigh)

    def forward(self, block: Plain, x: Tensor) -> Tensor:
        """[n_src, in] -> [n_dst, out]."""
        share = 1.0 / block.indptr.diff().clamp(min=1)
        weight = torch.repeat_interleave(share, block.indptr.diff()).to(x.dtype)
        linear, first = self.neighbours, self.neighbours.out_features < self.neighbours.in_features
        mean = block.sum(linear(x) if first else x, weight)
        return self.own(x[: block.n_dst]) + (mean if first else linear(mean))


class PlainGCN(nn.Module):
    """Normalised by the full graph's degrees, a sampled sum scaled up to the full one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = copy.deepcopy(layer.weight), copy.deepcopy(layer.bias)

    def forward(self, block: Plain, x: Tensor) -> Tensor:
        """[n_src, in] -> [n_dst, out]."""
        drawn = block.indptr.diff()
        at_destination = block.degree_in.clamp(min=1).to(x.dtype).sqrt() / drawn.clamp(min=1)
        weight = torch.repeat_interleave(at_destination, drawn)
        weight = weight * block.degree_out.clamp(min=1).to(x.dtype).rsqrt()[block.indices]
        narrows = self.weight.shape[1] < self.weight.shape[0]
        out = block.sum(x @ self.weight, weight) if narrows else block.sum(x, weight) @ self.weight
        return out + self.bias


class PlainGAT(nn.Module):
    """Attention by gathered rows, a scatter softmax and index_add."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.project = _plain(layer.fc)
        self.left, self.right = copy.deepcopy(layer.attn_l), copy.deepcopy(layer.attn_r)
        self.bias = copy.deepcopy(layer.bias)
        self.heads, self.width, self.joins = layer.heads, layer.head_features, layer.concat

    def forward(self, block: Plain, x: Tensor) -> Tensor:
        """[n_src, in] -> [n_dst, heads x out], or [n_dst, out] where heads are averaged."""
        source, destination, n_dst = block.indices, block.destination, block.n_dst
        value = self.project(x).view(-1, self.heads, self.width)
        score = (value * self.left).sum(-1)[source] + (value[:n_dst] * self.right).sum(-1)[destination]
        score = F.leaky_relu(score, 0.2)
        most = score.new_full((n_dst, self.heads), -torch.inf)
        most = most.scatter_reduce(0, destination[:, None].expand_as(score), score.detach(), "amax")
        share = (score - most[destination]).exp()
        total = share.new_zeros(n_dst, self.heads).index_add(0, destination, share)
        share = share / total[destination]
        out = value.new_zeros(n_dst, self.heads, self.width)
        out = out.index_add(0, destination, value[source] * share[..., None])
        out = out + self.bias.view(self.heads, self.width)
        return out.flatten(1) if self.joins else out.mean(1)


def require_peer(name: str) -> None:
    """UserError where what the peer needs cannot be imported."""
    if name == "dgl":
        import_framework(DGL)
    if name in ("pyg", "pyg-loader"):
        import_framework(PYG)
        torch_sparse()


def torch_sparse() -> types.ModuleType:
    """The package that PyG samples and multiplies with; UserError without it."""
    try:
        return importlib.import_module("torch_sparse")
    # An extension that does not fit the installed torch fails in many ways.
    except Exception as error:
        got = f"none that can be imported ({type(error).__name__}: {error})"
        do = "pip install --no-build-isolation torch-scatter torch-sparse"
        raise wrong(
            "PyG's torch-sparse", got, "torch-sparse and torch-scatter built for this torch", do
        ) from None


def make_peer(name: str, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> Peer:
    """The peer by name; UserError where it is not installed."""
    if name == "torch":
        return TorchPeer(dataset, fanouts, model)
    if name == "dgl":
        from _peer_dgl import DglPeer

        return DglPeer(dataset, fanouts, model)
    if name == "pyg":
        from _peer_pyg import PygPeer

        return PygPeer(dataset, fanouts, model)
    if name == "pyg-loader":
        from _peer_pyg_loader import PygLoaderPeer

        return PygLoaderPeer(dataset, fanouts, model)
    raise wrong("--against", name, "dgl, pyg, pyg-loader or torch", "correct the name")
