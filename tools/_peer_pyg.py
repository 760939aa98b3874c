"""PyG as a peer: its `NeighborSampler` on a `SparseTensor`, layers of `torch_geometric.nn` with our weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _peers import Layer, Peer, load_rows, require_peer, torch_sparse
from torch import Tensor, nn

from tgnn.data.graph import Dataset
from tgnn.export.pyg import to_pyg
from tgnn.kernels.block import Block
from tgnn.nn.model import GNN


@dataclass
class Sampled:
    """One step: original ids of the input rows and seeds, and a transposed adjacency [n_dst, n_src] per layer.

    `edges` holds each layer's places in the whole graph's edge list (None where they are not known), `weights` what
    `load` makes of them for GCN.
    """

    rows: Tensor
    seeds: Tensor
    layers: list[Any]
    edges: list[Tensor | None]
    weights: list[Tensor | None]


class PygPeer(Peer):
    """PyG with torch-sparse and torch-scatter: CSR products, fused where PyG fuses them.

    Its GCN takes explicit edge weights, those of the full graph scaled up for the draw, as exported models do.
    """

    name = "pyg"

    def __init__(self, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> None:
        require_peer(self.name)
        self.sparse = torch_sparse()
        super().__init__(dataset, fanouts, model)
        graph = dataset.graph
        self.indptr, indices = torch.from_numpy(graph.indptr), torch.from_numpy(graph.indices).long()
        self.degree = self.indptr.diff()
        size = (dataset.num_vertices, dataset.num_vertices)
        # In-edges row by row are the transposed adjacency already; values are places in that list.
        self.adjacency = self.sparse.SparseTensor(
            rowptr=self.indptr,
            col=indices,
            value=torch.arange(len(indices)),
            sparse_sizes=size,
            is_sorted=True,
        )
        self.gcn_weight = None
        if self.is_gcn:
            edges = torch.from_numpy(graph.edge_index())
            self.gcn_weight = self.model.gcn_weight(edges, dataset.num_vertices)

    def copy_of(self, model: GNN) -> nn.Module:
        return to_pyg(model)

    def sample(self, seeds: Tensor) -> Sampled:
        """What `NeighborSampler.sample` of PyG does for a batch, without its data loader around it."""
        rows, layers = seeds, []
        for fanout in self.fanouts:
            adjacency, rows = self.adjacency.sample_adj(rows, fanout, replace=False)
            layers.insert(0, adjacency)
        edges = [adjacency.storage.value() for adjacency in layers]
        layers = [adjacency.set_value(None) for adjacency in layers]
        return Sampled(rows, seeds, layers, edges, [None] * len(layers))

    def load(self, sampled: Sampled) -> tuple[Tensor, Tensor]:
        if self.is_gcn:
            sampled.weights = [
                self._scaled(self.gcn_weight[edges], adjacency, edges)
                for adjacency, edges in zip(sampled.layers, sampled.edges, strict=True)
            ]
        return load_rows(self.features, sampled.rows), load_rows(self.labels, sampled.seeds)

    def _scaled(self, weight: Tensor, adjacency: Any, edges: Tensor) -> Tensor:
        """A sampled sum estimates the full one: times (in-degree / drawn) of the destination."""
        drawn = adjacency.storage.rowptr().diff()
        full = torch.searchsorted(self.indptr, edges, right=True) - 1
        return weight * self.degree[full] / torch.repeat_interleave(drawn, drawn)

    def forward(self, sampled: Sampled, x: Tensor) -> Tensor:
        last = len(sampled.layers) - 1
        for number, (layer, adjacency) in enumerate(zip(self.model.layers, sampled.layers, strict=True)):
            x = self._apply(layer, adjacency, sampled.weights[number], x, number == last)
            x = x if number == last else F.relu(x)
        return x

    def _apply(
        self, layer: nn.Module, adjacency: Any, weight: Tensor | None, x: Tensor, is_last: bool
    ) -> Tensor:
        n_dst = adjacency.size(0)
        if self.is_gcn:
            # GCNConv knows square graphs only.
            square = adjacency.set_value(weight, layout="coo").sparse_resize((len(x), len(x)))
            return layer(x, square)[:n_dst]
        out = layer((x, x[:n_dst]), adjacency)
        merges = type(layer).__name__ == "GATConv" and is_last and layer.heads > 1
        return out.view(-1, layer.heads, layer.out_channels).mean(1) if merges else out

    def layers_of(self, sampled: Sampled) -> list[Layer]:
        found, rows = [], sampled.rows
        for adjacency in sampled.layers:
            destination, source, _ = adjacency.coo()
            found.append(Layer(rows[: adjacency.size(1)], adjacency.size(0), source, destination))
        return found

    def from_blocks(self, blocks: Sequence[Block], ids: Sequence[Tensor]) -> Sampled:
        layers = [
            self.sparse.SparseTensor(rowptr=block.indptr, col=block.indices.long(),
                                     sparse_sizes=(block.n_dst, block.n_src), is_sorted=True)
            for block in blocks
        ]  # fmt: skip
        weights = [_gcn_weight(block) if self.is_gcn else None for block in blocks]
        return Sampled(ids[0], ids[-1], layers, [None] * len(layers), weights)

    @torch.no_grad()
    def infer(self) -> Tensor:
        whole = self.adjacency.set_value(None)
        count = len(self.model.layers)
        return self.forward(
            Sampled(None, None, [whole] * count, [], [self.gcn_weight] * count), self.features
        )


def _gcn_weight(block: Block) -> Tensor:
    """What GCN multiplies each edge of one of our blocks with."""
    from_source = block.degree_out.clamp(min=1).float().rsqrt()
    at_destination = block.degree_in.clamp(min=1).float().sqrt() / block.degrees.clamp(min=1)
    return from_source[block.indices] * at_destination[block.dst_rows]
