"""Directories with safetensors files and a quantization_config: which format, and what it has beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import copy_files
from ..files.config_json import quantization_method, read_config
from ..files.safetensors import files_of, read_files
from .awq import read_awq
from .bitnet import read_bitnet
from .bitsandbytes import read_bitsandbytes
from .codes import Matrix, SourceTensor, Stacked, Weights
from .compressed_tensors import read_compressed_tensors
from .gptq import read_gptq, renamed
from .hqq import read_hqq
from .mxfp4 import read_mxfp4
from .report import file_states
from .small_floats import read_fp8, read_modelopt
from .source import Source
from .stock import Stock
from .torchao import read_torchao


def _read_auto_round(stock: Stock) -> Sequence[SourceTensor]:
    """AutoRound writes the layouts of others, and names them in ``packing_format``."""
    layout = stock.settings.get("packing_format", "auto_round:auto_gptq")
    stock.setting("data_type", ("int",), "int")
    stock.setting("act_bits", (16, 32), 16)
    versions = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
    if isinstance(layout, str) and layout in versions:
        stock.settings["checkpoint_format"] = versions[layout]
        return renamed(read_gptq(stock), "AutoRound")
    if layout == "auto_round:auto_awq":
        return renamed(read_awq(stock), "AutoRound")
    raise ValueError(
        f"{stock.path} has quantization_config.packing_format {layout!r}; lowbit imports {', '.join(versions)} and "
        "auto_round:auto_awq"
    )


_FORMATS: dict[str, tuple[str, Callable[[Stock], Sequence[SourceTensor]]]] = {
    "gptq": ("GPTQ", read_gptq),
    "awq": ("AWQ", read_awq),
    "auto-round": ("AutoRound", _read_auto_round),
    "mxfp4": ("MXFP4", read_mxfp4),
    "compressed-tensors": ("compressed-tensors", read_compressed_tensors),
    "bitnet": ("BitNet", read_bitnet),
    "bitsandbytes": ("bitsandbytes", read_bitsandbytes),
    "hqq": ("HQQ", read_hqq),
    "torchao": ("torchao", read_torchao),
    "fp8": ("FP8", read_fp8),
    **dict.fromkeys(("modelopt", "modelopt_fp4"), ("ModelOpt", read_modelopt)),
}


def open_directory(path: Path) -> Source:
    """The model in a directory.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: float weights, weights of lowbit, a format that lowbit does not import, or a damaged file.
    """
    config = read_config(path)
    method = quantization_method(config)
    if method is None:
        raise ValueError(f"{path} has float weights: use lowbit quantize")
    if method == "lowbit":
        raise ValueError(f"{path} is packed already")
    if not isinstance(config["quantization_config"], dict):
        raise ValueError(f"{path} has the quantization_config {config['quantization_config']!r:.200}; expected an object")
    if not isinstance(method, str) or method not in _FORMATS:
        raise ValueError(f"{path} is quantized by the method {method!r}; lowbit imports {', '.join(_FORMATS)}, and GGUF files")
    name, read = _FORMATS[method]
    files, weight_map = files_of(path)
    states = file_states(files)
    stock = Stock(path, read_files(files, weight_map), dict(config["quantization_config"]))
    tensors = list(read(stock))
    if not any(isinstance(tensor, Matrix | Stacked | Weights) for tensor in tensors):
        raise ValueError(f"{path} has no quantized layer, although its quantization_config says {method!r}")
    description: dict[str, Any] = {key: value for key, value in config.items() if key != "quantization_config"}
    return Source(path, name, description, tensors, lambda target: copy_files(path, target), states)
