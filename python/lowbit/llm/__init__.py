"""Language models: decoding with a static KV cache, compiled or exported or not, and generation. Needs transformers."""

from .compiled import Step, compile_decoder
from .decoder import Decoder
from .export import ExportedDecoder, export_pt2, export_pte, load_pt2, load_pte
from .generation import Generation, generate, sample
from .shapes import random_model, shape_config

__all__ = [
    "Decoder",
    "ExportedDecoder",
    "Generation",
    "Step",
    "compile_decoder",
    "export_pt2",
    "export_pte",
    "generate",
    "load_pt2",
    "load_pte",
    "random_model",
    "sample",
    "shape_config",
]
