"""What the sampling kernels share: counts per row, the edges they write, launch configurations."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.sample import Sample
from tgnn.kernels.segment_triton import launch, pointers, row_holding
from tgnn.kernels.tuning import Config, KernelSpec, lookup

# Edges or rows of a program of the kernels without a tile.
BLOCK = 512
# Arguments that change from launch to launch: no variant of a kernel for the values 1 or 16.
LOOSE = ("n_rows", "n_edges", "fanout", "key", "steps")


@triton.jit(do_not_specialize=LOOSE)
def count_kernel(indptr, rows, drawable, count, n_rows, fanout, REPLACE: tl.constexpr, BLOCK: tl.constexpr):
    """How many in-edges each row gives; drawable [N] int64 or None for its in-degree.

    Example: in-degrees 0, 2, 9 and fanout 3: counts 0, 2, 3, with replacement 0, 3, 3; fanout -1: 0, 2, 9.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n_rows
    row = tl.load(rows + i, mask=live, other=0).to(tl.int64)
    if drawable is None:
        some = tl.load(indptr + row + 1, mask=live, other=0) - tl.load(indptr + row, mask=live, other=0)
    else:
        some = tl.load(drawable + row, mask=live, other=0)
    if REPLACE:
        drawn = tl.where(some > 0, fanout, 0).to(tl.int64)
    else:
        drawn = tl.minimum(some, fanout)
    tl.store(count + i, tl.where(fanout == -1, some, drawn), mask=live)


@triton.jit
def store_edges(indices, src, position, edge, place, start, picks, mask):
    """Write the edges at `picks` of rows that start at edge `start` to `place` in the three outputs."""
    number = start + picks.to(tl.int64)
    tl.store(src + place, tl.load(indices + number, mask=mask), mask=mask)
    tl.store(position + place, picks.to(tl.int64), mask=mask)
    tl.store(edge + place, number, mask=mask)


