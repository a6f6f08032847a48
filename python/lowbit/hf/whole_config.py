"""The settings of a model that its config.json does not have."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig


def whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the values that the config class of its model_type has for missing settings.

    Raises:
        ValueError: the config class refuses a setting.
    """
    try:
        whole: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except Exception as error:  # of many classes
        raise ValueError(f"transformers refuses its settings: {error}") from error
    return whole
