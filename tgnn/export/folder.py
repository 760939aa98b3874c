"""Writes an exported model as a folder that works where only torch and the framework are installed.

    model.py      the model's code, `prepare` for the graph and `load` for the weights
    weights.pt    the module's state dict, tensors alone: torch.load(..., weights_only=True), strict
    config.json   versions it is meant for, inputs, outputs, how the graph is prepared, where it comes from
    README.md     the lines that load and run it

The folder takes its place in one rename, or not at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tgnn.errors import wrong
from tgnn.export import dgl, pyg
from tgnn.export.bridge import Bridge
from tgnn.export.frameworks import Framework
from tgnn.export.source import arguments_of
from tgnn.nn.model import GNN
from tgnn.training.checkpoint import atomic_file
from tgnn.training.metrics import write_json

FOLDER_FORMAT = 1
BRIDGES: Mapping[str, Bridge] = {bridge.framework.name: bridge for bridge in (dgl.BRIDGE, pyg.BRIDGE)}


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: what its export says of it."""

    kind: str
    """What `--model` calls it."""
    dataset: Mapping[str, Any]
    """Name, sizes and task, as `dataset_fingerprint` gives them."""
    options: Mapping[str, Any]
    """What was done to the dataset: `Dataset.options`."""
    weighted: bool = False
    """Whether its edges have weights."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Run, checkpoint, epoch, metric and figures per split."""
    versions: Mapping[str, Any] = field(default_factory=dict)


