"""Builds models of transformers without weights or with mapped weights, and reports the progress of loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import logging

from ..files.config_json import CONFIG, read_config, refuse_code
from ..files.untrusted import interpreting
from .building import bounded, check_numbers


def causal_model_types() -> Collection[str]:
    """The ``model_type`` of every causal language model that transformers knows."""
    return set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_model_types() -> Collection[str]:
    """The ``model_type`` of every image-text model that transformers knows."""
    return set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def meta_model(source: Path, tensors: int, *, causal: bool = False) -> transformers.PreTrainedModel:
    """Builds the model of a checkpoint on the meta device.

    Args:
        tensors: number of tensors in the checkpoint's files, which bounds the size of the model.
        causal: build a causal language model, whatever class config.json names.

    Raises:
        OSError: there is no config.json.
        ValueError: transformers cannot build what it describes, or it has far more modules than the files have tensors.
    """
    text, file = read_config(source), source / CONFIG
    check_numbers(text, file)
    refuse_code(source, text)
    with (
        counting(None),
        interpreting(
            f"{file} describes a model of type {text.get('model_type')!r}, architectures {text.get('architectures')}, "
            f"which transformers {transformers.__version__} does not build (models with code of their own are not "
            "supported; for new architectures install a newer transformers)"
        ),
    ):
        config = transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        names = config.architectures if isinstance(config.architectures, list) and not causal else ()
        named = [getattr(transformers, name, None) for name in names if isinstance(name, str)]
        model_class = next((kind for kind in named if hasattr(kind, "_from_config")), None)
        with bounded(tensors, file):
            if model_class is not None:
                return model_class._from_config(config)
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def mapped_model(source: Path, tensors: int) -> transformers.PreTrainedModel:
    """Loads the model of a checkpoint in eval mode, with its weights mapped from the files.

    Raises:
        OSError, ValueError: as :func:`meta_model`, or transformers cannot load it.
    """
    kind = type(meta_model(source, tensors))
    with counting(None), interpreting(f"{source} does not load"):
        # With the dtype of the files, weights are not copied from safetensors' mapping.
        return kind.from_pretrained(source, dtype="auto", local_files_only=True, use_safetensors=True).eval()


@contextmanager
def counting(progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """A context that reports transformers' loading progress to a function instead of showing a progress bar and a report."""

    class Counter:
        def __init__(self, items: Sequence[Any] = (), **kwargs: Any):
            self._items, self._total = items, kwargs.get("total") or len(items)

        def __iter__(self) -> Iterator[Any]:
            for done, item in enumerate(self._items, 1):
                yield item
                if progress is not None:
                    progress(done, self._total)

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., None]:  # the other methods of a progress bar do nothing
            return lambda *args, **kwargs: None

    verbosity = logging.get_verbosity()
    set_hook = getattr(logging, "set_tqdm_hook", None)
    if set_hook is not None:
        previous = set_hook(lambda factory, args, kwargs: Counter(*args, **kwargs))
    else:  # the first 5.x versions: nothing to report, but no bar either
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if set_hook is not None:
            set_hook(previous)
        elif bars:
            logging.enable_progress_bar()
