"""Platonov et al.'s `.npz` layout (heterophilous graphs, 2023): Minesweeper, Chameleon and others.

Keys `node_features` [N, F], `node_labels` [N], `edges` [M, 2] with each undirected edge once, and
`train_masks`, `val_masks`, `test_masks` bool [splits, N]. Edges are doubled; `--split 3` takes the fourth
of the (ten) splits, the first by default.
"""

from __future__ import annotations

from pathlib import Path

from tgnn.data.edits import add_reverse_edges
from tgnn.data.graph import SPLITS, Dataset, Graph
from tgnn.data.readers.npz import open_npz
from tgnn.errors import wrong

HETEROPHILOUS_KEYS = frozenset({"node_features", "node_labels", "edges"})


def read_heterophilous(path: Path, split: int = 0) -> Dataset:
    """The data set of a heterophilous `.npz` with its split number `split`.

    Raises:
        UserError: the file is damaged, lacks a key, or has no such split.
    """
    with open_npz(path) as arrays:
        x, y, edges = arrays["node_features"], arrays["node_labels"], arrays["edges"]
        masks = {}
        for name in SPLITS:
            table = arrays[f"{name}_masks"]
            if table.ndim != 2 or not 0 <= split < len(table):
                got = f"split {split} of masks of shape {table.shape}"
                raise wrong(str(path), got, "0 up to the number of splits less one", "give another --split")
            masks[name] = table[split]
        if edges.ndim != 2 or edges.shape[1] != 2:
            raise wrong(
                str(path), f"edges of shape {edges.shape}", "(M, 2)", "check that the file is of this layout"
            )
    graph = add_reverse_edges(Graph.from_edge_index(edges.T, len(x)))
    options = {"reader": "heterophilous", "made_symmetric": True, "split": str(split)}
    return Dataset(path.name.removesuffix(".npz"), graph, x, y, **masks, options=options)
