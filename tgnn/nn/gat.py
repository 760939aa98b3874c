"""Graph attention layers.

GATConv    Velickovic et al., "Graph attention networks", 2018: score(u, v) = LeakyReLU(a_l . W x[u] + a_r . W x[v])
GATv2Conv  Brody, Alon, Yahav, "How attentive are graph attention networks?", 2022, eq. 7:
           score(u, v) = a . LeakyReLU(W_src x[u] + b_src + W_dst x[v] + b_dst)

out[v] = sum over u -> v of softmax(score) W x[u] per head. Scores and dropped edges are per head; heads are joined or
averaged. A vertex without in-edges gets 0, and GATConv's bias. Edge weights of the data are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tgnn.kernels.attention import attention
from tgnn.kernels.block import Block
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.products import Linear


class _Attention(Layer):
    """What the two layers share: `heads` of `out_features` each, joined (`concat`) or averaged."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        attention_dropout: float,
        slope: float,
        concat: bool,
    ) -> None:
        super().__init__()
        self.in_features, self.head_features, self.heads = in_features, out_features, heads
        self.attention_dropout, self.slope, self.concat = attention_dropout, slope, concat
        self.out_features = heads * out_features if concat else out_features

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(-1, self.heads, self.head_features)

    def _merge(self, out: Tensor) -> Tensor:
        return out.flatten(1) if self.concat else out.mean(1)

    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0


class GATConv(_Attention):
    """Graph attention. Shapes: block and rows [n_src, in_features] -> [n_dst, heads x out_features], or
    [n_dst, out_features] where heads are averaged (`concat=False`)."""

    def __init__(
        self, in_features: int, out_features: int, heads: int = 1, *, attention_dropout: float = 0.0,
        slope: float = 0.2, concat: bool = True, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, heads, attention_dropout, slope, concat)
        self.fc = Linear(in_features, heads * out_features, bias=False)
        self.attn_l = nn.Parameter(torch.empty(1, heads, out_features))
        self.attn_r = nn.Parameter(torch.empty(1, heads, out_features))
        self.bias = nn.Parameter(torch.empty(heads * out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot normal with gain sqrt(2) and zero bias, as DGL's GATConv."""
        gain = nn.init.calculate_gain("relu")
        for parameter in (self.fc.weight, self.attn_l, self.attn_r):
            nn.init.xavier_normal_(parameter, gain=gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def before_exchange(self, x: Tensor) -> Tensor:
        """W x: every vertex is projected once, by its owner."""
        return self.fc(x)

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations."""
        value = self._by_head(rows.all())
        src = (value * self.attn_l).sum(-1)
        dst = (value[: block.n_dst] * self.attn_r).sum(-1)
        drop, key = self._dropout(), rows.attention_key
        out = attention(block, value, "gat", src, dst, slope=self.slope, dropout=drop, key=key)
        if self.bias is not None:
            out = out + self._by_head(self.bias)
        return self._merge(out)


class GATv2Conv(_Attention):
    """Graph attention with dynamic scores. Shapes as GATConv."""

    def __init__(
        self, in_features: int, out_features: int, heads: int = 1, *, attention_dropout: float = 0.0,
        slope: float = 0.2, concat: bool = True, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, heads, attention_dropout, slope, concat)
        self.fc_src = Linear(in_features, heads * out_features, bias=bias)
        self.fc_dst = Linear(in_features, heads * out_features, bias=bias)
        self.attn = nn.Parameter(torch.empty(1, heads, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot normal with gain sqrt(2) and zero bias, as DGL's GATv2Conv."""
        gain = nn.init.calculate_gain("relu")
        for parameter in (self.fc_src.weight, self.fc_dst.weight, self.attn):
            nn.init.xavier_normal_(parameter, gain=gain)
        for linear in (self.fc_src, self.fc_dst):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def before_exchange(self, x: Tensor) -> Tensor:
        """W_src x + b_src: every vertex is projected once, by its owner."""
        return self.fc_src(x)

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations."""
        value = self._by_head(rows.all())
        dst = self._by_head(self.fc_dst(rows.destinations(block)))
        drop, key = self._dropout(), rows.attention_key
        out = attention(
            block, value, "gatv2", value, dst, self.attn[0], slope=self.slope, dropout=drop, key=key
        )
        return self._merge(out)
