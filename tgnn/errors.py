"""Errors that teach: one wording for a user's mistake, and how a command line shows it.

A user's mistake is a `UserError`: one sentence that says what was got, what was expected and what to do about
it. Command lines print that sentence and end with status 2; anything else is our own fault and keeps its
traceback (in a rank: that rank's traceback, and not its parent's).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

USER_ERROR_STATUS = 2
FAULT_STATUS = 1
INTERRUPT_STATUS = 130
# Longer than torchrun needs to end the other ranks when one of them has failed.
_TORCHRUN_ENDS_RANKS_S = 15.0

_warned: set[str] = set()


class UserError(ValueError):
    """A mistake in what the user gave: its text is one whole sentence."""


class ReportedError(RuntimeError):
    """A fault whose text says all there is to say: a command line shows it without a traceback of its own."""


def wrong(what: str, got: object, expected: object, do: str) -> UserError:
    """The one wording of a user's mistake.

    >>> str(wrong("--ranks", 0, "at least 1", "give a positive number"))
    '--ranks: got 0, expected at least 1; give a positive number.'
    """
    sentence = f"{what}: got {got}, expected {expected}; {do}".replace("\n", " ").removesuffix(".")
    return UserError(sentence + ".")


def warn_once(key: str, message: str) -> None:
    """Warn with `message` the first time this process comes here with `key`."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, UserWarning, stacklevel=3)


def run_command(main: Callable[[Sequence[str] | None], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command line's `main` and return the exit status.

    A `UserError` becomes its sentence on stderr and status 2, a `ReportedError` its text and status 1, Ctrl-C
    status 130. Warnings for the user are shown as one line each.
    """
    with _plain_warnings():
        try:
            return main(argv) or 0
        except UserError as error:
            _let_rank_0_tell()
            print(f"error: {error}", file=sys.stderr)
            return USER_ERROR_STATUS
        except ReportedError as error:
            print(f"error: {error}", file=sys.stderr)
            return FAULT_STATUS
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPT_STATUS


def _let_rank_0_tell() -> None:
    """Under torchrun every rank meets the same mistake: rank 0 tells it, and torchrun ends the others
    meanwhile. One that rank 0 does not meet is told all the same, a little later.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(_TORCHRUN_ENDS_RANKS_S)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show `UserWarning`s as a line that speaks to a user, not as a place in the source."""
    before = warnings.formatwarning

    def plain(message, category, filename, lineno, line=None) -> str:
        if category is UserWarning:
            return f"warning: {message}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before
