"""Hugging Face transformers: ``from_pretrained`` quantises, and loads what is quantised.

Importing this module, or using ``lowbit.LowBitConfig``, registers the method "lowbit" with transformers.

>>> import lowbit, transformers
>>> config = lowbit.LowBitConfig(bits=4, group_size=32)
>>> model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config)  # doctest: +SKIP
"""

from ._imports import why_not

try:
    from .hf.config import FORMAT_VERSION, METHOD, LowBitConfig
    from .hf.quantizer import LowBitQuantizer
except ImportError as error:
    raise ImportError(why_not("transformers", error, "pip install 'transformers>=5,<6'")) from error

__all__ = ["FORMAT_VERSION", "METHOD", "LowBitConfig", "LowBitQuantizer"]
