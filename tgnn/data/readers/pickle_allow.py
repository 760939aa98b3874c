"""Read the pickles that published graph data comes in without running anything they name.

A pickle is a program: it can call whatever it names. This unpickler knows a closed list of names and
refuses all others, and scipy's matrices become an inert class that only keeps their arrays.
"""

from __future__ import annotations

import builtins
import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.errors import wrong


class _MatrixState:
    """Stands in for scipy's csr_matrix: holds the attributes of the pickled one."""


def _reconstruct() -> Any:
    """numpy's own array rebuilder, wherever this numpy keeps it; its name in old pickles is numpy.core's."""
    return np.zeros(0).__reduce__()[0]


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols: as text in latin1. Other codecs are not called."""
    if encoding != "latin1":
        raise ValueError(encoding)
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct(),
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("scipy.sparse.csr", "csr_matrix"): _MatrixState,
    ("scipy.sparse._csr", "csr_matrix"): _MatrixState,
    ("collections", "defaultdict"): collections.defaultdict,
    ("_codecs", "encode"): _encode,
    ("__builtin__", "list"): builtins.list,
    ("builtins", "list"): builtins.list,
}


class _Unpickler(pickle.Unpickler):
    """Looks names up in the list, and nowhere else."""

    def find_class(self, module: str, name: str) -> Any:
        """The allowed object of that name."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


class _Refused(Exception):
    """A name outside the list."""


def load_pickle(path: Path) -> Any:
    """What the pickle holds: arrays, dictionaries of lists, and scipy CSR matrices.

    Raises:
        UserError: the file is missing, damaged, or names anything outside the list.
    """
    try:
        with open(path, "rb") as file:
            value = _Unpickler(file, encoding="latin1").load()
        return _matrix(value) if isinstance(value, _MatrixState) else value
    except _Refused as error:
        expected = "numpy arrays, scipy CSR matrices and dictionaries of lists only"
        raise wrong(str(path), f"a pickle that names {error}", expected, "do not trust this file") from error
    except OSError as error:
        raise wrong(str(path), error.strerror or str(error), "a file to read", "check the path") from error
    except Exception as error:  # a damaged pickle raises almost anything, and nothing of ours ran
        got = f"a pickle that cannot be read ({type(error).__name__})"
        raise wrong(str(path), got, "the file as published", "fetch it again") from error


def _matrix(held: _MatrixState) -> sp.csr_matrix:
    """A checked CSR matrix from the attributes a pickled one had."""
    state = vars(held)
    shape = state.get("_shape", state.get("shape"))
    matrix = sp.csr_matrix(
        (state["data"], state["indices"], state["indptr"]), shape=tuple(int(n) for n in shape)
    )
    matrix.check_format(full_check=True)
    return matrix


def expect(value: Any, kind: type, path: Path) -> Any:
    """`value`, which must be of `kind`."""
    if not isinstance(value, kind):
        raise wrong(str(path), type(value).__name__, kind.__name__, "check that the files belong together")
    return value
