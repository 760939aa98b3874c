"""MiniBatch: what one rank needs for one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tgnn.kernels import rng
from tgnn.kernels.block import Block
from tgnn.parallel.comm import Comm
from tgnn.parallel.exchange import ExchangePlan

Stage = Callable[[str], AbstractContextManager]
"""Opens a named stage of a step's clock: `with stage("sample"): ...`."""


def no_stage(name: str) -> AbstractContextManager:
    """A clock that measures nothing."""
    return nullcontext()


@dataclass(eq=False)
class MiniBatch:
    """One rank's share of a global batch, sampled and loaded.

    Layer l reads rows `ids[l]` (the ones this rank owns), receives its halo rows by `plans[l]`, aggregates over
    `blocks[l]` and writes rows `ids[l + 1]`, which are the first of `ids[l]`; `ids[-1]` are the seeds. With a halo
    cache `ids[0]` ends with the rows of other ranks that the cache holds: `plans[0].n_local` come before them.
    """

    blocks: list[Block]
    """Input layer first. Sources of block l: the rows of `ids[l]`, then the halo rows that arrive."""
    plans: list[ExchangePlan]
    ids: list[Tensor]
    """Original ids, int64; one more entry than there are blocks."""
    x: Tensor | None
    """[len(ids[0]), F] features of the input rows. The halo rows may come behind them in memory: `room`."""
    y: Tensor | None
    """Labels of the seeds: int64 [B] or float32 [B, C]."""
    global_seeds: int
    """Seeds of the global batch, over all ranks: the loss is a sum divided by this."""
    comm: Comm
    """The ranks that exchange halo rows: this rank's group, this rank alone in data mode."""
    seed: int = 0
    epoch: int = 0
    step: int = 0
    work: dict[str, int] = field(default_factory=dict)
    """This rank's counts: seeds, edges, input_rows, feature_rows_loaded, feature_cache_rows, halo_rows,
    halo_cache_rows, exchange_bytes (of sampling)."""
    stage: Stage = no_stage
    exchange_dtype: torch.dtype | None = None
    """Number format of halo rows on the wire; None: the rows' own."""
    dst_rows: Tensor | None = None
    """Where the loader reads features in place: the rows of `x`, then the whole table [N, F], that are the input
    layer's destinations, int64 [n_dst]; `ids[0]` are the original ids of all its rows."""
    room: Tensor | None = None
    """[n_src, F] of the input layer: `x`, and room for its halo rows behind it; None where they have none."""
    ready: Any = None
    """On a GPU the event after which another stream may read the batch."""

    @property
    def seeds(self) -> Tensor:
        """Original ids of this rank's seeds, int64 [B]."""
        return self.ids[-1]

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the batch holds."""
        for block in self.blocks:
            yield from (value for value in vars(block).values() if isinstance(value, Tensor))
        yield from (plan.send_rows for plan in self.plans)
        yield from self.ids
        yield from (value for value in (self.x, self.y, self.dst_rows) if value is not None)

    def dropout_key(self, purpose: int, layer: int) -> int:
        """The key of a layer's dropout in this step; `purpose` is rng.FEATURE_DROPOUT or rng.ATTENTION_DROPOUT."""
        return rng.stream(self.seed, purpose, self.epoch, self.step, layer)
