"""The least time a training step can take on a machine: its matrix products and the bytes it must move.

Both at rates that are measured in the same rounds as the steps. The products are those of the layers, forward and
backward, at the rate of one large product. The bytes are those that no implementation avoids: every input row read
once, every in-edge's row read where it is summed (and its gradient, above layer 0, in the backward pass), every result
written; at the rate of gathering random rows of a table. No bytes are counted for sampling, activations, the loss or
the optimizer, so a step cannot reach it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgnn.kernels.block import Block
from tgnn.kernels.room import rows_with_room
from tgnn.nn.model import GNN
from tgnn.nn.products import linear
from tgnn.sampling.minibatch import MiniBatch

GATHERED_ROWS = 1 << 16


@dataclass
class Work:
    """Floating-point operations of matrix products, and bytes moved."""

    flops: float
    bytes: float


def work_of(model: GNN, batch: MiniBatch, dtype: torch.dtype) -> Work:
    """Of one step on `batch`; `dtype` is what rows are kept in."""
    flops, moved = 0.0, 0.0
    for number, (layer, block) in enumerate(zip(model.layers, batch.blocks, strict=True)):
        products, width = _products(layer, block)
        # Forward and the weights' gradient, above layer 0 the input's gradient too.
        passes = 2 if number == 0 else 3
        flops += passes * sum(2.0 * rows * layer.in_features * layer.out_features for rows in products)
        once = (block.n_edges + block.n_dst) * width * dtype.itemsize
        moved += once if number == 0 and width == layer.in_features else 2 * once
    return Work(flops, moved + batch.work["input_rows"] * batch.x.shape[1] * dtype.itemsize)


def _products(layer: torch.nn.Module, block: Block) -> tuple[list[int], int]:
    """(rows of each product of in_features x out_features, width of the rows that are aggregated)."""
    kind = type(layer).__name__
    first = kind == "GATConv" or layer.projects_first
    rows = [block.n_src if first else block.n_dst]
    width = layer.out_features if first else layer.in_features
    if kind == "GATConv":
        width = layer.heads * layer.head_features
        # Its out_features are those after heads were averaged.
        rows = [block.n_src * width // layer.out_features]
    return (rows + [block.n_dst] if kind == "SAGEConv" else rows), width


class Rates:
    """Measures what the floor is computed from: one large product, one gather of rows of `table`."""

    def __init__(
        self, table: Tensor, rows: int, width: int, dtype: torch.dtype, now: Callable[[], float]
    ) -> None:
        """The product is of [rows, columns of `table`] and [.., width] in `dtype`; `now` tells seconds."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((rows, table.shape[1]), (width, table.shape[1]))
        left, self._right = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        self._left = rows_with_room(left, rows).copy_(left)
        self._table, self._now = table, now
        count = min(GATHERED_ROWS, 4 * len(table))
        self._ids = [torch.randint(len(table), (count,), generator=generator) for _ in range(4)]
        self._turn = 0
        self.rounds: list[dict[str, float]] = []

    def once(self) -> dict[str, float]:
        """Measure each once: {"flops": per second, "bytes": per second}, kept in `rounds`."""
        start = self._now()
        linear(self._left, self._right)
        between = self._now()
        self._turn += 1
        rows = torch.index_select(self._table, 0, self._ids[self._turn % len(self._ids)])
        end = self._now()
        flops = 2.0 * self._left.numel() * len(self._right)
        moved = 2.0 * rows.numel() * rows.element_size()
        self.rounds.append({"flops": flops / (between - start), "bytes": moved / (end - between)})
        return self.rounds[-1]

    def floor(self, work: Work, last: int) -> list[dict[str, float]]:
        """Seconds of `work` in each of the last rounds: products, bytes and total."""
        found = []
        for rates in self.rounds[-last:]:
            products, moved = work.flops / rates["flops"], work.bytes / rates["bytes"]
            found.append({"products": products, "bytes": moved, "total": products + moved})
        return found
