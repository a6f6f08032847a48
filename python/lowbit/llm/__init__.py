"""Language models: decoding over a static KV cache, eager, compiled or exported, and generation; requires transformers."""

from typing import TYPE_CHECKING

from ..hf.decoding import Refusal
from .batch import generate_batch
from .caches import Caches
from .compiled import Step, compile_decoder
from .decoder import Decoder
from .expert_files import stream_experts
from .fallback import Fallback
from .generation import Generation, generate
from .images import ImageChat, ImageStep, image_samples, load_image_chat, open_image
from .mtp import Mtp
from .penalties import TokenLogprobs
from .prefixes import PrefixCache
from .sampling import Sampling, sample
from .shapes import random_model, shape_config
from .stopping import TextUntil, breakers

if TYPE_CHECKING:
    from ..exports.decoder_program import ExportedDecoder, export_decoder, load_decoder
else:

    def __getattr__(name: str):
        # On first use, because lowbit.exports imports the decoder, and so this package.
        if name not in ("ExportedDecoder", "export_decoder", "load_decoder"):
            raise AttributeError(f"module 'lowbit.llm' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("lowbit.exports.decoder_program"), name)


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
