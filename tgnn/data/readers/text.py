"""Tables in text, read in bounded memory: a fast parser for what is right, a strict one for what is wrong.

Columns are separated by spaces or tabs, commas or semicolons; a value may stand in double quotes (read
slower; a separator inside them is refused); digits are ASCII; `#` starts a comment; blank lines, CRLF and a
missing last newline are nothing special; names ending in `.gz` are unpacked. A fault names the file, the
line and the text.
"""

from __future__ import annotations

import gzip
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from tgnn.errors import UserError, wrong

ID, NUMBER, LABEL, WORD, SKIP = "a vertex id", "a number", "a label", "a word", "anything"
_DTYPES = {ID: np.int64, NUMBER: np.float64, LABEL: np.float64, WORD: "U16", SKIP: "U1"}
_BLOCK_CHARS = 1 << 24
_SHOWN_CHARS = 60
_SEPARATORS = {"space": None, "tab": "\t", "comma": ",", "semicolon": ";"}


@dataclass(frozen=True)
class Block:
    """Some rows of a table: `columns[c]` are the values of column c; `fault` words an error about one row."""

    path: Path
    columns: list[np.ndarray]
    lines: list[str]
    first_line: int

    def line_of(self, row: int) -> tuple[int, str]:
        """(line number from 1, text) of a row."""
        rows = ((i, line) for i, line in enumerate(self.lines) if _content(line))
        for _ in range(row):
            next(rows)
        place, line = next(rows)
        return self.first_line + place, line.strip()

    def fault(self, row: int, expected: str, do: str) -> UserError:
        """The error that `row` is not what was expected."""
        number, line = self.line_of(row)
        return wrong(f"{self.path}, line {number}", _shown(line), expected, do)


def read_blocks(
    path: Path,
    kinds_of: Callable[[list[str]], Sequence[str]],
    delimiter: str = "auto",
    row_is_line: bool = False,
    may_be_empty: bool = False,
) -> Iterator[Block]:
    """The rows of a text table, some millions of characters at a time.

    Args:
        path: the file; a `.csv` or `.csv.gz` may start with a header line of words, which is skipped.
        kinds_of: given the first row's fields, the kind of each column (ID, NUMBER, LABEL, WORD or SKIP).
        delimiter: a name of `DataOptions.delimiter`; "auto" looks at the first row.
        row_is_line: whether a single column counts lines, so that a blank line between rows is a fault.
        may_be_empty: whether a file without any row is nothing wrong.

    Raises:
        UserError: the file is missing, damaged or (unless it may be) empty, or a line is not what its columns
            should be.
    """
    kinds: Sequence[str] = ()
    separator, line_number, seen_blank, any_row = None, 1, 0, False
    with _open(path) as (text, progress):
        while lines := _read_lines(text, path):
            first_line, line_number = line_number, line_number + len(lines)
            if not kinds:
                place = next((i for i, line in enumerate(lines) if _content(line)), None)
                if place is None:
                    continue
                separator = _separator(_content(lines[place]), delimiter)
                fields = _content(lines[place]).split(separator)
                if _is_header(path, fields):
                    lines[place] = "#\n"
                kinds = kinds_of([field.strip() for field in fields])
            if row_is_line and len(kinds) == 1:
                seen_blank = _check_blanks(path, lines, first_line, seen_blank)
            block = Block(path, [], lines, first_line)
            block.columns.extend(_parse(block, kinds, separator))
            progress()
            if len(block.columns[0]):
                any_row = True
                yield block
    if not any_row and not may_be_empty:
        raise wrong(str(path), "no line of data", "at least one", "check that this is the right file")


def _parse(block: Block, kinds: Sequence[str], separator: str | None) -> list[np.ndarray]:
    """The block's columns; numpy parses, and where it cannot the strict parser does or says why not."""
    same = len(set(kinds)) == 1
    dtype = _DTYPES[kinds[0]] if same else [(f"c{i}", _DTYPES[kind]) for i, kind in enumerate(kinds)]
    try:
        with warnings.catch_warnings():
            # Some numpy versions take "1.0" for an integer with a DeprecationWarning; a block of nothing but
            # comments gives a UserWarning.
            warnings.simplefilter("error", DeprecationWarning)
            warnings.simplefilter("ignore", UserWarning)
            table = np.loadtxt(block.lines, dtype, comments="#", delimiter=separator, ndmin=2 if same else 1)
    except (ValueError, DeprecationWarning, OverflowError):
        return _parse_strictly(block, kinds, separator)
    if not same:
        return [table[name] for name in table.dtype.names]
    if table.size == 0:
        return [np.zeros(0, dtype) for _ in kinds]
    if table.shape[1] != len(kinds):
        return _parse_strictly(block, kinds, separator)
    return list(table.T)


