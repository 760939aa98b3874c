"""What exported DGL modules need besides `dgl.nn`: `source.py` copies these definitions into the generated
file.

They stand on torch and dgl alone and are never imported from here.
"""

import dgl
import dgl.function as fn
import torch
from dgl.nn.functional import edge_softmax
from torch import nn


class MaxSAGEConv(nn.Module):
    """GraphSAGE with a plain maximum over in-edges, which dgl.nn.SAGEConv lacks (its `pool` has a layer
    before it).
    """

    def __init__(self, in_feats, out_feats, bias=True):
        super().__init__()
        self.fc_self = nn.Linear(in_feats, out_feats, bias=bias)
        self.fc_neigh = nn.Linear(in_feats, out_feats, bias=False)

    def forward(self, graph, feat, edge_weight=None):
        """[number of source vertices, in_feats] -> [number of destinations, out_feats]."""
        with graph.local_scope():
            graph.srcdata["h"] = feat
            message = fn.copy_u("h", "m")
            if edge_weight is not None:
                graph.edata["w"] = edge_weight
                message = fn.u_mul_e("h", "w", "m")
            own = feat[: graph.num_dst_nodes()]
            graph.dstdata["neigh"] = torch.zeros_like(own)
            graph.update_all(message, fn.max("m", "neigh"))
            return self.fc_self(own) + self.fc_neigh(graph.dstdata["neigh"])


class TransformerConv(nn.Module):
    """Dot-product attention with keys, queries and values of their own, and the vertex's own row projected.

    Heads are joined or (concat=False) averaged before the own row is added; with beta a gate weighs the two.
    """

    def __init__(self, in_feats, out_feats, num_heads, concat=True, beta=False, attn_drop=0.0, bias=True):
        super().__init__()
        self.in_feats, self.out_feats, self.num_heads, self.concat = in_feats, out_feats, num_heads, concat
        width, merged = num_heads * out_feats, num_heads * out_feats if concat else out_feats
        self.lin_key = nn.Linear(in_feats, width)
        self.lin_query = nn.Linear(in_feats, width)
        self.lin_value = nn.Linear(in_feats, width)
        self.lin_skip = nn.Linear(in_feats, merged, bias=bias)
        self.lin_beta = nn.Linear(3 * merged, 1, bias=False) if beta else None
        self.attn_drop = nn.Dropout(attn_drop)

    def forward(self, graph, feat):
        """[number of source vertices, in_feats] -> [number of destinations, heads x out_feats or out_feats]."""
        by_head = (-1, self.num_heads, self.out_feats)
        own = feat[: graph.num_dst_nodes()]
        with graph.local_scope():
            graph.srcdata["key"] = self.lin_key(feat).view(by_head)
            graph.srcdata["value"] = self.lin_value(feat).view(by_head)
            graph.dstdata["query"] = self.lin_query(own).view(by_head) / self.out_feats**0.5
            graph.apply_edges(fn.u_dot_v("key", "query", "score"))
            graph.edata["share"] = self.attn_drop(edge_softmax(graph, graph.edata["score"]))
            graph.update_all(fn.u_mul_e("value", "share", "m"), fn.sum("m", "out"))
            out = graph.dstdata["out"]
        out = out.flatten(1) if self.concat else out.mean(1)
        skip = self.lin_skip(own)
        if self.lin_beta is None:
            return out + skip
        gate = torch.sigmoid(self.lin_beta(torch.cat([out, skip, out - skip], 1)))
        return gate * skip + (1 - gate) * out


def full_degree_weight(block, degrees, edge_weight, dtype):
    """Edge weights for GraphConv: on a whole graph those given, on a sampled block made up for its other
    degrees.

    GraphConv takes the degrees of what it is given, while the model was trained with those of the whole
    graph: degrees = (g.in_degrees(), g.out_degrees()) of the whole graph g.
    """
    if not block.is_block:
        return edge_weight
    if degrees is None:
        raise ValueError("sampled blocks need degrees=(g.in_degrees(), g.out_degrees()) of the whole graph g")
    source, destination = block.edges()
    at_source = degrees[1].to(block.device)[block.srcdata[dgl.NID]].clamp(min=1).to(dtype)
    at_destination = degrees[0].to(block.device)[block.dstdata[dgl.NID]].clamp(min=1).to(dtype)
    drawn = block.in_degrees().clamp(min=1).to(dtype)
    weight = (block.out_degrees().clamp(min=1) / at_source).sqrt()[source]
    weight = weight * (at_destination / drawn).sqrt()[destination]
    return weight if edge_weight is None else weight * edge_weight
