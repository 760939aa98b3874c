"""GraphSAGE layer (Hamilton, Ying, Leskovec: "Inductive representation learning on large graphs", 2017, algorithm 1).

    out[v] = W_self x[v] + b + W_neigh reduce over u -> v of x[u]                    reduce = mean or max
    out[v] = W_self x[v] + b + W_neigh max over u -> v of relu(W_pool x[u] + b_pool)                  pool (eq. 3)
    out[v] = b + W_neigh (x[v] + sum over u -> v of x[u]) / (in-edges of v + 1)                       gcn (eq. 2)

A vertex without in-edges gets its own term alone. Edge weights of the data multiply x[u]; a mean divides by the
number of edges, as DGL's does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.kernels.block import Block
from tgnn.kernels.spmm import spmm
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.products import Linear, add_linear

AGGREGATORS = ("mean", "max", "pool", "gcn")


class SAGEConv(Layer):
    """GraphSAGE layer. Shapes: block and rows [n_src, in_features] -> [n_dst, out_features]."""

    def __init__(
        self, in_features: int, out_features: int, aggregator: str = "mean", bias: bool = True
    ) -> None:
        super().__init__()
        if aggregator not in AGGREGATORS:
            raise wrong(
                "aggregator", repr(aggregator), f"one of {', '.join(AGGREGATORS)}", "choose one of these"
            )
        self.in_features, self.out_features, self.aggregator = in_features, out_features, aggregator
        has_self = aggregator != "gcn"
        self.fc_self = Linear(in_features, out_features, bias=bias) if has_self else None
        self.fc_neigh = Linear(in_features, out_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias and not has_self else None
        self.fc_pool = Linear(in_features, in_features) if aggregator == "pool" else None
        # A sum commutes with the projection: the narrower side of it aggregates and travels.
        self.projects_first = aggregator in ("mean", "gcn") and out_features < in_features
        self.reads_rows_in_place = aggregator in ("mean", "gcn")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform with gain sqrt(2) and zero bias, as DGL's SAGEConv."""
        for linear in (self.fc_self, self.fc_neigh, self.fc_pool):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight, gain=nn.init.calculate_gain("relu"))
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def reads_features_in_place(self) -> bool:
        """Where nothing is projected first."""
        return self.reads_rows_in_place and not self.projects_first

    def before_exchange(self, x: Tensor) -> Tensor:
        """The neighbours' projection where it is narrower, the pooled values, or x."""
        if self.fc_pool is not None:
            return F.relu(self.fc_pool(x))
        return self.fc_neigh(x) if self.projects_first else x

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations, [n_dst, out_features]."""
        if self.fc_self is None:
            return self._forward_gcn(block, rows)
        # The destinations' own term needs no halo: it is computed while the rows travel.
        out = self.fc_self(rows.destinations(block))
        if self.aggregator == "mean":
            neighbours = rows.aggregate(block, block.weight, "mean")
        else:
            neighbours = spmm(block, rows.all(), block.weight, "max")
        if self.projects_first:
            return out + neighbours
        return add_linear(out, neighbours, self.fc_neigh.weight)

    def _forward_gcn(self, block: Block, rows: Rows) -> Tensor:
        local = rows.local
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        total = rows.aggregate(block, block.weight).to(wide) + rows.local_destinations(block)
        out = (total / (block.degrees + 1)[:, None]).to(local.dtype)
        if not self.projects_first:
            out = self.fc_neigh(out)
        return out if self.bias is None else out + self.bias
