"""Language models: decoding with a static KV cache, compiled or not, and generation. Needs transformers."""

from .compiled import Step, compile_decoder, export_decoder, load_decoder
from .decoder import Decoder
from .generation import Generation, generate, sample
from .shapes import random_model, shape_config

__all__ = [
    "Decoder",
    "Generation",
    "Step",
    "compile_decoder",
    "export_decoder",
    "generate",
    "load_decoder",
    "random_model",
    "sample",
    "shape_config",
]
