"""LoRA adapters by request: the server treats each as a model of its own that shares the base model's weights.

So a text never gets the weights of another adapter, nor a prefix that another adapter computed.
"""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.untrusted import one_line, read_json
from ..machine.imports import why_not

if TYPE_CHECKING:
    import torch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_STARTS = (True, False, "gaussian", "orthogonal")


def adapted(model: torch.nn.Module, directory: Path) -> torch.nn.Module:
    """A copy of a transformers model with a LoRA adapter; it shares all weights with the model.

    Args:
        model: in eval mode, and not taken by a decoder.
        directory: as saved by peft's ``save_pretrained``.

    Raises:
        ImportError: peft is not installed.
        OSError, ValueError: the adapter is missing, damaged, not LoRA, or made for another model.
    """
    try:
        import peft

        import_module("lowbit.peft")  # makes peft accept packed layers
    except ImportError as error:
        raise ImportError(why_not("peft", error, "pip install 'lowbit[lora]'")) from error
    for name in (_CONFIG, _WEIGHTS):
        if not (directory / name).is_file():
            raise ValueError(
                f"{directory} has no {name}; expected a directory saved by peft's save_pretrained, with safetensors"
            )
    _check(read_json(directory / _CONFIG), directory)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, dict(shared))
    try:
        config = peft.LoraConfig.from_pretrained(str(directory), local_files_only=True)
        config.inference_mode = True
        # In the model's dtype, because the decoder's caches have it.
        wrapped = peft.get_peft_model(made, config, autocast_adapter_dtype=False)
        weights = peft.load_peft_weights(str(directory), device="cpu")
        result = peft.set_peft_model_state_dict(wrapped, weights)
    except Exception as error:
        raise ValueError(f"{directory} is not an adapter of this model: {one_line(error)}") from error
    _check_weights(directory, weights, result)
    inner: torch.nn.Module = wrapped.base_model.model.eval()
    return inner


def _check(config: dict[str, Any], directory: Path) -> None:
    """Raises ValueError for an adapter that is not LoRA, or that changes the base model's weights."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"{directory / _CONFIG} has peft_type {kind!r}; expected LORA")
    if (start := config.get("init_lora_weights", True)) not in _STARTS:
        raise ValueError(
            f"{directory / _CONFIG} has init_lora_weights {start!r}; expected {', '.join(map(repr, _STARTS))}: other ways "
            "change the base model's weights"
        )
    for name in (
        "use_dora",
        "use_qalora",
        "target_parameters",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "lora_bias",
    ):
        if config.get(name):
            raise ValueError(
                f"{directory / _CONFIG} has {name} {one_line(repr(config[name]), 60)}; expected an adapter without it"
            )
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(
            f"{directory / _CONFIG} has bias {bias!r}; expected 'none': the adapters of a server share the base model"
        )


def _check_weights(directory: Path, weights: dict[str, Any], result: Any) -> None:
    """Raises ValueError unless the file has all tensors of the adapter, and no other ones."""
    missing = [name for name in result.missing_keys if "lora_" in name or "modules_to_save" in name]
    for what, names, expected in (("no", missing, "one"), ("a tensor", result.unexpected_keys, "none")):
        if names:
            raise ValueError(f"{directory / _WEIGHTS} has {what} {one_line(names[0], 120)}; expected {expected}")
    wrong = next((name for name, tensor in weights.items() if not tensor.isfinite().all()), None)
    if wrong is not None:
        raise ValueError(
            f"{directory / _WEIGHTS} has numbers that are not finite in {one_line(wrong, 120)}; expected finite ones"
        )
