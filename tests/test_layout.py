"""House rules that a machine can check: who may import whom, how long things are, what is never called."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Every module stands on a floor and imports from lower floors and its own package only. A package's entry
# covers what is inside it; a new module beside these must be placed here.
FLOORS = {
    "tgnn.errors": -1,
    "tgnn.kernels": 0,
    "tgnn.data": 1,
    "tgnn.partition": 2,
    "tgnn.parallel": 3,
    "tgnn.sampling": 4,
    "tgnn.nn": 5,
    "tgnn.training": 6,
    "tgnn.export": 7,
    "tgnn.partition.__main__": 7,
    "tgnn.train": 7,
    "tgnn.predict": 7,
    "tgnn.plan": 7,
}
# The package's own face is above all floors, and nothing inside imports it.
FACE, FACE_FLOOR = "tgnn", 8

TOP_LEVEL = {"README.md", "LICENSE", "pyproject.toml", "constraints.txt", ".gitignore"}
TOP_LEVEL |= {".ci", "tgnn", "tools", "tests", "examples"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
PICKLE_READER = "tgnn/data/readers/pickle_allow.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sources("tgnn")}


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def entry(module: str) -> str | None:
    """The most specific entry of the floor table that covers a module."""
    covering = [name for name in FLOORS if module == name or module.startswith(name + ".")]
    return FACE if module == FACE else max(covering, key=len, default=None)


def floor(module: str) -> int:
    return FACE_FLOOR if module == FACE else FLOORS[entry(module)]


def imported(path: Path, node: ast.AST) -> Iterator[str]:
    """The modules of ours, and triton, that one import statement (or import_module call) names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module_name(path).split(".")
            package = package[: len(package) - node.level + (path.name == "__init__.py")]
            base = ".".join([*package, *base.split(".")]).rstrip(".")
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
    elif (
        isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
    ):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node that runs when the module is imported: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from at_import_time(child)


def test_every_module_stands_on_a_floor():
    assert [module for module in MODULES if entry(module) is None] == []
    assert [name for name in FLOORS if name.count(".") == 1 and (ROOT / name.replace(".", "/")).is_dir()
            and name not in MODULES] == []  # fmt: skip


def test_imports_go_down():
    wrong = []
    for module, path in MODULES.items():
        for node in ast.walk(tree(path)):
            for target in imported(path, node):
                if target.split(".")[0] != "tgnn" or entry(target) == entry(module):
                    continue
                if entry(target) is None or floor(target) >= floor(module):
                    wrong.append(f"{place(path, node)}: {module} imports {target}")
    assert wrong == []


def test_triton_is_imported_only_when_its_path_is_taken():
    wrong = []
    for path in MODULES.values():
        if path.stem.endswith("_triton"):
            continue
        for node in at_import_time(tree(path)):
            for target in imported(path, node):
                if target.split(".")[0] == "triton" or target.endswith("_triton"):
                    wrong.append(f"{place(path, node)} imports {target} at import time")
    assert wrong == []


def test_files_and_functions_are_short():
    wrong = []
    for path in sources("tgnn", "tools", "tests", "examples"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            wrong.append(f"{path.relative_to(ROOT)}: {lines} lines")
        if path.stem.endswith("_triton"):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, Function) and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES:
                wrong.append(
                    f"{place(path, node)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
                )
    assert wrong == []


def test_everything_public_is_documented():
    wrong = [str(path.relative_to(ROOT)) for path in sources("tgnn", "tools", "tests", "examples")
             if ast.get_docstring(tree(path)) is None]  # fmt: skip
    for path in sources("tgnn", "tools"):
        for node in tree(path).body:
            if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    wrong.append(f"{place(path, node)}: {node.name}")
    assert wrong == []


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else only what is known of its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(path: Path, node: ast.AST) -> str | None:
    """Why a node may run code that a file brings along, if it may."""
    loads = {"load", "loads", "Unpickler"}
    if str(path.relative_to(ROOT).as_posix()) != PICKLE_READER:
        if isinstance(node, ast.Attribute) and dotted(node.value) == "pickle" and node.attr in loads:
            return "reads pickles: use tgnn.data.readers.pickle_allow"
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            return "import pickle as a whole, so that its use can be seen"
    if isinstance(node, ast.Call):
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        if given.get("allow_pickle") is True:
            return "allow_pickle=True runs what a file says"
        if dotted(node.func) == "torch.load" and given.get("weights_only") is not True:
            return "torch.load without weights_only=True runs what a file says"
    return None


def test_no_pickle_is_read():
    found = []
    for path in sources("tgnn", "tools", "examples"):
        found += [f"{place(path, n)}: {unsafe(path, n)}" for n in ast.walk(tree(path)) if unsafe(path, n)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    ["pickle.load(f)", "pickle.Unpickler(f)", "from pickle import loads", "numpy.load(f, allow_pickle=True)",
     "torch.load(f)", "torch.load(f, weights_only=False)"],
)  # fmt: skip
def test_the_pickle_check_sees(code: str):
    assert any(unsafe(ROOT / "tgnn" / "x.py", node) for node in ast.walk(ast.parse(code)))


def test_comparisons_in_tests_raise():
    """A comparison that only returns a truth value hides what differs, or all if nobody looks."""
    found = [
        place(path, node)
        for path in sources("tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "allclose"
    ]
    assert found == [], "use torch.testing.assert_close or numpy.testing.assert_allclose"


def test_top_level_is_fixed():
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    ignored = [line.strip("/") for line in lines if line and not line.startswith(("#", "!"))] + [".git"]
    entries = {path.name for path in ROOT.iterdir()}
    assert sorted(e for e in entries - TOP_LEVEL if not any(fnmatch.fnmatch(e, i) for i in ignored)) == []


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_lint():
    check = subprocess.run(
        [sys.executable, "tools/check.py", "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert check.returncode == 0, check.stdout + check.stderr
