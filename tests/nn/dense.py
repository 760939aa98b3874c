"""Layers written out edge by edge from their papers' equations, over original vertex ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tgnn.data.graph import Graph
from tgnn.kernels.block import Block
from tgnn.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv


class Edge(NamedTuple):
    """A drawn in-edge: its source and weight."""

    source: int
    weight: float


def drawn_edges(graph: Graph, block: Block) -> dict[int, list[Edge]]:
    """Original destination id -> its drawn in-edges, looked up in the graph by position."""
    drawn = {}
    for row, vertex in enumerate(block.dst_id.tolist()):
        positions = block.position[block.indptr[row] : block.indptr[row + 1]].tolist()
        entries = [int(graph.indptr[vertex]) + position for position in positions]
        weight = graph.edge_weight
        drawn[vertex] = [
            Edge(int(graph.indices[e]), 1.0 if weight is None else float(weight[e])) for e in entries
        ]
    return drawn


def dense(layer: torch.nn.Module, graph: Graph, drawn: dict[int, list[Edge]], x: Tensor) -> Tensor:
    """The layer's outputs for the vertices of `drawn`, in its order; x [N, F] by original id."""
    kind = next(kind for kind in REFERENCES if isinstance(layer, kind))
    return torch.stack([REFERENCES[kind](layer, graph, vertex, edges, x) for vertex, edges in drawn.items()])


def sage(layer: SAGEConv, graph: Graph, vertex: int, edges: list[Edge], x: Tensor) -> Tensor:
    if layer.aggregator == "gcn":
        total = x[vertex] + sum(edge.weight * x[edge.source] for edge in edges)
        out = layer.fc_neigh.weight @ (total / (len(edges) + 1))
        return out if layer.bias is None else out + layer.bias
    own = F.linear(x[vertex], layer.fc_self.weight, layer.fc_self.bias)
    if not edges:
        return own
    rows = torch.stack([x[edge.source] for edge in edges])
    if layer.aggregator == "pool":
        rows = (rows @ layer.fc_pool.weight.t() + layer.fc_pool.bias).clamp(min=0)
    rows = rows * torch.tensor([[edge.weight] for edge in edges], dtype=x.dtype)
    neighbours = rows.sum(0) / len(edges) if layer.aggregator == "mean" else rows.max(0).values
    return own + layer.fc_neigh.weight @ neighbours


def gcn(layer: GCNConv, graph: Graph, vertex: int, edges: list[Edge], x: Tensor) -> Tensor:
    degree_in, degree_out = (graph.degree_in().tolist(), graph.degree_out().tolist())
    out = x.new_zeros(layer.out_features)
    for edge in edges:
        norm = (max(1, degree_out[edge.source]) * max(1, degree_in[vertex])) ** 0.5
        factor = degree_in[vertex] / len(edges) / norm * edge.weight
        out = out + factor * (x[edge.source] @ layer.weight)
    return out if layer.bias is None else out + layer.bias


def gin(layer: GINConv, graph: Graph, vertex: int, edges: list[Edge], x: Tensor) -> Tensor:
    total = (1 + layer.eps[0]) * x[vertex]
    for edge in edges:
        total = total + edge.weight * x[edge.source]
    first, _, second = layer.mlp
    return second.weight @ (first.weight @ total + first.bias).clamp(min=0) + second.bias


def gat(layer: GATConv, graph: Graph, vertex: int, edges: list[Edge], x: Tensor) -> Tensor:
    width, heads = layer.head_features, []
    for head in range(layer.heads):
        weight = layer.fc.weight[head * width : (head + 1) * width]
        left, right = layer.attn_l[0, head], layer.attn_r[0, head]
        rows = [weight @ x[edge.source] for edge in edges]
        scores = [F.leaky_relu(left @ row + right @ (weight @ x[vertex]), layer.slope) for row in rows]
        out = attend(scores, rows, x.new_zeros(width))
        heads.append(out if layer.bias is None else out + layer.bias[head * width : (head + 1) * width])
    return torch.cat(heads) if layer.concat else torch.stack(heads).mean(0)


def gatv2(layer: GATv2Conv, graph: Graph, vertex: int, edges: list[Edge], x: Tensor) -> Tensor:
    width, heads = layer.head_features, []
    for head in range(layer.heads):
        part = slice(head * width, (head + 1) * width)

        def project(linear: torch.nn.Linear, row: Tensor, part: slice = part) -> Tensor:
            out = linear.weight[part] @ row
            return out if linear.bias is None else out + linear.bias[part]

        rows = [project(layer.fc_src, x[edge.source]) for edge in edges]
        mine = project(layer.fc_dst, x[vertex])
        scores = [layer.attn[0, head] @ F.leaky_relu(row + mine, layer.slope) for row in rows]
        heads.append(attend(scores, rows, x.new_zeros(width)))
    return torch.cat(heads) if layer.concat else torch.stack(heads).mean(0)


def attend(scores: list[Tensor], rows: list[Tensor], nothing: Tensor) -> Tensor:
    """sum of softmax(scores) x rows; `nothing` without any."""
    if not rows:
        return nothing
    weights = torch.stack(scores).exp()
    return (weights / weights.sum()) @ torch.stack(rows)


REFERENCES: dict[type, Callable[..., Tensor]] = {
    SAGEConv: sage, GCNConv: gcn, GINConv: gin, GATConv: gat, GATv2Conv: gatv2,
}  # fmt: skip
