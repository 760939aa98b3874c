"""The frameworks that export writes for: which versions, and how to import them."""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass

from tgnn.errors import UserError, wrong
from tgnn.export.clean_run import add_setuptools_extern


@dataclass(frozen=True)
class Framework:
    """A framework and the versions whose layers have the parameters that export writes."""

    name: str
    """What `--to` calls it."""
    title: str
    package: str
    """What Python imports."""
    install: str
    lowest: tuple[int, int]
    highest: tuple[int, int]
    wheels: str = ""
    """For which machines there are wheels, where that is not for all."""

    @property
    def versions(self) -> str:
        """The supported versions in words."""
        return f"{'.'.join(map(str, self.lowest))} to {'.'.join(map(str, self.highest))}"

    def check(self, version: str) -> None:
        """Raise UserError for a version that the exported code is not meant for."""
        numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
        if not self.lowest <= numbers <= self.highest:
            do = f"install a supported one, for example pip install {self.install}{self.wheels}"
            raise wrong(self.title, f"version {version}", f"version {self.versions}", do)

    def absent(self, why: str, otherwise: str = "") -> UserError:
        """The error where it cannot be imported; `otherwise` says what else to do than to install it."""
        got, do = f"none that can be imported ({why})", f"pip install {self.install}{self.wheels}{otherwise}"
        return wrong(self.title, got, f"version {self.versions}", do)


_DGL_WHEELS = ", whose wheels end at Python 3.11 on x86-64 Linux"
DGL = Framework("dgl", "DGL", "dgl", "dgl==1.1.3", (1, 1), (2, 4), _DGL_WHEELS)
PYG = Framework("pyg", "PyG", "torch_geometric", "torch_geometric", (2, 5), (2, 8))
FRAMEWORKS = {framework.name: framework for framework in (DGL, PYG)}


def import_framework(framework: Framework) -> types.ModuleType:
    """The framework's package; raises UserError where it is absent, broken or of an unsupported version."""
    if framework is DGL:
        add_setuptools_extern()
    try:
        package = importlib.import_module(framework.package)
    # A wheel that does not fit the installed torch fails in many ways.
    except Exception as error:
        raise framework.absent(f"{type(error).__name__}: {error}") from None
    framework.check(package.__version__)
    return package
