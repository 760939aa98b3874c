"""What exported PyG modules need besides `torch_geometric.nn`: `source.py` copies these into the generated file.

They stand on torch and torch_geometric alone and are never imported from here.
"""

import torch
from torch import nn
from torch_geometric.nn import GINConv, MessagePassing, SAGEConv


class WeightedSAGEConv(SAGEConv):
    """SAGEConv whose messages are multiplied by edge weights; a mean still divides by the number of edges."""

    def forward(self, x, edge_index, edge_weight):
        """x [n, in], edge_index [2, E], edge_weight [E] -> [n, out]."""
        sent = self.lin(x).relu() if self.project else x
        out = self.propagate(edge_index, x=(sent, x), edge_weight=edge_weight)
        return self.lin_l(out) + self.lin_r(x)

    def message(self, x_j, edge_weight):
        """One message per edge."""
        return edge_weight.view(-1, 1) * x_j


class GCNSAGEConv(MessagePassing):
    """GraphSAGE's GCN aggregator: lin_l of (sum over in-edges + own row) / (in-degree + 1)."""

    def __init__(self, in_channels, out_channels, bias=True):
        super().__init__(aggr="sum")
        self.lin_l = nn.Linear(in_channels, out_channels, bias=bias)

    def forward(self, x, edge_index, edge_weight=None):
        """x [n, in], edge_index [2, E], edge_weight [E] or None -> [n, out]."""
        weight = x.new_ones(edge_index.shape[1]) if edge_weight is None else edge_weight
        degree = torch.bincount(edge_index[1], minlength=len(x)).to(x.dtype)
        out = self.propagate(edge_index, x=x, edge_weight=weight) + x
        return self.lin_l(out / (degree + 1)[:, None])

    def message(self, x_j, edge_weight):
        """One message per edge."""
        return edge_weight.view(-1, 1) * x_j


class WeightedGINConv(GINConv):
    """GINConv whose messages are multiplied by edge weights."""

    def forward(self, x, edge_index, edge_weight):
        """x [n, in], edge_index [2, E], edge_weight [E] -> [n, out]."""
        out = self.propagate(edge_index, x=(x, x), edge_weight=edge_weight)
        return self.nn(out + (1 + self.eps) * x)

    def message(self, x_j, edge_weight):
        """One message per edge."""
        return edge_weight.view(-1, 1) * x_j


def without_output_bias(layer):
    """The layer without the bias that PyG adds to its output, which the trained model does not have."""
    layer.bias = None
    return layer


def gcn_weight(edge_index, num_nodes, edge_weight=None):
    """The weights that GCN layers need, [E] float64: those of the data (or 1) / sqrt(out-degree x in-degree).

    With the out-degree of the source, the in-degree of the destination, both at least 1, in the whole graph: for
    a sampled subgraph compute them before sampling. PyG's own normalisation takes in-degrees at both ends.
    """
    source, destination = edge_index
    degree_out = torch.bincount(source, minlength=num_nodes).clamp(min=1).double()
    degree_in = torch.bincount(destination, minlength=num_nodes).clamp(min=1).double()
    weight = (degree_out[source] * degree_in[destination]).rsqrt()
    return weight if edge_weight is None else weight * edge_weight
