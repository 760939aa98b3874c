"""What DGL's files mean to us: names of features, labels and masks, and the description of a partition.

Vertex data `feat` [N, F], `label` [N] or [N, C] and `train_mask`, `val_mask`, `test_mask` [N], and edge data
`weight` [E] are a data set's fields. `orig_id` tells which vertex or edge of the original data a vertex or
edge is, where they have been renumbered; `orig_name` what the data's source calls a vertex, where that is not
its original id: int64 [N], or text in UTF-8, uint8 [N, bytes] filled up with zeros.

A partition is a folder with `<graph name>.json` and, for each part i, `part<i>/graph.dgl` (the part's
vertices, then copies of vertices that its edges touch, the halo) and `part<i>/node_feat.dgl` and
`edge_feat.dgl` (data of the part's own vertices and edges).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.errors import UserError, wrong

FEATURES, LABELS, WEIGHT, ORIGINAL_ID, NAME = "feat", "label", "weight", "orig_id", "orig_name"
MASKS = {"train": "train_mask", "val": "val_mask", "test": "test_mask"}
FIELD_NAMES = (FEATURES, LABELS, *MASKS.values())

# Of the vertices and edges of a part's graph: number in the whole graph, own or halo, owner.
GLOBAL_ID, INNER_NODE, INNER_EDGE, OWNER = "_ID", "inner_node", "inner_edge", "part_id"
NODE_TYPE, EDGE_TYPE = "_N", "_N:_E:_N"
PART_GRAPH, NODE_DATA, EDGE_DATA = "graph.dgl", "node_feat.dgl", "edge_feat.dgl"


def encode_names(names: np.ndarray) -> np.ndarray:
    """Names [N], integers or text, as DGL can hold them."""
    if names.dtype.kind in "iu":
        return names.astype(np.int64)
    text = np.char.encode(names.astype(str), "utf-8")
    return np.ascontiguousarray(text).view(np.uint8).reshape(len(text), text.dtype.itemsize)


def decode_names(value: np.ndarray) -> np.ndarray:
    """Names [N] of what `encode_names` gave; UserError for anything else."""
    if value.ndim == 1 and value.dtype.kind in "iu":
        return np.array(value)
    try:
        if value.ndim == 2 and value.dtype == np.uint8 and value.shape[1]:
            return np.char.decode(np.ascontiguousarray(value).view(f"S{value.shape[1]}")[:, 0], "utf-8")
        got = f"{value.dtype} of shape {value.shape}"
    except UnicodeDecodeError:
        got = "bytes that are no UTF-8"
    raise wrong(NAME, got, "an integer or a row of UTF-8 bytes for each vertex", "write it again")


def original_names(vertex_data: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """What the vertices were called before: their names, else their original ids, else None."""
    if NAME in vertex_data:
        return decode_names(vertex_data[NAME])
    return np.array(vertex_data[ORIGINAL_ID]) if ORIGINAL_ID in vertex_data else None


@dataclass(frozen=True)
class PartFiles:
    """The three files of a part."""

    graph: Path
    node_data: Path
    edge_data: Path


@dataclass(frozen=True)
class PartitionBook:
    """A partition's description: part p owns vertices `[node_offsets[p], node_offsets[p + 1])`, and edges
    likewise.
    """

    path: Path
    name: str
    node_offsets: np.ndarray
    edge_offsets: np.ndarray
    parts: tuple[PartFiles, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        """The description and every part's files."""
        return (self.path, *(f for part in self.parts for f in (part.graph, part.node_data, part.edge_data)))


def partition_json(path: Path) -> Path | None:
    """The description of the DGL partition that `path` is, or whose folder it is; None for anything else.

    Raises:
        UserError: the folder holds the descriptions of several partitions.
    """
    if path.is_dir():
        found = [file for file in sorted(path.glob("*.json")) if _is_description(file)]
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise wrong(str(path), f"several partitions: {names}", "one", "give the path of one .json")
        return found[0] if found else None
    return path if path.suffix == ".json" and path.is_file() and _is_description(path) else None


