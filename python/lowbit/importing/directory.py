"""Opens a directory of a quantized checkpoint: chooses the format's reader by ``quantization_config.quant_method``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import copy_files
from ..checkpoint.codes import Matrix, SourceTensor, Stacked, Weights
from ..files.config_json import MLX, QUANTIZED_LEAVES, SETTINGS_FILES, quantization_settings, read_config
from ..files.gguf_cache import file_states
from ..files.safetensors import WEIGHTS, files_of, read_files
from .awq import read_awq
from .bitnet import read_bitnet
from .bitsandbytes import read_bitsandbytes
from .compressed_tensors import read_compressed_tensors
from .gemma_qat import read_gemma
from .gptq import read_gptq, renamed
from .hqq import read_hqq
from .mlx import read_mlx
from .mxfp4 import read_mxfp4
from .small_floats import read_fp8, read_modelopt
from .source import Source
from .stock import Stock
from .torchao import read_torchao


def _read_auto_round(stock: Stock) -> Sequence[SourceTensor]:
    """Reads AutoRound's checkpoints, which are in GPTQ's or AWQ's layout as ``packing_format`` says."""
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
    "gemma": ("Gemma", read_gemma),
    MLX: ("MLX", read_mlx),
    **dict.fromkeys(("modelopt", "modelopt_fp4"), ("ModelOpt", read_modelopt)),
}


def _files_of(path: Path, settings: dict[str, Any]) -> tuple[list[Path], dict[str, str] | None]:
    """The weight files. Old versions of AutoGPTQ write a single file whose name is in the settings."""
    base = settings.get("model_file_base_name")
    if isinstance(base, str) and not (path / WEIGHTS).exists() and Path(base).name == base:
        file = path / f"{base}.safetensors"
        if file.exists():
            return [file], None
    return files_of(path)


def open_directory(path: Path) -> Source:
    """Describes and checks the model in a directory; reads no weights.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the weights are float, packed by lowbit, or in a format that lowbit does not import; or a file is damaged.
    """
    config = read_config(path)
    settings = quantization_settings(path, config)
    if settings is None:
        quantized = [stored for stored in read_files(*files_of(path)).values() if stored.name.endswith(QUANTIZED_LEAVES)]
        if quantized:
            raise ValueError(
                f"{path} has quantized weights, {quantized[0].name} for example, but no settings: expected "
                f"quantization_config in config.json, or one of {', '.join(SETTINGS_FILES)}"
            )
        raise ValueError(f"{path} has float weights: use lowbit quantize")
    if not isinstance(settings, dict):
        raise ValueError(f"{path} has the quantization_config {settings!r:.200}; expected an object")
    method = settings.get("quant_method", "")
    if method == "lowbit":
        raise ValueError(f"{path} is packed already")
    if not isinstance(method, str) or method not in _FORMATS:
        raise ValueError(f"{path} is quantized by the method {method!r}; lowbit imports {', '.join(_FORMATS)}, and GGUF files")
    name, read = _FORMATS[method]
    files, weight_map = _files_of(path, settings)
    states = file_states(files)
    stock = Stock(path, read_files(files, weight_map), dict(settings))
    tensors = list(read(stock))
    if not any(isinstance(tensor, Matrix | Stacked | Weights) for tensor in tensors):
        raise ValueError(f"{path} has no quantized layer, although its settings say {method!r}")
    description: dict[str, Any] = {
        key: value for key, value in config.items() if key not in ("quantization_config", "quantization")
    }
    return Source(path, name, description, tensors, lambda target: copy_files(path, target), states)