@triton.jit(do_not_specialize=LOOSE)
def fill_kernel(
    indptr, indices, rows, ends, kept, src, position, edge, n_rows, n_edges, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    """The edges at numbers `kept` [n_edges] (None: all) among the rows' in-edges, counted row after row."""
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = k < n_edges
    if kept is None:
        number = tl.where(live, k, 0)
    else:
        number = tl.load(kept + k, mask=live, other=0)
    i = row_holding(ends, number, n_rows, steps)
    start = tl.load(indptr + tl.load(rows + i).to(tl.int64))
    store_edges(indices, src, position, edge, k, start, number - tl.load(ends + i), live)


def counts(graph: list[Tensor], fanout: int, replace: bool = False, drawable: Tensor | None = None) -> Tensor:
    """Edges that every row gives: int64 [n]."""
    indptr, _, rows, _ = graph
    count = torch.empty(rows.numel(), dtype=torch.int64, device=rows.device)
    spec = COUNT if drawable is None else COUNT_DRAWABLE
    launch_flat(spec, rows.numel(), indptr, rows, drawable, count, rows.numel(), fanout, REPLACE=replace)
    return count


def running_sum(count: Tensor) -> Tensor:
    """[n + 1] int64, from 0 on."""
    out = torch.zeros(count.numel() + 1, dtype=torch.int64, device=count.device)
    torch.cumsum(count, 0, out=out[1:])
    return out


def edges_of(graph: list[Tensor], out: Tensor, n_edges: int) -> Sample:
    """A sample whose edges are still to be written."""
    src = torch.empty(n_edges, dtype=graph[1].dtype, device=out.device)
    position, edge = (torch.empty(n_edges, dtype=torch.int64, device=out.device) for _ in range(2))
    indptr, _, rows, _ = graph
    degree = indptr.index_select(0, rows + 1) - indptr.index_select(0, rows)
    return Sample(out, src, position, edge, degree)


def by_flags(graph: list[Tensor], ends: Tensor, keep: Tensor | None) -> Sample:
    """The in-edges of the rows where `keep` [ends[n]] int8 is 1, or (None) all of them.

    ends [n + 1]: running sum of the rows' in-degrees, by which in-edges are counted row after row.
    """
    indptr, indices, rows, _ = graph
    kept, out = None, ends
    if keep is not None:
        kept = torch.nonzero(keep).view(-1)
        out = torch.searchsorted(kept, ends)
    n, n_edges = rows.numel(), int(ends[-1]) if kept is None else kept.numel()
    drawn = edges_of(graph, out, n_edges)
    launch_flat(
        FILL if kept is None else FILL_KEPT, n_edges, indptr, indices, rows, ends, kept, drawn.src, drawn.position,
        drawn.edge, n, n_edges, n.bit_length(),
    )  # fmt: skip
    return drawn


def launch_flat(spec: KernelSpec, number: int, *args: Any, **constants: Any) -> None:
    """Launch a kernel of `BLOCKS` over `number` rows, edges or draws."""
    config = config_of(spec, 1, args[0].device)
    launch(spec, config, (triton.cdiv(number, config.tiles["BLOCK"]),), *args, **constants)


def config_of(spec: KernelSpec, fanout: int, device: torch.device) -> Config:
    """The configuration for rows of `fanout` draws on `device`; integers of 64 bits throughout."""
    return lookup(spec, device, torch.int64, fanout, 0)


def tile_configs(elements: tuple[int, ...], warps: int) -> Any:
    """width -> tiles of so many elements of [ROWS, next power of two of the width], or one row."""

    def configs(width: int) -> tuple[Config, ...]:
        wide = triton.next_power_of_2(max(1, width))
        return tuple(
            Config({"ROWS": max(1, size // wide)}, max(warps, min(8, wide // 256)), 1) for size in elements
        )

    return configs


def spec_of(
    name: str, kernel: Any, tensors: dict[str, torch.dtype | str | None], scalars: str, constants: dict[str, Any],
    configs: Any,
) -> KernelSpec:  # fmt: skip
    """A kernel of this op. tensors: argument -> type of the elements, "index" for the type of `indices`, None for an
    argument left out; scalars: names of the others.
    """

    def signature(dtype: torch.dtype, index: torch.dtype) -> dict[str, str]:
        types = pointers({name: index if kind == "index" else kind for name, kind in tensors.items()})
        types |= {name: "i32" if name in ("fanout", "steps") else "i64" for name in scalars.split()}
        tiles = [*configs(16)[0].tiles, *constants]
        return {**types, **dict.fromkeys([*tiles, *([] if configs is BLOCKS else ["WIDTH"])], "constexpr")}

    def constants_of(width: int) -> dict[str, Any]:
        absent = {name: None for name, kind in tensors.items() if kind is None}
        wide = {} if configs is BLOCKS else {"WIDTH": triton.next_power_of_2(max(1, width))}
        return {**absent, **constants, **wide}

    return KernelSpec(name, "sample_neighbors", kernel, signature, constants_of, configs)


def BLOCKS(width: int) -> tuple[Config, ...]:
    """Configurations of the kernels over edges or rows one by one."""
    return (Config({"BLOCK": BLOCK}, 4, 1),)


WIDE, BYTE, OF_GRAPH = torch.int64, torch.int8, {"indptr": torch.int64, "indices": "index"}
OF_ROWS = {**OF_GRAPH, "rows": WIDE, "ids": WIDE}
OUTPUTS = {"out": WIDE, "src": "index", "position": WIDE, "edge": WIDE}


def _count(name: str, drawable: torch.dtype | None) -> KernelSpec:
    tensors = {"indptr": WIDE, "rows": WIDE, "drawable": drawable, "count": WIDE}
    return spec_of(name, count_kernel, tensors, "n_rows fanout", {"REPLACE": False}, BLOCKS)


def _fill(name: str, kept: torch.dtype | None) -> KernelSpec:
    outputs = {name: kind for name, kind in OUTPUTS.items() if name != "out"}
    tensors = {**OF_GRAPH, "rows": WIDE, "ends": WIDE, "kept": kept, **outputs}
    return spec_of(name, fill_kernel, tensors, "n_rows n_edges steps", {}, BLOCKS)


FILL, FILL_KEPT = _fill("sample_fill", None), _fill("sample_fill_kept", WIDE)
COUNT, COUNT_DRAWABLE = _count("sample_count", None), _count("sample_count_drawable", WIDE)
SPECS = (COUNT, COUNT_DRAWABLE, FILL, FILL_KEPT)
