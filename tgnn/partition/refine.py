"""Improves a partition in vectorised rounds: first back within the balance caps, then fewer cut edges."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp

from tgnn.kernels.host import each, share
from tgnn.partition.balance import EPSILON, Requests, loads
from tgnn.partition.rows import row_chunks
from tgnn.partition.undirected import Mirrored, Undirected, entries_of, row_pieces, spans

CHUNK_CONNECTIONS = 1 << 19
REFINE_ROUNDS = 12
BALANCE_ROUNDS = 30
# Up to this many parts a table of an entry per vertex and part is worth its memory.
MOST_TABLE_PARTS = 8


class Connections:
    """Each vertex's weight of edges to every part, as vertices move.

    A table is kept and brought up to date where few parts allow one; else the weights are counted anew each time.
    """

    def __init__(self, matrix: Undirected, part_of: np.ndarray, num_parts: int) -> None:
        self.matrix, self.part_of, self.num_parts = matrix, part_of, num_parts
        keeps = isinstance(matrix, Mirrored) and num_parts <= MOST_TABLE_PARTS
        self._table = matrix.to_parts(part_of, num_parts) if keeps else None

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Runs of rows to look at one by one, as `spans` gives them."""
        return spans(self.matrix.indptr, share(CHUNK_CONNECTIONS), width=self.num_parts)

    def of(self, run: tuple[int, int, int, int]) -> tuple[int, int, np.ndarray]:
        """(start, stop, float [stop - start, P]) of a run."""
        start, stop, low, high = run
        if self._table is not None:
            return start, stop, self._table[start:stop]
        matrix = self.matrix
        degrees, neighbours = np.diff(matrix.indptr[start : stop + 1]), matrix.indices[low:high]
        if isinstance(matrix, Mirrored):
            data = matrix.values(np.repeat(np.arange(start, stop), degrees), neighbours)
        else:
            data = matrix.data[low:high]
        return start, stop, _to_parts(degrees, neighbours, data, self.part_of, self.num_parts)

    def move(self, rows: np.ndarray, target: np.ndarray) -> None:
        """Put `rows` into the parts `target`, in `part_of` too."""
        left = self.part_of[rows]
        self.part_of[rows] = target
        if self._table is not None:
            self.matrix.follow(self._table, rows, left, target)


def _to_parts(
    degrees: np.ndarray, neighbours: np.ndarray, data: np.ndarray, part_of: np.ndarray, num_parts: int
) -> np.ndarray:
    """Weight of each row's edges to every part, float64 [rows, P], from the rows' degrees and their edges in
    order.
    """
    rows = np.arange(len(degrees), dtype=np.int64)
    keys = np.repeat(rows * num_parts, degrees) + part_of[neighbours]
    return np.bincount(keys, weights=data, minlength=len(rows) * num_parts).reshape(len(rows), num_parts)


def cut_weight(matrix: sp.csr_matrix, part_of: np.ndarray) -> float:
    """Weight of the undirected edges between parts."""
    total = 0.0
    # In pieces of a fixed size: their number decides how the sum is rounded.
    for start, stop, piece in row_pieces(matrix, CHUNK_CONNECTIONS):
        own = np.repeat(part_of[start:stop], np.diff(piece.indptr))
        total += float(piece.data[own != part_of[piece.indices]].sum(dtype=np.float64))
    return total / 2


def refine(
    matrix: Undirected,
    part_of: np.ndarray,
    weights: np.ndarray,
    caps: np.ndarray,
    num_parts: int,
    rounds: int = REFINE_ROUNDS,
) -> None:
    """Move vertices to the part they are most connected to, in place, for as long as that cuts less and fits
    the caps.

    Rounds alternate between moves to higher and to lower parts, so neighbours never just change places. A
    part that is over a cap already takes nothing more of it.
    """
    idle, connections = 0, Connections(matrix, part_of, num_parts)
    for number in range(rounds):
        upwards = number % 2 == 0
        room = np.maximum(caps[:, None] - loads(part_of, weights, num_parts), 0)
        movers, target, gain = _wishes(connections, weights, room, upwards)
        accepted = Requests(target, gain).within(weights[:, movers], room)
        connections.move(movers[accepted], target[accepted])
        idle = idle + 1 if len(accepted) <= len(part_of) // 2000 else 0
        if idle == 2:
            break


