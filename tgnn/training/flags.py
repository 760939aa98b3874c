"""From a dataclass to command-line flags, TOML tables and JSON: one source of truth for every option.

A field `batch_size: int` becomes the flag `--batch-size`, the TOML and JSON key `batch_size`. What the
field's type cannot say stands in its metadata: `help`, `choices`, `parse` (text -> value), `const` (the bare
flag's meaning), `flag` (False: no flag and no TOML key). Types understood: `int`, `float`, `str`, `bool`,
`tuple[int, ...]`, and each of them `| None`. Every mistake is a `UserError`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tgnn.errors import UserError, wrong

_EXPECTED = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "integers separated by commas",
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One option as read from its dataclass field."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None
    parse: Callable[[str], Any] | None
    has_flag: bool
    bare: str | None
    """What the flag means without a value; None where it needs one."""

    @property
    def flag(self) -> str:
        """The flag's spelling, `--batch-size` for `batch_size`."""
        return flag_of(self.name)

    @property
    def example(self) -> str:
        """What to write: the default where there is one, spelt as on a command line."""
        if self.kind is bool:
            return self.flag
        if self.default is None or self.default == "":
            return f"{self.flag} {'1' if self.kind in (int, float) else self.kind.__name__.upper()}"
        return f"{self.flag} {_spell(self.default)}"


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    flag: bool = True,
    **more: Any,
) -> Any:
    """A dataclass field with what its flag needs; `more` is kept in the metadata for the caller's own use."""
    metadata = {"help": help, "flag": flag, **more}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    if parse is not None:
        metadata["parse"] = parse
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The flag of field `name`."""
    return "--" + name.replace("_", "-")


@functools.cache
def specs(cls: type) -> dict[str, Spec]:
    """The options of dataclass `cls` by field name, in the order of declaration."""
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        kind, optional = _kind_of(hints[field.name])
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        choices = field.metadata.get("choices")
        found[field.name] = Spec(
            name=field.name,
            kind=kind,
            optional=optional,
            default=default,
            help=field.metadata.get("help", ""),
            choices=tuple(choices) if choices else None,
            parse=field.metadata.get("parse"),
            has_flag=field.metadata.get("flag", True),
            bare=field.metadata.get("const"),
        )
    return found


def _kind_of(hint: Any) -> tuple[type, bool]:
    """The plain type of an annotation, and whether None is allowed beside it."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0]
    kind = typing.get_origin(hint) or hint
    if kind not in _EXPECTED:
        raise TypeError(f"an option's type must be one of {[k.__name__ for k in _EXPECTED]}, not {hint}")
    return kind, optional


def add_flags(parser: Parser, cls: type, title: str | None = None) -> None:
    """Add a flag per option of `cls` to `parser`, in a help group called `title`.

    Flags that are not given leave no trace in the parsed namespace, so that a file's values can stand under
    them. Values stay text here: `options_from_args` reads them, with one wording for every mistake.
    """
    group = parser.add_argument_group(title) if title else parser
    for spec in specs(cls).values():
        if not spec.has_flag:
            continue
        text = spec.help.replace("%", "%%")
        if spec.default is not None:
            text += f" (default: {_spell(spec.default)})"
        common = {"dest": spec.name, "default": argparse.SUPPRESS, "help": text}
        if spec.kind is bool:
            group.add_argument(spec.flag, action=argparse.BooleanOptionalAction, **common)
        else:
            shown = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.name.split("_")[-1].upper()
            group.add_argument(spec.flag, metavar=shown, nargs=None if spec.bare is None else "?", **common)
            if spec.bare is not None:
                parser.bare_values[spec.flag] = (spec.bare, spec.choices)


