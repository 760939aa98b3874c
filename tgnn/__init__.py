"""tgnn: train graph neural networks over several GPUs by split parallelism.

Every rank samples and trains on its own part of the graph and exchanges intermediate rows with the others,
so that no vertex is sampled, loaded or computed twice. `python -m tgnn.train` is the command line; the names
here are the API.
"""

from importlib.metadata import PackageNotFoundError, version

from tgnn.errors import UserError

try:
    __version__ = version("tgnn")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"

# Imported when first asked for, so that `import tgnn` and `--help` stay quick.
_WHERE = {
    "Dataset": "tgnn.data.graph",
    "Graph": "tgnn.data.graph",
    "Loader": "tgnn.sampling.loader",
    "Store": "tgnn.partition.store",
    "all_reduce_gradients": "tgnn.parallel.exchange",
    "current": "tgnn.parallel.comm",
    "launch": "tgnn.parallel.launch",
    "load": "tgnn.data.load",
    "predict": "tgnn.training.inference",
    "prepare": "tgnn.training.prepare",
}

__all__ = [*_WHERE, "UserError", "__version__"]


def __getattr__(name: str) -> object:
    import importlib

    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in ("data", "kernels", "nn", "parallel", "partition", "sampling", "training"):
        return importlib.import_module(f"tgnn.{name}")
    raise AttributeError(f"module 'tgnn' has no attribute {name!r}")
