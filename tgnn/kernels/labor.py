"""LABOR-0: rows that have a source in common keep or drop it together, so fewer distinct sources are met.

    source u of row v, which has d_v in-edges, is kept where r_u < min(1, K / d_v)

with one uniform number r_u per source (Balin, Catalyurek: "Layer-Neighbor Sampling: Defusing Neighborhood Explosion in
GNNs", NeurIPS 2023, section 3.2, with all pi = 1). A row keeps K in-edges on average where it has more, and may keep
none; copies of an edge are kept or dropped together. Every in-edge of a row has the same probability, so the mean over
those kept needs no correction. The key decides how far a number reaches: with a key per hop, destinations of a hop
share it; with one key for all hops (the paper's layer-dependent form) the layers do too.

As in DGL's LaborSampler (importance_sampling=0), weights play no part.

Example: rows with sources {4, 5} and {4, 5, 6, 7}, K = 2: the first keeps both, the second keeps u where r_u < 1/2; a
third row with the second's sources keeps the same as the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tgnn.kernels import rng
from tgnn.kernels.segment import edge_chunks
from tgnn.kernels.unique import true_places


def labor_candidates(
    indices: Tensor, source_id: Tensor, start: Tensor, degree: Tensor, fanout: int, key: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What rows of `degree` [n] in-edges from `start` [n] on keep (one device sync, and one per 2^25 in-edges).

    Returns (ends [n + 1] of the rows, then row and position of every kept edge), all int64.
    """
    ends = torch.zeros(degree.numel() + 1, dtype=torch.int64, device=degree.device)
    torch.cumsum(degree, 0, out=ends[1:])
    keep = torch.ones(int(ends[-1]), dtype=torch.bool, device=degree.device)
    for rows, edges in edge_chunks(ends, 1):
        row = torch.repeat_interleave(degree[rows], output_size=edges.stop - edges.start)
        if rows.start:
            row += rows.start
        wide = true_places(degree.index_select(0, row) > fanout)  # the others keep all without asking
        row = row.index_select(0, wide)
        number = wide + edges.start
        edge = number - ends.index_select(0, row) + start.index_select(0, row)
        ids = source_id.index_select(0, indices.index_select(0, edge))
        keep[number] = rng.below(rng.keyed(key, ids), degree.index_select(0, row)) < fanout
    kept = true_places(keep)
    out = torch.searchsorted(kept, ends)
    row = torch.repeat_interleave(out.diff(), output_size=kept.numel())
    return out, row, kept - ends.index_select(0, row)