def check_free(out: Path) -> None:
    """Raise UserError where `out` exists and is no empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        got = f"{out}, which {'holds files' if out.is_dir() else 'is a file'}"
        raise wrong("--out", got, "a new or empty directory", "choose another, or empty it")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that becomes `out` only when the block ends well; UserError where it cannot be
    written.
    """
    out = Path(os.path.abspath(out))
    check_free(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with _writing(out):
            temporary.mkdir(parents=True)
        yield temporary
        with _writing(out):
            os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise wrong(
            "--out", f"{out} ({error.strerror})", "a directory that can be written", "choose another"
        ) from None


def write_folder(folder: Path, framework: Framework, model: GNN, origin: Origin) -> dict[str, Any]:
    """Write the four files into an existing empty folder; returns the content of `config.json`.

    Raises: UserError, before anything is written, for a model that the framework has no counterpart of.
    """
    bridge = BRIDGES[framework.name]
    stack = bridge.take_apart(model)
    weighted = origin.weighted and bool(
        set(arguments_of(bridge.write(stack, True))) & {"edge_weight", "gcn_weight"}
    )
    written, steps = bridge.write(stack, weighted), preparation(origin.options)
    subject = f"{origin.kind} for {origin.dataset['name']}"
    title = f"{subject}, exported by tgnn for {framework.title} {framework.versions}."
    text = bridge.source(title, stack, weighted, steps)
    config = _config(framework, stack.dtype, [layer.make for layer in written], origin, steps, weighted)
    arguments = arguments_of(written)
    with atomic_file(folder / "model.py") as file:
        file.write(text.encode())
    with atomic_file(folder / "weights.pt") as file:
        torch.save(bridge.weights(stack), file)
    with atomic_file(folder / "README.md") as file:
        file.write(_readme(framework, config, arguments).encode())
    write_json(folder / "config.json", config)
    return config


def preparation(options: Mapping[str, Any]) -> list[str]:
    """The functions of the data parts that do what was done to the dataset, in the order in which `load`
    does it.
    """
    steps = ["merge_parallel_edges"] if options.get("duplicates") == "merge" else []
    steps += ["add_reverse_edges"] if options.get("add_reverse") else []
    loops = {"remove": ["remove_self_loops"], "add": ["add_self_loops"]}
    steps += loops.get(options.get("self_loops", "keep"), [])
    norms = {"row": ["normalise_rows"], "column": ["normalise_columns"]}
    return steps + norms.get(options.get("feature_norm", "none"), [])


def _by_hand(options: Mapping[str, Any]) -> list[str]:
    """What was done before `prepare` can go on, in words: it changes which vertices there are."""
    words = []
    if options.get("relabel"):
        words.append("number the vertices that occur 0 .. N - 1 in ascending order of their ids")
    if options.get("largest_component"):
        words.append(
            "keep the largest weakly connected component, its vertices renumbered in ascending order"
        )
    return words


def _config(
    framework: Framework, dtype: torch.dtype, layers: Sequence[str], origin: Origin, steps: Sequence[str],
    weighted: bool,
) -> dict[str, Any]:  # fmt: skip
    dataset, options = origin.dataset, origin.options
    done = ("duplicates", "add_reverse", "self_loops", "feature_norm", "relabel", "largest_component")
    return {
        "format": FOLDER_FORMAT,
        "framework": {"name": framework.package, "versions": framework.versions},
        "model": {"kind": origin.kind, "layers": list(layers), "dtype": str(dtype).removeprefix("torch.")},
        "input": {"features": dataset["num_features"], "edge_weight": weighted},
        "output": {"classes": dataset["num_classes"], "task": dataset["task"], "values": "logits"},
        "graph": {
            "edges": "u -> v carries a message from u to v",
            "before_prepare": _by_hand(options),
            "prepare": list(steps),
            **{name: options[name] for name in done if name in options},
            "degrees": "of the whole prepared graph: in-degree of the destination, out-degree of the source",
        },
        "dataset": {**dataset, "options": dict(options)},
        "training": dict(origin.training),
        "versions": dict(origin.versions),
    }


def _readme(framework: Framework, config: Mapping[str, Any], arguments: Sequence[str]) -> str:
    dataset, training, weighted = config["dataset"], config["training"], config["input"]["edge_weight"]
    features, classes = config["input"]["features"], config["output"]["classes"]
    cast = ".double()" if config["model"]["dtype"] == "float64" else ""
    weight = ", edge_weight" if weighted else ""
    shapes = f"int64 [2, E], float32 [N, {features}]"
    made_by = config["versions"].get("tgnn") or f"at commit {str(config['versions'].get('commit'))[:12]}"
    lines = [
        "from model import load, prepare  # with this folder on sys.path",
        f"edge_index, x{weight} = prepare(edge_index, num_nodes, x{weight})  # {shapes}",
    ]
    if framework.name == "dgl":
        given = f", edge_weight{cast}" if weighted else ""
        lines += [
            "import dgl",
            "g = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)",
            f"logits = load()(g, x{cast}{given})  # [N, {classes}]",
        ]
    elif "gcn_weight" in arguments:
        given = f", edge_weight{cast}" if "edge_weight" in arguments else ""
        lines += [
            "model = load()",
            f"gcn_weight = model.gcn_weight(edge_index, num_nodes{weight})",
            f"logits = model(x{cast}, edge_index{given}, gcn_weight)  # [N, {classes}]",
        ]
    else:
        lines.append(
            f"logits = load()(x{cast}, edge_index{weight + cast if weighted else ''})  # [N, {classes}]"
        )
    code = "\n".join(["```python", *lines, "```"])
    figures = ", ".join(
        f"{name.removesuffix('_acc')} {training[name]:.4f}" for name in ("train_acc", "val_acc", "test_acc")
        if training.get(name) is not None
    )  # fmt: skip
    by_hand = config["graph"]["before_prepare"]
    first = f"\nBefore `prepare`: {'; '.join(by_hand)}.\n" if by_hand else ""
    scored = f" ({training['metric']}: {figures})" if figures else ""
    return (
        f"# {config['model']['kind']} for {dataset['name']}\n\n"
        f"Exported by tgnn {made_by}; needs torch and {framework.title} {framework.versions}.\n"
        f"Trained on {dataset['name']}{scored}; `config.json` says how and where from.\n\n{code}\n{first}"
    )
