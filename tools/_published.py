"""Epoch times that GSplit's authors printed, and the graphs they are of.

Seconds: Juelin-Liu/dgl, branch spara, plot/main.ipynb: four V100 of a p3.8xlarge, global batch 1024, fanouts 15,15,15,
hidden width 256 (GAT: four heads of 64), three layers. Cross edges: experiment/simulation/plot.ipynb of its branch
distributed, read off a figure. Work per seed: dgl_groot, branch batch-loading, python/plot.ipynb, read off a figure.
Graphs: SNAP (com-Orkut and com-Friendster, edges in both directions) and OGB (papers100M, as it is directed).
"""

from __future__ import annotations

from dataclasses import dataclass, field

BATCH, FANOUTS, HIDDEN, HEADS, GPUS = 1024, (15, 15, 15), 256, 4, 4
CACHE_BYTES = 8e9
"""Per GPU: they took the best of 10, 8 and 6 GB for each system."""


@dataclass(frozen=True)
class Workload:
    """One graph as it was trained on, and seconds per epoch: (sample, load, train)."""

    name: str
    num_vertices: int
    num_edges: int
    num_features: int
    num_classes: int
    num_train: int
    scale: int
    """Base-2 logarithm of the vertices of its stand-in."""
    cross: float
    """Share of sampled edges between parts, with their own partition."""
    seconds: dict[tuple[str, str], tuple[float, float, float]]
    """By (model, mode): data is DGL's, split is GSplit's."""
    per_seed: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Input rows and edges per seed by mode, where published: in data mode at a quarter of the batch."""


WORKLOADS = (
    Workload(
        "orkut", 3_072_441, 234_370_166, 512, 16, 307_244, 18, 0.135,
        {
            ("sage", "data"): (4.06, 60.09, 9.23), ("sage", "split"): (4.32, 0.09, 14.62),
            ("gat", "data"): (4.06, 60.02, 17.15), ("gat", "split"): (4.31, 0.09, 20.70),
        },
    ),
    Workload(
        "papers100M", 111_059_956, 1_615_685_872, 128, 172, 1_207_179, 18, 0.05,
        {
            ("sage", "data"): (3.15, 8.79, 10.33), ("sage", "split"): (4.45, 2.86, 11.90),
            ("gat", "data"): (2.94, 8.56, 30.82), ("gat", "split"): (4.66, 2.40, 31.23),
        },
        {"data": (249.0, 396.0), "split": (207.0, 383.0)},
    ),
    Workload(
        "friendster", 65_608_366, 3_612_134_270, 128, 16, 6_560_836, 18, 0.20,
        {
            ("sage", "data"): (62.71, 283.40, 61.11), ("sage", "split"): (72.48, 5.03, 100.49),
            ("gat", "data"): (62.56, 284.76, 245.94), ("gat", "split"): (72.15, 4.95, 285.49),
        },
    ),
)  # fmt: skip
