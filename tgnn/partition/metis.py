"""The `metis` partitioner: METIS through pymetis, brought within tgnn's balance caps afterwards.

pymetis passes one vertex weight to METIS, so the constraints are summed into one there; vertices are then
moved until every constraint keeps its cap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.errors import UserError
from tgnn.partition.refine import rebalance, refine

WEIGHT_SCALE = 100


def metis(
    matrix: sp.csr_matrix,
    weights: np.ndarray,
    caps: np.ndarray,
    num_parts: int,
    seed: int,
    step: Callable[[], Any],
) -> np.ndarray:
    """Cut the undirected graph `matrix` (n >= num_parts) into `num_parts` parts: int32 [n]. Arguments as in
    `label_propagation`.

    Raises UserError where pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise UserError(
            "partitioner metis: got no pymetis package, expected one; "
            "run pip install tgnn[metis], or choose --partitioner lp."
        ) from None
    dtype = pymetis.zero_copy_dtype()
    # METIS wants neither loops nor empty edges, and whole weights.
    matrix = matrix.copy()
    matrix.eliminate_zeros()
    adjacency = pymetis.CSRAdjacency(matrix.indptr.astype(dtype), matrix.indices.astype(dtype))
    edge_weights = _whole(matrix.data, dtype)
    mean = np.maximum(weights.mean(axis=1, keepdims=True), 1e-9)
    vertex_weights = _whole((weights / mean).sum(axis=0), dtype)
    options = pymetis.Options(seed=seed % 2**31)
    _, parts = pymetis.part_graph(
        num_parts, adjacency, vweights=vertex_weights, eweights=edge_weights, options=options
    )
    part_of = np.asarray(parts, dtype=np.int32)
    step()
    rebalance(matrix, part_of, weights, caps, num_parts)
    refine(matrix, part_of, weights, caps, num_parts)
    return part_of


def _whole(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Positive integers in proportion to `values`; values that are small integers already are kept."""
    if len(values) and (values == np.round(values)).all() and 1 <= values.min() and values.max() < 2**20:
        return values.astype(dtype)
    mean = max(float(values.mean()), 1e-30) if len(values) else 1.0
    return np.maximum(1, np.round(values * (WEIGHT_SCALE / mean))).astype(dtype)
