"""PyG as its documentation has it: `NeighborLoader` on a `Data`, layers of `torch_geometric.nn` on an edge list.

With torch-sparse its sample is one subgraph: every vertex is drawn for once, by the hop that meets it first, and every
layer is computed on all of it (leaving out what a layer does not need takes pyg-lib).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _peers import Layer, Peer, require_peer
from torch import Tensor, nn

from tgnn.data.graph import Dataset
from tgnn.errors import wrong
from tgnn.export.pyg import to_pyg
from tgnn.kernels.block import Block
from tgnn.nn.model import GNN


@dataclass
class Sampled:
    """One step: what the loader's sampler gave, ids of the rows, and for every layer its edges and destinations."""

    output: Any
    rows: Tensor
    seeds: Tensor
    edges: list[Tensor]
    n_dst: list[int]


class PygLoaderPeer(Peer):
    """PyG with torch-sparse and torch-scatter, by its own data loader in this process."""

    name = "pyg-loader"
    draws_alike = False

    def __init__(self, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> None:
        require_peer(self.name)
        super().__init__(dataset, fanouts, model)
        if self.is_gcn:
            do = "compare GCN against pyg"
            raise wrong("--against pyg-loader", "--model gcn", "sage or gat, which need no edge weights", do)
        from torch_geometric.data import Data
        from torch_geometric.loader import NeighborLoader

        edges = torch.from_numpy(dataset.graph.edge_index()).long()
        data = Data(x=self.features, y=self.labels, edge_index=edges, num_nodes=dataset.num_vertices)
        with warnings.catch_warnings():
            # That torch-sparse will be replaced by pyg-lib, which no package index has.
            warnings.filterwarnings("ignore", message="Using 'NeighborSampler' without a 'pyg-lib'")
            self.loader = NeighborLoader(data, num_neighbors=self.fanouts, filter_per_worker=False)

    def copy_of(self, model: GNN) -> nn.Module:
        return to_pyg(model)

    def sample(self, seeds: Tensor) -> Sampled:
        output = self.loader.collate_fn(seeds)
        count = len(self.fanouts)
        edges = torch.stack([output.row, output.col])
        return Sampled(output, output.node, seeds, [edges] * count, [len(output.node)] * count)

    def load(self, sampled: Sampled) -> tuple[Tensor, Tensor]:
        data = self.loader.filter_fn(sampled.output)
        return data.x, data.y[: data.batch_size]

    def forward(self, sampled: Sampled, x: Tensor) -> Tensor:
        last = len(self.model.layers) - 1
        steps = zip(self.model.layers, sampled.edges, sampled.n_dst, strict=True)
        for number, (layer, edges, n_dst) in enumerate(steps):
            x = layer((x, x[:n_dst]), edges)
            if type(layer).__name__ == "GATConv" and number == last and layer.heads > 1:
                x = x.view(-1, layer.heads, layer.out_channels).mean(1)
            x = x if number == last else F.relu(x)
        return x[: len(sampled.seeds)]

    def layers_of(self, sampled: Sampled) -> list[Layer]:
        """One layer: the subgraph, all of whose rows are destinations."""
        source, destination = sampled.edges[0]
        return [Layer(sampled.rows, len(sampled.rows), source, destination)]

    def from_blocks(self, blocks: Sequence[Block], ids: Sequence[Tensor]) -> Sampled:
        edges = [torch.stack([block.indices.long(), block.dst_rows]) for block in blocks]
        return Sampled(None, ids[0], ids[-1], edges, [block.n_dst for block in blocks])

    def infer(self) -> Tensor:
        edges, rows = self.loader.data.edge_index, torch.arange(self.dataset.num_vertices)
        count = len(self.model.layers)
        return self.forward(Sampled(None, rows, rows, [edges] * count, [len(rows)] * count), self.features)
