"""Seeded graphs made here: communities to learn on, R-MAT to measure on, small ones drawn by hand to test on.

Every generator is a pure function of its arguments through numpy's PCG64.
"""

from __future__ import annotations

import numpy as np

from tgnn.data.edits import merge_parallel_edges, remove_self_loops
from tgnn.data.graph import Dataset, Graph
from tgnn.errors import wrong

_CHUNK = 1 << 20


def sbm(
    num_vertices: int = 8_000,
    seed: int = 0,
    *,
    num_classes: int = 8,
    num_communities: int = 40,
    pairs_per_vertex: float = 8.0,
    inside: float = 0.8,
    pareto: float = 2.5,
    weight_cap: float = 30.0,
    num_features: int = 32,
    signal: float = 1.5,
    name: str = "sbm",
    train_share: float = 0.5,
) -> Dataset:
    """Degree-corrected communities with noisy features: easy with the graph, hard without.

    A vertex lies in a random community, and communities are dealt to classes in turn. `pairs_per_vertex` x N
    pairs are drawn, the first end proportional to a Pareto weight, the second likewise but `inside` of the
    time within the first one's community; they are made symmetric and merged, without loops. Features are a
    class vector of length `signal` plus standard normal noise in each column. At the defaults a linear
    model on the features is right for about half the vertices, a 2-layer SAGE for more than nine in ten.

    Args:
        num_vertices: N, at least 2.
        seed: of PCG64.
        num_classes, num_communities: at most num_communities classes are met.
        pairs_per_vertex: half the mean degree, before merging.
        inside: share of pairs within a community.
        pareto, weight_cap: shape of the degree weights (P(weight > t) = t^-pareto, from 1 up to the cap).
        num_features: F.
        signal: length of the class vectors; the noise has standard deviation 1 in every column.
        train_share: share of training vertices; the rest is halved into val and test.
        name: the data set's.

    Returns:
        Dataset with x float32 [N, F], y int64 [N], random train, val and test.
    """
    rng = _generator(seed)
    _at_least(num_vertices, 2, name)
    community = rng.integers(0, num_communities, num_vertices)
    weight = np.minimum(1.0 + rng.pareto(pareto, num_vertices), weight_cap)
    num_pairs = int(pairs_per_vertex * num_vertices)
    source, destination = _community_pairs(community, weight, num_pairs, inside, rng)
    y = community % num_classes
    x = _noisy_features(y, num_classes, num_features, signal, rng)
    order = rng.permutation(num_vertices)
    first, second = (int(share * num_vertices) for share in (train_share, (1 + train_share) / 2))
    return Dataset(
        name,
        _symmetric_simple(source, destination, num_vertices),
        x,
        y,
        order[:first],
        order[first:second],
        order[second:],
        num_classes,
        {"generator": name, "num_vertices": num_vertices, "generator_seed": seed},
    )


def _noisy_features(
    y: np.ndarray, num_classes: int, num_features: int, signal: float, rng: np.random.Generator
) -> np.ndarray:
    """A class vector of length `signal` plus standard normal noise: float32 [N, F]."""
    centres = rng.standard_normal((num_classes, num_features))
    centres *= signal / np.linalg.norm(centres, axis=1, keepdims=True)
    x = rng.standard_normal((len(y), num_features), dtype=np.float32)
    x += centres.astype(np.float32)[y]
    return x


