"""Triton kernels of unique and DirectTable: many ids become few by hashing or direct address, the few are sorted.

Frontiers repeat their sources many times over. `unique` lets every distinct id win one slot of a hash table (open
addressing, twice as many slots as ids), and DirectTable one of its own slots; which copy of an id wins is left to
chance, the set of winners is not. Compaction and the sort that gives the order are torch's `nonzero`, `masked_select`
and `sort`: on a GPU library kernels at the speed of memory, and there is little left to sort. `position_in` stays
torch's bisection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.rng_triton import mix
from tgnn.kernels.segment_triton import launch, pointers
from tgnn.kernels.tuning import Config, KernelSpec, lookup

EMPTY = -(1 << 63)
LOOSE = ("n", "m", "mask")


@triton.jit(do_not_specialize=LOOSE)
def insert_kernel(ids, table, n, mask, BLOCK: tl.constexpr):
    """Put every distinct id into table [mask + 1] int64, which starts out EMPTY; mask + 1 a power of two above n.

    Example: ids 7, 7, 2 in 4 slots: 7 and 2 each in the first free slot from their hash on.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Lanes past the end repeat the last id, which does no harm.
    number = tl.load(ids + tl.minimum(i, n - 1)).to(tl.int64)
    slot = mix(number) & mask
    empty = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    # The loop asks for a scalar: Triton 3.6 cannot compile one that reduces a tensor to go on.
    left = tl.full((), 1, tl.int32)
    while left > 0:
        # A lane that is done meets its own id again and changes nothing.
        found = tl.atomic_cas(table + slot, empty, number)
        missed = (found != number) & (found != -0x8000000000000000)
        slot = tl.where(missed, (slot + 1) & mask, slot)
        left = tl.max(missed.to(tl.int32), 0)


@triton.jit(do_not_specialize=LOOSE)
def mark_kernel(ids, slot, flag, n, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """flag[ids[i]] = VALUE, slot[ids[i]] = i: of several i any one."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    place = tl.load(ids + i, mask=live, other=0).to(tl.int64)
    tl.store(flag + place, tl.full([BLOCK], VALUE, tl.int8), mask=live)
    tl.store(slot + place, i.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=LOOSE)
def winner_kernel(ids, slot, flag, won, n, BLOCK: tl.constexpr):
    """won[i] = 1 for the one i of every flagged id that its slot names."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    place = tl.load(ids + i, mask=live, other=0).to(tl.int64)
    named = tl.load(slot + place, mask=live, other=-1) == i.to(tl.int32)
    tl.store(won + i, (named & (tl.load(flag + place, mask=live, other=0) != 0)).to(tl.int8), mask=live)


@triton.jit(do_not_specialize=LOOSE)
def number_kernel(first, rest, slot, flag, ids, m, n, BLOCK: tl.constexpr):
    """ids = first [m], then rest [n - m]; slot[ids[i]] = i; the flags of `rest` are cleared."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    old = i < m
    kept = tl.load(first + i, mask=old, other=0).to(tl.int64)
    new = tl.load(rest + (i - m), mask=live & ~old, other=0).to(tl.int64)
    place = tl.where(old, kept, new)
    tl.store(ids + i, place, mask=live)
    tl.store(slot + place, i.to(tl.int32), mask=live)
    tl.store(flag + place, tl.zeros([BLOCK], tl.int8), mask=live & ~old)


def unique_triton(ids: Tensor) -> Tensor:
    """`unique` through a hash table (one device sync). Ids are above -2^63."""
    n = ids.numel()
    if n == 0:
        return ids.new_empty(0)
    size = triton.next_power_of_2(2 * n)
    table = torch.full((size,), EMPTY, dtype=torch.int64, device=ids.device)
    _launch(INSERT, n, ids.contiguous(), table, n, size - 1)
    return table.masked_select(table != EMPTY).sort().values.to(ids.dtype)


def number_triton(slot: Tensor, flag: Tensor, first: Tensor, others: Tensor, scans: bool) -> Tensor:
    """`DirectTable.number` (one device sync).

    slot [size] int32, flag [size] bool, all False before and after; scans: look for the rest among the flags, else
    among `others`.
    """
    first, others, flag = first.contiguous(), others.contiguous(), flag.view(torch.int8)
    m, n = first.numel(), others.numel()
    _launch(MARK, n, others, slot, flag, n, VALUE=1)
    _launch(MARK, m, first, slot, flag, m, VALUE=0)
    if scans:
        rest = torch.nonzero(flag).view(-1)
    else:
        won = torch.empty(n, dtype=torch.int8, device=flag.device)
        _launch(WINNER, n, others, slot, flag, won, n)
        rest = others.masked_select(won.view(torch.bool)).sort().values
    total = m + rest.numel()
    ids = torch.empty(total, dtype=torch.int64, device=flag.device)
    _launch(NUMBER, total, first, rest, slot, flag, ids, m, total)
    return ids


def _launch(spec: KernelSpec, n: int, *args: Tensor | int, **constants: int) -> None:
    config = lookup(spec, args[0].device, torch.int64, 1, 0)
    launch(spec, config, (triton.cdiv(n, config.tiles["BLOCK"]),), *args, **constants)


def _configs(width: int) -> tuple[Config, ...]:
    return tuple(Config({"BLOCK": size}, 4, 1) for size in (512, 256, 1024))


def _spec(
    name: str, op: str, kernel: object, tensors: dict[str, torch.dtype | str], scalars: tuple[str, ...],
    **constants: int,
) -> KernelSpec:  # fmt: skip
    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        types = pointers({name: index if kind == "index" else kind for name, kind in tensors.items()})
        return {**types, **dict.fromkeys(scalars, "i64"), **dict.fromkeys((*constants, "BLOCK"), "constexpr")}

    return KernelSpec(name, op, kernel, signature, lambda width: dict(constants), _configs)


OF_TABLE = {"slot": torch.int32, "flag": torch.int8}
INSERT = _spec(
    "unique_insert", "unique", insert_kernel, {"ids": "index", "table": torch.int64}, ("n", "mask")
)
MARK = _spec("relabel_mark", "relabel", mark_kernel, {"ids": "index", **OF_TABLE}, ("n",), VALUE=1)
WINNER = _spec(
    "relabel_winner", "relabel", winner_kernel, {"ids": "index", **OF_TABLE, "won": torch.int8}, ("n",)
)
NUMBER = _spec(
    "relabel_number", "relabel", number_kernel,
    {"first": torch.int64, "rest": "index", **OF_TABLE, "ids": torch.int64}, ("m", "n"),
)  # fmt: skip
SPECS = (INSERT, MARK, WINNER, NUMBER)