def options_from_args(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The options of `cls` that were given as flags, read from their text; raises UserError."""
    found = {}
    for spec in specs(cls).values():
        if spec.has_flag and hasattr(args, spec.name):
            value = getattr(args, spec.name)
            found[spec.name] = value if isinstance(value, bool) else parse_text(spec, value)
    return found


def parse_text(spec: Spec, text: str) -> Any:
    """The value that `text` spells for this option; raises UserError naming the flag."""
    if spec.parse is not None:
        return spec.parse(text)
    if spec.kind is str:
        return check_value(spec, text)
    try:
        if spec.kind is tuple:
            return tuple(int(part) for part in text.split(","))
        return spec.kind(text)
    except ValueError:
        raise wrong(
            spec.flag, repr(text), _EXPECTED[spec.kind], f"write for example {spec.example}"
        ) from None


def check_value(spec: Spec, value: Any, where: str | None = None) -> Any:
    """`value` as the option's own type, for values that come typed (Python, TOML, JSON); raises UserError.

    Integers pass for floats and lists for tuples; text goes through the option's `parse` where it has one.
    `where` names the place in the error, the flag by default.
    """
    where = where or spec.flag
    if value is None and spec.optional:
        return None
    if isinstance(value, str) and spec.parse is not None:
        value = spec.parse(value)
    if spec.kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if spec.kind is tuple and isinstance(value, (list, tuple)):
        value = tuple(spec.parse(part) if spec.parse and isinstance(part, str) else part for part in value)
        value = tuple(inner for part in value for inner in (part if isinstance(part, tuple) else (part,)))
        if any(not isinstance(part, int) or isinstance(part, bool) for part in value):
            raise wrong(where, _show(value), _EXPECTED[tuple], f"write for example {spec.example}")
    if not isinstance(value, spec.kind) or (spec.kind is not bool and isinstance(value, bool)):
        raise wrong(where, _show(value), _EXPECTED[spec.kind], f"write for example {spec.example}")
    if spec.choices and value not in spec.choices:
        raise wrong(where, _show(value), "one of " + ", ".join(spec.choices), _advise(value, spec.choices))
    return value


def check_fields(options: Any) -> None:
    """Check and normalise every field of a (non-frozen) options dataclass in place; raises UserError."""
    for spec in specs(type(options)).values():
        setattr(options, spec.name, check_value(spec, getattr(options, spec.name)))


def check_table(cls: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of `cls` in a table of a file, checked; keys may be spelt with dashes or underscores.

    `where` names the table in errors, for example `[train] in run.toml`. Raises UserError for a key that is
    no option.
    """
    known = {name: spec for name, spec in specs(cls).items() if spec.has_flag}
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in known:
            raise unknown_key(key, known, where)
        if name in found:
            raise wrong(
                f"{key} {where}", "the same key twice", "each key once", "remove one of the two spellings"
            )
        found[name] = check_value(known[name], value, f"{key} {where}")
    return found


def unknown_key(key: str, known: Sequence[str] | Mapping[str, Any], where: str) -> UserError:
    """The error for a key in a file that nobody knows, with the closest known one."""
    return wrong(
        f"{key} {where}",
        "an unknown key",
        "the name of an option",
        _advise(key.replace("-", "_"), list(known)),
    )


def as_dict(options: Any) -> dict[str, Any]:
    """The options as JSON has them (tuples as lists), without those that have no flag."""
    values = {
        spec.name: getattr(options, spec.name) for spec in specs(type(options)).values() if spec.has_flag
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(cls: type, values: Mapping[str, Any], where: str) -> Any:
    """The inverse of `as_dict`; keys left out get their defaults, unknown ones raise UserError naming
    `where`.
    """
    return cls(**check_table(cls, values, where))


def load_toml(path: str) -> dict[str, Any]:
    """A TOML file as nested dicts; raises UserError when it is missing, not TOML, or cannot be read here."""
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise wrong(
                "--config",
                f"Python {sys.version_info.major}.{sys.version_info.minor}, which reads no TOML",
                "Python 3.11 or later, or the tomli package",
                "pip install tgnn[toml]",
            ) from None
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise wrong(
            "--config", f"{path} ({error.strerror})", "a readable TOML file", "check the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise wrong("--config", f"{path} ({error})", "a file in TOML syntax", "correct it there") from None


class Parser(argparse.ArgumentParser):
    """An argument parser whose every complaint is one `UserError` sentence; flags are never abbreviated.

    A value that starts with a minus sign needs no `=`: `--fanouts -1,-1` means `--fanouts=-1,-1`.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)
        self.bare_values: dict[str, tuple[str, tuple[str, ...] | None]] = {}

    def error(self, message: str) -> NoReturn:
        """Raise UserError for a complaint of argparse itself."""
        found = re.match(r"argument ([^:]+): (.*)", message, re.DOTALL)
        what, complaint = found.groups() if found else (self.prog, message)
        what = what.split("/")[0]
        if complaint == "expected one argument":
            raise wrong(what, "no value", "one value after it", f"write {what} VALUE, or see --help")
        if complaint.startswith("ignored explicit argument"):
            raise wrong(
                what, f"the value {complaint.split()[-1]}", "no value after it", f"write {what} alone"
            )
        if complaint.startswith("the following arguments are required: "):
            missing = complaint.split(": ", 1)[1].split(",")[0].strip()
            raise wrong(self.prog, f"no {missing}", f"{missing} on the command line", "see --help")
        choice = re.match(r"invalid choice: (.*) \(choose from (.*)\)$", complaint, re.DOTALL)
        if choice:
            known = [word.strip().strip("'") for word in choice[2].split(",")]
            word = choice[1].strip("'")
            raise wrong(what, choice[1], "one of " + ", ".join(known), _advise(word, known))
        value = re.match(r"invalid (\w+) value: (.*)", complaint, re.DOTALL)
        if value:
            kind = {"int": "an integer", "float": "a number"}.get(value[1], f"a value of {value[1]}")
            raise wrong(what, value[2], kind, "correct the value")
        raise wrong(what, complaint, "a command line as --help shows it", "see --help")

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Any:
        """Like argparse's; raises UserError for what it does not know, suggesting the closest flag."""
        words = self._join_values(list(sys.argv[1:] if args is None else args))
        namespace, extra = self.parse_known_args(words, namespace)
        flags = [word.split("=")[0] for word in extra if word.startswith("-")]
        if flags:
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            raise wrong(flags[0], "an unknown flag", "a flag that --help lists", _advise(flags[0], known))
        if extra:
            expected = f"one {self._positional()} argument at most"
            raise wrong(self.prog, f"the extra argument {extra[0]!r}", expected, "see --help")
        for action in self._actions:
            # A bare flag's own meaning may be the empty text.
            if getattr(namespace, action.dest, None) == "" and action.const != "":
                what = action.option_strings[0] if action.option_strings else action.metavar
                do = "write it" if action.required else f"write it, or leave {what} out"
                raise wrong(str(what), "''", "a value that is not empty", do)
        return namespace

    def _positional(self) -> str:
        """What help calls the argument that has no flag."""
        return next((str(action.metavar) for action in self._actions if not action.option_strings), "DATA")

    def _join_values(self, words: list[str]) -> list[str]:
        """The words with values tied to their flags where argparse would go wrong.

        `--flag -1,2` becomes `--flag=-1,2`, which argparse would take for another flag; a flag with a bare
        meaning takes the next word only if it is one of its choices, not for example DATA.
        """
        joined: list[str] = []
        for word in words:
            flag = joined[-1] if joined else ""
            action = self._option_string_actions.get(flag)
            if action is not None and action.nargs is None and re.match(r"-[\d.]|-inf|-nan", word):
                joined[-1] += "=" + word
                continue
            if flag in self.bare_values:
                bare, choices = self.bare_values[flag]
                if word in (choices or ()):
                    joined[-1] += "=" + word
                    continue
                joined[-1] += "=" + bare
            joined.append(word)
        if joined and joined[-1] in self.bare_values:
            joined[-1] += "=" + self.bare_values[joined[-1]][0]
        return joined


def _advise(got: object, known: Sequence[str]) -> str:
    """What to do about a misspelt word: the closest known one, or the whole list where it is short."""
    close = difflib.get_close_matches(str(got), known, n=1)
    if close:
        return f"perhaps you meant {close[0]}"
    return "choose one of these" if len(known) <= 8 else "see --help for the list"


def _show(value: Any) -> str:
    """A wrong value for a sentence: Python's own spelling, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _spell(value: Any) -> str:
    """A value as one writes it on a command line."""
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
