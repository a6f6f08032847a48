"""Loads processors of image-text models without their video part, which needs torchvision."""

from __future__ import annotations

import os
from typing import Any

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING


class _NoVideos:
    """A placeholder for a video processor."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def without_videos(path: str | os.PathLike[str], tokenizer: Any) -> Any:
    """The processor of a multimodal model without its video processor."""
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    kind: Any = PROCESSOR_MAPPING[type(config)]

    class Still(kind):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

        def __repr__(self) -> str:  # transformers' repr writes all parts as JSON, and is always called
            return f"{kind.__name__} without videos"

    images = transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": _NoVideos()}
    settings, _ = kind.get_processor_dict(path, local_files_only=True)
    return Still.from_args_and_dict([parts[name] for name in kind.get_attributes()], settings)
