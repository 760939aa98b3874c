"""Hill climbing on a small graph: single moves, also those that cut more for a while, and back to the best
state seen.

This is Fiduccia-Mattheyses refinement for several parts and constraints. It moves one vertex at a time, so it
is meant for the smallest graph of a multilevel partitioner, some hundreds of clusters, where it finds what
rounds of simultaneous moves cannot.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from tgnn.partition.balance import EPSILON, loads

MOST_ENTRIES = 1 << 16
PASSES = 4
PATIENCE = 60


def hill_climb(
    matrix: sp.csr_matrix, part_of: np.ndarray, weights: np.ndarray, caps: np.ndarray, num_parts: int
) -> None:
    """Lower the cut of a small graph, in place, without breaking the caps. Does nothing beyond MOST_ENTRIES
    vertices x parts.
    """
    if len(part_of) * num_parts > MOST_ENTRIES:
        return
    for _ in range(PASSES):
        state = _Climb(matrix, part_of, weights, caps, num_parts)
        if state.run() <= EPSILON:
            return


class _Climb:
    """One pass, in which every vertex moves at most once."""

    def __init__(
        self,
        matrix: sp.csr_matrix,
        part_of: np.ndarray,
        weights: np.ndarray,
        caps: np.ndarray,
        num_parts: int,
    ) -> None:
        n = len(part_of)
        self.matrix, self.part_of, self.weights, self.caps = matrix, part_of, weights, caps
        self.load = loads(part_of, weights, num_parts)
        one_hot = np.zeros((n, num_parts), dtype=np.float64)
        one_hot[np.arange(n), part_of] = 1
        self.to_parts = matrix @ one_hot
        self.open = one_hot == 0
        self.fits = np.zeros((n, num_parts), dtype=bool)
        for part in range(num_parts):
            self._update_fits(part)
        self.gain = np.full((n, num_parts), -np.inf)
        self._update_rows(np.arange(n))

    def run(self) -> float:
        """Climb, undo what came after the best state, and return how much less is cut."""
        moves: list[tuple[int, int]] = []
        total = best = 0.0
        best_length = 0
        while len(moves) - best_length <= PATIENCE:
            vertex, target = divmod(int(self.gain.argmax()), self.gain.shape[1])
            gain = float(self.gain[vertex, target])
            if gain == -np.inf:
                break
            moves.append((vertex, int(self.part_of[vertex])))
            self._move(vertex, target)
            total += gain
            if total > best + EPSILON:
                best, best_length = total, len(moves)
        for vertex, source in reversed(moves[best_length:]):
            self.part_of[vertex] = source
        return best

    def _move(self, vertex: int, target: int) -> None:
        source = int(self.part_of[vertex])
        self.part_of[vertex] = target
        self.open[vertex] = False
        self.load[:, source] -= self.weights[:, vertex]
        self.load[:, target] += self.weights[:, vertex]
        low, high = self.matrix.indptr[vertex], self.matrix.indptr[vertex + 1]
        neighbours, weight = self.matrix.indices[low:high], self.matrix.data[low:high]
        self.to_parts[neighbours, source] -= weight
        self.to_parts[neighbours, target] += weight
        own = self.part_of
        for part in (source, target):
            self._update_fits(part)
            value = self.to_parts[:, part] - self.to_parts[np.arange(len(own)), own]
            self.gain[:, part] = np.where(self.open[:, part] & self.fits[:, part], value, -np.inf)
        self._update_rows(np.append(neighbours, vertex))

    def _update_fits(self, part: int) -> None:
        room = (self.caps - self.load[:, part])[:, None]
        self.fits[:, part] = ((self.weights <= room + EPSILON) | (self.weights == 0)).all(axis=0)

    def _update_rows(self, rows: np.ndarray) -> None:
        value = self.to_parts[rows] - self.to_parts[rows, self.part_of[rows]][:, None]
        self.gain[rows] = np.where(self.open[rows] & self.fits[rows], value, -np.inf)
