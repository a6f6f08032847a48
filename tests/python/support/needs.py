"""Requirements of tests, and the outcome if they are missing."""

import importlib.util
import os
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Ends a test or test module that cannot run here: a skip, but on CI a failure, because a skip would go unnoticed."""
    if os.environ.get("CI"):
        pytest.fail(what, pytrace=False)
    pytest.skip(what, allow_module_level=True)


def need_packages(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        lacking(f"not installed: {', '.join(missing)}")
