"""How the trained graph was prepared, on torch alone: `source.py` copies what a model needs into its file.

The same edits as `tgnn.data.edits`, on edges [2, E] in any order, row 0 sources and row 1 destinations;
weights are [E] or None. Never imported from here.
"""

import torch


def merge_parallel_edges(edge_index, num_nodes, edge_weight=None):
    """One edge for each (source, destination) that has any; weights are summed."""
    key, place = torch.unique(edge_index[1] * num_nodes + edge_index[0], return_inverse=True)
    if edge_weight is not None:
        total = torch.zeros(len(key), dtype=torch.float64).index_add_(0, place, edge_weight.double())
        edge_weight = total.to(edge_weight.dtype)
    return torch.stack([key % num_nodes, key // num_nodes]), edge_weight


def add_reverse_edges(edge_index, num_nodes, edge_weight=None):
    """Every edge gets its reverse, with its weight, unless that exists; parallel edges are counted one by
    one.
    """
    key = edge_index[1] * num_nodes + edge_index[0]
    back = edge_index[0] * num_nodes + edge_index[1]
    order = torch.argsort(key, stable=True)
    have = torch.sort(back).values
    # Of k parallel edges u -> v those beyond the number of v -> u that are there lack a reverse.
    key = key[order]
    number = torch.arange(len(key)) - torch.searchsorted(key, key)
    existing = torch.searchsorted(have, key, right=True) - torch.searchsorted(have, key)
    lacking = order[number >= existing]
    if edge_weight is not None:
        edge_weight = torch.cat([edge_weight, edge_weight[lacking]])
    return torch.cat([edge_index, edge_index[:, lacking].flip(0)], 1), edge_weight


def remove_self_loops(edge_index, num_nodes, edge_weight=None):
    """The edges but those from a vertex to itself."""
    kept = edge_index[0] != edge_index[1]
    return edge_index[:, kept], None if edge_weight is None else edge_weight[kept]


def add_self_loops(edge_index, num_nodes, edge_weight=None):
    """One edge v -> v, of weight 1, for each vertex that has none."""
    has_loop = torch.zeros(num_nodes, dtype=torch.bool)
    has_loop[edge_index[0, edge_index[0] == edge_index[1]]] = True
    loops = (~has_loop).nonzero()[:, 0]
    if edge_weight is not None:
        edge_weight = torch.cat([edge_weight, torch.ones(len(loops), dtype=edge_weight.dtype)])
    return torch.cat([edge_index, torch.stack([loops, loops])], 1), edge_weight


def normalise_rows(x):
    """Feature rows that sum to 1; rows of zeros stay."""
    total = x.sum(1, dtype=torch.float64, keepdim=True)
    return x / torch.where(total > 0, total, 1).to(x.dtype)


def normalise_columns(x):
    """Feature columns of mean 0 and deviation 1 over all rows given: give the whole data, as in training."""
    wide = x.double()
    deviation = wide.std(0, correction=0)
    return (x - wide.mean(0).to(x.dtype)) / torch.where(deviation > 0, deviation, 1).to(x.dtype)