def _parse_strictly(block: Block, kinds: Sequence[str], separator: str | None) -> list[np.ndarray]:
    """Line by line: what a value is for its kind, and the first line that is wrong."""
    values: list[list[Any]] = [[] for _ in kinds]
    for place, line in enumerate(block.lines):
        content = _content(line)
        if not content:
            continue
        fields = [_unquoted(field) for field in content.split(separator)]
        where = f"{block.path}, line {block.first_line + place}"
        if len(fields) != len(kinds):
            raise wrong(
                where,
                f"{_shown(line.strip())} ({len(fields)} columns)",
                f"{len(kinds)} columns as in the first line",
                "correct or remove that line",
            )
        for column, (field, kind) in enumerate(zip(fields, kinds, strict=True)):
            try:
                values[column].append(_value(field, kind))
            except ValueError:
                raise wrong(
                    where, f"{_shown(field)} in column {column + 1}", _EXPECTED[kind], _CURES[kind]
                ) from None
    return [np.array(column, _DTYPES[kind]) for column, kind in zip(values, kinds, strict=True)]


_EXPECTED = {
    ID: "a vertex id, a whole number such as 7",
    NUMBER: "a number",
    LABEL: "a class number, -1, nan or nothing",
}
_CURES = {
    ID: "correct that line (only a .csv may have a header line of words)",
    NUMBER: "correct that line",
    LABEL: "number the classes 0, 1, 2, ...",
}


def _value(field: str, kind: str) -> Any:
    """One field as its kind; ValueError where it is not."""
    if kind == ID:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", field):
            raise ValueError(field)
        return int(field)
    if kind == LABEL and not field:
        return np.nan
    if kind in (NUMBER, LABEL) and ("_" in field or not field.isascii()):
        raise ValueError(field)
    return float(field) if kind in (NUMBER, LABEL) else field


def _unquoted(field: str) -> str:
    """The field without the space and one pair of double quotes around it.

    >>> _unquoted(' "7" ')
    '7'
    """
    field = field.strip()
    quoted = len(field) >= 2 and field[0] == field[-1] == '"'
    return field[1:-1].strip() if quoted else field


def _shown(text: str) -> str:
    """The text as an error shows it: quoted, cut to a line's width, bytes that are no text escaped."""
    shown = ascii(text) if "\ufffd" in text else repr(text)
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


def _content(line: str) -> str:
    """The line without its comment and the space around it."""
    return line.partition("#")[0].strip()


def _separator(content: str, delimiter: str) -> str | None:
    """What to split by: the named delimiter, or the one the first row has; None is any white space."""
    if delimiter != "auto":
        return _SEPARATORS[delimiter]
    return "," if "," in content else ";" if ";" in content else None


def _is_header(path: Path, fields: list[str]) -> bool:
    """Whether a csv's first row is a header: no field of it is a number, in quotes or digits of any kind."""
    if not path.name.removesuffix(".gz").endswith(".csv"):
        return False
    number = re.compile(r"[\s\"'\u201c\u2018]*([+\u2212-]?[.\d\u00b2\u00b3\u00b9]|nan\b|$)", re.IGNORECASE)
    return not any(number.match(field) for field in fields)


def _check_blanks(path: Path, lines: list[str], first_line: int, seen: int) -> int:
    """Refuse a row after a blank line; returns the number of the last blank line so far (0: none)."""
    for place, line in enumerate(lines):
        if not line.strip():
            seen = seen or first_line + place
        elif seen:
            raise wrong(
                f"{path}, line {seen}",
                "a blank line",
                "a value on every line",
                "write -1 or nan for no label",
            )
    return seen


def _read_lines(text: TextIO, path: Path) -> list[str]:
    """The next lines; damage inside a packed file shows here."""
    try:
        return text.readlines(_BLOCK_CHARS)
    except (OSError, EOFError, zlib.error) as error:
        raise wrong(
            str(path), f"a file that cannot be unpacked ({error})", "a whole gzip file", "fetch it again"
        ) from error


class _open:
    """The text of a file, unpacked, and a progress bar over its bytes that shows after two seconds."""

    def __init__(self, path: Path) -> None:
        try:
            self._raw = open(path, "rb")
        except OSError as error:
            raise wrong(
                str(path), error.strerror or str(error), "a file to read", "check the path"
            ) from error
        size = path.stat().st_size
        self._bar = tqdm(
            total=size, unit="B", unit_scale=True, desc=f"reading {path.name}", delay=2, disable=None
        )
        stream = gzip.open(self._raw) if path.name.endswith(".gz") else self._raw
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace")

    def __enter__(self) -> tuple[TextIO, Callable[[], None]]:
        return self._text, lambda: self._bar.update(self._raw.tell() - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._text.close()
        self._raw.close()
