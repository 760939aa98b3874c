"""Opening `.npz` archives and `.npy` arrays without pickle, with faults that name the file."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy.sparse as sp
from numpy.lib import format as npy_format

from tgnn.errors import UserError, wrong

_MAPPED_BYTES = 1 << 28
"""Arrays of an archive from this size on are unpacked to disk where `mapped_array` reads them."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever numpy, scipy or zip raise over a damaged, foreign or pickled file into one sentence."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise wrong(str(path), error.strerror or str(error), "a file to read", "check the path") from error
    except Exception as error:  # damage makes these libraries raise almost anything
        got = f"a file that cannot be read ({error or type(error).__name__})"
        raise wrong(
            str(path), got, "a whole file of plain arrays (no pickled objects)", "write or fetch it again"
        ) from error


def open_npz(path: Path) -> Npz:
    """The archive's keys and arrays."""
    return Npz(path)


def load_npy(path: Path, mmap: bool = False) -> np.ndarray:
    """The array in a `.npy` file, memory-mapped read-only where asked."""
    with reading(path):
        return np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)


def load_sparse(path: Path) -> Any:
    """The matrix in a file of `scipy.sparse.save_npz`, checked."""
    with reading(path):
        matrix = sp.load_npz(path)
        # scipy itself would read and write beside the arrays of a damaged one.
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)
        return matrix


def mapped_array(path: Path, key: str) -> np.ndarray | None:
    """An array of an `.npz`; a big one is unpacked to a file without a name beside the archive (where that
    folder cannot be written, with other temporary files) and memory-mapped, so it is never in memory as a
    whole. None where the archive lacks the key or holds Python's None under it.
    """
    with reading(path), zipfile.ZipFile(path) as archive:
        name = f"{key}.npy"
        if name not in archive.namelist():
            return None
        with archive.open(name) as member:
            version = npy_format.read_magic(member)
            head = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
            shape, fortran, dtype = head(member)
            if dtype.hasobject and shape == ():
                return None
            if archive.getinfo(name).file_size < _MAPPED_BYTES or dtype.hasobject:
                with open_npz(path) as arrays:
                    return arrays[key]
            with _nameless_file(path.parent) as file:
                shutil.copyfileobj(member, file, 1 << 22)
                file.flush()
                return np.memmap(file, dtype, "r+", shape=shape, order="F" if fortran else "C")


def _nameless_file(folder: Path) -> BinaryIO:
    """A temporary file in `folder` if that can be written; its space is free again when the last map ends."""
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError:
        return tempfile.TemporaryFile()


class Npz:
    """An `.npz` archive: `keys`, and arrays by key, each read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            archive = np.load(path, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise wrong(str(path), "a single array", "an .npz archive", "save it with numpy.savez")
            self._archive = archive
        self.keys = frozenset(archive.files)

    def __getitem__(self, key: str) -> np.ndarray:
        if key not in self.keys:
            have = ", ".join(sorted(self.keys))
            raise wrong(
                str(self.path), f"keys {have}", f"the key {key}", "check that the file is of this layout"
            )
        with reading(self.path):
            return self._archive[key]

    def get(self, key: str) -> Any:
        """The array, or None where the archive lacks it."""
        return self[key] if key in self.keys else None

    def __enter__(self) -> Npz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
