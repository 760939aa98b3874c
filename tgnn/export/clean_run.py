"""Runs an exported folder where tgnn cannot be imported: `python clean_run.py FRAMEWORK [FOLDER GRAPH OUT]`.

Started by `python -m tgnn.export --verify` in a process of its own, with any Python that has the framework.
Without FOLDER it says which versions there are. Prints one line of JSON; stands on torch, numpy and the
framework alone.
"""

import sys

if __name__ == "__main__":
    # Beside this file lies a dgl.py that must not pass for the framework.
    sys.path[:1] = sys.argv[2:3]
    # What is exported must do without tgnn.
    sys.modules["tgnn"] = None

import contextlib
import importlib
import importlib.util
import json
import types


def add_setuptools_extern() -> None:
    """Let DGL 1.1 be imported beside a setuptools without `setuptools.extern`.

    It takes `packaging` from there where that is not installed by itself; newer setuptools have dropped the
    name, but carry `packaging` on a path of their own. Does nothing where the name is there, or no
    `packaging` at all.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("setuptools")
    try:
        found = importlib.util.find_spec("setuptools.extern") is not None
    except (ImportError, ValueError):
        found = "setuptools.extern" in sys.modules
    if found or importlib.util.find_spec("packaging") is None:
        return
    packaging = importlib.import_module("packaging")
    extern = types.ModuleType("setuptools.extern")
    extern.packaging = packaging
    extern.__path__ = []
    sys.modules["setuptools.extern"] = extern
    sys.modules["setuptools.extern.packaging"] = packaging
    sys.modules["setuptools.extern.packaging.version"] = importlib.import_module("packaging.version")


def score(framework: str, graph_file: str, out: str) -> None:
    """Write the logits that the folder's model gives for every vertex of a graph to `out` (.npy, [N,
    classes]).
    """
    import numpy as np
    import torch

    exported = importlib.import_module("model")
    with np.load(graph_file, allow_pickle=False) as arrays:
        data = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    model = exported.load()
    dtype = next(model.parameters()).dtype
    x, edges, more = data["x"].to(dtype), data["edge_index"], {}
    weight = data.get("edge_weight")
    takes = exported.Model.forward.__code__.co_varnames
    if "gcn_weight" in takes:
        more["gcn_weight"] = model.gcn_weight(edges, len(x), weight)
    if "edge_weight" in takes and weight is not None:
        more["edge_weight"] = weight.to(dtype)
    with torch.no_grad():
        if framework == "dgl":
            dgl = importlib.import_module("dgl")
            logits = model(dgl.graph((edges[0], edges[1]), num_nodes=len(x)), x, **more)
        else:
            logits = model(x, edges, **more)
    np.save(out, logits.numpy(), allow_pickle=False)


def main(arguments: list) -> int:
    """Say the versions, and score a graph where one is given."""
    package = {"dgl": "dgl", "pyg": "torch_geometric"}[arguments[0]]
    if arguments[0] == "dgl":
        add_setuptools_extern()
    try:
        torch, found = importlib.import_module("torch"), importlib.import_module(package)
    # A wheel that does not fit the installed torch fails in many ways.
    except Exception as error:
        print(json.dumps({"absent": f"{type(error).__name__}: {error}"}))
        return 0
    if len(arguments) > 1:
        score(arguments[0], *arguments[2:])
    print(json.dumps({"version": found.__version__, "torch": str(torch.__version__)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
