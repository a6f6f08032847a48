"""Plans of image-text models: the language model's step over embeddings, which are those of images or of tokens.

The model's own code computes the embeddings and positions of a prompt, up to the call of its language model, and features for
inner layers: of images (DeepStack), or of all tokens (Gemma 4). A prompt whose call has more than these, such as a mask, runs
by transformers' attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..hf import decoding
from ..plan.lowering import Lowered
from ..plan.model_parts import ModelParts, ModelPlan, check_hooks
from ..plan.recording import Unplannable
from ..plan.running import Caches, Planned, by_slot
from .caches import name_of
from .decoder import Decoder
from .planning import Text, lowered_step
from .proof import ATTENTION_LIMIT, EXACT_LIMIT, TOKENS, Rounding, sample_text
from .texts_call import PIECE

_DEEP = ("visual_pos_masks", "deepstack_visual_embeds")  # which tokens have features, and those of each layer
_EACH = "per_layer_inputs"  # embeddings of each token for each layer, [1, s, layers, size]
_AXES = 3  # of positions of rotary embeddings with sections: time, height, width


@dataclass
class Inputs:
    """Inputs of a language model for s tokens."""

    embeddings: Tensor  # [1, s, size]
    positions: Tensor  # [s] or [axes, s]
    features: Sequence[Tensor] = ()  # for inner layers, [1, s, size]: one for each of the first ones, or one for all

    def part(self, begin: int, end: int) -> Inputs:
        features = [each[:, begin:end] for each in self.features]
        return Inputs(self.embeddings[:, begin:end], self.positions[..., begin:end], features)

    def common(self, other: Inputs) -> int:
        """The number of first tokens with the same inputs."""
        count = min(self.embeddings.shape[1], other.embeddings.shape[1])
        one, two = self.part(0, count), other.part(0, count)
        differs = (one.positions != two.positions).view(-1, count).any(0)
        for a, b in zip((one.embeddings, *one.features), (two.embeddings, *two.features), strict=True):
            differs |= (a != b).any(-1)[0]
        return int(differs.int().argmax()) if differs.any() else count

    @staticmethod
    def joined(parts: Sequence[Inputs]) -> Inputs:
        features = [torch.cat(each, 1) for each in zip(*(part.features for part in parts), strict=True)]
        embeddings = torch.cat([part.embeddings for part in parts], 1)
        return Inputs(embeddings, torch.cat([part.positions for part in parts], -1), features)

    def tokens_alone(self) -> Inputs:
        """Each token as a text of its own: [s, 1, size], with positions [s, 1] or [s, axes, 1]."""
        features = [each.transpose(0, 1) for each in self.features]
        return Inputs(self.embeddings.transpose(0, 1), self.positions.movedim(-1, 0).unsqueeze(-1), features)


class _Language(torch.nn.Module):
    """The language model and the output head of an image-text model, as a causal language model."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.lm_head = model.get_decoder(), model.get_output_embeddings()
        self.config = self.model.config.get_text_config()
        self.dtype, self.training = model.dtype, model.training
        self.each = getattr(self.config, "hidden_size_per_layer_input", 0) or 0  # inputs of a token for a layer

    def get_input_embeddings(self) -> torch.nn.Module:
        found: torch.nn.Module = self.model.get_input_embeddings()
        return found

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **others: Any
    ) -> SimpleNamespace:
        """Logits of tokens [1, s], or of embeddings [1, s, size], with positions [1, s] or [1, axes, s]."""
        name = "inputs_embeds" if input_ids.is_floating_point() else "input_ids"
        if position_ids is not None and position_ids.dim() == 3:
            position_ids = position_ids.transpose(0, 1)
        hidden = self.model(**{name: input_ids}, position_ids=position_ids, **others).last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return SimpleNamespace(logits=logits)

    def for_each_layer(self, features: Tensor) -> Tensor:
        """Features [1, s, layers * size] as the model takes them."""
        return features.unflatten(-1, (-1, self.each))

    def own_logits(self, inputs: Inputs) -> Tensor:
        """Logits by the model's own code, which takes features of images as transformers gives them."""
        features: dict[str, Any] = {}
        if self.each:
            features = {_EACH: self.for_each_layer(inputs.features[0])}
        elif inputs.features:
            shown = inputs.features[0].any(-1)
            features = dict(zip(_DEEP, (shown, [each[shown] for each in inputs.features])))
        positions = inputs.positions if len(inputs.embeddings) > 1 else inputs.positions[None]
        logits: Tensor = self(inputs.embeddings, positions, **features).logits
        return logits

    @contextmanager
    def adding(self, features: Sequence[Tensor]) -> Iterator[None]:
        """A context in which calls have features [1, s, size] for all tokens."""
        if not features:
            yield
            return
        model = self.model
        more = {_EACH: self.for_each_layer(features[0])} if self.each else dict(zip(_DEEP, (features[0], features)))
        hook = model.register_forward_pre_hook(
            lambda module, inputs, arguments: (inputs, {**arguments, **more}), with_kwargs=True
        )
        if not self.each:
            model._deepstack_process = lambda hidden, shown, each: hidden + each
        try:
            yield
        finally:
            if not self.each:
                del model._deepstack_process
            hook.remove()