def describe_partition(
    name: str, method: str, node_offsets: np.ndarray, edge_offsets: np.ndarray
) -> dict[str, Any]:
    """The content of `<name>.json` for a partition with its parts' one-hop halo."""

    def ranges(offsets: np.ndarray) -> list[list[int]]:
        return [[int(a), int(b)] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]

    description: dict[str, Any] = {
        "graph_name": name,
        "num_nodes": int(node_offsets[-1]),
        "num_edges": int(edge_offsets[-1]),
        "part_method": method,
        "num_parts": len(node_offsets) - 1,
        "halo_hops": 1,
        "node_map": {NODE_TYPE: ranges(node_offsets)},
        "edge_map": {EDGE_TYPE: ranges(edge_offsets)},
        "ntypes": {NODE_TYPE: 0},
        "etypes": {EDGE_TYPE: 0},
    }
    for part in range(len(node_offsets) - 1):
        files = {"node_feats": NODE_DATA, "edge_feats": EDGE_DATA, "part_graph": PART_GRAPH}
        description[f"part-{part}"] = {key: f"part{part}/{file}" for key, file in files.items()}
    return description


def read_book(path: Path) -> PartitionBook:
    """The description of a partition, checked.

    Raises:
        UserError: no JSON, an entry is missing, several vertex or edge types, or maps that are no ranges.
    """
    content = _json(path)
    if not isinstance(content, dict):
        raise _no_book(path, f"a JSON {type(content).__name__}")
    for key in ("ntypes", "etypes"):
        types = content.get(key, {"_": 0})
        if not isinstance(types, dict) or len(types) != 1:
            kinds = ", ".join(types) if isinstance(types, dict) else repr(types)
            what = "vertex type" if key == "ntypes" else "edge type"
            raise wrong(str(path), f"the {what}s {kinds}", f"one {what}", "partition one type alone")
    try:
        num_parts, name = int(content["num_parts"]), str(content["graph_name"])
        nodes = _offsets(content["node_map"], int(content["num_nodes"]), num_parts)
        edges = _offsets(content["edge_map"], int(content["num_edges"]), num_parts)
        parts = tuple(_part_files(path, part, content[f"part-{part}"]) for part in range(num_parts))
    except (KeyError, TypeError, ValueError) as error:
        got = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
        raise _no_book(path, got) from None
    return PartitionBook(path, name, nodes, edges, parts)


def _part_files(path: Path, part: int, files: Mapping[str, str]) -> PartFiles:
    """A part's files, whose names are relative to the description."""
    if "part_graph" not in files and "part_graph_graphbolt" in files:
        raise wrong(
            str(path),
            f"part {part} as a GraphBolt graph, a pickle",
            "graph.dgl files",
            "partition with use_graphbolt=False",
        )
    return PartFiles(*(path.parent / files[key] for key in ("part_graph", "node_feats", "edge_feats")))


def _offsets(ranges: Any, total: int, num_parts: int) -> np.ndarray:
    """int64 [parts + 1] from a map {type: [[start, end], ...]}, an older bare list, or one of ends alone."""
    if isinstance(ranges, Mapping):
        ranges = next(iter(ranges.values()), None)
    if not isinstance(ranges, list) or len(ranges) != num_parts:
        raise ValueError("a map that is no list of ranges, one per part")
    ends = [entry[1] if isinstance(entry, list) else entry for entry in ranges]
    starts = [entry[0] if isinstance(entry, list) else None for entry in ranges]
    offsets = np.array([0, *ends], dtype=np.int64)
    gaps = any(start not in (None, before) for start, before in zip(starts, offsets, strict=False))
    if gaps or (np.diff(offsets) < 0).any() or offsets[-1] != total:
        raise ValueError(f"ranges that do not cover 0 to {total} one after the other")
    return offsets


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise wrong(str(path), error.strerror or str(error), "a file to read", "check the path") from error
    except ValueError as error:
        raise _no_book(path, f"no JSON ({error})") from None


def _is_description(path: Path) -> bool:
    """Whether a JSON file describes a DGL partition, whole or not."""
    try:
        content = _json(path)
    except UserError:
        return False
    return isinstance(content, dict) and {"graph_name", "num_parts", "node_map"} <= content.keys()


def _no_book(path: Path, got: str) -> UserError:
    return wrong(str(path), got, "the description of a DGL partition", "partition the graph again")
