"""DGL as a peer: blocks of its own sampler, layers of `dgl.nn` with our weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _peers import Layer, Peer, load_rows
from torch import Tensor, nn

from tgnn.data.graph import Dataset
from tgnn.export.dgl import to_dgl
from tgnn.export.frameworks import DGL, import_framework
from tgnn.kernels.block import Block
from tgnn.nn.model import GNN


class DglPeer(Peer):
    """DGL's `NeighborSampler` in this process, and the module that `tgnn.export.to_dgl` gives.

    Its GCN normalises by the degrees within a block, as `GraphConv` does for its users.
    """

    name = "dgl"

    def __init__(self, dataset: Dataset, fanouts: Sequence[int], model: GNN | None) -> None:
        self.dgl = import_framework(DGL)
        super().__init__(dataset, fanouts, model)
        arrays = [torch.from_numpy(array) for array in (dataset.graph.indptr, dataset.graph.indices)]
        no_ids = torch.empty(0, dtype=torch.int64)
        self.graph = self.dgl.graph(
            ("csc", (arrays[0], arrays[1].long(), no_ids)), num_nodes=dataset.num_vertices
        )
        # DGL lists fanouts from the input layer on.
        self.sampler = self.dgl.dataloading.NeighborSampler(self.fanouts[::-1])

    def copy_of(self, model: GNN) -> nn.Module:
        return to_dgl(model)

    def sample(self, seeds: Tensor) -> Any:
        return self.sampler.sample_blocks(self.graph, seeds)

    def load(self, sampled: Any) -> tuple[Tensor, Tensor]:
        rows, seeds, _ = sampled
        return load_rows(self.features, rows), load_rows(self.labels, seeds)

    def forward(self, sampled: Any, x: Tensor) -> Tensor:
        blocks = sampled[2]
        if not self.is_gcn:
            return self.model(blocks, x)
        last = len(blocks) - 1
        for number, (layer, block) in enumerate(zip(self.model.layers, blocks, strict=True)):
            x = layer(block, x)
            x = x if number == last else F.relu(x)
        return x

    def layers_of(self, sampled: Any) -> list[Layer]:
        return [
            Layer(block.srcdata[self.dgl.NID], block.num_dst_nodes(), *(end.long() for end in block.edges()))
            for block in sampled[2]
        ]

    def from_blocks(self, blocks: Sequence[Block], ids: Sequence[Tensor]) -> Any:
        made = [
            self.dgl.create_block(
                (block.indices.long(), block.dst_rows), num_src_nodes=block.n_src, num_dst_nodes=block.n_dst
            )
            for block in blocks
        ]
        return ids[0], ids[-1], made

    def degrees_for(self, blocks: Sequence[Block]) -> list[Block]:
        return [
            dataclasses.replace(
                block,
                degree_in=block.degrees,
                degree_out=torch.bincount(block.indices, minlength=block.n_src),
            )
            for block in blocks
        ]

    @torch.no_grad()
    def infer(self) -> Tensor:
        return self.model(self.graph, self.features)
