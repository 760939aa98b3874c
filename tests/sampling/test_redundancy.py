"""What data parallelism repeats: the published workload, counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tgnn.data.synthetic import rmat
from tgnn.parallel.comm import Comm
from tgnn.partition.store import write_store
from tgnn.sampling.loader import Loader

FANOUTS, GLOBAL_BATCH, RANKS = [5, 10, 15], 4096, 4


def test_data_mode_repeats_edges_and_features_on_rmat(tmp_path: Path):
    """R-MAT 2^18, 4 ranks: 1.88 times the edges and 2.87 times the feature rows of one rank (data mode samples
    without collectives, so the ranks can take their turns in one process)."""
    dataset = rmat(18, num_features=1)
    vertices = dataset.num_vertices
    whole = write_store(dataset, np.zeros(vertices, np.int32), tmp_path / "one", {}, {})
    dealt = write_store(dataset, (np.arange(vertices) % RANKS).astype(np.int32), tmp_path / "four", {}, {})

    alone = next(iter(Loader(whole, FANOUTS, GLOBAL_BATCH, prefetch=0))).work
    shares = [
        next(
            iter(
                Loader(
                    dealt,
                    FANOUTS,
                    GLOBAL_BATCH,
                    parallel="data",
                    prefetch=0,
                    comm=Comm(rank=rank, ranks=RANKS),
                )
            )
        ).work
        for rank in range(RANKS)
    ]
    total = {name: sum(share[name] for share in shares) for name in alone}
    assert alone["seeds"] == total["seeds"] == GLOBAL_BATCH
    assert abs(total["edges"] / alone["edges"] - 1.88) < 0.05
    assert abs(total["feature_rows_loaded"] / alone["feature_rows_loaded"] - 2.87) < 0.06
