"""`load`: a name or a path becomes a Dataset, read by its format and edited as the options say."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tgnn.data import synthetic, transforms
from tgnn.data.catalogue import CATALOGUE
from tgnn.data.dgl_binary import FILE_MAGIC, starts_like_dgl
from tgnn.data.dgl_format import partition_json, read_book
from tgnn.data.download import fetch
from tgnn.data.graph import SPLITS, Dataset
from tgnn.data.options import DataOptions
from tgnn.data.readers.dgl import read_dgl_graph, read_dgl_partition
from tgnn.data.readers.edge_list import TEXT_SUFFIXES, read_edge_list
from tgnn.data.readers.heterophilous import HETEROPHILOUS_KEYS, read_heterophilous
from tgnn.data.readers.npz import open_npz
from tgnn.data.readers.ogb import ogb_files, read_ogb
from tgnn.data.readers.planetoid import planetoid_files, read_planetoid
from tgnn.data.readers.shchur import SHCHUR_KEYS, read_shchur
from tgnn.data.readers.sidecar import read_split
from tgnn.data.readers.sparse_matrix import SPARSE_KEYS, read_sparse_matrix
from tgnn.data.readers.tgnn_npz import read_tgnn_npz
from tgnn.errors import wrong

__all__ = ["DataOptions", "data_fingerprint", "load"]

# Name -> (generator, whether "name:size" is understood; the size is the first argument).
_GENERATORS: dict[str, tuple[Callable[..., Dataset], bool]] = {
    "sbm": (synthetic.sbm, True),
    "community": (synthetic.community, True),
    "rmat": (synthetic.rmat, True),
    "ring": (synthetic.ring, True),
    "hand-drawn": (synthetic.hand_drawn, False),
    "karate": (synthetic.karate, False),
}
# Raised whenever a generator or reader gives another data set for the same input, so that caches notice.
_FINGERPRINT_VERSION = 1

_EDGE_LIST_ONLY = ("num_vertices", "relabel")
_WITH_SIDE_FILES = ("feature_file", "label_file", "delimiter", "weight_column")
_BARE_FORMATS = ("edge-list", "sparse-matrix")


@dataclass(frozen=True)
class _Source:
    """What `data` turned out to be: `format`, the files it consists of, and how to read it."""

    format: str
    files: tuple[Path, ...]
    read: Callable[[DataOptions], Dataset]


def load(data: str | Path, options: DataOptions | None = None) -> Dataset:
    """The data set that `data` names, edited as `options` say.

    Args:
        data: a generator (`sbm`, `community`, `rmat`, `ring`, each also with a size such as `sbm:20000` or
            the scale `rmat:18`; `hand-drawn`, `karate`); a published data set (`cora`, `ogbn-arxiv`, ...; see
            `tgnn.data.download`, which fetches what is not there yet); or a path: a Planetoid, OGB or DGL
            partition directory, an `.npz` (Shchur, heterophilous or tgnn layout or a scipy sparse matrix, told by
            its keys), a DGL graph file, or an edge list in text. What exists as a path is not a published name.
        options: applied in the order that `DataOptions` states.

    Returns:
        The Dataset; its `options` record what the reader and each edit did, defaults included.

    Raises:
        UserError: nothing of that name or format, faulty files, or an option that cannot apply to this data.
    """
    options = options or DataOptions()
    source = _find(str(data))
    _check_applicable(source, str(data), options)
    dataset = source.read(options)
    if options.split_file is not None and source.format != "edge-list":
        splits = dict.fromkeys(SPLITS) | read_split(Path(options.split_file), dataset.num_vertices)
        dataset = dataset.changed(**splits)
    return _edit(dataset, options)


def data_fingerprint(data: str | Path, options: DataOptions | None = None) -> str:
    """A hash of the name, the files (path, size, time of change) and the options: the key of a cache.

    Raises:
        UserError: as `load` does for a name or format it does not know, or a missing file.
    """
    options = options or DataOptions()
    source = _find(str(data))
    files = [*source.files, *(Path(file) for file in _side_files(options))]
    facts = {
        "version": _FINGERPRINT_VERSION,
        "data": str(Path(data).resolve()) if Path(data).exists() else str(data),
        "files": [_facts(file) for file in files],
        "options": options.as_dict(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _edit(dataset: Dataset, options: DataOptions) -> Dataset:
    """Apply the edits in the documented order and record all of them."""
    record = {key: getattr(options, key) for key in ("duplicates", "add_reverse", "self_loops", "relabel")}
    record |= {"largest_component": options.largest_component, "feature_norm": options.feature_norm}
    own = "file" if options.split_file is not None else dataset.options.get("split", "fixed")
    record["split"] = own if any(len(getattr(dataset, name)) for name in SPLITS) else None
    dataset = dataset.changed(record)
    if options.duplicates == "merge":
        dataset = transforms.merge_duplicates(dataset)
    if options.add_reverse:
        dataset = transforms.add_reverse(dataset)
    if options.self_loops == "remove":
        dataset = transforms.self_loops(dataset, "remove")
    if options.largest_component:
        dataset = transforms.largest_component(dataset)
    if options.self_loops == "add":
        dataset = transforms.self_loops(dataset, "add")
    if options.split is not None and not _is_number(options.split):
        dataset = transforms.split(dataset, options.split, options.split_seed)
    if options.feature_norm != "none":
        dataset = transforms.feature_norm(dataset, options.feature_norm)
    return dataset


def _find(data: str) -> _Source:
    """What `data` is: a generator's name first, then a path."""
    name, _, size = data.partition(":")
    if name in _GENERATORS:
        return _Source("generator", (), lambda options: _generate(name, size if ":" in data else None))
    path = Path(data)
    if not path.exists():
        if data not in CATALOGUE:
            raise wrong(
                "DATA",
                repr(data),
                f"one of {', '.join([*_GENERATORS, *CATALOGUE])}, or the path of a directory or file",
                "check the name or path",
            )
        path = fetch(data)
    description = partition_json(path)
    if description is not None:
        files = read_book(description).files
        return _Source("dgl-partition", files, lambda options: read_dgl_partition(description))
    return _find_directory(path) if path.is_dir() else _find_file(path)


