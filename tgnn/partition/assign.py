"""Decides which part every vertex goes to.

What is balanced, most important first: training vertices (the seeds a rank starts from), in-edges (the work
it does), vertices (the rows it stores), validation and test vertices. Within those caps the partitioners `lp`
and `metis` cut few edges; `random` cuts many, needs almost no memory, and balances everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from tgnn.errors import wrong
from tgnn.partition.balance import part_caps
from tgnn.partition.edge_factors import EdgeFactors
from tgnn.partition.label_propagation import LARGE, label_propagation
from tgnn.partition.metis import metis
from tgnn.partition.refine import rebalance, refine
from tgnn.partition.undirected import Mirrored, Undirected, sketch, undirected

METHODS = ("lp", "metis", "random")
SLACK = 1.05
MOST_EMPTY_PARTS = 1024
SLACK_EVALUATION = 1.10
# Weights that are given are estimates of work to come, whose error must fit below SLACK as well.
SLACK_GIVEN = 1.04
# Of each row of a large graph so many entries are enough to find its communities; the last refinement sees all.
SKETCH_ENTRIES = 8


def assign(
    data: Any,
    num_parts: int,
    method: str = "lp",
    seed: int = 0,
    *,
    train: np.ndarray | None = None,
    val: np.ndarray | None = None,
    test: np.ndarray | None = None,
    vertex_weight: np.ndarray | None = None,
    edge_weight: np.ndarray | EdgeFactors | None = None,
    progress: bool = False,
) -> np.ndarray:
    """The part of every vertex of `data`, a Graph or a Dataset (whose splits are taken unless given here):
    int32 [N].

    `num_parts` >= 1; more parts than vertices (up to 1024) leave parts empty. `method` is "lp" (label
    propagation, built in), "metis" (needs pymetis) or "random". `train`, `val`, `test`: id arrays.
    `vertex_weight` [N] or [N, k], non-negative: the work of a vertex, each column balanced by itself (default: its
    in-edges). `edge_weight`: what cutting an edge costs, [E] in in-edge order and non-negative, or
    EdgeFactors (default: 1; the graph's own edge weights play no part). The same
    arguments give the same answer everywhere. `progress` shows a bar
    where stderr is a terminal and the work lasts.

    Each balanced quantity stays within 1.05 times its mean per part (1.10 for val and test) where single
    vertices are small enough for that. Raises UserError for arguments of other shapes or values, and for
    "metis" without pymetis.
    """
    graph = getattr(data, "graph", data)
    n = graph.num_vertices
    if not isinstance(num_parts, (int, np.integer)) or num_parts < 1:
        raise wrong("number of parts", num_parts, "at least 1", "give a positive whole number")
    if num_parts > max(n, MOST_EMPTY_PARTS):
        expected = f"at most {max(n, MOST_EMPTY_PARTS)} for {n} vertices"
        raise wrong("number of parts", num_parts, expected, "give one part for each rank")
    if method not in METHODS:
        raise wrong("partitioner", method, " or ".join(METHODS), "choose one of these")
    splits = [
        given if given is not None else getattr(data, name, None)
        for given, name in ((train, "train"), (val, "val"), (test, "test"))
    ]
    kind = _kinds(n, splits)
    if num_parts == 1:
        return np.zeros(n, dtype=np.int32)
    if method == "random":
        return _random(kind, num_parts, seed)
    weights, caps = _constraints(graph, kind, _checked_weight(vertex_weight, n, "vertex_weight"), num_parts)
    if not isinstance(edge_weight, EdgeFactors):
        edge_weight = _checked_weight(edge_weight, graph.num_edges, "edge_weight", most_axes=1)
    matrix = undirected(graph, edge_weight)
    hidden = None if progress else True
    with tqdm(desc=f"partitioning ({method})", unit=" levels", leave=False, delay=2, disable=hidden) as bar:
        return _cut(matrix, weights, caps, kind, num_parts, method, seed, bar.update)


def estimated_bytes(num_vertices: int, num_edges: int, method: str, symmetric: bool = False) -> int:
    """About how much memory `assign` and `report` take at their peak beside the graph itself.

    `symmetric`: every edge has its reverse, which spares `lp` the undirected copy.
    """
    if method == "random":
        return 64 * num_vertices
    if method == "lp" and symmetric:
        return 160 * num_vertices + 8 * min(SKETCH_ENTRIES * num_vertices, num_edges)
    return 160 * num_vertices + (40 if method == "lp" else 72) * num_edges


def _kinds(n: int, splits: list) -> np.ndarray:
    """int8 [N]: 0 train, 1 val, 2 test, 3 none of them."""
    kind = np.full(n, 3, dtype=np.int8)
    for number, ids in reversed(list(enumerate(splits))):
        if ids is None:
            continue
        ids = np.asarray(ids)
        if ids.ndim != 1 or (ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= n)):
            name = ("train", "val", "test")[number]
            raise wrong(
                name,
                f"{ids.dtype} {list(ids.shape)}",
                f"a list of vertex ids in [0, {n})",
                "pass ids, not a mask",
            )
        kind[ids.astype(np.int64)] = number
    return kind


def _checked_weight(weight: Any, length: int, name: str, most_axes: int = 2) -> np.ndarray | None:
    if weight is None:
        return None
    weight = np.asarray(weight)
    good = weight.dtype.kind in "iufb" and 1 <= weight.ndim <= most_axes and len(weight) == length
    if not good or not np.isfinite(weight).all() or (weight.size and weight.min() < 0):
        shape = f"[{length}]" + (f" or [{length}, k]" if most_axes == 2 else "")
        raise wrong(
            name,
            f"{weight.dtype} {list(weight.shape)}",
            f"finite numbers >= 0 of shape {shape}",
            "pass one weight for each",
        )
    return weight


def _constraints(
    graph: Any, kind: np.ndarray, vertex_weight: np.ndarray | None, num_parts: int
) -> tuple[np.ndarray, np.ndarray]:
    """(weights float32 [k, N], caps [k]), most important first; what weighs nothing at all is left out."""
    work = graph.degree_in()[None] if vertex_weight is None else np.atleast_2d(vertex_weight.T)
    rows = [kind == 0, *work, np.ones(len(kind), bool), kind == 1, kind == 2]
    kept = [i for i, row in enumerate(rows) if row.any()]
    weights = np.zeros((len(kept), len(kind)), np.float32)
    for row, i in zip(weights, kept, strict=True):
        row[:] = rows[i]
    slack = np.array([SLACK] * (len(rows) - 2) + [SLACK_EVALUATION] * 2)
    if vertex_weight is not None:
        slack[1 : 1 + len(work)] = SLACK_GIVEN
    # The seeds of training are dealt as evenly as they can be: every step waits for the part with the most.
    spare = np.arange(len(rows)) > 0
    return weights, part_caps(weights, num_parts, slack[kept], spare[kept])


def _random(kind: np.ndarray, num_parts: int, seed: int) -> np.ndarray:
    """Shuffle, then deal train, val, test and other vertices out in turn: every kind is even to within one
    vertex.
    """
    order = np.random.default_rng(seed).permutation(len(kind))
    order = order[np.argsort(kind[order], kind="stable")]
    part_of = np.empty(len(kind), dtype=np.int32)
    part_of[order] = np.arange(len(kind)) % num_parts
    return part_of


def _cut(
    matrix: Undirected,
    weights: np.ndarray,
    caps: np.ndarray,
    kind: np.ndarray,
    num_parts: int,
    method: str,
    seed: int,
    step: Callable[[], Any],
) -> np.ndarray:
    """Cut the connected vertices by `method`, then deal the isolated ones to the parts that lack their kind
    most.
    """
    part_of = np.full(matrix.shape[0], -1, dtype=np.int32)
    # Self-loops weigh 0 in the undirected view, so a vertex with nothing else counts as isolated.
    has_neighbour = np.asarray(matrix.sum(axis=1)).ravel() > 0
    connected, isolated = np.flatnonzero(has_neighbour), np.flatnonzero(~has_neighbour)
    # METIS cannot leave a part empty.
    by_metis = method == "metis" and num_parts <= len(connected)
    is_sketched = not by_metis and len(connected) > LARGE
    if is_sketched:
        rows = sketch(matrix, connected, SKETCH_ENTRIES, np.random.default_rng(seed))
        part_of[connected] = label_propagation(
            rows, weights[:, connected], caps, num_parts, seed, step, one_sided=True
        )
        del rows
    elif len(connected):
        whole = matrix.to_csr() if isinstance(matrix, Mirrored) else matrix
        inner = weights
        if len(isolated):
            whole, inner = whole[connected][:, connected], weights[:, connected]
        part_of[connected] = (metis if by_metis else label_propagation)(
            whole, inner, caps, num_parts, seed, step
        )
    _deal(part_of, isolated, kind, num_parts)
    if is_sketched:
        rebalance(matrix, part_of, weights, caps, num_parts)
        refine(matrix, part_of, weights, caps, num_parts)
    return part_of


def _deal(part_of: np.ndarray, isolated: np.ndarray, kind: np.ndarray, num_parts: int) -> None:
    """Give the `isolated` vertices to the parts that lack their kind most, in place."""
    for number in range(4):
        same_kind = isolated[kind[isolated] == number]
        counted = part_of[(part_of >= 0) & ((kind == number) | (number == 3))]
        load = np.bincount(counted, minlength=num_parts)
        vertices = np.bincount(part_of[part_of >= 0], minlength=num_parts)
        shares = _level(load, vertices, len(same_kind))
        part_of[same_kind] = np.repeat(np.arange(num_parts, dtype=np.int32), shares)


def _level(load: np.ndarray, then: np.ndarray, amount: int) -> np.ndarray:
    """Share `amount` units out so that `load` [P] becomes even; of equal loads that with least `then` comes
    first.

    Returns int64 [P], which sums to `amount`.

    >>> _level(np.array([5, 1, 2]), np.zeros(3), 6).tolist()
    [0, 4, 2]
    """
    order = np.lexsort((then, load))
    ascending = load[order]
    # Raising the lowest m loads to the height of the m-th costs this much.
    cost = np.arange(len(load)) * ascending - (np.cumsum(ascending) - ascending)
    m = int(np.searchsorted(cost, amount, side="right"))
    height, rest = divmod(amount + int(ascending[:m].sum()), m)
    shares = np.zeros(len(load), dtype=np.int64)
    shares[order[:m]] = height - ascending[:m]
    shares[order[:rest]] += 1
    return shares
