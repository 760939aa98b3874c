"""Planetoid directories (Yang et al. 2016): Cora, Citeseer and PubMed as eight files `ind.<name>.<part>`.

What the files are silent about, and what is done: row i of `tx` and `ty` belongs to line i of `test.index`,
which is not sorted; vertices in none of the matrices (15 of Citeseer) get zero features and no label;
neighbour lists hold duplicates, which are merged, and the graph is made symmetric; self-loops stay. Train
is the first rows, val the next 500, test the lines of `test.index`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from tgnn.data.edits import add_reverse_edges, merge_parallel_edges
from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.pickle_allow import expect, load_pickle
from tgnn.data.readers.text import ID, read_blocks
from tgnn.errors import wrong

_NUM_VAL = 500
_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")


def planetoid_files(folder: Path) -> list[Path]:
    """The files of a Planetoid directory, those that should be there; empty where it is no such directory."""
    graphs = sorted(folder.glob("ind.*.graph"))
    return [graphs[0].with_suffix("." + part) for part in _PARTS] if graphs else []


def read_planetoid(folder: Path) -> Dataset:
    """The data set of a Planetoid directory, with its fixed split.

    Raises:
        UserError: a file is missing or damaged, names something outside the allow-list, or the files
            disagree.
    """
    files = dict(zip(_PARTS, planetoid_files(folder), strict=True))
    for path in files.values():
        if not path.is_file():
            raise wrong(
                str(folder), f"no file {path.name}", "all eight Planetoid files", "fetch the missing one"
            )
    lists = expect(load_pickle(files["graph"]), dict, files["graph"])
    n = len(lists)
    if set(lists) != set(range(n)):
        raise wrong(
            str(files["graph"]), f"{n} vertices with other ids", f"ids 0 to {n - 1}", "fetch it again"
        )
    test = np.concatenate([block.columns[0] for block in read_blocks(files["test.index"], lambda _: [ID])])
    x = _assemble(files, "allx", "tx", test, n, sp.csr_matrix)
    one_hot = _assemble(files, "ally", "ty", test, n, np.ndarray)
    y = np.where(one_hot.sum(axis=1) > 0, one_hot.argmax(axis=1), -1)
    num_train = len(expect(load_pickle(files["y"]), np.ndarray, files["y"]))
    num_known = len(load_pickle(files["ally"]))
    val = np.arange(num_train, min(num_train + _NUM_VAL, num_known))
    name = files["graph"].name.split(".")[1]
    options = {"reader": "planetoid", "duplicates_in_file": "merged", "made_symmetric": True}
    return Dataset(
        name, _graph(lists, files["graph"]), x, y, np.arange(num_train), val, test, one_hot.shape[1], options
    )


def _graph(lists: dict[int, list[int]], path: Path) -> Graph:
    """Both directions of every listed pair, once."""
    n = len(lists)
    counts = np.array([len(expect(lists[v], list, path)) for v in range(n)], dtype=np.int64)
    neighbours = np.array([u for v in range(n) for u in lists[v]])
    if len(neighbours) and (neighbours.dtype.kind != "i" or neighbours.min() < 0 or neighbours.max() >= n):
        raise wrong(str(path), "a neighbour that is no vertex", f"ids in [0, {n})", "fetch it again")
    edges = np.stack([np.repeat(np.arange(n), counts), neighbours.astype(np.int64)])
    return add_reverse_edges(merge_parallel_edges(Graph.from_edge_index(edges, n)))


def _assemble(
    files: dict[str, Path], rest: str, of_test: str, test: np.ndarray, n: int, kind: type
) -> np.ndarray:
    """float32 [n, columns]: the rows of `rest` first, those of `of_test` at the test ids, zeros elsewhere."""
    first = expect(load_pickle(files[rest]), kind, files[rest])
    at_test = expect(load_pickle(files[of_test]), kind, files[of_test])
    shapes_fit = first.ndim == at_test.ndim == 2 and first.shape[1] == at_test.shape[1]
    if not shapes_fit or at_test.shape[0] != len(test) or first.shape[0] > n:
        raise wrong(
            f"{files[rest]} and {files[of_test].name}",
            f"shapes {first.shape} and {at_test.shape}",
            f"equal widths, at most {n} and exactly {len(test)} rows",
            "check that the files belong together",
        )
    if len(test) and (test.min() < first.shape[0] or test.max() >= n or len(np.unique(test)) != len(test)):
        raise wrong(
            str(files["test.index"]),
            f"ids {test.min()} to {test.max()}",
            f"different ids in [{first.shape[0]}, {n})",
            "check that the files belong together",
        )
    table = np.zeros((n, first.shape[1]), np.float32)
    table[: first.shape[0]] = first.toarray() if sp.issparse(first) else first
    table[test] = at_test.toarray() if sp.issparse(at_test) else at_test
    return table
