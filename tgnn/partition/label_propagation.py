"""Multilevel weighted label propagation under balance caps: tgnn's own partitioner.

Clusters of bounded size are contracted again and again, the small graph that remains is cut by greedy
growing, and the cut is refined on the way back to the vertices. All work on vertices and edges is vectorised;
the only loop runs over the clusters of the smallest graph, some hundreds. The result depends on the graph and
the seed alone.

After Meyerhenke, Sanders, Schulz, "Partitioning complex networks via size-constrained clustering" (SEA 2014),
with several constraints.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from tgnn.partition.balance import loads
from tgnn.partition.climb import hill_climb
from tgnn.partition.clusters import cluster
from tgnn.partition.refine import cut_weight, rebalance, refine
from tgnn.partition.undirected import contract

CLUSTERS_PER_PART = 64
STOP = 4
TRIES = 4
CYCLES = 2
MAX_LEVELS = 40


def label_propagation(
    matrix: sp.csr_matrix, weights: np.ndarray, caps: np.ndarray, num_parts: int, seed: int
) -> np.ndarray:
    """Cut the undirected graph `matrix` into `num_parts` parts: int32 [n].

    `weights` float [k, n], most important constraint first; `caps` [k] per part. A cap may be passed where
    nothing else is possible.
    """
    rng = np.random.default_rng(seed)
    part_of = None
    for _ in range(CYCLES):
        part_of = _cycle(matrix, weights, caps, num_parts, rng, part_of)
    return part_of


def _cycle(matrix, weights, caps, num_parts, rng, part_of) -> np.ndarray:
    """Contract to a small graph, cut it or improve the cut `part_of` that is there already, and refine on the way back."""
    levels = []
    total = weights.sum(axis=1, dtype=np.float64)
    for _ in range(MAX_LEVELS):
        n = matrix.shape[0]
        if n <= STOP * CLUSTERS_PER_PART * num_parts:
            break
        cluster_caps = np.maximum(total / (CLUSTERS_PER_PART * num_parts), weights.max(axis=1))
        label, count = cluster(matrix, weights, cluster_caps, rng, part_of)
        if count > 0.98 * n:
            break
        levels.append((matrix, weights, label))
        if part_of is not None:
            coarse = np.empty(count, dtype=np.int32)
            coarse[label] = part_of
            part_of = coarse
        matrix, weights = contract(matrix, label, count), loads(label, weights, count)
    if part_of is None:
        part_of = _first_partition(matrix, weights, caps, num_parts, rng)
    else:
        _improve(matrix, part_of, weights, caps, num_parts)
    while levels:
        matrix, weights, label = levels.pop()
        part_of = part_of[label]
        rebalance(matrix, part_of, weights, caps, num_parts)
        refine(matrix, part_of, weights, caps, num_parts)
    return part_of


def _first_partition(matrix, weights, caps, num_parts, rng) -> np.ndarray:
    """The best of a few grown and refined partitions: least over the caps, then least cut."""
    best, best_score = None, None
    for _ in range(TRIES):
        part_of = _grow(matrix, weights, caps, num_parts, rng)
        _improve(matrix, part_of, weights, caps, num_parts)
        excess = np.maximum(loads(part_of, weights, num_parts) / np.maximum(caps, 1e-9)[:, None] - 1, 0).sum()
        score = (round(float(excess), 3), cut_weight(matrix, part_of))
        if best_score is None or score < best_score:
            best, best_score = part_of, score
    return best


def _improve(matrix, part_of, weights, caps, num_parts) -> None:
    rebalance(matrix, part_of, weights, caps, num_parts)
    refine(matrix, part_of, weights, caps, num_parts, rounds=40)
    hill_climb(matrix, part_of, weights, caps, num_parts)


def _grow(matrix, weights, caps, num_parts, rng) -> np.ndarray:
    """Grow all parts together: the least loaded part takes the free cluster that belongs to it most."""
    n = matrix.shape[0]
    part_of = np.full(n, -1, dtype=np.int32)
    mean = np.maximum(weights.sum(axis=1) / num_parts, 1e-9)
    share = weights / mean[:, None]
    load = np.zeros((len(weights), num_parts))
    degree = np.maximum(np.asarray(matrix.sum(axis=1)).ravel(), 1e-9)
    # A little noise decides among clusters that are not connected to the part at all.
    affinity = 1e-6 * rng.random((num_parts, n))
    taken = np.zeros(n, dtype=bool)
    limit = (caps / mean)[:, None] + 1e-9
    for _ in range(n):
        part = int(load.sum(axis=0).argmin())
        fits = (load[:, part, None] + share <= limit).all(axis=0)
        score = np.where(taken, -2.0, np.where(fits, affinity[part], affinity[part] - 1))
        chosen = int(score.argmax())
        part_of[chosen], taken[chosen] = part, True
        load[:, part] += share[:, chosen]
        low, high = matrix.indptr[chosen], matrix.indptr[chosen + 1]
        neighbours = matrix.indices[low:high]
        affinity[part, neighbours] += matrix.data[low:high] / degree[neighbours]
    return part_of
