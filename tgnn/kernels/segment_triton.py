"""Rows of a CSR on a GPU: how a launch is cut, shared by the kernels that walk over in-edges.

A launch has two kinds of lanes. Row lanes, one a row, take the first `PIECE` edges of their row: for nearly
all rows that is all of them. Window lanes, one for every `PIECE` edges of the block, take what is left of the
longer rows: piece k >= 1 of a row starts `k * PIECE` edges after its first edge, and each window of the flat
edge array holds the start of at most one such piece, because the row before it in the window would have to be
longer than `PIECE` too. A window finds its row by bisection, so there is no plan to build and nothing to
wait for, and a hub of 100,000 in-edges is worked on by 100,000 / PIECE lanes at once. A row is cut by its own
edges alone, wherever it stands in a block: its sum has the same bits in every block.

What pieces leave in a scratch buffer, a second small launch adds in their order. Slots: piece k >= 1 that
starts in window w has slot w; the first piece of a longer row, starting in window w, has slot n_windows + w.

Example: PIECE = 4, indptr = [0, 2, 11]: row 0 has edges 0-1; row 1's pieces start at edges 2, 6 and 10, in
windows 0, 1 and 2: slots 3 + 0, 1 and 2; window 0 has no later piece and does nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgnn.kernels.tuning import Config, KernelSpec, lanes_of, lookup

# Edges of a piece. Rows up to this long are one lane's work.
PIECE = 512

# Triton's name of each type that kernels take.
TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@triton.jit
def row_holding(indptr, edge, n_rows, search_steps):
    """The row that holds each of `edge`, in [0, n_edges): the last row that starts at or before it."""
    low = edge * 0
    high = low + n_rows
    for _ in range(search_steps):
        middle = (low + high) // 2
        after = tl.load(indptr + middle) <= edge
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle)
    return low


@triton.jit
def later_piece(indptr, window, n_rows, n_edges, search_steps, PIECE: tl.constexpr):
    """The piece k >= 1 that starts in each of `window` (int64): (row, start, end of row, if there is one)."""
    first = window * PIECE
    inside = first < n_edges
    row = row_holding(indptr, tl.where(inside, first, 0), n_rows, search_steps)
    begin = tl.load(indptr + row)
    end = tl.load(indptr + row + 1)
    start = begin + (first - begin + PIECE - 1) // PIECE * PIECE
    return row, start, end, inside & (start > begin) & (start < end)


@triton.jit
def lanes(indptr, n_rows, n_edges, n_row_tiles, search_steps, PIECE: tl.constexpr, ROWS: tl.constexpr):
    """What the `ROWS` lanes of this program do: (row, first edge, end, slot or -1, if there is a row)."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, ROWS)
    if tile < n_row_tiles:
        row = tile * ROWS + lane
        live = row < n_rows
        start = tl.load(indptr + row, mask=live, other=0)
        end = tl.load(indptr + row + 1, mask=live, other=0)
        n_windows = (tl.cast(n_edges, tl.int64) + PIECE - 1) // PIECE
        slot = tl.where(end - start > PIECE, n_windows + start // PIECE, -1)
    else:
        slot = (tile - n_row_tiles) * ROWS + lane
        row, start, end, live = later_piece(indptr, slot, n_rows, n_edges, search_steps, PIECE)
    stop = tl.where(live, tl.minimum(end, start + PIECE), start)
    return row, start, stop, slot, live


@triton.jit
def columns(WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """(head, column of all heads', which are there) of the second grid axis, (head, tile of columns)."""
    TILES: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    head = tl.program_id(1) // TILES
    column = tl.program_id(1) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    return head, head * WIDTH + column, column < WIDTH


@triton.jit
def store_sums(out, scratch, result, row, slot, live, at, inside, ROW_WIDTH: tl.constexpr):
    """Columns `at` of each lane's result: to out if the lane has all edges of a row, else to its slot in scratch."""
    mask = live[:, None] & inside[None, :]
    place = out + row[:, None] * ROW_WIDTH + at[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=mask & (slot < 0)[:, None])
    place = scratch + slot[:, None] * ROW_WIDTH + at[None, :]
    tl.store(place, result, mask=mask & (slot >= 0)[:, None])


@triton.jit
def load_elements(
    table, rest, u, active, at, inside, n_prefix,
    STRIDE: tl.constexpr, REST_STRIDE: tl.constexpr, ALL_INSIDE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """[A, B, len(at)]: columns `at` of row u [A, B] of `table`, from row n_prefix on of `rest`, as WIDE.

    0 where not `active` [A, B], or not `inside` [len(at)]; ALL_INSIDE: every column is.
    """
    u = u.to(tl.int64)[:, :, None]
    at = at[None, None, :]
    place = table + u * STRIDE + at
    if rest is not None:
        # Chosen element by element: a choice between row starts would hide that columns lie side by side.
        place = tl.where(u < n_prefix, place, rest + (u - n_prefix) * REST_STRIDE + at)
    mask = active[:, :, None]
    if not ALL_INSIDE:
        mask = mask & inside[None, None, :]
    return tl.load(place, mask=mask, other=0).to(WIDE)


@dataclass(frozen=True, eq=False)
class Source:
    """Rows that a kernel reads: row u is `table[rows[u]]`, or of `rest` from row `len(table)` on.

    table, rest: [n, width] in which each row is dense; rows: int32 or int64, None for the identity.
    """

    table: Tensor
    rest: Tensor | None = None
    rows: Tensor | None = None

    @property
    def n_prefix(self) -> int:
        """Rows of `table`."""
        return self.table.shape[0]

    @property
    def strides(self) -> dict[str, int]:
        """The constexpr arguments that say how far apart rows are."""
        rest = self.rest
        return {"STRIDE": self.table.stride(0), "REST_STRIDE": 0 if rest is None else rest.stride(0)}


def dense_rows(x: Tensor) -> Tensor:
    """`x` [n, ...] as [n, width] with dense rows: a view where its rows are dense already, else a copy."""
    width = prod(x.shape[1:])
    if x.dim() == 2 and width and x.stride(1) == 1 and x.stride(0) >= width:
        return x
    return x.contiguous().view(x.shape[0], width)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Cut:
    """How a CSR is cut into a launch: the scalar arguments of `lanes`."""

    n_rows: int
    n_edges: int
    piece: int

    @staticmethod
    def of(indptr: Tensor, n_edges: int) -> Cut:
        """The cut of a CSR of this `indptr`; no device sync."""
        return Cut(indptr.numel() - 1, n_edges, PIECE)

    @property
    def n_windows(self) -> int:
        """Windows that may hold later pieces: none where no row can be longer than a piece."""
        return -(-self.n_edges // self.piece) if self.n_edges > self.piece else 0

    @property
    def search_steps(self) -> int:
        """Steps of the bisection over the rows."""
        return self.n_rows.bit_length()

    def row_tiles(self, rows: int) -> int:
        """Programs of `rows` row lanes."""
        return -(-self.n_rows // rows)

    def programs(self, rows: int) -> int:
        """Programs of the launch, `rows` lanes each."""
        return self.row_tiles(rows) + -(-self.n_windows // rows)

    def scratch(self, like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer for what pieces leave; nobody clears it: what is read was written."""
        return torch.empty(2 * self.n_windows, width, dtype=dtype, device=like.device)


def config_of(spec: KernelSpec, x: Tensor, width: int, n_edges: int = 0, n_rows: int = 0) -> Config:
    """The launch configuration of `spec` on rows like `x`'s."""
    return lookup(spec, x.device, x.dtype, width, n_edges / max(1, n_rows))


def launch(spec: KernelSpec, config: Config, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first argument; a grid without programs is no launch."""
    if prod(grid) == 0:
        return
    # Multiplication and addition fuse: sums are no decisions, and no law asks for their last bit.
    warps = config.warps(lanes_of(args[0].device))
    options = {"num_warps": warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    with torch.cuda.device_of(args[0]):
        spec.kernel[grid](*args, **constants, **config.tiles, **options)


def pointers(names: Mapping[str, torch.dtype | None]) -> dict[str, str]:
    """Signature of pointer arguments: name -> type of the elements, None for an argument left out."""
    return {name: "constexpr" if dtype is None else f"*{TYPE_NAMES[dtype]}" for name, dtype in names.items()}


def row_tile_configs(width: int, edges: int) -> tuple[Config, ...]:
    """Tiles of ROWS x BLOCK_D per step, `edges` of them in flight; the warps are as many as fill one.

    A thread's 128-bit load is 4 floats, so a warp spans 128 columns. Narrower rows share a warp; wider ones
    get warps of their own, two to four to a program, so that programs are not too many.
    """
    block_d = min(256, triton.next_power_of_2(max(1, width)))
    # Four times eight rows of 128 columns spill with Triton 3.6.
    rows = {256: 2, 128: 16 // edges, 64: 4, 32: 4, 16: 8, 8: 16}.get(block_d, 32)
    warps = max(1, min(4, rows * block_d // 128))

    if width % 4 and width > 2:
        edges //= 2  # single elements and an address for each: more in flight would take too many registers

    def config(rows: int, edges: int, warps: int) -> Config:
        return Config({"ROWS": rows, "EDGES": edges, "BLOCK_D": block_d}, warps, 1)

    choices = [config(rows, edges, warps), config(rows, edges // 2, warps), config(rows, 2 * edges, warps)]
    choices += [config(max(1, rows // 4), edges, max(1, warps // 4)), config(2 * rows, edges, 2 * warps)]
    return tuple(dict((str(choice), choice) for choice in choices).values())
