"""Opening `.npz` archives and `.npy` arrays without pickle, with faults that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tgnn.errors import UserError, wrong


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
