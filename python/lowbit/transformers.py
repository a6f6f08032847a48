"""Registers lowbit with transformers: ``from_pretrained`` quantizes models and loads packed ones.

transformers imports this module when it first meets the method "lowbit" (``lowbit_autoload.imports``). With
``LOWBIT_AUTOLOAD=0`` importing it, or using ``lowbit.LowBitConfig``, registers the method.

>>> import lowbit, transformers
>>> config = lowbit.LowBitConfig(bits=4, group_size=32)
>>> model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=config)  # doctest: +SKIP
"""

from .machine.imports import why_not

try:
    from .hf.config import FORMAT_VERSION, METHOD, LowBitConfig
    from .hf.quantizer import LowBitQuantizer
except ImportError as error:
    raise ImportError(why_not("transformers", error, "pip install 'transformers>=5,<6'")) from error

__all__ = ["FORMAT_VERSION", "METHOD", "LowBitConfig", "LowBitQuantizer"]
