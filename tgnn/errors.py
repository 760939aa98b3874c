"""Errors that teach: one wording for a user's mistake, and how a command line shows it.

A user's mistake is a `UserError`: one sentence that says what was got, what was expected and what to do about it.
Command lines print that sentence and end with status 2; anything else is our own fault and keeps its traceback.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence

USER_ERROR_STATUS = 2

_warned: set[str] = set()


class UserError(ValueError):
    """A mistake in what the user gave: its text is one whole sentence."""


def wrong(what: str, got: object, expected: object, do: str) -> UserError:
    """The one wording of a user's mistake.

    >>> str(wrong("--ranks", 0, "at least 1", "give a positive number"))
    '--ranks: got 0, expected at least 1; give a positive number.'
    """
    sentence = f"{what}: got {got}, expected {expected}; {do}".replace("\n", " ").rstrip(".")
    return UserError(sentence + ".")


def warn_once(key: str, message: str) -> None:
    """Warn with `message` the first time this process comes here with `key`."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=3)


def run_command(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command line's `main`; a `UserError` becomes its sentence on stderr and exit status 2."""
    try:
        return main(argv) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
