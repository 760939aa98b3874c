"""DataOptions: everything a user can say about a data set, one field per flag.

A field `add_reverse` is the flag `--add-reverse`; its help, choices and other argparse settings are in its
metadata.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tgnn.errors import wrong


def _option(default: Any, help: str, **argparse: Any) -> Any:
    """A field with what its flag needs."""
    return field(default=default, metadata={"help": help, **argparse})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How a data set is read and what is done to it; JSON-able through `as_dict`.

    `load` applies them in this order: read (with relabel), duplicates, add_reverse, self_loops "remove",
    largest_component, self_loops "add", split, feature_norm.

    Raises:
        UserError: a value of the wrong type or outside its choices.
    """

    num_vertices: int | None = _option(None, "edge lists: number of vertices; ids are 0 .. N - 1")
    feature_file: str | None = _option(
        None, "edge lists, matrices: features, one row per vertex (.npy, scipy sparse .npz, .csv, .csv.gz)"
    )
    label_file: str | None = _option(
        None,
        "edge lists, matrices: labels (.npy; text with 'id label' or one label a line; empty, nan or -1: no label)",
    )
    split_file: str | None = _option(
        None, "train, val and test ids (.npz or .json with those keys; csv lines 'id,train|val|test')"
    )
    delimiter: str = _option(
        "auto", "edge lists: what separates columns", choices=("auto", "space", "tab", "comma", "semicolon")
    )
    weight_column: int | None = _option(
        None,
        "edge lists: column of the edge weight, from 1 (3 if there are exactly three columns); 0: no weights, "
        "of a matrix too",
    )
    relabel: bool = _option(
        False,
        "edge lists: ids have gaps; number the vertices 0 .. N - 1 in ascending order and keep the mapping",
    )
    add_inverse_edge: bool | None = _option(
        None,
        "OGB's csv files: repeat every edge with its ends swapped (default: as OGB does for that data set)",
    )
    duplicates: str = _option(
        "keep", "parallel edges: keep, or merge (weights are summed)", choices=("keep", "merge")
    )
    add_reverse: bool = _option(False, "add the reverse of every edge that has none yet")
    self_loops: str = _option(
        "keep",
        "self-loops: keep, add one to each vertex without any (what the bare flag means), or remove all",
        choices=("keep", "add", "remove"),
        nargs="?",
        const="add",
    )
    largest_component: bool = _option(False, "keep only the largest weakly connected component")
    split: str | None = _option(
        None,
        "fixed (the data's own), 0 .. 9 (one of several the data has), random:T,V (T training, V validation "
        "vertices per class, the rest test) or shares such as 0.6,0.2,0.2",
    )
    split_seed: int = _option(0, "seed of random splits")
    feature_norm: str = _option(
        "none",
        "features: none, row (rows sum to 1), column (mean 0, deviation 1)",
        choices=("none", "row", "column"),
    )

    def __post_init__(self) -> None:
        for this in fields(self):
            value, flag = getattr(self, this.name), "--" + this.name.replace("_", "-")
            choices = this.metadata.get("choices")
            if choices is not None and value not in choices:
                raise wrong(flag, repr(value), f"one of {', '.join(choices)}", "choose one of them")
            expected = _TYPES[str(this.type)]
            if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
                raise wrong(flag, repr(value), str(this.type), "give a value of that type")
        for name in ("num_vertices", "weight_column", "split_seed"):
            if (getattr(self, name) or 0) < 0:
                flag = "--" + name.replace("_", "-")
                raise wrong(flag, getattr(self, name), "at least 0", "give a number that is not negative")

    def as_dict(self) -> dict[str, Any]:
        """Every field, as JSON can hold it."""
        return asdict(self)

    def given(self) -> list[str]:
        """Names of the fields that differ from their default."""
        return [this.name for this in fields(self) if getattr(self, this.name) != this.default]


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
    "bool | None": (bool, type(None)),
}
