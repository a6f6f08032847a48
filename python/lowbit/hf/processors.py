"""Loads processors of image-text models without their parts for videos, which need torchvision, and for sound."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING


class _Nothing:
    """A placeholder for a processor of videos or sound."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def without_videos(path: str | os.PathLike[str], tokenizer: Any) -> Any:
    """The processor of a multimodal model with only its tokenizer and image processor."""
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    kind: Any = PROCESSOR_MAPPING[type(config)]

    class Still(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return super().check_argument_for_proper_class(name, argument) if name in parts else None

        def __repr__(self) -> str:  # transformers' repr writes all parts as JSON, and is always called
            return f"{kind.__name__} for images"

    images = transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    settings, _ = kind.get_processor_dict(path, local_files_only=True)
    return Still.from_args_and_dict([parts.get(name, _Nothing()) for name in kind.get_attributes()], settings)
