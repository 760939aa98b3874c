"""Balance caps: how much of each constraint a part (or cluster) may hold, and moves that never break them.

A constraint is a weight per vertex (in-edges, training seeds, ...); `weights` holds them as float [k, n],
most important first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

EPSILON = 1e-6


def loads(label: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Sum of each constraint over each label: float64 [k, count]."""
    return np.stack([np.bincount(label, weights=row, minlength=count) for row in weights])


def part_caps(weights: np.ndarray, num_parts: int, slack: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """Caps [k] of one part: `slack` [k] times the mean, but room for the heaviest vertex and for the mean.

    Room for the mean is the mean rounded up or, where `spare` [k] is set, the mean and one average vertex
    more: in a small graph that is what makes a good cut possible.
    """
    mean = weights.sum(axis=1, dtype=np.float64) / num_parts
    one = mean * num_parts / np.maximum(1, np.count_nonzero(weights, axis=1))
    least = np.where(spare, mean + one, np.ceil(mean - EPSILON))
    return np.maximum.reduce([slack * mean, least, weights.max(axis=1, initial=0)])


class Requests:
    """Requests of m vertices, each for one group (a target to enter or a part to leave), ranked by gain
    inside the group.

    >>> requests = Requests(np.array([1, 0, 1]), np.array([2.0, 1.0, 3.0]))
    >>> requests.order
    array([1, 2, 0])
    >>> requests.running(np.array([6.0, 7.0, 5.0]))
    array([ 6.,  7., 12.])
    """

    def __init__(self, group: np.ndarray, gain: np.ndarray) -> None:
        self.order = np.lexsort((-gain, group))
        self.group = group[self.order]
        self._first = np.flatnonzero(np.diff(self.group, prepend=-1))
        self._lengths = np.diff(self._first, append=len(self.order))

    def running(self, ranked: np.ndarray) -> np.ndarray:
        """Running sum inside each group of weights [m] in ranked order: float64 [m]."""
        sums = np.cumsum(ranked, dtype=np.float64)
        return sums - np.repeat(sums[self._first] - ranked[self._first], self._lengths)

    def within(self, weights: Iterable[np.ndarray], room: Iterable[np.ndarray]) -> np.ndarray:
        """Which requests fit, higher gains first: indices into the requests.

        `weights` k x [m]; `room` k x [groups] is what each group may take. For every constraint the running sum
        over a group's granted requests stays within its room.
        """
        keep = np.ones(len(self.order), dtype=bool)
        for row, free in zip(weights, room, strict=True):
            weight = np.where(keep, row[self.order], 0.0)
            # What weighs nothing is not stopped by a full group; dropping others only lowers the sums of
            # earlier constraints.
            keep &= (weight == 0) | (self.running(weight) <= free[self.group] + EPSILON)
        return self.order[keep]

    def until(self, weight: np.ndarray, amount: np.ndarray) -> np.ndarray:
        """The best requests of each group up to the one whose `weight` [m] completes `amount` [groups]:
        indices.
        """
        ranked = weight[self.order]
        return self.order[self.running(ranked) - ranked < amount[self.group] - EPSILON]
