"""Size-constrained label propagation: many small clusters of tightly connected vertices.

Every vertex starts as its own cluster. In a round each vertex asks for the neighbouring cluster it is most
connected to; requests are granted in order of gain as long as the cluster stays within its caps. In one round
vertices only move towards clusters of higher (random) rank, so two neighbours never just change places.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from tgnn.kernels.host import each
from tgnn.partition.balance import Requests, loads
from tgnn.partition.undirected import contract, membership, row_pieces

# Rounds end when fewer than this share of the vertices still moves.
ROUNDS, SETTLED = 8, 0.05
# Where more clusters than this share of the vertices are left, small ones are packed together.
SLOW = 0.6


def compact(label: np.ndarray) -> tuple[np.ndarray, int]:
    """Renumber labels in [0, n) to 0 .. count - 1, keeping their order: (int32 [n], count)."""
    used = np.zeros(int(label.max(initial=-1)) + 1, dtype=bool)
    used[label] = True
    return (np.cumsum(used, dtype=np.int32) - 1)[label], int(used.sum())


def cluster(
    matrix: sp.csr_matrix,
    weights: np.ndarray,
    caps: np.ndarray,
    rng: np.random.Generator,
    within: np.ndarray | None = None,
) -> tuple[np.ndarray, int]:
    """Group the vertices of `matrix` into clusters whose `weights` [k, n] stay within `caps` [k].

    `within` int [n]: only vertices of the same group may share a cluster. Returns (label int32 [n], count).
    """
    n = matrix.shape[0]
    label, count = np.arange(n, dtype=np.int32), n
    group = np.zeros(n, dtype=np.int32) if within is None else within
    for _ in range(ROUNDS):
        label_group = np.zeros(count, dtype=np.int32)
        label_group[label] = group
        wish, gain = _wishes(matrix, label, rng.random(count, dtype=np.float32), label_group)
        movers = np.flatnonzero(gain > 0)
        # One constraint at a time: each is as long as the graph.
        asked = (row[movers] for row in weights)
        room = (cap - loads(label, row[None], count)[0] for cap, row in zip(caps, weights, strict=True))
        accepted = movers[Requests(wish[movers], gain[movers]).within(asked, room)]
        label[accepted] = wish[accepted]
        label, count = compact(label)
        if len(accepted) <= SETTLED * n:
            break
    if count > SLOW * n:
        label, count = _pack(matrix, label, count, weights, caps, group, anywhere=count > 0.95 * n)
    return label, count


def _wishes(
    matrix: sp.csr_matrix, label: np.ndarray, rank: np.ndarray, label_group: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each vertex the best connected other cluster of higher rank and of its group, and what it gains
    there.

    Returns (wish int32 [n], gain float32 [n]); gain <= 0 means stay.
    """
    n = matrix.shape[0]
    wish, gain = np.zeros(n, np.int32), np.zeros(n, np.float32)
    members = membership(label, len(rank))

    def of_piece(found: tuple[int, int, sp.csr_matrix]) -> None:
        start, stop, piece = found
        best, connection, own = _best_per_row(piece @ members, label[start:stop], rank, label_group)
        wish[start:stop] = best
        gain[start:stop] = connection - own

    each(of_piece, row_pieces(matrix))
    return wish, gain


def _best_per_row(
    to_clusters: sp.csr_matrix, own_label: np.ndarray, rank: np.ndarray, label_group: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(best cluster, connection to it, connection to the own cluster) of each row; connection 0 where there
    is none.
    """
    counts = np.diff(to_clusters.indptr)
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    column, value = to_clusters.indices, to_clusters.data
    mine = own_label[row]
    own = np.zeros(len(counts), np.float32)
    at_home = column == mine
    own[row[at_home]] = value[at_home]
    # Ties are many in an unweighted graph: the higher rank wins them, by less than any weight differs.
    allowed = (rank[column] > rank[mine]) & (label_group[column] == label_group[mine])
    score = np.where(allowed, value * (1 + 1e-3 * rank[column]), 0).astype(np.float32)
    filled = np.flatnonzero(counts)
    highest = np.zeros(len(counts), np.float32)
    if len(filled):
        highest[filled] = np.maximum.reduceat(score, to_clusters.indptr[filled])
    best = np.zeros(len(counts), np.int32)
    winners = np.flatnonzero((score == highest[row]) & (score > 0))
    best[row[winners]] = column[winners]
    connection = np.zeros(len(counts), np.float32)
    connection[row[winners]] = value[winners]
    return best, connection, own


def _pack(
    matrix: sp.csr_matrix,
    label: np.ndarray,
    count: int,
    weights: np.ndarray,
    caps: np.ndarray,
    group: np.ndarray,
    anywhere: bool,
) -> tuple[np.ndarray, int]:
    """Join small clusters that have the same best connected neighbour (leaves of a hub, pieces without
    edges).

    With `anywhere` small clusters are joined whatever their neighbours are. Keeps the caps and the groups.
    """
    share = (loads(label, weights, count) / caps[:, None]).max(axis=0)
    label_group = np.zeros(count, dtype=np.int64)
    label_group[label] = group
    favourite = np.full(count, count, dtype=np.int64)
    if not anywhere:
        # Rank 1 for all but a label that nobody has: every neighbour is allowed.
        rank, nobody = np.append(np.ones(count, np.float32), 0), np.full(count, -1, dtype=np.int32)
        for start, stop, piece in row_pieces(contract(matrix, label, count)):
            best, connection, _ = _best_per_row(piece, nobody[start:stop], rank, np.zeros(count + 1, np.int8))
            favourite[start:stop] = np.where(connection > 0, best, count)
    key = label_group * (count + 1) + favourite
    small = np.flatnonzero(share <= 0.5)
    order = small[np.argsort(key[small], kind="stable")]
    # Half-cap bins: a bin starts with less than half a cap and its last member brings at most another half.
    half_caps = np.floor(2 * np.cumsum(share[order]))
    starts = (np.diff(key[order], prepend=-1) != 0) | (np.diff(half_caps, prepend=-1) != 0)
    merged = np.arange(count, dtype=np.int64)
    merged[order] = order[starts][np.cumsum(starts) - 1]
    merged, count = compact(merged)
    return merged[label], count
