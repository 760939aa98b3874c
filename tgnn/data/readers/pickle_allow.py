"""Read the pickles that published graph data comes in without running anything they name.

A pickle is a program: it can call whatever it names. This unpickler knows a closed list of names and
refuses all others. Those of numpy and scipy stand for inert classes that only keep what the file says:
numpy's own restore a damaged or hostile dtype as told, and then crash. Arrays are rebuilt here from checked
codes, shapes and bytes.
"""

from __future__ import annotations

import builtins
import collections
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from tgnn.errors import wrong


class _Dtype:
    """Stands for numpy.dtype: a code such as f4, and its byte order."""

    def __init__(self, code: str, *_: object) -> None:
        if not re.fullmatch(r"[iufb][1248]", code):
            raise ValueError(f"dtype {code}")
        self.code, self.order = code, "|"

    def __setstate__(self, state: tuple) -> None:
        if state[1] not in ("<", ">", "|"):
            raise ValueError(f"byte order {state[1]}")
        self.order = state[1]


class _Array:
    """Stands for numpy.ndarray: version, shape, dtype, whether in Fortran order, and the bytes."""

    state: tuple

    def __setstate__(self, state: tuple) -> None:
        self.state = state


class _Matrix:
    """Stands for scipy's csr_matrix: its attributes."""


def _reconstruct(*_: object) -> _Array:
    """Stands for numpy's array rebuilder: an array that waits for its state."""
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols: as text in latin1. Other codecs are not called."""
    if encoding != "latin1":
        raise ValueError(encoding)
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("scipy.sparse.csr", "csr_matrix"): _Matrix,
    ("scipy.sparse._csr", "csr_matrix"): _Matrix,
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
    """What the pickle holds: a numpy array, a scipy CSR matrix, or a dictionary of lists.

    Raises:
        UserError: the file is missing, damaged, or names anything outside the list.
    """
    try:
        with open(path, "rb") as file:
            value = _Unpickler(file, encoding="latin1").load()
        if isinstance(value, _Matrix):
            return _matrix(vars(value))
        return _array(value) if isinstance(value, _Array) else value
    except _Refused as error:
        expected = "numpy arrays, scipy CSR matrices and dictionaries of lists only"
        raise wrong(str(path), f"a pickle that names {error}", expected, "do not trust this file") from error
    except OSError as error:
        raise wrong(str(path), error.strerror or str(error), "a file to read", "check the path") from error
    except Exception as error:  # a damaged pickle raises almost anything, and nothing it named ran
        got = f"a pickle that cannot be read ({type(error).__name__})"
        raise wrong(str(path), got, "the file as published", "fetch it again") from error


def _array(held: _Array) -> np.ndarray:
    """The array that a pickled one's state describes."""
    _, shape, dtype, fortran, data = held.state
    if not isinstance(dtype, _Dtype):
        raise TypeError(type(dtype).__name__)
    raw = data.encode("latin1") if isinstance(data, str) else bytes(data)
    values = np.frombuffer(raw, np.dtype(dtype.order + dtype.code))
    return values.reshape(tuple(int(n) for n in shape), order="F" if fortran else "C")


def _matrix(held: dict[str, Any]) -> sp.csr_matrix:
    """A checked CSR matrix from the attributes of a pickled one."""
    data, indices, indptr = (_array(held[name]) for name in ("data", "indices", "indptr"))
    shape = tuple(int(n) for n in held.get("_shape", held.get("shape")))
    matrix = sp.csr_matrix((data, indices, indptr), shape=shape)
    matrix.check_format(full_check=True)
    return matrix


def expect(value: Any, kind: type, path: Path) -> Any:
    """`value`, which must be of `kind`."""
    if not isinstance(value, kind):
        got = type(value).__name__
        raise wrong(str(path), got, kind.__name__, "check that the files belong together")
    return value