def community(num_vertices: int = 200_000, seed: int = 0, *, num_features: int = 128) -> Dataset:
    """The larger community graph that exchange volumes are measured on: `sbm` with other numbers.

    At the default size 400 communities, 2.5M pairs, 85 % inside, weights with exponent 2.2 capped at 300:
    some 4.7M directed edges, largest degree about a thousand; 10 % training vertices. Other sizes keep the
    size of a community.
    """
    return sbm(
        num_vertices,
        seed,
        num_classes=16,
        num_communities=max(1, num_vertices // 500),
        pairs_per_vertex=12.5,
        inside=0.85,
        pareto=2.2,
        weight_cap=300.0,
        num_features=num_features,
        name="community",
        train_share=0.1,
    )


def rmat(
    scale: int = 18,
    edge_factor: int = 15,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    seed: int = 0,
    *,
    num_features: int = 128,
    num_classes: int = 16,
    train_share: float = 0.1,
) -> Dataset:
    """An R-MAT graph (Chakrabarti et al. 2004): skewed degrees, no structure to learn; for measuring.

    2^scale vertices, edge_factor x 2^scale draws, made symmetric, merged, without loops; at scale 18 some
    7.2M edges. Features and labels are random; training vertices are a random share of those that are not
    isolated, the rest of those is halved into val and test.

    Args:
        scale: 1 to 30.
        edge_factor: draws per vertex.
        a, b, c: probabilities of the upper left, upper right and lower left quadrant.
        seed: of PCG64.
        num_features, num_classes: of the random features and labels.
        train_share: share of non-isolated vertices in train.
    """
    if not 1 <= scale <= 30:
        raise wrong("rmat scale", scale, "1 to 30", "give the base-2 logarithm of the number of vertices")
    rng = _generator(seed)
    n = 1 << scale
    source, destination = _rmat_draws(scale, edge_factor * n, (a, b, c), rng)
    graph = _symmetric_simple(source, destination, n)
    x = rng.standard_normal((n, num_features), dtype=np.float32) if num_features else None
    y = rng.integers(0, num_classes, n)
    connected = rng.permutation(np.flatnonzero(graph.degree_in() > 0))
    first, second = (int(share * len(connected)) for share in (train_share, (1 + train_share) / 2))
    return Dataset(
        "rmat",
        graph,
        x,
        y,
        connected[:first],
        connected[first:second],
        connected[second:],
        num_classes,
        {"generator": "rmat", "scale": scale, "edge_factor": edge_factor, "generator_seed": seed},
    )


def ring(num_vertices: int = 10, num_rings: int = 1, *, num_features: int = 4, seed: int = 0) -> Dataset:
    """`num_rings` separate directed rings of equal size: vertex i sends to i + 1 of its ring.

    Labels alternate 0, 1; vertices go to train, val, test in turn.
    """
    if num_rings < 1 or num_vertices < num_rings or num_vertices % num_rings:
        raise wrong(
            "ring", f"{num_vertices} vertices in {num_rings} rings", "rings of equal size", "change either"
        )
    ids = np.arange(num_vertices)
    size = num_vertices // num_rings
    following = ids // size * size + (ids + 1) % size
    graph = Graph.from_edge_index(np.stack([ids, following]), num_vertices)
    x = _generator(seed).standard_normal((num_vertices, num_features), dtype=np.float32)
    options = {"generator": "ring", "num_vertices": num_vertices, "num_rings": num_rings}
    return Dataset("ring", graph, x, ids % 2, ids[0::3], ids[1::3], ids[2::3], min(2, num_vertices), options)


# source -> destination; one line per destination.
_HAND_DRAWN = (
    ((1, 2, 2, 5), 0),
    ((0, 0, 0, 3, 7), 1),  # three parallel edges 0 -> 1
    ((0, 2, 9), 2),  # a self-loop
    ((2, 8), 3),
    ((0, 1, 2, 3, 5, 6, 7, 8, 9, 10), 4),  # the hub
    ((4, 4, 6), 5),
    ((10,), 6),
    ((4, 5, 6, 8), 7),
    ((7,), 8),
    ((3, 4, 8), 9),
)  # 10 has out-edges only, 11 none at all


def hand_drawn(with_weights: bool = False, num_features: int = 5) -> Dataset:
    """A directed graph of 12 vertices, drawn by hand so that most oddities occur.

    Parallel edges (0 -> 1 three times, 2 -> 0 and 4 -> 5 twice), a self-loop (2), a hub (4, in-degree 10), a
    vertex without in-edges (10), an isolated last vertex (11), an unlabelled vertex (9). 3 classes; train
    0 1 2 4 5 10 11, val 3 6, test 7 8.

    Args:
        with_weights: give edge e of the canonical order the weight 0.5 + (e mod 4) / 4.
        num_features: F; features are fixed numbers in (-1, 1).
    """
    ends = [(u, v) for sources, v in _HAND_DRAWN for u in sources]
    edges = np.array(ends, dtype=np.int64).T
    weight = 0.5 + np.arange(edges.shape[1]) % 4 / 4 if with_weights else None
    graph = Graph.from_edge_index(edges, 12, weight)
    x = np.sin(1.0 + np.arange(12 * num_features)).reshape(12, num_features)
    y = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, -1, 1, 0])
    splits = ([0, 1, 2, 4, 5, 10, 11], [3, 6], [7, 8])
    return Dataset("hand-drawn", graph, x, y, *splits, num_classes=3, options={"generator": "hand-drawn"})


