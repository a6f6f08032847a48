"""Plans of image-text models: the language model's step over embeddings, which are those of pictures or of tokens.

The model's own code computes the embeddings and positions of a prompt, up to the call of its language model. A prompt whose call
has more than these, such as a mask or features for inner layers, runs by transformers' attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..plan.model_parts import ModelParts, check_hooks
from ..plan.recording import Unplannable
from ..plan.running import Caches, Planned, by_slot
from .decoder import PIECE, Decoder
from .planning import lowered_step
from .proof import ATTENTION_LIMIT, EXACT_LIMIT, TOKENS, Rounding, sample_text

_AXES = 3  # of positions of rotary embeddings with sections: time, height, width


class _Language(torch.nn.Module):
    """The language model and the output head of an image-text model, as a causal language model."""

    def __init__(self, model: Any):
        super().__init__()
        self.model, self.lm_head = model.get_decoder(), model.get_output_embeddings()
        self.config = self.model.config.get_text_config()
        self.dtype = model.dtype
        self.eval()

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
        return SimpleNamespace(logits=self.lm_head(hidden[:, keep]))


class _Captured(Exception):
    """The arguments of the language model in a call of the whole model."""

    def __init__(self, arguments: dict[str, Any]):
        super().__init__()
        self.arguments = arguments


class ImagePlan:
    """The plan of the language model of an image-text model, and the caches of one text. The model is unchanged."""

    def __init__(self, model: Any, max_length: int):
        """
        Args:
            model: an image-text model in eval mode.
            max_length: the longest text in tokens.

        Raises:
            Unplannable, ValueError: the model has no plan; the message says why.
            Exception: whatever the model raises.
        """
        language = _Language(model)
        check_hooks(language)
        rope = getattr(language.config, "rope_parameters", None) or {}
        self._axes = _AXES if "mrope_section" in rope else 1
        self._model, self._language = model, language
        self._next = 0  # the position of the next token
        with torch.inference_mode():
            tokens = sample_text(language.config, min(TOKENS, max_length))
            self._captured(tokens, {})
            embeddings, positions = self._embed(tokens), self._sample_positions(tokens.shape[1])
            if not torch.equal(language(tokens).logits, model(input_ids=tokens, use_cache=False).logits):
                raise Unplannable("its logits are not those of its language model and output head")
            whole = language(embeddings, positions[None]).logits
            alone = language(
                embeddings.transpose(0, 1), positions.T[:, :, None] if self._axes > 1 else positions[:, None]
            ).logits
        length = -(-max_length // 16) * 16
        decoder = Decoder(language, length, plan=False)
        try:
            self._planned = Planned(self._lowered(decoder, embeddings))
            layers = decoder.new_caches(length).layers
        finally:
            decoder.release()
        self._caches = Caches(self._planned.places, by_slot(layers))
        self._parts = ModelParts(language)
        self._prove(embeddings, positions, whole, Rounding(language, whole, alone.transpose(0, 1)))

    def _embed(self, tokens: Tensor) -> Tensor:
        found: Tensor = self._language.get_input_embeddings()(tokens)
        return found

    def _sample_positions(self, count: int) -> Tensor:
        """Positions [s], or [axes, s] that differ, as those of pictures."""
        rows = torch.arange(count)
        return rows if self._axes == 1 else torch.stack([rows - rows % 3, rows // 2 * 2, rows])

    def _lowered(self, decoder: Decoder, embeddings: Tensor) -> Any:
        def run(inputs: Tensor, positions: Tensor, keep: Tensor, start: Tensor, layers: Sequence[Any]) -> Tensor:
            return decoder.run(inputs, positions, start, layers, keep)

        def inputs(rows: int, kept: int) -> list[Tensor]:
            given = embeddings[:, :1].repeat(1, rows, 1)
            return [given, self._sample_positions(rows), torch.arange(rows - kept, rows)]

        return lowered_step(run, inputs, lambda: decoder.new_caches(16).layers, self._language)

    @torch.inference_mode()
    def _prove(self, embeddings: Tensor, positions: Tensor, whole: Tensor, rounding: Rounding) -> None:
        """Compares the plan with the language model's own attention, for several rows, single rows, and the rest.

        Raises:
            Unplannable: the logits differ by more than rounding.
        """
        count = embeddings.shape[1]
        ends = sorted({0, count // 2, *range(count // 2, count - count // 4), count})
        found = [
            self._run(embeddings[:, begin:end], positions[..., begin:end], begin, torch.arange(end - begin))
            for begin, end in zip(ends, ends[1:])
        ]
        difference = rounding.difference(torch.cat(found)[None], whole)
        limit = EXACT_LIMIT if rounding.exact else ATTENTION_LIMIT
        if not difference <= limit:
            raise Unplannable(
                f"its logits differ (by {difference:.2g} of the earlier text's effect; rounding is below {limit:g})"
            )

    def _run(self, embeddings: Tensor, positions: Tensor, start: int, keep: Tensor) -> Tensor:
        rows = embeddings.shape[1]
        inputs = [embeddings.contiguous(), positions.contiguous(), keep]
        return self._planned.run(inputs, len(keep), [(0, rows, start, self._caches)])[0][0]

    def fits(self) -> bool:
        """Whether the language model still has the modules, parameters and hooks that it had."""
        return self._parts.are_unchanged()

    def read(self, tokens: Tensor, images: Mapping[str, Any]) -> Tensor:
        """Begins a text; returns the logits [1, vocabulary] after it.

        Args:
            tokens: [1, s].
            images: the other inputs of the model.

        Raises:
            Unplannable: the call of the language model has other arguments than embeddings and positions.
            Exception: whatever the model raises.
        """
        embeddings, positions = self._captured(tokens, images)
        self._next = int(positions.max()) + 1
        return self._continue(embeddings, positions, 0)

    def _captured(self, tokens: Tensor, images: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Embeddings [1, s, size] and positions [s] or [axes, s] of a prompt; raises as :meth:`read`."""

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
        embeddings, positions, mask = (
            arguments.pop(name, None) for name in ("inputs_embeds", "position_ids", "attention_mask")
        )
        other = [name for name, value in arguments.items() if value is not None and not isinstance(value, bool)]
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            other.append("a mask of its own")
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        else:  # [1, s], or [axes, 1, s], of which the first may be that of the mask
            positions = positions[0] if positions.dim() == 2 else positions[-_AXES:, 0]
        if self._axes > 1 and positions.dim() == 1:
            positions = positions.expand(self._axes, -1)
        if positions.dim() != (1 if self._axes == 1 else 2):
            other.append(f"{len(positions)} positions of each token")
        if other or embeddings is None:
            raise Unplannable(f"its language model gets {' and '.join(other) or 'no embeddings'}")
        return embeddings, positions

    def add(self, tokens: Tensor, start: int) -> Tensor:
        """Continues the text of :meth:`read` after ``start`` tokens; returns the logits [1, vocabulary] after it."""
        positions = torch.arange(self._next, self._next + tokens.shape[1])
        self._next += tokens.shape[1]
        return self._continue(self._embed(tokens), positions if self._axes == 1 else positions.repeat(self._axes, 1), start)

    def _continue(self, embeddings: Tensor, positions: Tensor, start: int) -> Tensor:
        count = embeddings.shape[1]
        for begin in range(0, count, PIECE):
            end = min(count, begin + PIECE)
            logits = self._run(
                embeddings[:, begin:end], positions[..., begin:end], start + begin, torch.tensor([end - begin - 1])
            )
        return logits
