"""Graph convolution (Kipf, Welling: "Semi-supervised classification with graph convolutional networks", 2017, eq. 2).

    out[v] = b + sum over drawn u -> v of (deg_in(v) / drawn(v)) W x[u] / sqrt(max(1, deg_out(u)) max(1, deg_in(v)))

with the degrees of the full graph, so that a sampled sum estimates the full one and every rank agrees: DGL's
`norm="both"` where all in-edges are drawn. There are self-loops only if the data has them. Edge weights of the data
multiply x[u].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.kernels.block import Block
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.products import linear


class GCNConv(Layer):
    """Graph convolution. Shapes: block and rows [n_src, in_features] -> [n_dst, out_features]."""

    reads_rows_in_place = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.projects_first = out_features < in_features
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform weight and zero bias."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def reads_features_in_place(self) -> bool:
        """Where nothing is projected first."""
        return self.reads_rows_in_place and not self.projects_first

    def before_exchange(self, x: Tensor) -> Tensor:
        """The projection where it is narrower than x, else x."""
        return linear(x, self.weight.t()) if self.projects_first else x

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations, [n_dst, out_features]."""
        if block.degree_in is None or block.degree_out is None:
            do = "take the block from a tgnn.Loader, or set its degree_in and degree_out"
            raise wrong("GCNConv block", "no degrees", "the full graph's degrees", do)
        wide = torch.float64 if rows.local.dtype == torch.float64 else torch.float32
        # The sources may be a table of all vertices, of which few are used.
        per_edge = block.n_src > block.n_edges
        degree = block.degree_out.index_select(0, block.indices) if per_edge else block.degree_out
        from_source = degree.clamp(min=1).to(wide).rsqrt()
        at_destination = block.degree_in.clamp(min=1).to(wide).sqrt() / block.degrees.clamp(min=1)
        # Both factors go into the edges' weights: the sum is rounded once, also in half types.
        if not per_edge:
            from_source = from_source.index_select(0, block.indices)
        weight = from_source * at_destination.index_select(0, block.dst_rows)
        if block.weight is not None:
            weight = weight * block.weight
        out = rows.aggregate(block, weight)
        if not self.projects_first:
            out = linear(out, self.weight.t())
        return out if self.bias is None else out + self.bias
