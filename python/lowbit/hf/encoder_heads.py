"""Heads of encoders, which turn the hidden states of a text into its result: classifiers, modules of sentence-transformers.

The encoder of a head is its ``base``. Plans are recorded from a replica of a head: ``rows`` computes concatenated texts. After
``drop_plans``, ``own`` computes a batch by the model's own code, for comparison.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..plan.pooling import pool
from ..plan.recording import Unplannable

_LIBRARY = "sentence_transformers."
_MODULES = ("Dense", "Normalize", "LayerNorm", "Dropout")  # modules after the pooling, which compute each row alone


class Classifier(torch.nn.Module):
    """A classifier of the first token, as in BERT and RoBERTa."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def base(self) -> Any:
        return self.model.base_model

    def drop_plans(self) -> None:
        for module in (self.model, self.base):
            vars(module).pop("forward", None)

    def rows(self, hidden: Tensor, ranges: Tensor, output: Any) -> Tensor:
        """Logits [texts, labels]; ``output`` makes the encoder's output from hidden states."""
        found = output(pool(hidden, ranges, "cls")[:, None])
        self.base.forward = lambda *arguments, **named: found
        try:
            # The encoder's forward was replaced, so the values of these tokens do not matter.
            return self.own(torch.zeros_like(ranges[:, :1]))
        finally:
            del self.base.forward

    def own(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        found: Tensor = type(self.model).forward(self.model, input_ids=ids, attention_mask=mask, **more).logits
        return found


class Chain(torch.nn.Module):
    """Pooling, and the modules after it, of a SentenceTransformer."""

    def __init__(self, model: Any):
        """
        Raises:
            Unplannable: it has other modules.
        """
        super().__init__()
        first, pooling, *rest = modules = list(model)
        names = [type(each).__name__ if type(each).__module__.startswith(_LIBRARY) else "" for each in modules]
        if names[:2] != ["Transformer", "Pooling"] or not set(names[2:]) <= set(_MODULES):
            raise Unplannable(f"its modules are {', '.join(type(each).__name__ for each in modules)}")
        text = first.modality_config.get("text", {})
        called = text.get("method"), text.get("method_output_name")
        if called != ("forward", "last_hidden_state") or len(first.modality_config) != 1:
            raise Unplannable("its encoder is called in another way")
        if first.module_output_name != "token_embeddings" or not pooling.include_prompt:
            raise Unplannable("its pooling leaves out some tokens")
        self.base, self.pooling, self.rest = first.model, pooling, torch.nn.ModuleList(rest)

    def drop_plans(self) -> None:
        for module in (self.base, *self.rest.modules()):  # fuse_() makes dense layers compute row by row, as plans do
            vars(module).pop("forward", None)

    def rows(self, hidden: Tensor, ranges: Tensor, output: Any) -> Tensor:
        modes = self.pooling.pooling_mode
        pooled = [pool(hidden, ranges, mode) for mode in ([modes] if isinstance(modes, str) else modes)]
        return self._after(pooled[0] if len(pooled) == 1 else torch.cat(pooled, -1))

    def own(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        hidden = type(self.base).forward(self.base, input_ids=ids, attention_mask=mask, **more)[0]
        features = self.pooling({"token_embeddings": hidden, "attention_mask": mask})
        return self._after(features["sentence_embedding"])

    def _after(self, rows: Tensor) -> Tensor:
        features: dict[str, Any] = {"sentence_embedding": rows}
        for module in self.rest:
            features = module(features)
        result: Tensor = features["sentence_embedding"]
        return result


def is_chain(model: Any) -> bool:
    """Whether a model is a SentenceTransformer."""
    return type(model).__name__ == "SentenceTransformer" and type(model).__module__.startswith(_LIBRARY)


def is_classifier(model: Any) -> bool:
    """Whether a model of transformers classifies texts."""
    return type(model).__name__.endswith("ForSequenceClassification")
