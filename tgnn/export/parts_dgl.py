"""What exported DGL modules need besides `dgl.nn`: `source.py` copies these definitions into the generated
file.

They stand on torch and dgl alone and are never imported from here.
"""

import dgl
import dgl.function as fn
import torch
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
