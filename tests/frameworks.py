"""DGL and PyG for tests, where they can be imported."""

from __future__ import annotations

import types

import pytest

from tgnn.errors import UserError
from tgnn.export.frameworks import Framework, import_framework


def imported(framework: Framework) -> types.ModuleType:
    """The framework's package; a test that needs it skips, saying why, without it."""
    try:
        return import_framework(framework)
    except UserError as error:
        pytest.skip(str(error))