class _Captured(Exception):
    """The arguments of the language model in a call of the whole model."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__()
        self.arguments = arguments


class _Block(decoding.Texts):
    """Used in place of caches: those of a text whose next tokens are those of one image, which attend to each other."""

    def __init__(self, start: int, count: int, layers: Sequence[tuple[Tensor, ...]], everywhere: bool):
        """
        Args:
            everywhere: whether they do in all layers; otherwise in those with a window.
        """
        super().__init__([decoding.Part(0, count, torch.tensor([start]), layers)])
        self.everywhere = everywhere

    def attend(self, layer: int, inputs: tuple[Tensor, Tensor, Tensor], *more: Any) -> Tensor:
        (part,), (scale, window, *rest) = self.parts, more
        if not (window or self.everywhere):
            return super().attend(layer, inputs, *more)
        whole, outputs = super().attend(layer, inputs, *more), []  # writes all keys and values; correct for the last query
        queries, *last = inputs[0], *(tensor[:, :, -1:].contiguous() for tensor in inputs[1:])
        end = torch.tensor([int(part.start) + part.end - 1])
        for row in range(part.end - 1):
            # Computed as a query at the end of the block, with a window that begins at the same position as the row's own.
            wider = window and window + part.end - 1 - row
            query = queries[:, :, row : row + 1].contiguous()
            outputs.append(torch.ops.lowbit.attention(query, *last, *part.layers[layer][:2], end, scale, wider, *rest))
        return torch.cat([*outputs, whole[:, -1:]], 1)


class ImagePlan(ModelPlan):
    """The plan of the language model of an image-text model, and the caches of one text. The model is unchanged, unless the
    tokens of an image attend to each other: a decoder then owns its language model."""

    def __init__(self, model: Any, max_length: int, cache: str | None = None, blocks: bool = False):
        """
        Args:
            model: an image-text model in eval mode.
            max_length: the longest text in tokens.
            cache: the type of the KV cache, as for :class:`lowbit.llm.Decoder`.
            blocks: whether to take models in which the tokens of an image attend to each other (:meth:`run_block`).

        Raises:
            Unplannable, ValueError: the model has no plan; the message says why.
            Exception: whatever the model raises.
        """
        language = _Language(model)
        check_hooks(language)
        rope = getattr(language.config, "rope_parameters", None) or {}
        self.axes = _AXES if "mrope_section" in rope else 1
        layers = getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ()
        self._features = len(layers) if hasattr(language.model, "_deepstack_process") else 0
        self._model, self._language = model, language
        kind, seen = model.config.model_type, getattr(language.config, "use_bidirectional_attention", None)
        self.blocks = blocks and (kind == "gemma3" or (kind == "gemma4" and seen == "vision"))
        self._everywhere = kind == "gemma3"  # in all layers; Gemma 4's blocks are in layers with a window
        self._causal = kind == "gemma4" and seen is None  # the masks that the model makes are those of any text
        self._next = 0  # position of the next token
        self._held: list[Inputs] = []  # inputs of the tokens in the caches
        with torch.inference_mode():
            tokens = sample_text(language.config, min(TOKENS, max_length))
            self.captured(tokens, {})  # refuses models whose calls never fit
            if not torch.equal(language(tokens).logits, model(input_ids=tokens, use_cache=False).logits):
                raise Unplannable("its logits are not those of its language model and output head")
            sample = self._sample(tokens)
            whole, alone = language.own_logits(sample), language.own_logits(sample.tokens_alone()).transpose(0, 1)
        self._length = -(-max_length // 16) * 16
        self._decoder = Decoder(language, self._length, cache, windows=False, plan=False)
        self.cache_type, self.recurrent = self._decoder.cache_type, self._decoder.recurrent
        try:
            self._planned = Planned(self._lowered(self._decoder, sample))
        finally:
            if not self.blocks:
                self._decoder.release()
        self._caches: Caches | None = None  # of the text of `read`, made when it begins
        self._parts = ModelParts(language)
        self._prove(sample, whole, Rounding(language, whole, alone))

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [1, s, size] of tokens [1, s]."""
        found: Tensor = self._language.get_input_embeddings()(tokens)
        return found

    def _sample(self, tokens: Tensor) -> Inputs:
        """Inputs like those of a text with images: positions that differ between axes, and features of some tokens."""
        embeddings, rows = self.embed(tokens), torch.arange(tokens.shape[1])
        positions = rows if self.axes == 1 else torch.stack([rows - rows % 3, rows // 2 * 2, rows])
        shown = (rows % 3 == 1)[None, :, None]
        features = [embeddings.roll(i + 1, 1) * shown for i in range(self._features)]
        if self._language.each:
            features = [each.roll(1, 1) for each in self.features_of(tokens, embeddings)]
        return Inputs(embeddings, positions, features)

    def _lowered(self, decoder: Decoder, sample: Inputs) -> Lowered:
        def run(inputs: Tensor, positions: Tensor, keep: Tensor, *others: Any) -> Tensor:
            *features, start, layers = others
            with self._language.adding(features):
                return decoder.run(inputs, positions, start, layers, keep)

        def inputs(rows: int, kept: int) -> list[Tensor]:
            repeated = [each[:, :1].repeat(1, rows, 1) for each in (sample.embeddings, *sample.features)]
            positions = torch.arange(rows).expand(*sample.positions.shape[:-1], -1).contiguous()
            return [repeated[0], positions, torch.arange(rows - kept, rows), *repeated[1:]]

        return lowered_step(run, inputs, lambda: decoder.new_caches(16).layers, self._language)

    @torch.inference_mode()
    def _prove(self, sample: Inputs, whole: Tensor, rounding: Rounding) -> None:
        """Compares the plan with the language model's own attention, for several rows, single rows, and the rest.

        Raises:
            Unplannable: the logits differ by more than rounding.
        """
        count = whole.shape[1]
        ends = sorted({0, count // 2, *range(count // 2, count - count // 4), count})
        caches = self.arranged(self.make_caches(16, name_of(self._language.dtype)))
        found = [self.run(sample.part(a, b), torch.arange(b - a), [(0, b - a, a, caches)]) for a, b in zip(ends, ends[1:])]
        difference = rounding.difference(torch.cat(found)[None], whole)
        limit = EXACT_LIMIT if rounding.exact else ATTENTION_LIMIT
        if not difference <= limit:
            raise Unplannable(
                f"its logits differ (by {difference:.2g} of the earlier text's effect; rounding is below {limit:g})"
            )

    def make_caches(self, length: int, cache_type: str) -> list[tuple[Tensor, ...]]:
        """Empty keys, values and states of each layer, for a text of ``length`` tokens."""
        return self._decoder.make_caches(length, cache_type)

    def arranged(self, layers: Sequence[Sequence[Tensor]]) -> Caches:
        """A text's caches as the plan uses them; they must stay where they are."""
        return Caches(self._planned.places, by_slot(layers))

    def check_texts(self) -> None:
        """Raises ValueError if texts in one call change each other's logits."""
        self._decoder.check_texts()

    def run(self, inputs: Inputs, keep: Tensor, texts: Sequence[Text]) -> Tensor:
        """Logits [len(keep), vocabulary] of a call with the rows of one or more texts."""
        tensors = [inputs.embeddings, inputs.positions, keep, *inputs.features]
        return self._planned.run([tensor.contiguous() for tensor in tensors], len(keep), texts)[0][0]

    def run_block(self, inputs: Inputs, keep: Tensor, start: int, layers: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Logits [len(keep), vocabulary] of a text's next tokens, which are those of one image and attend to each other.

        Args:
            start: the number of earlier tokens.
            layers: the text's caches.
        """
        block = _Block(start, inputs.embeddings.shape[1], layers, self._everywhere)
        with self._language.adding(inputs.features):
            return self._decoder.run(inputs.embeddings, inputs.positions, torch.tensor([start]), block, keep)[0]

    def _run(self, inputs: Inputs, start: int, keep: Tensor) -> Tensor:
        if self._caches is None:
            self._caches = self.arranged(self.make_caches(self._length, self.cache_type))
        return self.run(inputs, keep, [(0, inputs.embeddings.shape[1], start, self._caches)])

    def read(self, tokens: Tensor, images: Mapping[str, Any]) -> Tensor:
        """Begins a text, as :meth:`begin`.

        Args:
            tokens: [1, s].
            images: the other inputs of the model.

        Raises:
            Unplannable: the call of the language model has other arguments than embeddings and positions.
            Exception: whatever the model raises.
        """
        return self.begin(self.captured(tokens, images))

    def begin(self, inputs: Inputs) -> Tensor:
        """Begins a text; returns the logits [1, vocabulary] after it.

        The caches keep the first tokens of the last text that have the same inputs, unless there are states.
        """
        self._next, count, same = int(inputs.positions.max()) + 1, inputs.embeddings.shape[1], 0
        if self._held and not self.recurrent:
            same = min(count - 1, Inputs.joined(self._held).common(inputs))
        self._held = [inputs.part(0, same)]
        return self._continue(inputs.part(same, count), same)

    def captured(self, tokens: Tensor, images: Mapping[str, Any]) -> Inputs:
        """The inputs of the language model for a prompt, which computes its images; raises as :meth:`read`."""

        def capture(module: torch.nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]) -> None:
            raise _Captured(arguments if not inputs else {**arguments, "unnamed arguments": inputs})

        hook = self._language.model.register_forward_pre_hook(capture, with_kwargs=True)
        try:
            self._model(input_ids=tokens, use_cache=False, **images)
            raise Unplannable("it does not call its language model")
        except _Captured as captured:
            arguments = captured.arguments
        finally:
            hook.remove()
        arguments.pop("logits_to_keep", None)  # meant for the output head, but some models pass it on
        embeddings, positions, mask = (
            arguments.pop(name, None) for name in ("inputs_embeds", "position_ids", "attention_mask")
        )
        shown, given = (arguments.pop(name, None) if self._features else None for name in _DEEP)
        for_each_layer = arguments.pop(_EACH, None) if self._language.each else None
        other = [name for name, value in arguments.items() if value is not None and not isinstance(value, bool)]
        plain = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()))
        if not (plain or self.blocks or self._causal):
            other.append("a mask of its own")
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        else:  # [1, s], or [axes, 1, s], where an additional first axis is for the mask
            positions = positions[0] if positions.dim() == 2 else positions[-_AXES:, 0]
        if self.axes > 1 and positions.dim() == 1:
            positions = positions.expand(self.axes, -1)
        if positions.dim() != (1 if self.axes == 1 else 2):
            other.append(f"{len(positions)} positions of each token")
        if other or embeddings is None:
            raise Unplannable(f"its language model gets {' and '.join(other) or 'no embeddings'}")
        features = [for_each_layer.flatten(2)] if for_each_layer is not None else self.features_of(tokens, embeddings)
        if given is not None:
            for each, part in zip(features, given, strict=True):
                each[shown] = part.to(each.dtype)
        return Inputs(embeddings, positions, features)

    def features_of(self, tokens: Tensor, embeddings: Tensor) -> list[Tensor]:
        """Features for inner layers of tokens [1, s] that belong to no image."""
        if self._language.each:
            return [self._language.model.get_per_layer_inputs(tokens, embeddings).flatten(2)]
        return [torch.zeros_like(embeddings) for _ in range(self._features)]

    def add(self, tokens: Tensor, start: int) -> Tensor:
        """Continues the text of :meth:`read` after ``start`` tokens; returns the logits [1, vocabulary] after it."""
        positions, embeddings = torch.arange(self._next, self._next + tokens.shape[1]), self.embed(tokens)
        self._next += tokens.shape[1]
        positions = positions if self.axes == 1 else positions.expand(self.axes, -1)
        return self._continue(Inputs(embeddings, positions, self.features_of(tokens, embeddings)), start)

    def _continue(self, inputs: Inputs, start: int) -> Tensor:
        count = inputs.embeddings.shape[1]
        for begin in range(0, count, PIECE):
            end = min(count, begin + PIECE)
            logits = self._run(inputs.part(begin, end), start + begin, torch.tensor([end - begin - 1]))
        self._held.append(inputs)
        return logits
