"""Shchur et al.'s `.npz` layout ("Pitfalls of GNN evaluation", 2018): Amazon and Microsoft Academic graphs.

Keys `adj_data`, `adj_indices`, `adj_indptr`, `adj_shape`, the same for `attr` (or one dense `attr_matrix`),
and `labels`. As in the paper's protocol the graph is made unweighted and symmetric, (A + A^T) > 0, and
self-loops are removed. Column indices may be unsorted. There is no split: see `--split random:20,30` and
`--largest-component`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse as sp

from tgnn.data.edits import add_reverse_edges, merge_parallel_edges, remove_self_loops
from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.npz import Npz, open_npz, reading

SHCHUR_KEYS = frozenset({"adj_data", "adj_indices", "adj_indptr", "adj_shape"})


def read_shchur(path: Path) -> Dataset:
    """The data set of a Shchur `.npz`.

    Raises:
        UserError: the file is damaged, lacks a key, or its arrays are no CSR matrix.
    """
    with open_npz(path) as arrays:
        graph = Graph.from_scipy(_csr(arrays, "adj"))
        graph = add_reverse_edges(merge_parallel_edges(remove_self_loops(graph)))
        if "attr_matrix" in arrays.keys:
            x = arrays["attr_matrix"]
        else:
            x = _csr(arrays, "attr") if "attr_data" in arrays.keys else None
        options = {"reader": "shchur", "made_symmetric": True, "self_loops_in_file": "removed"}
        names = arrays.get("class_names")
        num_classes = None if names is None else len(names)
        name = path.name.removesuffix(".npz").removesuffix(".converted")
        return Dataset(name, graph, x, arrays["labels"], num_classes=num_classes, options=options)


def _csr(arrays: Npz, prefix: str) -> sp.csr_matrix:
    """A checked CSR matrix from its three arrays and shape."""
    data, indices, indptr, shape = (
        arrays[f"{prefix}_{part}"] for part in ("data", "indices", "indptr", "shape")
    )
    with reading(arrays.path):
        matrix = sp.csr_matrix((np.asarray(data), indices, indptr), shape=tuple(int(n) for n in shape))
        matrix.check_format(full_check=True)
        return matrix
