"""Edge weights that are products of a number per source and a number per destination: no [E] array is needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class EdgeFactors:
    """Edge u -> v weighs `source[u] * destination[v]`, and times `edge[e]` where that is given.

    `source`, `destination` float32 [N]; `edge` float32 [E] in in-edge order, or None. All finite and >= 0.

    >>> factors = EdgeFactors(np.float32([2, 3]), np.float32([1, 5]))
    >>> factors.weights(np.array([0, 1, 2]), np.array([1, 0]))
    array([ 3., 10.], dtype=float32)
    """

    source: np.ndarray
    destination: np.ndarray
    edge: np.ndarray | None = None

    def weights(self, indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Weight of every in-edge of the CSR (indptr, indices): float32 [E]."""
        weight = np.repeat(self.destination, np.diff(indptr))
        weight *= self.source[indices]
        if self.edge is not None:
            weight *= self.edge
        return weight