def _find_directory(path: Path) -> _Source:
    """Which published layout a directory has."""
    if files := planetoid_files(path):
        return _Source("planetoid", tuple(files), lambda options: read_planetoid(path))
    if files := ogb_files(path):
        return _Source("ogb", tuple(files), lambda options: _read_ogb(path, options))
    if (path / "store.json").is_file():
        raise wrong(
            str(path),
            "a partition store, which is no data set to load",
            "a data set",
            f"give the store to training as it is (python -m tgnn.train {path}), or open it with Store.open",
        )
    if (path / "part-0000").is_dir():
        raise wrong(
            str(path),
            "a folder with part-0000 but without store.json",
            "a whole partition store, or a data set",
            "copy its store.json too, or make the store again with python -m tgnn.partition",
        )
    raise wrong(
        str(path),
        "a directory without ind.<name>.graph, raw/edge.csv.gz, raw/data.npz or a DGL partition's .json",
        "a Planetoid, OGB or DGL partition directory",
        "give another path",
    )


def _find_file(path: Path) -> _Source:
    """Which format a file has."""
    if magic := starts_like_dgl(path):
        if magic != FILE_MAGIC:
            do = "give the graph file, or the partition's folder or .json"
            raise wrong(str(path), "a DGL tensor file, which holds no edges", "a DGL graph file", do)
        return _Source("dgl-graph", (path,), lambda options: read_dgl_graph(path))
    if path.suffix == ".npz":
        return _find_npz(path)
    if path.name.endswith(TEXT_SUFFIXES):
        return _Source("edge-list", (path,), lambda options: _read_text(path, options))
    known = f"a DGL graph file, or a file ending in .npz, {', '.join(TEXT_SUFFIXES)}"
    raise wrong("DATA", repr(str(path)), known, "rename or convert it")


def _find_npz(path: Path) -> _Source:
    """Which of the four layouts an `.npz` has."""
    with open_npz(path) as arrays:
        keys = arrays.keys
    if keys >= SHCHUR_KEYS:
        return _Source("shchur", (path,), lambda options: read_shchur(path))
    if keys >= HETEROPHILOUS_KEYS:
        return _Source(
            "heterophilous", (path,), lambda options: read_heterophilous(path, _split_number(options))
        )
    if keys >= SPARSE_KEYS:
        return _Source("sparse-matrix", (path,), lambda options: _read_matrix(path, options))
    if keys & {"edge_index", "indptr"}:
        return _Source("tgnn", (path,), lambda options: read_tgnn_npz(path))
    raise wrong(
        str(path),
        f"keys {', '.join(sorted(keys))}",
        "adj_data ... (Shchur), node_features ... (heterophilous), format ... (scipy) or edge_index ... (tgnn)",
        "save it with tgnn.data.save_npz",
    )


