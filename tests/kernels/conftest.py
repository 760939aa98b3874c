"""Fixtures of the kernel tests: poisoned output buffers and random blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tgnn.kernels import Block
from tgnn.kernels import backend as backend_module

ABSURD_ID = 0x5A5A5A5A


def poison(buffer: torch.Tensor) -> torch.Tensor:
    """NaN in floats, an absurd id in integers, so that an element nobody wrote shows."""
    if buffer.is_floating_point():
        return buffer.fill_(float("nan"))
    return buffer.fill_(ABSURD_ID if buffer.element_size() >= 4 else 1)


@pytest.fixture(autouse=True)
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every uninitialised buffer that the code under test asks for starts poisoned."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def allocate(*args: object, _original: Callable = original, **kwargs: object) -> torch.Tensor:
            return poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, allocate)


@pytest.fixture(autouse=True)
def fresh_record() -> None:
    """`last_ran` speaks of this test only."""
    backend_module.forget_ran()


@pytest.fixture
def random_block() -> Callable[..., Block]:
    """Factory of blocks with empty rows, repeated edges and a hub; ids and positions set."""

    def make(
        n_dst: int = 7, n_src: int = 11, most: int = 4, seed: int = 0, dtype: torch.dtype = torch.int64
    ) -> Block:
        generator = torch.Generator().manual_seed(seed)
        degrees = torch.randint(0, most + 1, (n_dst,), generator=generator)
        if n_dst > 2:
            degrees[1], degrees[2] = 0, 3 * most
        indptr = torch.zeros(n_dst + 1, dtype=torch.int64)
        indptr[1:] = degrees.cumsum(0)
        n_edges = int(indptr[-1])
        indices = torch.randint(0, n_src, (n_edges,), generator=generator).to(dtype)
        position = torch.cat([torch.arange(d) for d in degrees.tolist()]) if n_dst else torch.arange(0)
        ids = torch.randperm(1000, generator=generator)[:n_dst]
        return Block(indptr=indptr, indices=indices, n_src=n_src, position=position, dst_id=ids)

    return make


@pytest.fixture
def empty_blocks() -> list[Block]:
    """Blocks without edges, without destinations, and without anything."""

    def block(n_dst: int, n_src: int) -> Block:
        none = torch.zeros(0, dtype=torch.int64)
        indptr, ids = torch.zeros(n_dst + 1, dtype=torch.int64), torch.arange(n_dst)
        return Block(indptr=indptr, indices=none, n_src=n_src, position=none, dst_id=ids)

    return [block(3, 4), block(0, 4), block(0, 0)]
