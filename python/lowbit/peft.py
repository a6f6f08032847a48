"""LoRA on packed layers, through peft: the packed weights stay as they are, beside each float matrices are trained.

>>> import lowbit.peft, peft
>>> config = lowbit.peft.for_packed_layers(peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
>>> model = peft.get_peft_model(model, config)  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

try:
    import peft
    from peft.tuners import lora
except ImportError as error:
    raise ImportError(
        f"peft is not installed, or not a version for lowbit: {error}. Install it with `pip install peft`."
    ) from error

from . import nn


class LoraLinear(lora.Linear):
    """A packed linear layer with adapters: ``layer(x) + scaling * B(A(x))`` (Hu et al., LoRA, 2021).

    Gradients reach A, B and x; those of x pass the packed layer as in :func:`lowbit.linear`.
    """

    @property
    def lora_variants(self) -> dict:
        return {(): None}  # the others change the weight, or read it at each call

    def update_layer(self, adapter_name: str, *arguments: Any, **options: Any) -> None:
        start = options["config"].init_lora_weights
        if start not in (True, False, "gaussian", "orthogonal"):
            raise ValueError(
                f"init_lora_weights is {start!r}; expected True, False, 'gaussian' or 'orthogonal': other ways change "
                "the weight, and packed weights are fixed"
            )
        super().update_layer(adapter_name, *arguments, **options)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuses.

        Raises:
            ValueError: always.
        """
        bits = self.get_base_layer().info.bits
        raise ValueError(
            f"adapters cannot be merged into packed weights: rounding to {bits} bits would lose most of what they "
            "learnt. Keep them beside the packed model (save_pretrained), or merge them into the float model and quantise "
            "that"
        )

    def unmerge(self) -> None:
        """Nothing: adapters are never merged."""


def for_packed_layers(config: peft.LoraConfig) -> peft.LoraConfig:
    """Lets peft put adapters on :class:`lowbit.nn.Linear`.

    Args:
        config: a LoraConfig, or one that ``peft.PeftConfig.from_pretrained`` has read: an adapter is loaded with
            ``PeftModel.from_pretrained(model, path, config=for_packed_layers(PeftConfig.from_pretrained(path)))``.
            ``target_modules`` are names: peft's "all-linear" means float layers.

    Returns:
        The config.

    Raises:
        TypeError, ValueError: no LoraConfig, or a variant that needs a float weight, such as DoRA.
    """
    if not isinstance(config, peft.LoraConfig) or isinstance(config, peft.AdaLoraConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a peft.LoraConfig")
    if config.use_dora:
        raise ValueError("config has use_dora=True; expected False: DoRA reads the float weight at each call")
    if getattr(config, "use_qalora", False):
        raise ValueError("config has use_qalora=True; expected False: peft has it for GPTQ's own layers only")
    if config.target_modules == "all-linear":
        raise ValueError(
            "target_modules is 'all-linear', by which peft means float layers; expected names, such as "
            "['q_proj', 'v_proj']"
        )
    config._register_custom_module({nn.Linear: LoraLinear})
    return config


__all__ = ["LoraLinear", "for_packed_layers"]
