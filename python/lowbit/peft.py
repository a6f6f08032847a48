"""LoRA on packed layers with peft: packed weights are frozen, adapters are trained.

>>> import peft
>>> model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))  # doctest: +SKIP
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .machine.imports import why_not

try:
    import peft
    from peft.tuners import lora
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
except ImportError as error:
    raise ImportError(why_not("peft", error, "pip install peft")) from error

from . import nn


class LoraLinear(lora.Linear):
    """A packed linear layer with adapters: ``layer(x) + scaling * B(A(x))`` (Hu et al., LoRA, 2021).

    A, B and x get gradients. The gradient of x through the packed layer is that of :func:`lowbit.linear`.
    """

    @property
    def lora_variants(self) -> dict[Any, Any]:
        return {(): None}  # other variants change the weight or read it at each call

    def update_layer(self, adapter_name: str, *arguments: Any, **options: Any) -> None:
        _check(options["config"])
        start = options["config"].init_lora_weights
        if start not in (True, False, "gaussian", "orthogonal"):
            raise ValueError(
                f"init_lora_weights is {start!r}; expected True, False, 'gaussian' or 'orthogonal': other ways change "
                "the weight, and packed weights are fixed"
            )
        super().update_layer(adapter_name, *arguments, **options)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises ValueError: an adapter cannot be merged into packed weights."""
        bits = self.get_base_layer().info.bits
        raise ValueError(
            f"adapters cannot be merged into packed weights: rounding to {bits} bits would lose most of what they "
            "learned. Keep them beside the packed model (save_pretrained), or merge them into the float model and quantize "
            "that"
        )

    def unmerge(self) -> None:
        """Does nothing: adapters are never merged."""


def _check(config: peft.LoraConfig) -> None:
    if config.use_dora:
        raise ValueError("config has use_dora=True; expected False: DoRA reads the float weight at each call")
    if getattr(config, "use_qalora", False):
        raise ValueError("config has use_qalora=True; expected False: peft has it for GPTQ's own layers only")


def know_packed_layers(config: peft.LoraConfig, model: torch.nn.Module) -> None:
    """Changes a config in place so that peft's LoraModel also adapts packed layers.

    "all-linear" then selects all packed layers except the output head.

    Raises:
        ValueError: a module in ``modules_to_save`` is packed or contains packed layers.
    """
    for name, module in model.named_modules():  # the same matching as in peft
        saved = next((saved for saved in config.modules_to_save or () if name.endswith(saved)), None)
        if saved and any(isinstance(part, nn.Packed) for part in module.modules()):
            raise ValueError(
                f"modules_to_save has {saved!r}, but {name} is packed and cannot be trained: leave it float "
                f"(LowBitConfig(..., overrides={{'*{saved}*': None}}))"
            )
    config._register_custom_module({nn.Linear: LoraLinear})
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        packed = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}
        config.target_modules = _maybe_include_all_linear_layers(config, model).target_modules | packed


def for_packed_layers(config: peft.LoraConfig) -> peft.LoraConfig:
    """Checks that a peft config is supported on packed layers, and returns it.

    The call is optional: peft adapts :class:`lowbit.nn.Linear` without it. Only with ``LOWBIT_AUTOLOAD=0`` or
    ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` is ``import lowbit.peft`` required.

    Args:
        config: a LoraConfig, also one read by ``peft.PeftConfig.from_pretrained``.

    Returns:
        The config.

    Raises:
        TypeError, ValueError: not a LoraConfig, or a variant that needs a float weight, such as DoRA.
    """
    if not isinstance(config, peft.LoraConfig) or isinstance(config, peft.AdaLoraConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a peft.LoraConfig")
    _check(config)
    return config


_usual = lora.model.LoraModel._prepare_model


@functools.wraps(_usual)
def _prepare_model(self: Any, peft_config: Any, model: Any) -> None:
    _usual(self, peft_config, model)
    if any(isinstance(module, nn.Linear) for module in model.modules()):
        know_packed_layers(peft_config, model)


lora.model.LoraModel._prepare_model = _prepare_model
_usual_preparation = peft.utils.other.prepare_model_for_kbit_training


@functools.wraps(_usual_preparation)
def _prepare_for_training(model: Any, *arguments: Any, **options: Any) -> Any:
    """Enables gradient checkpointing for packed models, which peft does only for the quantization methods on its list."""
    if not any(isinstance(module, nn.Packed) for module in model.modules()):
        return _usual_preparation(model, *arguments, **options)
    before = vars(model).get("is_loaded_in_4bit", False)
    model.is_loaded_in_4bit = True
    try:
        return _usual_preparation(model, *arguments, **options)
    finally:
        del model.is_loaded_in_4bit
        if before:
            model.is_loaded_in_4bit = before


for _module in (peft.utils.other, peft.utils, peft):
    _module.prepare_model_for_kbit_training = _prepare_for_training

__all__ = ["LoraLinear", "for_packed_layers"]
