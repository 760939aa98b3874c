"""Multilevel weighted label propagation under balance caps: tgnn's own partitioner.

Clusters of bounded size are contracted again and again, the small graph that remains is cut by greedy growing
and hill climbing, and the cut is refined on the way back to the vertices. A second cycle contracts within the
parts that the first one found and improves them. All work on vertices and edges is vectorised; the only loops
over vertices run on the smallest graph, some hundreds of clusters. The result depends on the arguments alone.

After Meyerhenke, Sanders, Schulz, "Partitioning complex networks via size-constrained clustering" (SEA 2014),
here with several constraints at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from tgnn.partition.balance import loads
from tgnn.partition.climb import hill_climb
from tgnn.partition.clusters import cluster
from tgnn.partition.refine import cut_weight, rebalance, refine
from tgnn.partition.undirected import contract

# Clusters hold at most this fraction of a part, in every constraint: first smaller ones, which keep
# communities apart, then larger ones until few are left.
CLUSTERS_PER_PART = (64, 20)
# Contraction with one cluster size ends at this many times the least possible number of clusters,
ROUGHLY = 1.3
# or where it leaves more than this share of the vertices.
SHRINKS = 0.95
CYCLES = 2
# A larger graph is contracted once for all cycles: its own rounds cost most and gain least from repetition.
LARGE = 50_000
TRIES, TRIES_TINY, TINY = 4, 8, 200
COARSE_ROUNDS = 40


class Problem(NamedTuple):
    """What is cut: an undirected graph, its constraints [k, n], their caps [k] in a part, the number of
    parts.

    `step` is called whenever a level is done.
    """

    matrix: sp.csr_matrix
    weights: np.ndarray
    caps: np.ndarray
    num_parts: int
    step: Callable[[], Any]


def label_propagation(
    matrix: sp.csr_matrix,
    weights: np.ndarray,
    caps: np.ndarray,
    num_parts: int,
    seed: int,
    step: Callable[[], Any] = lambda: None,
    one_sided: bool = False,
) -> np.ndarray:
    """Cut the undirected graph `matrix` into `num_parts` parts: int32 [n].

    `weights` float [k, n], most important constraint first; `caps` [k] per part. A cap is passed only where
    no move found leads below it. `one_sided`: the graph is the sum of `matrix` and its transpose, and only its first
    contraction is refined; the caller refines further.
    """
    rng = np.random.default_rng(seed)
    whole = Problem(matrix, weights, caps, num_parts, step)
    contracted = _contracted(whole, None, rng) if matrix.shape[0] > LARGE else None
    problem, label = contracted or (whole, None)
    if one_sided:
        problem = problem._replace(matrix=sp.csr_matrix(problem.matrix + problem.matrix.T))
    part_of = None
    for _ in range(CYCLES):
        part_of = _cycle(problem, part_of, rng)
    if label is None:
        return part_of
    return part_of[label] if one_sided else _back(whole, part_of[label])


def _cycle(problem: Problem, part_of: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Contract to a small graph, cut it (or improve `part_of`, where there is one already), refine on the way
    back.
    """
    levels = []
    while contracted := _contracted(problem, part_of, rng):
        smaller, label = contracted
        levels.append((problem, label))
        if part_of is not None:
            coarse_part_of = np.empty(smaller.matrix.shape[0], dtype=np.int32)
            coarse_part_of[label] = part_of
            part_of = coarse_part_of
        problem = smaller
    if part_of is None:
        part_of = _first_partition(problem, rng)
    else:
        _improve(problem, part_of)
    for problem, label in reversed(levels):
        part_of = _back(problem, part_of[label])
    return part_of


def _contracted(
    problem: Problem, part_of: np.ndarray | None, rng: np.random.Generator
) -> tuple[Problem, np.ndarray] | None:
    """The problem between clusters (inside parts, where there are any), and each vertex's cluster; None when
    done.
    """
    matrix, weights, caps, num_parts, _ = problem
    n = matrix.shape[0]
    total = weights.sum(axis=1, dtype=np.float64)
    for per_part in CLUSTERS_PER_PART:
        if n <= ROUGHLY * per_part * num_parts:
            continue
        limit = np.maximum(total / (per_part * num_parts), weights.max(axis=1))
        label, count = cluster(matrix, weights, limit, rng, part_of)
        if count <= SHRINKS * n:
            problem.step()
            smaller = contract(matrix, label, count)
            return problem._replace(matrix=smaller, weights=loads(label, weights, count)), label
    return None


def _back(problem: Problem, part_of: np.ndarray) -> np.ndarray:
    """A coarser graph's parts, brought within the caps and refined on this one."""
    rebalance(problem.matrix, part_of, problem.weights, problem.caps, problem.num_parts)
    refine(problem.matrix, part_of, problem.weights, problem.caps, problem.num_parts)
    problem.step()
    return part_of


def _improve(problem: Problem, part_of: np.ndarray) -> None:
    """All that can be done on the smallest graph, in place."""
    matrix, weights, caps, num_parts, _ = problem
    rebalance(matrix, part_of, weights, caps, num_parts)
    refine(matrix, part_of, weights, caps, num_parts, rounds=COARSE_ROUNDS)
    hill_climb(matrix, part_of, weights, caps, num_parts)


def _first_partition(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """The best of a few grown and improved partitions: least over the caps, then least cut."""
    matrix, weights, caps, num_parts, _ = problem
    candidates = []
    tries = TRIES_TINY if matrix.shape[0] <= TINY else TRIES
    for number in range(tries):
        part_of = _grow(problem, rng)
        _improve(problem, part_of)
        over = np.maximum(loads(part_of, weights, num_parts) / np.maximum(caps, 1e-9)[:, None] - 1, 0).sum()
        candidates.append((round(float(over), 3), cut_weight(matrix, part_of), number, part_of))
    return min(candidates, key=lambda candidate: candidate[:3])[3]


def _grow(problem: Problem, rng: np.random.Generator) -> np.ndarray:
    """Grow all parts together: the least loaded part takes the free vertex most of whose edges lead to it."""
    matrix, weights, caps, num_parts, _ = problem
    n = matrix.shape[0]
    part_of = np.full(n, -1, dtype=np.int32)
    mean = np.maximum(weights.sum(axis=1) / num_parts, 1e-9)[:, None]
    share, limit = weights / mean, caps[:, None] / mean + 1e-9
    load = np.zeros((len(weights), num_parts))
    degree = np.maximum(np.asarray(matrix.sum(axis=1)).ravel(), 1e-9)
    # A little noise decides among vertices that have no edge to the part at all.
    affinity = 1e-6 * rng.random((num_parts, n))
    taken = np.zeros(n, dtype=bool)
    for _ in range(n):
        part = int(load.sum(axis=0).argmin())
        fits = (load[:, part, None] + share <= limit).all(axis=0)
        # What does not fit comes last; the repair of the caps deals with it.
        score = np.where(taken, -3.0, np.where(fits, affinity[part], affinity[part] - 2))
        chosen = int(score.argmax())
        part_of[chosen], taken[chosen] = part, True
        load[:, part] += share[:, chosen]
        low, high = matrix.indptr[chosen], matrix.indptr[chosen + 1]
        neighbours = matrix.indices[low:high]
        affinity[part, neighbours] += matrix.data[low:high] / degree[neighbours]
    return part_of
