"""A graph as `scipy.sparse.save_npz` writes its adjacency matrix: a stored A[i, j] != 0 is an edge i -> j.

The matrix declares N by its size. Its entries are the edge weights, unless every one is 1 or none are wanted.
"""

from __future__ import annotations

from pathlib import Path

from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.npz import load_sparse
from tgnn.data.readers.sidecar import read_features, read_labels
from tgnn.errors import UserError, wrong

SPARSE_KEYS = frozenset({"format", "shape", "data"})


def read_sparse_matrix(
    path: Path,
    *,
    delimiter: str = "auto",
    weight_column: int | None = None,
    feature_file: Path | None = None,
    label_file: Path | None = None,
) -> Dataset:
    """A data set from a sparse matrix and the files beside it; see `DataOptions` for the arguments.

    Raises:
        UserError: a damaged file, a matrix that is not square, or files of another number of vertices.
    """
    if weight_column:
        got = f"{weight_column} for {path.name}, a sparse matrix"
        raise wrong("--weight-column", got, "0 for no weights", "leave it out: the entries are the weights")
    matrix = load_sparse(path).tocoo()
    weighted = weight_column is None and bool(((matrix.data != 0) & (matrix.data != 1)).any())
    x = None if feature_file is None else read_features(feature_file)
    try:
        graph = Graph.from_scipy(matrix, with_weights=weighted)
        y = None if label_file is None else read_labels(label_file, delimiter).spread(graph.num_vertices)
        options = {"reader": "sparse-matrix", "weighted": weighted}
        return Dataset(path.name.removesuffix(".npz"), graph, x, y, options=options)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
