"""Explicit edits of a data set: pure functions Dataset -> Dataset; each records itself in `options`."""

from __future__ import annotations

import re

import numpy as np

from tgnn.data import edits
from tgnn.data.graph import SPLITS, Dataset
from tgnn.errors import wrong


def merge_duplicates(dataset: Dataset) -> Dataset:
    """Parallel edges become one; their weights are summed. See `edits.merge_parallel_edges`."""
    return dataset.changed({"duplicates": "merge"}, graph=edits.merge_parallel_edges(dataset.graph))


def add_reverse(dataset: Dataset) -> Dataset:
    """Every edge gets its reverse unless that exists already. See `edits.add_reverse_edges`."""
    return dataset.changed({"add_reverse": True}, graph=edits.add_reverse_edges(dataset.graph))


def self_loops(dataset: Dataset, how: str) -> Dataset:
    """ "add" one self-loop to each vertex that has none, "remove" all, or "keep" them as they are."""
    edit = {"add": edits.add_self_loops, "remove": edits.remove_self_loops, "keep": lambda graph: graph}
    if how not in edit:
        raise wrong("self_loops", repr(how), "add, remove or keep", "choose one of them")
    return dataset.changed({"self_loops": how}, graph=edit[how](dataset.graph))


def largest_component(dataset: Dataset) -> Dataset:
    """The largest weakly connected component, vertices renumbered in ascending order.

    Features, labels and splits follow; split vertices outside are dropped. `original_names` keeps what the
    vertices were called before.
    """
    kept = edits.largest_component(dataset.graph)
    ids = np.flatnonzero(kept)
    new_id = np.cumsum(kept) - 1
    splits = {split: new_id[old[kept[old]]] for split in SPLITS for old in [getattr(dataset, split)]}
    names = ids if dataset.original_names is None else dataset.original_names[ids]
    return dataset.changed(
        {"largest_component": True, "vertices_before_component": dataset.num_vertices},
        graph=edits.keep_vertices(dataset.graph, kept),
        x=None if dataset.x is None else dataset.x[ids],
        y=None if dataset.y is None else dataset.y[ids],
        original_names=names,
        **splits,
    )


def split(dataset: Dataset, spec: str, seed: int = 0) -> Dataset:
    """The data set with the split that `spec` says; only labelled vertices enter a split made here.

    Args:
        dataset: with labels, unless spec is "fixed".
        spec: "fixed" (the data's own must exist); "random:T,V" (per class T training and V validation
            vertices at random, the rest test; single-label); shares such as "0.6,0.2,0.2" of all labelled
            vertices at random, adding up to at most 1.
        seed: of the random choice.

    Raises:
        UserError: the spec is none of these, a class is too small, or the data has no split or labels.
    """
    if spec == "fixed":
        if not any(len(getattr(dataset, name)) for name in SPLITS):
            raise wrong(
                "--split fixed",
                "data without a split of its own",
                "train, val and test in the data",
                "give --split random:20,30, shares such as --split 0.6,0.2,0.2, or --split-file",
            )
        return dataset.changed({"split": "fixed"})
    per_class = re.fullmatch(r"random:(\d+),(\d+)", spec)
    shares = re.fullmatch(r"(\d*\.?\d+),(\d*\.?\d+),(\d*\.?\d+)", spec)
    if not per_class and not shares:
        raise wrong(
            "--split",
            repr(spec),
            "fixed, a number, random:T,V or shares such as 0.6,0.2,0.2",
            "give one of these forms",
        )
    if dataset.y is None:
        raise wrong(f"--split {spec}", "data without labels", "labelled vertices", "give labels")
    rng = np.random.Generator(np.random.PCG64(seed))
    if per_class:
        parts = _per_class(dataset, int(per_class[1]), int(per_class[2]), rng)
    else:
        parts = _by_share(dataset, [float(share) for share in shares.groups()], rng)
    return dataset.changed({"split": spec, "split_seed": seed}, **dict(zip(SPLITS, parts, strict=True)))


def feature_norm(dataset: Dataset, how: str) -> Dataset:
    """Features scaled: "row" (each row sums to 1, zero rows stay), "column" (mean 0, deviation 1), or "none".

    Raises:
        UserError: no features; or "row" with negative ones, whose sum says nothing.
    """
    if how == "none":
        return dataset.changed({"feature_norm": how})
    if how not in ("row", "column"):
        raise wrong("feature_norm", repr(how), "none, row or column", "choose one of them")
    if dataset.x is None:
        raise wrong(f"--feature-norm {how}", "data without features", "features", "leave it out")
    if how == "row":
        if dataset.x.min(initial=0) < 0:
            raise wrong("--feature-norm row", "negative features", "features of at least 0", "use column")
        total = dataset.x.sum(axis=1, dtype=np.float64, keepdims=True)
        x = dataset.x / np.where(total > 0, total, 1).astype(np.float32)
    else:
        mean = dataset.x.mean(axis=0, dtype=np.float64)
        deviation = dataset.x.std(axis=0, dtype=np.float64)
        x = (dataset.x - mean.astype(np.float32)) / np.where(deviation > 0, deviation, 1).astype(np.float32)
    return dataset.changed({"feature_norm": how}, x=x)


def _per_class(dataset: Dataset, num_train: int, num_val: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Shchur's protocol: num_train and num_val vertices of each class that occurs, the rest test."""
    if dataset.task != "single-label":
        raise wrong(
            "--split random", "multi-label data", "one label a vertex", "use shares such as 0.6,0.2,0.2"
        )
    train, val, test = [], [], []
    for label in range(dataset.num_classes):
        members = rng.permutation(np.flatnonzero(dataset.y == label))
        if 0 < len(members) < num_train + num_val:
            raise wrong(
                f"--split random:{num_train},{num_val}",
                f"{len(members)} vertices of class {label}",
                f"at least {num_train + num_val} of every class",
                "take fewer per class or use shares",
            )
        train.append(members[:num_train])
        val.append(members[num_train : num_train + num_val])
        test.append(members[num_train + num_val :])
    return [np.concatenate(part) if part else np.zeros(0, np.int64) for part in (train, val, test)]


def _by_share(dataset: Dataset, shares: list[float], rng: np.random.Generator) -> list[np.ndarray]:
    """Shares of the labelled vertices, at random; a last part whose shares reach 1 takes the rounding."""
    if sum(shares) > 1 + 1e-9:
        raise wrong("--split", f"shares adding up to {sum(shares):g}", "at most 1", "lower them")
    order = rng.permutation(np.flatnonzero(dataset.labelled()))
    ends = np.rint(np.cumsum(shares) * len(order)).astype(np.int64)
    return [order[: ends[0]], order[ends[0] : ends[1]], order[ends[1] : ends[2]]]
