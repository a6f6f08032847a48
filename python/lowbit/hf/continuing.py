"""Continues a text with the caches of transformers, as its generate() does, for models without lowbit's attention."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor


class OwnCaches:
    """The caches of one text, of the model's own class: keys and values, states, and so on.

    The model's `prepare_inputs_for_generation` makes the inputs of each call, so models that need more than tokens work.
    """

    def __init__(self, model: torch.nn.Module):
        self.model: Any = model
        utils = import_module("transformers.generation.utils")
        self._names = utils.ALL_CACHE_NAMES
        # Older versions of transformers identify new tokens by positions, newer ones by their number.
        usual = signature(utils.GenerationMixin.prepare_inputs_for_generation).parameters
        self._by_positions = "next_sequence_length" not in usual
        self._takes = signature(model.forward).parameters
        # Since 5.24 the caches have one name in all models.
        older = "cache_params" if "cache_params" in self._takes else "past_key_values"
        self._name = "cache" if "cache" in usual else older
        self.count = 0  # tokens in the caches
        self._kwargs: dict[str, Any] = {}
        self._outputs: Any = None

    def reset(self) -> None:
        """Drops the text."""
        for module in self.model.modules():  # RecurrentGemma stores its states in modules, where the next text would find them
            for name in ("conv1d_state", "recurrent_states"):
                if isinstance(getattr(module, name, None), Tensor):
                    setattr(module, name, None)
        self.count, self._kwargs, self._outputs = 0, {}, None

    def run(self, text: Tensor, keep: int, images: Mapping[str, Any] | None = None) -> Tensor:
        """Logits [1, s, vocabulary] after the last `keep` tokens of a text, or with 0 after all computed tokens.

        Args:
            text: [1, s] int64: the tokens in the caches, followed by one or more new ones.
            images: additional inputs of the model for a new text.
        """
        new = text.shape[1] - self.count
        if self.count:
            kwargs = self.model._update_model_kwargs_for_generation(
                self._outputs, self._kwargs, is_encoder_decoder=False, num_new_tokens=new
            )
        else:
            kwargs = self._begin(text, images or {})
        first, self.count = not self.count, 0  # if interrupted, the caches count as empty
        self._kwargs = kwargs
        if self._by_positions:
            kwargs["cache_position"] = torch.arange(text.shape[1] - new, text.shape[1])
        else:
            kwargs["next_sequence_length"] = None if first else new
        inputs = self.model.prepare_inputs_for_generation(text, is_first_iteration=first, **kwargs)
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = keep
        kwargs.pop("next_sequence_length", None)
        self._outputs = self.model(**inputs, return_dict=True)
        logits = self._outputs.logits[:, -keep:] if keep else self._outputs.logits
        self._outputs.logits = None  # only the caches are needed later
        self.count = text.shape[1]
        return logits

    def _begin(self, text: Tensor, images: Mapping[str, Any]) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"use_cache": True, **images}
        if "attention_mask" in self._takes and self._by_positions and "attention_mask" not in images:
            kwargs["attention_mask"] = torch.ones_like(text)
        if "position_ids" in self._takes and not self._by_positions:
            kwargs["position_ids"] = self.model._prepare_position_ids_for_generation(text, kwargs)
        if self.model._supports_default_dynamic_cache():  # other models make their own
            cache = import_module("transformers").DynamicCache(config=self.model.config.get_text_config(decoder=True))
            kwargs[self._name] = cache
        return kwargs

    def cut(self, count: int) -> bool:
        """Keeps the first `count` tokens and returns True; if the caches cannot do that, drops all and returns False."""
        cache = next((self._kwargs[name] for name in self._names if self._kwargs.get(name) is not None), None)
        try:
            if cache is not None and getattr(cache, "is_croppable", False) is True and 0 < count <= self.count:
                if count < self.count:
                    cache.crop(count - self.count)
                    if self._kwargs.get("position_ids") is not None:
                        self._kwargs["position_ids"] = self._kwargs["position_ids"][..., :count]
                self.count = count
                return True
        except (RuntimeError, ValueError):  # a sliding-window layer no longer holds the tokens that would be needed
            pass
        self.reset()
        return False
