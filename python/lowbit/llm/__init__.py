"""Language models: decoding with a static KV cache and generation. Needs transformers."""

from .decoder import Decoder
from .generation import Generation, generate, sample

__all__ = ["Decoder", "Generation", "generate", "sample"]
