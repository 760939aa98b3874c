"""What exported PyG modules need besides `torch_geometric.nn`: `source.py` copies these into the generated
file.

They stand on torch and torch_geometric alone and are never imported from here.
"""

import torch
from torch import nn
from torch_geometric.nn import MessagePassing


class WeightedSAGEConv(MessagePassing):
    """PyG's SAGEConv with messages multiplied by edge weights; a mean still divides by the number of
    edges.
    """

    def __init__(self, in_channels, out_channels, aggr="mean", project=False, bias=True):
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(in_channels, in_channels) if project else None
        self.lin_l = nn.Linear(in_channels, out_channels, bias=bias)
        self.lin_r = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x, edge_index, edge_weight):
        """x [n, in], edge_index [2, E], edge_weight [E] -> [n, out]."""
        sent = x if self.lin is None else self.lin(x).relu()
        return self.lin_l(self.propagate(edge_index, x=sent, edge_weight=edge_weight)) + self.lin_r(x)

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


class WeightedGINConv(MessagePassing):
    """PyG's GINConv with messages multiplied by edge weights."""

    def __init__(self, nn, train_eps=False):
        super().__init__(aggr="sum")
        self.nn = nn
        if train_eps:
            self.eps = torch.nn.Parameter(torch.zeros(1))
        else:
            self.register_buffer("eps", torch.zeros(1))

    def forward(self, x, edge_index, edge_weight):
        """x [n, in], edge_index [2, E], edge_weight [E] -> [n, out]."""
        total = self.propagate(edge_index, x=x, edge_weight=edge_weight)
        return self.nn(total + (1 + self.eps) * x)

    def message(self, x_j, edge_weight):
        """One message per edge."""
        return edge_weight.view(-1, 1) * x_j


def without_output_bias(layer):
    """The layer without the bias that PyG adds to its output, which the trained model does not have."""
    layer.bias = None
    return layer


def without_skip_bias(layer):
    """The TransformerConv without the bias of its own term; `bias=False` would drop others too."""
    layer.lin_skip.bias = None
    return layer


def gcn_weight(edge_index, num_nodes, edge_weight=None):
    """The weights that GCN layers need, [E] float64: those of the data (or 1) / sqrt(out-degree x in-degree).

    With the out-degree of the source, the in-degree of the destination, both at least 1, in the whole graph:
    for a sampled subgraph compute them before sampling. PyG's own normalisation takes in-degrees at both
    ends.
    """
    source, destination = edge_index
    degree_out = torch.bincount(source, minlength=num_nodes).clamp(min=1).double()
    degree_in = torch.bincount(destination, minlength=num_nodes).clamp(min=1).double()
    weight = (degree_out[source] * degree_in[destination]).rsqrt()
    return weight if edge_weight is None else weight * edge_weight
