"""Graph isomorphism layer (Xu, Hu, Leskovec, Jegelka: "How powerful are graph neural networks?", 2019, eq. 4.1).

    out[v] = MLP((1 + eps) x[v] + sum over u -> v of x[u])

Edge weights of the data multiply x[u]. The MLP has two linear layers and a ReLU between, and no norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgnn.kernels.block import Block
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.products import Linear


class GINConv(Layer):
    """Graph isomorphism layer. Shapes: block and rows [n_src, in_features] -> [n_dst, out_features]."""

    reads_rows_in_place = True

    def __init__(self, in_features: int, out_features: int, eps: float = 0.0, learn_eps: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.mlp = nn.Sequential(
            Linear(in_features, out_features), nn.ReLU(), Linear(out_features, out_features)
        )
        eps_value = torch.tensor([float(eps)])
        if learn_eps:
            self.eps = nn.Parameter(eps_value)
        else:
            self.register_buffer("eps", eps_value)

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations, [n_dst, out_features]."""
        total = rows.aggregate(block, block.weight)
        return self.mlp((1 + self.eps) * rows.destinations(block) + total)
