"""Replaces the attention of a transformers causal language model by lowbit's for a decoder, and restores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from .. import nn
from . import key_scales, norms, own_attention, position_tables, recurrent, rotary, rotary_tables
from .activations import RowWise, is_activation
from .shared_inputs import SharedInput
from .unsupported import Unsupported as Unsupported

ATTENTION = "lowbit"  # the name of :func:`attend` among transformers' attention functions
_TAKEN = "this model belongs to a lowbit.llm.Decoder; call the decoder, or its release() first"
_TAKEOVER = "_lowbit_takeover"  # attribute of a model that is in use by a decoder

# Arguments of attention functions in transformers that do not change what attention computes.
_HARMLESS = frozenset(
    ("cache_position", "dropout", "hidden_states", "is_causal", "output_attentions", "output_hidden_states")
    + ("logits_to_keep", "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache")
)


class Refusal(ValueError):
    """The decoder does not support this model with any settings; the message names the model and the reason."""


class NoCaches(Unsupported):
    """Attention was called without a decoder's caches."""


class Asked:
    """Used in place of caches for a trial call: records the caches that each layer's attention needs."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}  # layer -> heads, width of keys, width of values
        self.windows: dict[int, int | None] = {}
        self.states: dict[int, list[tuple[tuple[int, ...], torch.dtype]]] = {}  # layer -> shape and dtype of each state

    def note_state(self, layer: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new state for the trial text."""
        self.states.setdefault(layer, [])[number:] = [(shape, dtype)]
        return torch.zeros(shape, dtype=dtype)

    def note(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """New caches for the trial text."""
        self.shapes[layer] = key.shape[1], key.shape[3], value.shape[3]
        self.windows[layer] = window
        length = -(-key.shape[2] // 16) * 16
        return tuple(tensor.new_zeros(*tensor.shape[:2], length, tensor.shape[3]) for tensor in (key, value))


@dataclass(frozen=True)
class Part:
    """The tokens and caches of one text in a call with several texts."""

    begin: int  # range of its tokens in the call
    end: int
    start: Tensor  # [1] int64: number of earlier tokens of the text
    layers: Sequence[tuple[Tensor, ...]]


class Texts:
    """Used in place of caches: the caches of several texts whose tokens are concatenated in the call.

    Only attention separates the texts; for all other layers they are one text.
    """

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts

    def attend(self, layer: int, inputs: tuple[Tensor, Tensor, Tensor], *more: Any) -> Tensor:
        """Attention within each text: inputs [1, heads, s, d] -> [1, s, heads, e]."""
        outputs = []
        for part in self.parts:
            queries_keys_values = (tensor[:, :, part.begin : part.end] for tensor in inputs)
            outputs.append(_attention(queries_keys_values, part.layers[layer], part.start, *more))
        return torch.cat(outputs, dim=1)


def _attention(inputs: Iterable[Tensor], layer: Sequence[Tensor], start: Tensor | None, *more: Any) -> Tensor:
    """Attention over the caches of a layer, which hold the whole text or, with ``held``, a window."""
    if len(layer) > 2 and layer[2].dtype is torch.int64:
        return torch.ops.lowbit.window_attention(*inputs, *layer[:3], start, *more)
    return torch.ops.lowbit.attention(*inputs, *layer[:2], start, *more)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    caches: Any = None,
    start: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over a decoder's caches, with the signature of transformers' attention functions: returns [1, s, heads, e].

    query [1, heads, s, d], key [1, kv_heads, s, d], value [1, kv_heads, s, e]; s_aux [heads] are the sinks of
    lowbit.attention.

    Raises:
        NoCaches: called without caches.
        Unsupported: another kind of attention.
    """
    if caches is None:
        raise NoCaches(_TAKEN)
    if attention_mask is not None:
        raise Unsupported("its attention has a mask or bias of its own, which the decoder's attention does not support")
    for name, argument in others.items():
        if argument is not None and name not in _HARMLESS:
            raise Unsupported(f"its attention has {name}, which the decoder's attention does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.to(query.dtype)
    more = (scale, sliding_window or 0, softcap or 0.0, sinks)
    query, key = key_scales.balanced(module, query, key)
    if isinstance(caches, Texts):
        return caches.attend(module.layer_idx, (query, key, value), *more), None
    if isinstance(caches, Asked):
        layer = caches.note(module.layer_idx, key, value, sliding_window)
    else:
        layer = caches[module.layer_idx]
    return _attention((query, key, value), layer, start, *more), None


def check_windows(config: Any, asked: Asked, max_length: int) -> None:
    """Refuses a model with sliding windows that it does not pass to its attention, which a short trial cannot reveal.

    Raises:
        Unsupported: describes what was found.
    """
    if not hasattr(config, "sliding_window"):
        return  # GPT-Neo uses another name for its window, which its replacement reads
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", None) is not False else None
    for layer, in_call in asked.windows.items():
        in_config = window if kinds is None or "sliding" in kinds[layer] else None
        if any(size is not None and size < max_length for size in (in_call, in_config)) and in_call != in_config:
            raise Unsupported(
                f"layer {layer} has a sliding window of {in_config} in its configuration, but passes {in_call} to its "
                f"attention; expected a max_length of at most {min(size for size in (in_call, in_config) if size is not None)}"
            )


def position_limit(config: Any) -> int | None:
    """The longest text that the text configuration of a model allows, in tokens."""
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)


def _takes_positions(model: torch.nn.Module) -> bool:
    return "position_ids" in signature(model.forward).parameters


def tells_positions(model: torch.nn.Module) -> bool | None:
    """Whether a model takes positions. False: it does not, and does not need them. None: it counts positions by itself, so
    its treatment of distant ones shows only in long texts.

    Raises:
        Unsupported: it needs positions but does not accept them.
    """
    relative = [kind.is_relative(attention) for _, _, attention, kind in own_attention.find(model)]
    if not all(relative):
        return None
    if _takes_positions(model):
        return True
    if any(position_tables.find(model)):
        return None
    if not relative and not any(recurrent.find(model)):
        raise Unsupported("it takes no position_ids, so it cannot continue a text")
    return False


def check_config(config: Any, max_length: int) -> None:
    """Refuses unsupported properties of a model that a short trial cannot reveal.

    Args:
        config: the text configuration of a model.

    Raises:
        Unsupported: describes the property.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_length:
        raise Unsupported(
            f"its attention sees chunks of {chunk} positions only and max_length is {max_length}; "
            f"expected a max_length of at most {chunk}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind in ("dynamic", "longrope"):
            until = part.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
            if until is not None and max_length > until:
                raise Unsupported(
                    f"its rotary embeddings (rope_type={kind}) change when a text grows beyond {until} tokens and "
                    f"max_length is {max_length}; expected a max_length of at most {until}"
                )


def _configs(model: torch.nn.Module) -> Iterator[Any]:
    """Every config object in a model once: those of its modules, and nested ones."""
    configs: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            continue
        configs[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return iter(configs.values())


class _Keep:
    """A pre-hook of a layer that stores the keyword arguments meant for its attention."""

    def __init__(self, held: dict[str, Any]):
        self.held = held

    def __call__(self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.held.update({name: kwargs[name] for name in ("caches", "start") if name in kwargs})


class _Give:
    """A pre-hook of the layer's attention that adds the stored arguments."""

    def __init__(self, held: dict[str, Any]):
        self.held = held

    def __call__(self, attention: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        more = dict(self.held)
        self.held.clear()  # keeps no tensor alive after the call
        return args, kwargs | more


class Takeover:
    """The changes that a decoder has made to a model, and how to undo them."""

    def __init__(self, model: torch.nn.Module, positions: int):
        """Replaces a model's attention, rotary positions, norms and activation functions by lowbit's. Ends an earlier
        takeover of the same model."""
        give_back(model)
        import_module("transformers").AttentionInterface.register(ATTENTION, attend)
        self.active = True
        # Copy the configs, because another model may share them.
        copies = {id(config): copy(config) for config in _configs(model)}
        for config in copies.values():
            for name in getattr(config, "sub_configs", {}):
                if id(part := getattr(config, name, None)) in copies:
                    setattr(config, name, copies[id(part)])
        self._attention = list(copies.values())
        self._configs = [
            (module, name, value) for module in model.modules() for name, value in vars(module).items() if id(value) in copies
        ]
        for module, name, config in self._configs:
            setattr(module, name, copies[id(config)])
        self._rotary: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self._activations: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        self._hooks: list[Any] = []
        self._forwards: list[torch.nn.Module] = []  # modules whose forward is replaced
        self._scaled: list[torch.nn.Module] = []  # attention with scales of keys
        self._own: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        self._shared: list[SharedInput] = []
        self.takes_positions = _takes_positions(model)
        self.states = recurrent.States()
        self.mixers = [recurrent.Mixer(module, self.states) for module in recurrent.find(model)]
        self.positions = position_tables.Positions()
        self.tables = (
            []
            if self.takes_positions
            else [position_tables.Table(module, self.positions) for module in list(position_tables.find(model))]
        )
        self.call: own_attention.Call | None = None  # for models that do not use transformers' attention interface
        setattr(model, _TAKEOVER, self)
        self._replace_attention(model, positions)
        for config in self._attention:
            config._attn_implementation_internal = ATTENTION
        tables: dict[int, rotary_tables.RotaryTable | None] = {}  # shared by layers that share their rotary embedding
        for module in list(model.modules()):
            embedding = getattr(module, "rotary_emb", None)
            if embedding is not None and id(embedding) not in tables:
                tables[id(embedding)] = rotary_tables.tabulated(embedding, positions, model.dtype)
            if embedding is not None and tables[id(embedding)] is not None:
                self._rotary.append((module, embedding))
                module.rotary_emb = tables[id(embedding)]
            for name, child in list(module.named_children()):
                if is_activation(child):
                    self._activations.append((module, name, child))
                    setattr(module, name, RowWise(child))
        self._forwards = norms.replace(model, decoding=True) + rotary.replace(model)
        self._scaled = key_scales.attach(model)

    def _replace_attention(self, model: torch.nn.Module, positions: int) -> None:
        for module, name, attention, kind in list(own_attention.find(model)):
            if self.call is None:
                self.call = own_attention.Call(attend, _takes_positions(model))
            replacement = kind(attention, self.call)
            if not self._own:
                self.call.alibi = replacement.alibi(model, positions)
                replacement.carried = self.call.alibi  # a submodule, because compiled code looks for tensors in the model
                if self.call.alibi is not None and positions > own_attention.MOST_POSITIONS:
                    raise Unsupported(
                        f"max_length is {positions}; expected at most {own_attention.MOST_POSITIONS} positions of its alibi"
                    )
                if kind.needs_mask:
                    self._attention = []
            self._own.append((module, name, attention))
            setattr(module, name, replacement)

    @property
    def has_alibi(self) -> bool:
        """Whether keys carry an ALiBi bias, which the caches must hold exactly."""
        return self.call is not None and self.call.alibi is not None

    def hand_on(self, model: torch.nn.Module) -> None:
        """Passes the caches to the attention of layers that do not pass on their keyword arguments (StableLM, Nemotron)."""
        for layer in model.modules():
            attention = getattr(layer, "self_attn", None)
            if isinstance(attention, torch.nn.Module):
                held: dict[str, Any] = {}
                for module, hook in ((layer, _Keep(held)), (attention, _Give(held))):
                    self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def share_inputs(self, groups: list[list[nn.Linear]]) -> None:
        """Makes packed layers with the same input quantize it once; ``groups`` are from :func:`observed`."""
        self._shared = [SharedInput(group) for group in groups]

    @contextmanager
    def each_layer_alone(self) -> Iterator[None]:
        """A context in which each packed layer quantizes its own input, to export a program for any number of rows."""
        groups = [shared.layers for shared in self._shared]
        for shared in self._shared:
            shared.end()
        self._shared = []
        try:
            yield
        finally:
            if self.active:
                self.share_inputs(groups)

    def run(
        self, model: torch.nn.Module, tokens: Tensor, positions: Tensor, start: Tensor, caches: Any, keep: int | Tensor
    ) -> Tensor:
        """Logits of a call; see :meth:`lowbit.llm.Decoder.run`."""
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "logits_to_keep": keep}
        if self.takes_positions:
            arguments["position_ids"] = positions[None]
        if self.call is None:
            arguments |= {"caches": caches, "start": start}
        else:
            self.call.give(caches, start, positions)
        self.states.give(caches, start)
        self.positions.now = positions
        try:
            logits: Tensor = model(**arguments).logits
            return logits
        finally:
            self.states.clear()
            self.positions.now = None
            if self.call is not None:
                self.call.clear()

    def is_whole(self) -> bool:
        """Whether all replacements are still in place."""
        return self.active and all(config._attn_implementation_internal == ATTENTION for config in self._attention)

    def uses_caches(self, model: torch.nn.Module) -> bool:
        """Whether all attention of the model is lowbit's, also that of modules that were put into it later."""
        if self._own and any(own_attention.find(model)):
            return False
        return not self._attention or all(config._attn_implementation_internal == ATTENTION for config in _configs(model))

    def end(self, model: torch.nn.Module) -> None:
        """Restores the model."""
        if not self.active:
            return
        self.active = False
        for module, name, config in self._configs:
            setattr(module, name, config)
        for module, embedding in self._rotary:
            module.rotary_emb = embedding
        for module, name, replaced in self._activations + self._own:
            setattr(module, name, replaced)
        for module in self._forwards:
            del module.forward
        for module in self._scaled:
            key_scales.detach(module)
        for hook in self._hooks:
            hook.remove()
        for mixer in self.mixers:
            mixer.end()
        for shared in self._shared:
            shared.end()
        for table in self.tables:
            table.end()
        delattr(model, _TAKEOVER)


def give_back(model: torch.nn.Module) -> None:
    """Ends the takeover of a model, if there is one."""
    takeover = getattr(model, _TAKEOVER, None)
    if takeover is not None:
        takeover.end(model)


def check_attention(model: torch.nn.Module) -> None:
    """Refuses a model that belongs to no decoder, but has layers of one that does.

    Raises:
        ValueError: names such a layer.
    """
    for name, module in model.named_modules():
        if getattr(vars(module).get("config"), "_attn_implementation_internal", None) == ATTENTION:
            raise ValueError(
                f"the module {name!r} was taken from a model that belonged to a lowbit.llm.Decoder; call release() of that "
                "decoder before you copy or move its layers"
            )


def refusal(model: torch.nn.Module, error: Exception) -> Refusal:
    """The error that says why a decoder does not support a model."""
    reason = str(error).strip().split("\n")[0].rstrip(".")
    if not getattr(model, "_can_set_attn_implementation", lambda: True)() and not any(own_attention.find(model)):
        reason = "its attention is the model's own code, which transformers does not let others replace"
    elif isinstance(error, NoCaches):
        reason = "its layers do not pass the decoder's caches to their attention"
    elif not isinstance(error, Unsupported):
        reason = f"the model raises {type(error).__name__}: {reason}"
    return Refusal(
        f"lowbit's decoder is not for {type(model).__name__} (model_type {model.config.model_type}): {reason}; use "
        "transformers' generate(), which takes quantized models too"
    )
