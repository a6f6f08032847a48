"""What a test needs of the machine, and what becomes of the test where that is missing."""

import importlib.util
import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Ends a test, or a module of them, that cannot run here: a skip, but on CI a failure, as nobody would notice the skip."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what, allow_module_level=True)


def need_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"not installed: {', '.join(missing)}")
