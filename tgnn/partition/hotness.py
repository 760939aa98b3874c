"""Hotness: how often vertices are input rows, measured before training, as the store keeps it.

It orders the vertices inside a part, so that a cache of the hottest rows is a prefix, and names the remote rows that
a part asks for most, so that copies of them save most of the exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tgnn.errors import wrong


@dataclass(frozen=True, eq=False)
class Hotness:
    """What presampling found, in original ids.

    `options`: how it was presampled, JSON-able. `inputs` float32 [N]: appearances of a vertex as an input row per
    step. `halo`: for each part its remote input rows, (ids int64 [h], requests per step float32 [h]), most requests
    first, ties by ascending id.
    """

    options: dict[str, Any]
    inputs: np.ndarray
    halo: list[tuple[np.ndarray, np.ndarray]]

    def require(self, num_vertices: int, num_parts: int) -> Hotness:
        """This hotness, if it is one of a graph of `num_vertices` in `num_parts` parts; else UserError."""
        got = (self.inputs.shape, len(self.halo))
        if got != ((num_vertices,), num_parts):
            raise wrong(
                "presampled hotness",
                f"{list(got[0])} vertices and {got[1]} parts",
                f"[{num_vertices}] and {num_parts}",
                "presample the graph and the parts that are written",
            )
        return self
