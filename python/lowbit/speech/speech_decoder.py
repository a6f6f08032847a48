"""The encoder and the decoding step of a Whisper model, over static caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hf.decoding import Unsupported
from ..hf.fusing import fuse_
from ..llm.caches import empty_caches, name_of, type_of
from ..llm.token_calls import check_call
from ..plan.recording import Unplannable, reason_of
from .beams import BeamDecoder, Place, Queries, Text
from .speech_plan import ListenPlan, SpeechPlan

_TRIAL = 24  # encoder positions in the trial
_TRIAL_LIMIT = 0.05  # relative to the spread of the logits: rounding stays below, a different computation does not


class SpeechDecoder(torch.nn.Module, BeamDecoder):
    """The decoder of a Whisper model: :meth:`listen` encodes audio, then each call continues the text.

    Keys and values of the encoder's output are computed once per window of audio. They and those of the text are static
    buffers, so a step copies no caches. A text may be split into calls in any way.

    The model is changed: lowbit computes the encoder's attention and the activation functions (:func:`lowbit.fuse_`).
    """

    def __init__(self, model: torch.nn.Module, cache: str | None = None):
        """
        Args:
            model: transformers' ``WhisperForConditionalGeneration`` or an equivalent class, quantized or not, in eval mode.
            cache: type of keys and values: "float32", "bfloat16", "float16", or "int8", "int8,int4" (keys of int8, values of
                int4) or "int4", which have a scale for each position of a head; None: the model's dtype.

        Raises:
            ValueError: an unknown cache type, a model in training mode, or a model whose decoder gives other results for a
                few trial tokens.
        """
        super().__init__()
        if getattr(getattr(model, "config", None), "model_type", None) != "whisper" or not hasattr(model, "proj_out"):
            raise Unsupported(f"the model is {type(model).__name__}; expected WhisperForConditionalGeneration")
        if model.training:
            raise ValueError("the model is in training mode; call its eval() first")
        self.model: Any = model
        self.cache_type = type_of(cache, model.dtype)
        config: Any = model.config
        self.vocabulary: int = config.vocab_size
        self.max_length: int = config.max_target_positions
        self.heads: int = config.decoder_attention_heads
        self.positions: int = config.max_source_positions
        self.mel_bins: int = config.num_mel_bins
        self.median_filter_width: int = config.median_filter_width
        self.alignment_heads = _alignment_heads(model)
        self.queries: list[Queries] = []
        self._states: Tensor | None = None  # of the encoder
        self._count = 0  # tokens of the text in the caches
        self._last: Tensor | None = None  # last position of the encoder's output whose key and value the caches hold
        self.plan: SpeechPlan | None = None
        self.plan_refusal: str | None = None  # why steps run the model's Python code
        self.listen_plan: ListenPlan | None = None
        self.listen_refusal: str | None = None  # why the encoder runs its Python code
        fuse_(model)
        for number, caches in enumerate(self._make(self.max_length, config.max_source_positions)):
            for name, tensor in zip(self._names(number), caches, strict=True):
                self.register_buffer(name, tensor, persistent=False)
        self._try()
        self._places, self._beams = [self._place([caches[:2] for caches in self.caches()])], [0]

    @staticmethod
    def _names(layer: int) -> list[str]:
        return [f"{name}_cache_{layer}" for name in ("k", "v", "heard_k", "heard_v", "last_k", "last_v")]

    @torch.inference_mode(False)  # inference tensors could not be changed outside of inference mode
    def _make(self, length: int, heard: int) -> list[tuple[Tensor, ...]]:
        config = self.model.config
        width = config.d_model // self.heads

        def empty(positions: int) -> list[Tensor]:
            return empty_caches(self.heads, (width, width), positions, self.cache_type)

        last = (1, self.heads, 1, width)
        return [
            (*empty(length), *empty(heard), *(torch.zeros(last, dtype=self.model.dtype) for _ in range(2)))
            for _ in range(config.decoder_layers)
        ]

    def caches(self) -> list[tuple[Tensor, ...]]:
        layers = self.model.config.decoder_layers
        return [tuple(getattr(self, name) for name in self._names(layer)) for layer in range(layers)]

    @torch.inference_mode()
    def _try(self) -> None:
        """Compares the results with the model's for a random encoder output."""
        config, tokens = self.model.config, torch.arange(4)[None] % self.vocabulary
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(1, min(_TRIAL, config.max_source_positions), config.d_model, generator=generator)
        states = states.to(self.model.dtype)
        expected = self.model.model.decoder(input_ids=tokens, encoder_hidden_states=states, use_cache=False)[0]
        expected = self.model.proj_out(expected).float()
        self.hear(states, torch.tensor([0]))
        last = torch.tensor([states.shape[1] - 1])
        calls = [(tokens[:, at:end], torch.arange(at, end), torch.tensor([end - at - 1])) for at, end in ((0, 3), (3, 4))]
        own = self.caches()
        pieces = [self.step(piece, at, keep, last, [(0, len(at), at[:1], own)]) for piece, at, keep in calls]
        difference = (torch.stack([pieces[0][0][0], pieces[1][0][0]]).float() - expected[0, 2:]).square().mean().sqrt()
        measured = float(difference / expected.std())
        if self.cache_type == name_of(self.model.dtype) and not measured <= _TRIAL_LIMIT:
            raise Unsupported(
                f"{type(self.model).__name__} gives other logits than lowbit's decoder (they differ by {measured:.2g} of "
                f"their spread; rounding is below {_TRIAL_LIMIT}); expected Whisper's layers"
            )
        try:
            plan = SpeechPlan(self, last)
            again = [plan.run(piece, at, keep, last, [(0, len(at), int(at[0]), plan.caches)]) for piece, at, keep in calls]
            if not all(torch.equal(*pair) for pairs in zip(again, pieces) for pair in zip(*pairs, strict=True)):
                raise Unplannable("its logits differ")
            alike = [(0, 1, 3, plan.caches), (1, 2, 3, plan.caches)]
            twice = plan.run(tokens[:, [3, 3]], torch.tensor([3, 3]), torch.tensor([0, 1]), last, alike)
            if not all(torch.equal(rows, one.expand_as(rows)) for rows, one in zip(twice, pieces[1], strict=True)):
                raise Unplannable("its logits differ for several texts in a call")
            self.plan = plan
        except Exception as reason:  # the model's own code works as well, so nothing is lost
            self.plan_refusal = reason_of(reason)
        try:
            self.listen_plan = ListenPlan(self)
        except Exception as reason:
            self.listen_refusal = reason_of(reason)

    def listen(self, features: Tensor | np.ndarray) -> None:
        """Encodes a window of audio and starts a new text.

        Args:
            features: [1, mel bins, frames], the log-mel spectrogram of a window.

        Raises:
            ValueError: another shape.
        """
        expected = (1, self.mel_bins, 2 * self.positions)
        if tuple(features.shape) != expected:
            raise ValueError(f"features is {list(features.shape)}; expected {list(expected)}")
        features = torch.as_tensor(features).to(self.model.dtype).contiguous()
        with torch.inference_mode():
            if self.listen_plan is not None and not self.listen_plan.fits():
                self.listen_plan, self.listen_refusal = None, "the model has been changed since the decoder was made"
            if self.listen_plan is None:
                self._states = self.model.model.encoder(features)[0]
                self.hear(self._states, torch.tensor([0]))
            else:
                self._states = self.listen_plan.listen(features)
        self._last = torch.tensor([self.positions - 1])

    def hear(self, states: Tensor, at: Tensor) -> list[Tensor]:
        """Stores keys and values of the encoder's output [1, positions, width] from ``at`` on; returns the last ones."""
        ends = []
        for layer, (_, _, k_cache, v_cache, last_k, last_v) in zip(self.model.model.decoder.layers, self.caches(), strict=True):
            attention = layer.encoder_attn
            key, value = self._split(attention.k_proj(states)), self._split(attention.v_proj(states))
            # Called to store keys and values. With a window of 1 the unused attention result costs almost nothing.
            torch.ops.lowbit.attention(key, key, value, k_cache, v_cache, at, 1.0, 1)
            ends += [key[:, :, -1:], value[:, :, -1:]]
            last_k.copy_(ends[-2])
            last_v.copy_(ends[-1])
        return ends

    def _split(self, rows: Tensor) -> Tensor:
        """[1, heads, s, width]"""
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Computes a step.

        Args:
            tokens: [1, s] int64.
            start: [1] int64, the number of earlier tokens.

        Returns:
            [1, vocabulary] of the model's dtype: the logits after the last token.

        Raises:
            ValueError: tokens or start has another shape or dtype, or a token is not in the vocabulary.
            IndexError: the text is longer than the model's positions, or has fewer than ``start`` tokens.
            RuntimeError: :meth:`listen` was not called before.
        """
        check_call(tokens, start, self.vocabulary, self.max_length, self._count)
        count = tokens.shape[1]
        return self._run(tokens, start + torch.arange(count), [count - 1], [self.text(count, int(start))])[0]

    def _run(self, tokens: Tensor, positions: Tensor, keep: list[int], texts: list[Text]) -> list[Tensor]:
        """Logits and queries of kept rows, as :meth:`step`."""
        last = self._last
        if last is None:
            raise RuntimeError("the decoder has no audio; call listen() first")
        start = texts[0].start
        with torch.inference_mode():
            if self.plan is not None and start == 0 and not self.plan.fits():
                self.plan, self.plan_refusal = None, "the model has been changed since the decoder was made"
            self._count = start  # if the call fails
            if self.plan is not None:
                given = [(begin, end, at, place.described) for begin, end, at, place in texts]
                found = self.plan.run(tokens, positions, torch.tensor(keep), last, given)
            else:
                several = [(begin, end, torch.tensor([at]), place.layers) for begin, end, at, place in texts]
                found = self.step(tokens, positions, torch.tensor(keep), last, several)
        self._count += texts[0].end
        return found

    def compute(self, tokens: list[int], positions: list[int], keep: list[int], texts: list[Text]) -> np.ndarray:
        given = torch.tensor([tokens])
        for begin, end, start, _ in texts:
            check_call(given[:, begin:end], torch.tensor([start]), self.vocabulary, self.max_length, self._count)
        logits, *queries = (each.float().numpy() for each in self._run(given, torch.tensor(positions), keep, texts))
        self.queries = [list(row) for row in zip(*queries, strict=True)]
        return logits

    def new_place(self) -> Place:
        return self._place([caches[:2] for caches in self._make(self.max_length, 0)])

    def _place(self, layers: list[tuple[Tensor, ...]]) -> Place:
        return Place(layers, None if self.plan is None else self.plan.of_beam(layers))

    def heard_keys(self) -> list[np.ndarray]:
        """The keys of the encoder's output for each layer with alignment heads, float32 [heads, positions, width]."""
        layers = self.model.model.decoder.layers
        with torch.inference_mode():
            keys = [self._split(layers[number].encoder_attn.k_proj(self._states)) for number in self.aligned_layers]
        return [key[0].float().numpy() for key in keys]

    @property
    def aligned_layers(self) -> list[int]:
        """The layers with alignment heads."""
        return sorted({layer for layer, _ in self.alignment_heads})

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        keep: Tensor | slice,
        last: Tensor,
        texts: Sequence[tuple[int, int, Tensor, Any]],
    ) -> list[Tensor]:
        """Computes a step, without checks.

        Args:
            tokens: [1, s] int64.
            positions: [s] int64, of the tokens.
            keep: [kept] int64, the rows with results.
            last: [1] int64, the last position of the encoder's output.
            texts: for each text the range of its rows, the number of earlier tokens [1] int64, and its keys and values in each
                layer, at the begin of those of :meth:`caches`.

        Returns:
            The logits [kept, vocabulary], and the queries [kept, heads, width] of each layer with alignment heads.
        """
        decoder, count = self.model.model.decoder, tokens.shape[1]
        x = decoder.embed_tokens(tokens) + decoder.embed_positions.weight[positions]
        # Each query becomes an additional head at the last position of the encoder's output, which attends to all of it. The
        # operator rewrites the key and value of that position unchanged.
        attend, queries = torch.ops.lowbit.attention, []
        for number, (layer, (*_, heard_k, heard_v, last_k, last_v)) in enumerate(
            zip(decoder.layers, self.caches(), strict=True)
        ):
            attention, h = layer.self_attn, layer.self_attn_layer_norm(x)
            given = [self._split(project(h)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)]
            outputs = [
                attend(
                    *(given if len(texts) == 1 else [each[:, :, begin:end] for each in given]), *caches[number][:2], start,
                    attention.scaling,
                )
                for begin, end, start, caches in texts
            ]  # fmt: skip
            x = x + attention.out_proj((outputs[0] if len(texts) == 1 else torch.cat(outputs, 1)).flatten(2))

            attention, h = layer.encoder_attn, layer.encoder_attn_layer_norm(x)
            projected = attention.q_proj(h)
            queries.append(projected[:, keep])
            query = self._split(projected).reshape(1, self.heads * count, 1, -1)
            output = attend(query, last_k, last_v, heard_k, heard_v, last, attention.scaling)
            output = output.view(1, self.heads, count, -1).transpose(1, 2).flatten(2)
            x = x + attention.out_proj(output)

            x = x + layer.fc2(layer.activation_fn(layer.fc1(layer.final_layer_norm(x))))
        logits = self.model.proj_out(decoder.layer_norm(x[:, keep]))[0]
        return [logits, *(queries[layer][0].unflatten(-1, (self.heads, -1)) for layer in self.aligned_layers)]


def _alignment_heads(model: Any) -> list[tuple[int, int]]:
    """Layers and heads whose cross-attention follows the recording, as the model's files name them.

    All heads of the upper half of the layers if the files name none, or ones that do not exist: distilled models have the
    settings of their larger teachers.
    """
    layers, heads = range(model.config.decoder_layers), range(model.config.decoder_attention_heads)
    named = getattr(model.generation_config, "alignment_heads", None)
    given = list(named) if isinstance(named, (list, tuple)) else []
    found = [(pair[0], pair[1]) for pair in given if isinstance(pair, (list, tuple)) and list(map(type, pair)) == [int, int]]
    if found and len(found) == len(given) and set(found) <= {(layer, head) for layer in layers for head in heads}:
        return found
    return [(layer, head) for layer in layers[len(layers) // 2 :] for head in heads]
