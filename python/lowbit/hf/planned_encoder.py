"""The ``forward`` of fused encoders: runs the plan of :mod:`.encoder_plan` where it can.

The model's own code runs calls that a plan cannot compute: with gradients, compiled code or caches, with embeddings as inputs,
or with hidden states as outputs.
"""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..plan.recording import reason_of
from .encoder_heads import Chain, Classifier, is_classifier
from .encoder_plan import EncoderPlan
from .masked import ATTENTION

_LOG = logging.getLogger(__name__)
_FLAGS = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_BUILDING = threading.Lock()


class PlannedEncoder:
    """The ``forward`` of a fused model: runs the plan if it can compute the call, else the model's own code."""

    _sees_caches = True  # whether callers get the caches that the model makes

    def __init__(self, model: Any):
        self.model = model
        self.plan: EncoderPlan | None = None
        self.refusal: str | None = None  # why calls run the model's own code
        self._names = [name for name in inspect.signature(type(model).forward).parameters if name != "self"]
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedEncoder:
        return type(self)(copy.deepcopy(self.model, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.model,)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            output = self._planned(dict(zip(self._names, arguments)) | named)
            if output is not None:
                return output
        return type(self.model).forward(self.model, *arguments, **named)

    def _planned(self, arguments: dict[str, Any]) -> Any:
        """The plan's output; None if it cannot compute the call."""
        given = {name: value for name, value in arguments.items() if value is not None}
        tensors = {name: given.pop(name) for name in _TENSORS if name in given}
        if self.refusal is not None or not self._accepts(tensors, given):
            return None
        with _BUILDING:
            if self.plan is None and self.refusal is None:
                self._build()
        if self.plan is None:
            return None
        if not self.plan.fits():
            if not self.plan.has_its_memory():  # drops the plan, which would keep the old parameters alive
                self._refuse("the model has been changed since its first call")
            return None
        if self._sees_caches and self.plan.makes_caches and given.get("use_cache", self.model.config.use_cache):
            return None
        try:
            return self._output(self.plan, self.plan.run(**tensors))
        except (IndexError, ValueError):  # the model's own code runs such calls, or says what is wrong with their input
            return None

    def _build(self) -> None:
        try:
            self.plan = self._made()
        except Exception as reason:  # the model's own code runs, so nothing is lost
            self._refuse(reason_of(reason))

    @property
    def _config(self) -> Any:
        return self.model.config

    def _made(self) -> EncoderPlan:
        return EncoderPlan(self.model)

    def _output(self, plan: EncoderPlan, found: dict[str, Tensor]) -> Any:
        return plan.output(found)

    def _refuse(self, reason: str) -> None:
        self.plan, self.refusal = None, reason
        _LOG.info("each call of %s runs the model's Python code: %s", type(self.model).__name__, reason)

    def _accepts(self, tensors: dict[str, Tensor], flags: dict[str, Any]) -> bool:
        """Whether plans can compute a call with these arguments."""
        model, ids, config = self.model, tensors.get("input_ids"), self._config
        return bool(
            not torch.is_grad_enabled()
            and not model.training
            and not torch.is_autocast_enabled("cpu")
            and not torch.jit.is_tracing()
            # Modes see the operators that run.
            and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and not torch._C._are_functorch_transforms_active()
            and not _global_forward_hooks
            and not _global_forward_pre_hooks
            and config._attn_implementation == ATTENTION
            and not (config.output_hidden_states or config.output_attentions)
            and config.return_dict
            and all(name in _FLAGS and value == _FLAGS[name] or name == "use_cache" for name, value in flags.items())
            and ids is not None
            and ids.numel()
            and all(_fits(name, tensor, ids.shape) for name, tensor in tensors.items())
        )


class PlannedClassifier(PlannedEncoder):
    """The ``forward`` of a fused model that classifies texts."""

    def _made(self) -> EncoderPlan:
        return EncoderPlan(self.model.base_model, Classifier(self.model))

    def _output(self, plan: EncoderPlan, found: dict[str, Tensor]) -> Any:
        return import_module("transformers").modeling_outputs.SequenceClassifierOutput(logits=found["head"])


class PlannedChain(PlannedEncoder):
    """The ``forward`` of a fused SentenceTransformer."""

    _sees_caches = False

    def __init__(self, model: Any):
        super().__init__(model)
        self._modules = list(model)

    @property
    def _config(self) -> Any:
        return self._modules[0].model.config

    def __call__(self, input: dict[str, Any], **named: Any) -> Any:
        about = {name: value for name, value in input.items() if name not in _TENSORS}
        others = {name: value for name, value in named.items() if value is not None}
        if about.pop("modality", "text") == "text" and not others and not about.keys() - {"prompt_length"}:
            if not torch.compiler.is_compiling() and self._modules == list(self.model):
                found = self._planned({name: input[name] for name in _TENSORS if name in input})
                if found is not None:
                    input.update(found)
                    return input
        return type(self.model).forward(self.model, input, **named)

    def _made(self) -> EncoderPlan:
        return EncoderPlan(self._modules[0].model, Chain(self.model))

    def _output(self, plan: EncoderPlan, found: dict[str, Tensor]) -> Any:
        return {"token_embeddings": found["last_hidden_state"], "sentence_embedding": found["head"]}


def _fits(name: str, tensor: Any, shape: torch.Size) -> bool:
    """Whether a plan can use an argument in a call of ``shape`` [texts, positions]."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.dim() != 2 or tensor.shape[1] != shape[1]:
        return False
    if name == "attention_mask":
        return bool(tensor.shape == shape)
    return tensor.dtype in (torch.int64, torch.int32) and tensor.shape[0] in (1, shape[0])


def replace(model: Any) -> bool:
    """Makes calls of a fused model run by a plan where it has one; returns whether it can have one."""
    base = model.base_model
    if not isinstance(vars(base).get("forward"), (type(None), PlannedEncoder)) or base.config._attn_implementation != ATTENTION:
        return False
    base.forward = PlannedEncoder(base)
    if is_classifier(model) and isinstance(vars(model).get("forward"), (type(None), PlannedEncoder)):
        model.forward = PlannedClassifier(model)
    return True


def replace_chain(model: Any) -> None:
    """Makes calls of a fused SentenceTransformer, with its pooling and the modules after it, run by a plan where it has one."""
    base = getattr(model[0], "model", None)
    forward = vars(model).get("forward")
    if isinstance(forward, (type(None), PlannedChain)) and isinstance(vars(base).get("forward"), PlannedEncoder):
        model.forward = PlannedChain(model)