def _split_number(options: DataOptions) -> int:
    """Which of the data's splits: the number given, else the first."""
    return int(options.split) if _is_number(options.split) else 0


def _is_number(split: str | None) -> bool:
    """Whether --split names one of several splits that the data has."""
    return split is not None and re.fullmatch(r"[0-9]+", split) is not None


def _generate(name: str, size: str | None) -> Dataset:
    """The generator's data set, of the size after the colon."""
    make, sized = _GENERATORS[name]
    if size is None:
        return make()
    if not sized:
        raise wrong("DATA", f"'{name}:{size}'", f"{name}, whose size is fixed", "leave the size out")
    if not re.fullmatch(r"[0-9]{1,10}", size):
        raise wrong(
            "DATA", f"'{name}:{size}'", f"{name} or {name}:SIZE with a whole number", "correct the size"
        )
    return make(int(size))


def _read_ogb(path: Path, options: DataOptions) -> Dataset:
    """An OGB directory, its own split where that is asked for."""
    own_split = options.split_file is None and options.split in (None, "fixed")
    return read_ogb(path, options.add_inverse_edge, own_split=own_split, reverse_follows=options.add_reverse)


def _read_text(path: Path, options: DataOptions) -> Dataset:
    """An edge list with its side files."""
    return read_edge_list(
        path,
        num_vertices=options.num_vertices,
        relabel=options.relabel,
        delimiter=options.delimiter,
        weight_column=options.weight_column,
        **_paths(options, "feature_file", "label_file", "split_file"),
    )


def _read_matrix(path: Path, options: DataOptions) -> Dataset:
    """A sparse matrix with its side files."""
    how = {"delimiter": options.delimiter, "weight_column": options.weight_column}
    return read_sparse_matrix(path, **how, **_paths(options, "feature_file", "label_file"))


def _paths(options: DataOptions, *names: str) -> dict[str, Path | None]:
    """Side files by the option's name."""
    given = {name: getattr(options, name) for name in names}
    return {name: None if file is None else Path(file) for name, file in given.items()}


def _check_applicable(source: _Source, data: str, options: DataOptions) -> None:
    """Refuse options that this kind of data cannot take."""
    given = options.given()
    for keys, formats, expected in (
        (_EDGE_LIST_ONLY, ("edge-list",), "an edge list in text"),
        (_WITH_SIDE_FILES, _BARE_FORMATS, "an edge list in text, or a sparse matrix"),
    ):
        for key in keys:
            if key in given and source.format not in formats:
                flag = "--" + key.replace("_", "-")
                got = f"{data}, which is no edge list ({source.format})"
                raise wrong(flag, got, expected, f"leave {flag} out")
    if options.add_inverse_edge is not None and source.format != "ogb":
        flag = "--add-inverse-edge" if options.add_inverse_edge else "--no-add-inverse-edge"
        raise wrong(flag, f"{data}, which is no OGB directory", "one", "give --add-reverse, or leave it out")
    if _is_number(options.split) and source.format != "heterophilous":
        raise wrong(
            "--split",
            options.split,
            f"a split that {data} has; it has no numbered ones",
            "use fixed, random:T,V or shares",
        )
    if options.split_file is not None and options.split not in (None, "fixed"):
        raise wrong("--split", f"{options.split!r} and --split-file", "one of the two", "leave one out")


def _side_files(options: DataOptions) -> list[str]:
    """The files that the options name."""
    return [
        file for file in (options.feature_file, options.label_file, options.split_file) if file is not None
    ]


def _facts(file: Path) -> list:
    """[path, size, time of change in ns] of a file; a missing one has no facts, its reader will say so."""
    if not file.exists():
        return [str(file), None, None]
    stat = file.stat()
    return [str(file.resolve()), stat.st_size, stat.st_mtime_ns]
