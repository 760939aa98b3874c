"""tgnn's own one-file layout, an `.npz` of plain arrays: reader and writer.

Keys: `edge_index` [2, E] (source, destination) or `indptr` [N + 1] and `indices` [E] (in-edges);
`num_nodes`; `x` [N, F]; `y` [N] or [N, C] (missing: NaN or -1); `train`, `val`, `test` (boolean masks or id
lists); optionally `edge_weight` [E].
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.arrays import check_count
from tgnn.data.graph import SPLITS, Dataset, Graph
from tgnn.data.readers.npz import Npz, open_npz
from tgnn.errors import UserError, wrong

TGNN_KEYS = frozenset({"edge_index", "indptr", "indices", "num_nodes", "x", "y", "edge_weight", *SPLITS})


def read_tgnn_npz(path: Path) -> Dataset:
    """The data set of a tgnn `.npz`.

    Raises:
        UserError: unknown keys (named), no edges, no number of vertices, or arrays that do not fit together.
    """
    with open_npz(path) as arrays:
        unknown = sorted(arrays.keys - TGNN_KEYS)
        if unknown:
            known = ", ".join(sorted(TGNN_KEYS))
            raise wrong(
                str(path), f"unknown keys {', '.join(unknown)}", f"keys among {known}", "rename or drop them"
            )
        try:
            fields = {key: arrays.get(key) for key in ("x", "y", *SPLITS)}
            return Dataset(
                path.name.removesuffix(".npz"),
                _graph(arrays, _rows(fields)),
                **fields,
                options={"reader": "tgnn"},
            )
        except UserError as error:
            raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error


def _graph(arrays: Npz, rows: dict[str, int]) -> Graph:
    """The graph, from either form of its edges; `rows` of x and y."""
    by_edge, by_row = "edge_index" in arrays.keys, bool({"indptr", "indices"} & arrays.keys)
    if by_edge == by_row:
        raise wrong(
            str(arrays.path),
            f"keys {', '.join(sorted(arrays.keys))}",
            "either edge_index or indptr and indices",
            "give the edges in one of the two forms",
        )
    if by_row:
        graph = Graph.from_csr(arrays["indptr"], arrays["indices"], arrays.get("edge_weight"))
        declared = _num_nodes(arrays, rows)
        if declared not in (None, graph.num_vertices):
            raise wrong(
                "num_nodes", declared, f"{graph.num_vertices}, the rows of indptr", "correct one of them"
            )
        return graph
    num_vertices = _num_nodes(arrays, rows)
    if num_vertices is None:
        raise wrong(
            str(arrays.path),
            "edges without num_nodes, x or y",
            "the number of vertices",
            "add num_nodes, which no edge list can tell",
        )
    return Graph.from_edge_index(arrays["edge_index"], num_vertices, arrays.get("edge_weight"))


def _rows(fields: dict[str, Any]) -> dict[str, int]:
    """The rows of x and y, of those that there are."""
    given = {key: fields[key] for key in ("x", "y") if fields[key] is not None}
    return {key: len(array) for key, array in given.items() if array.ndim}


def _num_nodes(arrays: Npz, rows: dict[str, int]) -> int | None:
    """`num_nodes`, or the rows of x or y, or None."""
    if "num_nodes" not in arrays.keys:
        return next(iter(rows.values()), None)
    value = arrays["num_nodes"]
    declared = check_count(value.item() if value.size == 1 else value.shape, "num_nodes")
    for key, count in rows.items():
        if count != declared:
            raise wrong("num_nodes", declared, f"{count}, the rows of {key}", "correct one of them")
    return declared


def save_npz(dataset: Dataset, path: str | Path) -> None:
    """Write `dataset` as a tgnn `.npz`, atomically, without `name`, `options` and `original_names`."""
    path = Path(path)
    graph = dataset.graph
    arrays: dict[str, Any] = {
        "indptr": graph.indptr,
        "indices": graph.indices,
        "num_nodes": graph.num_vertices,
    }
    optional = {"edge_weight": graph.edge_weight, "x": dataset.x, "y": dataset.y}
    arrays.update({key: value for key, value in optional.items() if value is not None})
    arrays.update({split: getattr(dataset, split) for split in SPLITS})
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
