"""Language models: decoding over a static KV cache, eager, compiled or exported, and generation; requires transformers."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..exports.decoder_program import ExportedDecoder as ExportedDecoder
    from ..exports.decoder_program import export_decoder as export_decoder
    from ..exports.decoder_program import load_decoder as load_decoder
    from ..hf.decoding import Refusal as Refusal
    from .batch import generate_batch as generate_batch
    from .caches import Caches as Caches
    from .compiled import Step as Step
    from .compiled import compile_decoder as compile_decoder
    from .decoder import Decoder as Decoder
    from .expert_files import stream_experts as stream_experts
    from .fallback import Fallback as Fallback
    from .generation import Generation as Generation
    from .generation import generate as generate
    from .images import ImageChat as ImageChat
    from .images import ImageStep as ImageStep
    from .images import image_samples as image_samples
    from .images import load_image_chat as load_image_chat
    from .images import open_image as open_image
    from .mtp import Mtp as Mtp
    from .penalties import TokenLogprobs as TokenLogprobs
    from .prefixes import PrefixCache as PrefixCache
    from .sampling import Sampling as Sampling
    from .sampling import sample as sample
    from .shapes import random_model as random_model
    from .shapes import shape_config as shape_config
    from .stopping import TextUntil as TextUntil
    from .stopping import breakers as breakers

# Public name -> its module, imported on first use: programs without torch use some of them.
_LAZY = {
    "Caches": ".caches",
    "Decoder": ".decoder",
    "ExportedDecoder": "..exports.decoder_program",
    "Fallback": ".fallback",
    "Generation": ".generation",
    "ImageChat": ".images",
    "ImageStep": ".images",
    "Mtp": ".mtp",
    "PrefixCache": ".prefixes",
    "Refusal": "..hf.decoding",
    "Sampling": ".sampling",
    "Step": ".compiled",
    "TextUntil": ".stopping",
    "TokenLogprobs": ".penalties",
    "breakers": ".stopping",
    "compile_decoder": ".compiled",
    "export_decoder": "..exports.decoder_program",
    "generate": ".generation",
    "generate_batch": ".batch",
    "image_samples": ".images",
    "load_decoder": "..exports.decoder_program",
    "load_image_chat": ".images",
    "open_image": ".images",
    "random_model": ".shapes",
    "sample": ".sampling",
    "shape_config": ".shapes",
    "stream_experts": ".expert_files",
}

if not TYPE_CHECKING:  # a type checker would conclude that every name exists

    def __getattr__(name: str):
        if name in _LAZY:
            try:
                value = globals()[name] = getattr(import_module(_LAZY[name], __name__), name)
            except ImportError as error:
                from ..machine.imports import not_available

                raise not_available(f"lowbit.llm.{name}", error, "lowbit[llm]", sys._getframe(1)) from error
            return value
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module 'lowbit.llm' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "Caches",
    "Decoder",
    "ExportedDecoder",
    "Fallback",
    "Generation",
    "ImageChat",
    "ImageStep",
    "Mtp",
    "PrefixCache",
    "Refusal",
    "Sampling",
    "Step",
    "TextUntil",
    "TokenLogprobs",
    "breakers",
    "compile_decoder",
    "export_decoder",
    "generate",
    "generate_batch",
    "load_decoder",
    "image_samples",
    "load_image_chat",
    "open_image",
    "random_model",
    "sample",
    "shape_config",
    "stream_experts",
]