def _wishes(
    connections: Connections, weights: np.ndarray, room: np.ndarray, upwards: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(vertices, target part, gain) of all moves in one direction that cut less and fit on their own."""
    parts = np.arange(connections.num_parts)

    def of_run(run: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start, stop, to_parts = connections.of(run)
        own = connections.part_of[start:stop, None]
        own_value = np.take_along_axis(to_parts, own.astype(np.int64), axis=1)
        gain = np.where((parts > own) if upwards else (parts < own), to_parts - own_value, 0)
        rows = np.flatnonzero(gain.max(axis=1) > 0)
        gain = np.where(_fits(weights[:, start + rows], room), gain[rows], 0)
        target = gain.argmax(axis=1)
        best = gain[np.arange(len(rows)), target]
        good = best > 0
        return start + rows[good], target[good], best[good]

    found = each(of_run, connections.runs())
    return tuple(np.concatenate(column) for column in zip(*found, strict=True))


def _fits(weights: np.ndarray, room: np.ndarray) -> np.ndarray:
    """bool [m, P]: whether a vertex fits into a part by itself, in every constraint."""
    fits = np.ones((weights.shape[1], room.shape[1]), dtype=bool)
    for row, free in zip(weights, room, strict=True):
        fits &= (row[:, None] <= free + EPSILON) | (row[:, None] == 0)
    return fits


def rebalance(
    matrix: Undirected, part_of: np.ndarray, weights: np.ndarray, caps: np.ndarray, num_parts: int
) -> None:
    """Move vertices out of parts that are over a cap, in place, where it costs the least cut per weight.

    Constraints are repaired one after the other, most important first: a repair keeps the caps repaired
    before it and may break the later ones, which come next. Where a cap cannot be kept, the lowest one that
    can is sought.
    """
    for constraint in range(len(weights)):
        _repair_constraint(matrix, part_of, weights[: constraint + 1], caps[: constraint + 1], num_parts)


def _repair_constraint(
    matrix: Undirected, part_of: np.ndarray, weights: np.ndarray, caps: np.ndarray, num_parts: int
) -> None:
    """Bring the last of `weights` within its cap without breaking the others' caps, or as low as can be."""
    allowed = caps.astype(np.float64)
    reached = np.inf
    unreached = caps[-1]
    for _ in range(BALANCE_ROUNDS):
        moved = _repair(matrix, part_of, weights, allowed, num_parts)
        highest = np.bincount(part_of, weights=weights[-1], minlength=num_parts).max()
        if highest <= caps[-1] + EPSILON:
            return
        if highest <= allowed[-1] + EPSILON or not moved:
            # Halve the gap between what was reached and what was not.
            unreached = unreached if highest <= allowed[-1] + EPSILON else allowed[-1]
            reached = min(reached, highest)
            allowed[-1] = (reached + unreached) / 2
            if reached - unreached <= max(1.0, 0.01 * caps[-1]):
                return


def _repair(
    matrix: Undirected, part_of: np.ndarray, weights: np.ndarray, caps: np.ndarray, num_parts: int
) -> int:
    """One round of moves out of the parts that are over the last constraint's cap; returns their number."""
    load = loads(part_of, weights, num_parts)
    excess = load[-1] - caps[-1]
    over = excess > EPSILON
    if not over.any():
        return 0
    room = np.maximum(caps[:, None] - load, 0)
    movable = np.flatnonzero(over[part_of] & (weights[-1] > 0))
    rows, target, gain = _cheapest_moves(matrix, part_of, weights, room, num_parts, movable)
    if len(rows) == 0:
        return 0
    source, weight = part_of[rows], weights[-1, rows]
    # Each part sheds just enough: its requests in order of cost, up to the one that ends the excess.
    shed = Requests(source, gain / weight).until(weight, excess)
    rows, target, gain, weight = rows[shed], target[shed], gain[shed], weight[shed]
    accepted = Requests(target, gain / weight).within(weights[:, rows], room)
    part_of[rows[accepted]] = target[accepted]
    return len(accepted)


def _cheapest_moves(
    matrix: Undirected,
    part_of: np.ndarray,
    weights: np.ndarray,
    room: np.ndarray,
    num_parts: int,
    vertices: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(vertices, target, gain): best move of each vertex to a part it fits into; some may fit nowhere."""
    found = []
    for rows in row_chunks(matrix.indptr, vertices, max(1, CHUNK_CONNECTIONS // num_parts)):
        local = np.arange(len(rows), dtype=np.int64)
        to_parts = _to_parts(*entries_of(matrix, rows), part_of, num_parts)
        own = part_of[rows]
        gain = to_parts - to_parts[local, own][:, None]
        fits = _fits(weights[:, rows], room)
        fits[local, own] = False
        gain = np.where(fits, gain, -np.inf)
        target = gain.argmax(axis=1)
        best = gain[local, target]
        good = best > -np.inf
        found.append((rows[good], target[good], best[good]))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    return tuple(np.concatenate(column) for column in zip(*(found or [empty]), strict=True))
