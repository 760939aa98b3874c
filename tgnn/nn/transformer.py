"""Graph transformer layer (Shi et al.: "Masked label prediction", 2021, eq. 3 to 5; PyG's TransformerConv).

    alpha(u, v) = softmax over u -> v of <q[v], k[u]> / sqrt(D)    q = W_q x + b_q, k = W_k x + b_k, per head
    out[v] = m[v] + r[v]    m[v] = sum over u -> v of alpha(u, v) (W_v x[u] + b_v), r = W_skip x + b_skip

Heads of m are joined or averaged before r is added. With `beta` a gate takes both: out = b r + (1 - b) m,
b = sigmoid(w . [m, r, m - r]). A vertex without in-edges has m = 0. Edge weights of the data are not used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.kernels.attention import attention
from tgnn.kernels.block import Block
from tgnn.nn.layer import Layer, Rows
from tgnn.nn.products import Linear, linear


class TransformerConv(Layer):
    """Dot-product attention. Shapes: block and rows [n_src, in_features] -> [n_dst, heads x out_features], or
    [n_dst, out_features] where heads are averaged (`concat=False`)."""

    def __init__(
        self, in_features: int, out_features: int, heads: int = 1, *, attention_dropout: float = 0.0,
        concat: bool = True, beta: bool = False, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.head_features, self.heads = in_features, out_features, heads
        self.attention_dropout, self.concat = attention_dropout, concat
        self.out_features = heads * out_features if concat else out_features
        self.lin_key = Linear(in_features, heads * out_features)
        self.lin_query = Linear(in_features, heads * out_features)
        self.lin_value = Linear(in_features, heads * out_features)
        self.lin_skip = Linear(in_features, self.out_features, bias=bias)
        self.lin_beta = Linear(3 * self.out_features, 1, bias=False) if beta else None

    def reset_parameters(self) -> None:
        """Uniform in 1 / sqrt(in_features) around 0, as PyG's TransformerConv."""
        for module in (self.lin_key, self.lin_query, self.lin_value, self.lin_skip, self.lin_beta):
            if module is not None:
                module.reset_parameters()

    def before_exchange(self, x: Tensor) -> Tensor:
        """Key and value side by side, [n, 2 x heads x out_features]: every vertex is projected once."""
        weight = torch.cat([self.lin_key.weight, self.lin_value.weight])
        return linear(x, weight, torch.cat([self.lin_key.bias, self.lin_value.bias]))

    def forward(self, block: Block, rows: Rows) -> Tensor:
        """Outputs of the destinations."""
        key, value = rows.all().view(-1, 2, self.heads, self.head_features).unbind(1)
        x_dst = rows.destinations(block)
        query = self.lin_query(x_dst).view(-1, self.heads, self.head_features)
        drop = self.attention_dropout if self.training else 0.0
        message = attention(block, value, "dot", key, query, dropout=drop, key=rows.attention_key)
        message = message.flatten(1) if self.concat else message.mean(1)
        skip = self.lin_skip(x_dst)
        if self.lin_beta is None:
            return message + skip
        gate = torch.sigmoid(self.lin_beta(torch.cat([message, skip, message - skip], 1)))
        return gate * skip + (1 - gate) * message
