"""Edge lists in text: SNAP's and other `source destination [weight]` lines, csv, each also as `.gz`.

An id is a vertex's number: N is declared by `num_vertices`, by the rows of a feature file, or by a label
file with one row for each of 0 .. N - 1, and never taken from the largest id. `relabel` is for ids with
gaps: the vertices are those of the edges and the label file, in ascending order of their ids, which
`original_names` keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tgnn.data.arrays import distinct
from tgnn.data.graph import Dataset, Graph
from tgnn.data.readers.sidecar import LabelTable, read_features, read_labels, read_split, to_rows
from tgnn.data.readers.text import ID, NUMBER, SKIP, Block, read_blocks
from tgnn.errors import wrong

TEXT_SUFFIXES = (".txt", ".csv", ".tsv", ".txt.gz", ".csv.gz", ".tsv.gz", ".gz")


def read_edge_list(
    path: Path,
    *,
    num_vertices: int | None = None,
    relabel: bool = False,
    delimiter: str = "auto",
    weight_column: int | None = None,
    feature_file: Path | None = None,
    label_file: Path | None = None,
    split_file: Path | None = None,
) -> Dataset:
    """A data set from an edge list and the files beside it; see `DataOptions` for the arguments.

    Raises:
        UserError: a line that is no edge, an id outside [0, N), no declared N, files that disagree about N,
            and whatever else is wrong with a file: each names the file, and the line where there is one.
    """
    x = None if feature_file is None else read_features(feature_file)
    labels = None if label_file is None else read_labels(label_file, delimiter)
    n = None if relabel else _declared(num_vertices, feature_file, x, labels)
    edges, weight = _read_edges(path, n, delimiter, weight_column)
    names = None
    if relabel:
        edges, names, labels = _relabel(edges, labels)
        n = _check_relabelled(len(names), num_vertices, feature_file, x)
    elif n is None:
        known = f"ids up to {edges.max()} and no number of vertices"
        raise wrong(
            str(path),
            known,
            "a declared number of vertices, since the last ones may be isolated",
            f"give --num-vertices (at least {edges.max() + 1}), --feature-file or --label-file, or --relabel",
        )
    splits = {} if split_file is None else read_split(split_file, n, names)
    options: dict[str, Any] = {"reader": "edge-list", "weighted": weight is not None}
    return Dataset(
        _stem(path),
        Graph.from_edge_index(edges, n, weight),
        x,
        None if labels is None else labels.spread(n),
        **splits,
        options=options,
        original_names=names,
    )


def _declared(given: int | None, feature_file: Path | None, x: Any, labels: LabelTable | None) -> int | None:
    """The number of vertices that the options and files tell, which must agree; None if nothing tells."""
    told = {} if given is None else {"--num-vertices": given}
    if x is not None:
        told[str(feature_file)] = x.shape[0] if x.ndim else 0
    if labels is not None and (labels.ids is None or not told) and labels.declares is not None:
        told[str(labels.path)] = labels.declares
    if len(set(told.values())) > 1:
        got = ", ".join(f"{count} vertices by {source}" for source, count in told.items())
        raise wrong("number of vertices", got, "one number", "correct the files or --num-vertices")
    return next(iter(told.values()), None)


def _check_relabelled(found: int, given: int | None, feature_file: Path | None, x: Any) -> int:
    """The number of relabelled vertices, which what else is said must equal."""
    for source, count in (("--num-vertices", given), (str(feature_file), None if x is None else x.shape[0])):
        if count not in (None, found):
            raise wrong(
                source,
                f"{count} vertices",
                f"the {found} that occur in the edges and the label file",
                "leave out --relabel if ids are row numbers, or give a row for each vertex that occurs",
            )
    return found


def _read_edges(
    path: Path, num_vertices: int | None, delimiter: str, weight_column: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """(edges int64 [2, E], weights float32 [E] or None), ids checked."""
    sources, destinations, weights = [], [], []
    place: list[int | None] = []

    def kinds_of(fields: list[str]) -> list[str]:
        place.append(_weight_place(path, len(fields), weight_column))
        kinds = [ID, ID] + [SKIP] * (len(fields) - 2)
        if place[0] is not None:
            kinds[place[0]] = NUMBER
        return kinds

    for block in read_blocks(path, kinds_of, delimiter):
        _check_block(block, num_vertices, place[0])
        sources.append(block.columns[0])
        destinations.append(block.columns[1])
        if place[0] is not None:
            weights.append(block.columns[place[0]].astype(np.float32))
    edges = np.stack([np.concatenate(sources), np.concatenate(destinations)])
    return edges, np.concatenate(weights) if weights else None


def _weight_place(path: Path, num_columns: int, weight_column: int | None) -> int | None:
    """Index of the weight column, or None for no weights; what more columns mean is never guessed."""
    if num_columns < 2:
        raise wrong(
            str(path),
            "one column in the first line",
            "a source and a destination on every line",
            "check the file and --delimiter",
        )
    if weight_column is None and num_columns > 3:
        raise wrong(
            str(path),
            f"{num_columns} columns",
            "to know which one is the edge weight",
            "give --weight-column (from 1), or 0 to use none",
        )
    if weight_column is None:
        return 2 if num_columns == 3 else None
    if weight_column == 0:
        return None
    if not 3 <= weight_column <= num_columns:
        expected = f"0, or 3 to {num_columns}" if num_columns > 2 else "0 for a file of two columns"
        raise wrong("--weight-column", weight_column, expected, "columns 1 and 2 are the ends of the edge")
    return weight_column - 1


def _check_block(block: Block, num_vertices: int | None, weight_place: int | None) -> None:
    """Refuse the first line with an id outside the interval or a weight that is not finite."""
    limit = 2**62 if num_vertices is None else num_vertices
    source, destination = block.columns[:2]
    bad = (source < 0) | (destination < 0) | (source >= limit) | (destination >= limit)
    if bad.any():
        interval = "at least 0" if num_vertices is None else f"in [0, {num_vertices})"
        raise block.fault(
            int(np.flatnonzero(bad)[0]), f"ids {interval}", "correct that line or the number of vertices"
        )
    if weight_place is None:
        return
    with np.errstate(over="ignore"):
        finite = np.isfinite(block.columns[weight_place].astype(np.float32))
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise block.fault(row, f"a finite weight in column {weight_place + 1}", "correct that line")


def _relabel(
    edges: np.ndarray, labels: LabelTable | None
) -> tuple[np.ndarray, np.ndarray, LabelTable | None]:
    """Edges and labels in new numbers, and the ascending ids that those stand for."""
    by_id = labels is not None and labels.ids is not None
    names = distinct(np.concatenate([edges.reshape(-1), labels.ids]) if by_id else edges)
    if by_id:
        labels = LabelTable(labels.path, labels.values, to_rows(labels.ids, names)[0])
    return np.searchsorted(names, edges), names, labels


def _stem(path: Path) -> str:
    """The file's name without its endings."""
    return path.name.split(".")[0]
