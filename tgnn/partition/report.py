"""What a partition is like: cut, balance and halo of every part, as numbers and as a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgnn.errors import wrong
from tgnn.partition.ownership import ownership_from_assignment
from tgnn.partition.rows import in_edges

UNEVEN = 1.5
SPLITS = ("train", "val", "test")
BALANCED = ("vertices", "edges", "train")


def report(
    data: Any,
    part_of: np.ndarray,
    num_parts: int | None = None,
    *,
    train: np.ndarray | None = None,
    val: np.ndarray | None = None,
    test: np.ndarray | None = None,
) -> dict[str, Any]:
    """Measure a partition of `data`, a Graph or a Dataset (whose splits are taken unless given here).

    `part_of` integer [N]; `num_parts` counts empty last parts too (default: largest part + 1); splits are id
    arrays. Returns a JSON-able dict: `num_parts`, `num_vertices`, `num_edges`; `cut_edges` (in-edges whose
    source another part owns) and `cut_fraction` of E; lists with one entry per part: `vertices`, `edges`
    (in-edges), `train`, `val`, `test`, `halo_vertices` (distinct sources that another part owns) and
    `halo_share` = halo / (own + halo); `balance` = largest over mean of vertices, edges and train (1.0 where
    there are none); `warnings`, sentences.

    Works in pieces: beside the graph it holds [N] tables only. Raises UserError where `part_of` does not fit.
    """
    graph = getattr(data, "graph", data)
    part_of = np.asarray(part_of)
    if part_of.shape != (graph.num_vertices,):
        raise wrong(
            "assignment",
            f"shape {list(part_of.shape)}",
            f"[{graph.num_vertices}], a part for each vertex",
            "pass what assign() returns",
        )
    ownership, original_of_new, _ = ownership_from_assignment(part_of, num_parts)
    num_parts = ownership.num_parts
    edges, cut, halo = [], [], []
    for part in range(num_parts):
        owned = original_of_new[ownership.offsets[part] : ownership.offsets[part + 1]]
        counts = _walk_part(graph, part_of, part, owned)
        for column, value in zip((edges, cut, halo), counts, strict=True):
            column.append(value)
    result: dict[str, Any] = {
        "num_parts": num_parts,
        "num_vertices": graph.num_vertices,
        "num_edges": graph.num_edges,
        "cut_edges": sum(cut),
        "cut_fraction": sum(cut) / max(1, graph.num_edges),
        "vertices": ownership.sizes().tolist(),
        "edges": edges,
    }
    for split, given in zip(SPLITS, (train, val, test), strict=True):
        ids = given if given is not None else getattr(data, split, None)
        ids = np.zeros(0, np.int64) if ids is None else np.asarray(ids)
        result[split] = np.bincount(part_of[ids], minlength=num_parts).tolist()
    result["halo_vertices"] = halo
    result["halo_share"] = [h / max(1, own + h) for h, own in zip(halo, result["vertices"], strict=True)]
    result["balance"] = {what: _balance(result[what]) for what in BALANCED}
    result["warnings"] = _warnings(result)
    return result


def _walk_part(graph: Any, part_of: np.ndarray, part: int, owned: np.ndarray) -> tuple[int, int, int]:
    """(in-edges, those cut, distinct remote sources) of one part."""
    remote = np.zeros(graph.num_vertices, dtype=bool)
    edges = cut = 0
    for _, sources, _ in in_edges(graph, owned):
        crossing = sources[part_of[sources] != part]
        remote[crossing] = True
        edges += len(sources)
        cut += len(crossing)
    return edges, cut, int(remote.sum())


def _balance(counts: list[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def _warnings(result: dict[str, Any]) -> list[str]:
    """Sentences on what will make ranks wait for each other."""
    found = []
    names = {"vertices": "vertices", "edges": "in-edges", "train": "training vertices"}
    for what in BALANCED:
        if result["balance"][what] > UNEVEN:
            times = f"{result['balance'][what]:.2f} times the mean at most"
            found.append(f"{names[what]} are uneven: {_shown(result[what])} per part, {times}.")
    without = [part for part, count in enumerate(result["train"]) if count == 0]
    if without and sum(result["train"]):
        which = f"part {without[0]} owns" if len(without) == 1 else f"parts {_shown(without)} own"
        found.append(f"{which} no training vertex: {_shown(result['train'])} training vertices per part.")
    return found


def _shown(counts: list[int], most: int = 16) -> str:
    text = ", ".join(str(count) for count in counts[:most])
    return text + (", ..." if len(counts) > most else "")


def format_report(result: dict[str, Any]) -> str:
    """The report as an aligned table of text: a line per part, largest over mean, the cut, the warnings."""
    columns = ["vertices", "edges", *SPLITS, "halo_vertices"]
    rows = [["part", "vertices", "in-edges", "train", "val", "test", "halo", "halo share"]]
    for part in range(result["num_parts"]):
        numbers = [f"{result[column][part]:,}" for column in columns]
        rows.append([str(part), *numbers, f"{100 * result['halo_share'][part]:.1f} %"])
    rows.append(["max/mean", *(f"{_balance(result[column]):.3f}" for column in columns), ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    share = f"{100 * result['cut_fraction']:.1f} %"
    lines.append(f"cut: {result['cut_edges']:,} of {result['num_edges']:,} in-edges ({share})")
    lines += _expected_lines(result["expected"]) if "expected" in result else []
    return "\n".join(lines + [f"warning: {sentence}" for sentence in result["warnings"]])


def _expected_lines(expected: dict[str, Any]) -> list[str]:
    """What presampling says of a step, this partition beside the others that were tried."""
    again = expected["redundancy"]
    lines = [
        f"a step when each rank works alone: {again['input_rows']:.2f} times the input rows, "
        f"{again['edges']:.2f} times the in-edges; split: once"
    ]
    layers = range(len(next(iter(expected["partitions"].values()))["exchange_rows"]))
    rows = [
        ["expected per step", "rows exchanged", *(f"layer {layer}" for layer in layers), "in-edges max/mean"]
    ]
    for name, found in expected["partitions"].items():
        counts = found["exchange_rows"]
        rows.append([name, *(f"{count:,.0f}" for count in (sum(counts), *counts)), f"{found['balance']:.3f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for name, *cells in rows:
        shown = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *shown]))
    return lines
