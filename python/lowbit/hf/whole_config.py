"""The settings of a model that its config.json does not have."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the values that the config class of its model_type has for missing settings.

    Raises:
        Exception: of any class, if the config class refuses a setting.
    """
    whole: dict[str, Any] = import_module("transformers").AutoConfig.for_model(**config).to_dict()
    return whole