# Zachary 1977, vertices from 0: each one's friends with a higher number.
_KARATE = (
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31),
    (2, 3, 7, 13, 17, 19, 21, 30),
    (3, 7, 8, 9, 13, 27, 28, 32),
    (7, 12, 13),
    (6, 10),
    (6, 10, 16),
    (16,),
    (),
    (30, 32, 33),
    (33,),
    (),
    (),
    (),
    (33,),
    (32, 33),
    (32, 33),
    (),
    (),
    (32, 33),
    (33,),
    (32, 33),
    (),
    (32, 33),
    (25, 27, 29, 32, 33),
    (25, 27, 31),
    (31,),
    (29, 33),
    (33,),
    (31, 33),
    (32, 33),
    (32, 33),
    (32, 33),
    (33,),
)
_KARATE_INSTRUCTOR = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 19, 21)


def karate() -> Dataset:
    """Zachary's karate club: 34 members, 78 friendships (156 edges), the faction each joined as label.

    Class 0 is the instructor's (vertex 0), class 1 the officer's (vertex 33), as in networkx. Features are
    the identity; train is the two leaders, 0 and 33, and of the rest even ids are val, odd ones test.
    """
    pairs = np.array([(u, v) for u, friends in enumerate(_KARATE) for v in friends], dtype=np.int64).T
    graph = Graph.from_edge_index(np.concatenate([pairs, pairs[::-1]], axis=1), 34)
    y = np.ones(34, np.int64)
    y[list(_KARATE_INSTRUCTOR)] = 0
    rest = np.arange(1, 33)
    splits = ([0, 33], rest[rest % 2 == 0], rest[rest % 2 == 1])
    return Dataset("karate", graph, np.eye(34), y, *splits, num_classes=2, options={"generator": "karate"})


def _generator(seed: int) -> np.random.Generator:
    """PCG64, the one generator used here: its stream is fixed across numpy versions."""
    return np.random.Generator(np.random.PCG64(seed))


def _at_least(num_vertices: int, least: int, name: str) -> None:
    """Refuse a graph too small to make."""
    if num_vertices < least:
        raise wrong(f"{name} vertices", num_vertices, f"at least {least}", "give a larger size")


def _symmetric_simple(source: np.ndarray, destination: np.ndarray, num_vertices: int) -> Graph:
    """Both directions of every pair, once, without loops."""
    edges = np.stack([np.concatenate([source, destination]), np.concatenate([destination, source])])
    return remove_self_loops(merge_parallel_edges(Graph.from_edge_index(edges, num_vertices)))


def _community_pairs(
    community: np.ndarray, weight: np.ndarray, num_pairs: int, inside: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends int64 [num_pairs] of pairs drawn by weight, `inside` of them within a community."""
    order = np.argsort(community, kind="stable")
    edge_of = np.concatenate([[0.0], np.cumsum(weight[order])])
    group_start = np.searchsorted(community[order], np.arange(community.max() + 2))
    first = _draw_between(edge_of, np.zeros(num_pairs), edge_of[-1], rng)
    group = community[order[first]]
    within = rng.random(num_pairs) < inside
    low = np.where(within, edge_of[group_start[group]], 0.0)
    high = np.where(within, edge_of[group_start[group + 1]], edge_of[-1])
    return order[first], order[_draw_between(edge_of, low, high, rng)]


def _draw_between(
    edge_of: np.ndarray, low: np.ndarray, high: np.ndarray | float, rng: np.random.Generator
) -> np.ndarray:
    """Index of the cumulative-weight interval that a uniform number in [low, high) falls in."""
    point = low + rng.random(len(low)) * (high - low)
    return np.minimum(np.searchsorted(edge_of, point, side="right") - 1, len(edge_of) - 2)


def _rmat_draws(
    scale: int, num_draws: int, quadrants: tuple[float, float, float], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Both ends int64 [num_draws], one bit per level, in chunks so that memory stays bounded."""
    a, b, c = quadrants
    source, destination = np.zeros(num_draws, np.int64), np.zeros(num_draws, np.int64)
    for start in range(0, num_draws, _CHUNK):
        part = slice(start, min(start + _CHUNK, num_draws))
        of, to = source[part], destination[part]  # views
        where = np.empty(len(of))
        for _ in range(scale):
            rng.random(out=where)
            lower = where >= a + b
            right = where >= a
            right ^= lower  # a <= where < a + b
            right |= where >= a + b + c
            of <<= 1
            of |= lower
            to <<= 1
            to |= right
    return source, destination
