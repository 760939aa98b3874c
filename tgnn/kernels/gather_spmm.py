"""gather_spmm: aggregate straight from a feature table, without a copy of the block's source rows.

    out[v] = reduce over edges u -> v of weight[u -> v] * table[rows[u]],     reduce = sum, mean, max or min

`rows` says which row of the table each source row of the block is. The table may lie in two memories, as in
`gather`. The gradient of the weight reads the table in the same way; a table that itself requires a gradient
is gathered first.

Example: edges 1 -> 0 and 2 -> 0, none into row 1, table = [[5], [7], [1], [2]], rows = [2, 3, 0]: the source
rows are [[1], [2], [5]], sum [[7], [0]].
"""

from __future__ import annotations

from torch import Tensor

from tgnn.errors import wrong
from tgnn.kernels.backend import choose
from tgnn.kernels.block import Block
from tgnn.kernels.gather import check_rest, gather, gather_torch
from tgnn.kernels.spmm import REDUCTIONS, spmm, spmm_torch


def gather_spmm(
    block: Block, table: Tensor, rows: Tensor, weight: Tensor | None = None, reduce: str = "sum",
    rest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Aggregate table rows over in-edges; differentiable in `weight`, and in `table` if there is no `rest`.

    Args:
        block: n_src sources, n_dst destinations, n_edges edges.
        table: [n, D] or [n, H, D] floating; any strides.
        rows: [n_src] int32 or int64 in [0, n), or in [0, n + n_rest): the table row of each source row.
        weight, reduce: as in `spmm`.
        rest: [n_rest, ...], the rows from n on: as in `gather`.

    Returns: [n_dst, D] or [n_dst, H, D] in the table's dtype.
    Raises: UserError when shapes do not fit or `reduce` is unknown.
    """
    _check(block, table, rows, weight, reduce)
    check_rest(table, rest)
    if table.requires_grad:
        choose("gather_spmm", table)
        return spmm(block, gather(table, rows), weight, reduce)
    if choose("gather_spmm", table) == "triton":
        from tgnn.kernels import spmm_triton

        return spmm_triton.spmm_triton(block, table, weight, reduce, rows, rest)
    return gather_spmm_torch(block, table, rows, weight, reduce, rest)


def _check(block: Block, table: Tensor, rows: Tensor, weight: Tensor | None, reduce: str) -> None:
    if reduce not in REDUCTIONS:
        expected = f"one of {', '.join(REDUCTIONS)}"
        raise wrong("gather_spmm reduce", repr(reduce), expected, "choose one of these")
    if table.dim() not in (2, 3) or not table.is_floating_point():
        got = f"{tuple(table.shape)} {table.dtype}"
        raise wrong("gather_spmm table", got, "[n, D] or [n, H, D] floating", "give one row per vertex")
    if rows.shape != (block.n_src,):
        raise wrong("gather_spmm rows", tuple(rows.shape), (block.n_src,), "give one table row per source")
    if weight is not None and weight.shape != (block.n_edges, *table.shape[1:-1]):
        expected = (block.n_edges, *table.shape[1:-1])
        do = "give one weight per edge (and head)"
        raise wrong("gather_spmm weight", tuple(weight.shape), expected, do)


def gather_spmm_torch(
    block: Block, table: Tensor, rows: Tensor, weight: Tensor | None = None, reduce: str = "sum",
    rest: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`gather_spmm` on torch's own operations, by way of a copy; the reference of the Triton path."""
    return spmm_torch(block, gather_torch(table, rows, rest), weight, reduce)
