"""Checks that a decoder computes the same as its model, and says how they differ if it does not.

A model may have more state than keys and values (recurrent layers, short convolutions), or custom attention. A decoder would
silently lose this state, and its output would still look like text. So a few tokens are run through the unchanged model, and
through the decoder at once and in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..hf.decoding import Asked, Unsupported, tells_positions

TOKENS = 10
PIECES = (3, 1, 4, 2)
# Differences are relative to the effect of the preceding text on the logits of a token. A decoder that loses the text has a
# difference of about 1; a correct one differs only by rounding, in float32 by at most 1e-5. Quantized layers amplify rounding:
# a different order of float32 sums moves a few activations to the next of 255 values, which later layers propagate. The two
# attention implementations sum in different orders, but a text at once and in pieces uses the same operators, and results of
# lowbit's do not depend on the split. docs/models.md has the measurements. Correct models: at most 4e-6 in floats and 0.003 at
# 4 bits. Wrong models: at least 0.19 in pieces (recurrent_gemma, which the number of layers reveals as well), 0.4 where only
# these differences reveal it (falcon_h1), and 0.5 for the whole text.
EXACT_LIMIT = 1e-3  # for models in float32 only
ATTENTION_LIMIT = 0.3  # against the model's own attention; observed: 0.04 in models of 16 and 28 layers with random weights
PIECES_LIMIT = 0.1  # between pieces and the whole text; observed: 0.02 in bfloat16
# If the preceding text has no effect on the logits, they must agree within float32 rounding.
_ROUNDING = 1e-6

# Decoder.run: (tokens [1, s], positions [s], start [1], caches) -> logits [1, s, vocabulary].
Run = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def sample_text(config: Any, count: int) -> Tensor:
    """Token ids, int64 [1, count], spread over the vocabulary, without special tokens."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")):
            special.update(value if isinstance(value, (list, tuple)) else [value])
    size = config.vocab_size
    usual = [token for i in range(4 * count) if (token := (7 + i * max(1, size // count - 3)) % size) not in special]
    return torch.tensor([(usual or [0] * count)[:count]])


class Rounding:
    """Measures differences of logits relative to those of a decoding step that loses the text."""

    def __init__(self, model: torch.nn.Module, whole: Tensor, alone: Tensor):
        """
        Args:
            whole: [1, s, vocabulary], the logits of a text.
            alone: [1, s, vocabulary], the logits of each token as if it were the first.

        Raises:
            Unsupported: logits are NaN.
        """
        if whole.isnan().any():
            raise Unsupported("its logits are NaN")
        rounds = any(isinstance(module, nn.Linear | nn.LinearExperts) for module in model.modules())
        self.exact = model.dtype == torch.float32 and not rounds
        self.effect = _rms_difference(alone, whole)

    def differences(self, logits: Tensor, expected: Tensor) -> Tensor:
        """Differences [s] of [1, s, vocabulary]: 0 if equal; 1 if they differ as much as if the token were the first."""
        return _relative(logits, expected, self.effect)

    def difference(self, logits: Tensor, expected: Tensor) -> float:
        """The median over all tokens except the first, because rounding may route single tokens to another expert."""
        return float(self.differences(logits, expected)[1:].median())

    def change_by_later_tokens(self, prefixes: Tensor, whole: Tensor) -> str | None:
        """A clause that says that logits depend on later tokens; None if they do not.

        Args:
            prefixes: [1, s, vocabulary], the logits after the last token of each prefix of a text.
            whole: [1, s, vocabulary], the logits of the whole text.
        """
        limit = EXACT_LIMIT if self.exact else ATTENTION_LIMIT
        difference = self.difference(prefixes, whole)
        if difference <= limit:
            return None
        return (
            f"its logits after a token change with the tokens that follow (by {difference:.2g} of the earlier text's effect; "
            f"rounding is below {limit:g})"
        )


class Reference(Rounding):
    """The logits of a few tokens with the model's own attention, and the checks of a decoder against them."""

    def __init__(self, model: torch.nn.Module, max_length: int):
        """
        Args:
            model: unchanged.
            max_length: the decoder's, in tokens.

        Raises:
            Unsupported: the model's logits are NaN.
            Exception: whatever the model raises.
        """
        told = tells_positions(model)
        self.tokens = sample_text(model.config.get_text_config(), min(TOKENS, max_length))
        config = model.config.get_text_config()
        kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or ()
        self.without = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}  # layers that need no caches
        count = self.tokens.shape[1]
        self.positions = torch.arange(count)
        self.whole = _logits(model, self.tokens)
        # Each token as if it were the first: the logits of a decoder that loses the text.
        alone = {"position_ids": self.positions[:, None]} if told else {}
        super().__init__(model, self.whole, _logits(model, self.tokens.T, **alone).transpose(0, 1))
        # The same tokens at the end of the longest text, because position tables must reach there.
        self.far = self.positions + (max_length - count)
        self.whole_far: Tensor | None = None
        if told is not None:
            self.whole_far = _logits(model, self.tokens, position_ids=self.far[None]) if told else self.whole

    @torch.inference_mode()
    def ask(self, run: Run, layers: int) -> Asked:
        """Records the shapes of keys and values that each layer's attention uses, and of the states of recurrent layers.

        Raises:
            Unsupported: a layer has no attention over caches.
            Exception: whatever the model raises.
        """
        asked = Asked()
        run(self.tokens, self.positions, torch.tensor([0]), asked)
        _check_all_used({*asked.shapes, *asked.states} & {*range(layers)}, layers, self.without)
        return asked

    @torch.inference_mode()
    def prove(
        self,
        run: Run,
        run_texts: Callable[[list[list[int]]], list[Tensor]],
        caches: Sequence[tuple[Tensor, ...]],
        uses: Sequence[int],
    ) -> dict[str, float]:
        """Checks a decoder against the model, and returns the measured differences by name.

        Args:
            run_texts: logits [s, vocabulary] of each of several texts, computed in one call.
            caches: the caches of each layer, in the model's dtype, long enough for the reference's tokens.
            uses: how often a call must use the caches of each layer.

        Raises:
            Unsupported: the decoder's results differ from the model's; the message says how.
            Exception: whatever the model raises.
        """
        tokens, count = self.tokens, self.tokens.shape[1]
        measured: dict[str, float] = {}

        def logits_of(text: Tensor, positions: Tensor, start: int) -> Tensor:
            counted = _Counted(caches)
            logits = run(text, positions, torch.tensor([start]), counted)
            if counted.uses != Counter(dict(enumerate(uses))):
                raise Unsupported(f"its {len(caches)} layers use the decoder's caches {counted.uses.total()} times a call")
            return logits

        def in_pieces(sizes: Sequence[int]) -> Tensor:
            begins = [sum(sizes[:i]) for i in range(len(sizes))]
            return torch.cat(
                [logits_of(tokens[:, at : at + size], torch.arange(at, at + size), at) for at, size in zip(begins, sizes)],
                dim=1,
            )

        def check(name: str, logits: Tensor, expected: Tensor, limit: float, problem: str) -> None:
            measured[name] = self.difference(logits, expected)
            limit = EXACT_LIMIT if self.exact else limit
            if not measured[name] <= limit:
                raise Unsupported(
                    f"{problem} (by {measured[name]:.2g} of the earlier text's effect; rounding is below {limit:g})"
                )

        whole = logits_of(tokens, self.positions, 0)
        check("whole", whole, self.whole, ATTENTION_LIMIT, "its logits differ from those of its own attention")
        sizes = list(PIECES) if count == sum(PIECES) else [1, count - 1]
        forgets = "its logits change when a text comes in pieces"
        check("one by one", in_pieces([1] * count), whole, PIECES_LIMIT, forgets)
        check("pieces", in_pieces(sizes), whole, PIECES_LIMIT, forgets)
        if self.whole_far is not None:
            far = logits_of(tokens, self.far, 0)
            check(
                "far",
                far,
                self.whole_far,
                ATTENTION_LIMIT,
                "its logits at far positions differ from those of its own attention",
            )
        measured["texts"] = self._difference_of_texts(run_texts, whole)
        return measured

    def _difference_of_texts(self, run_texts: Callable[[list[list[int]]], list[Tensor]], whole: Tensor) -> float:
        """The difference caused by another text in the same call; infinite if the model raises an exception.

        Only :meth:`Decoder.check_texts` depends on it, so a model that fails here can still be decoded.
        """
        text = self.tokens[0].tolist()
        shorter = max(1, len(text) - 3)
        try:
            logits = torch.cat(run_texts([text[:shorter], text]))
        except Exception:
            return float("inf")
        expected = torch.cat([whole[0, :shorter], whole[0]])
        effect = torch.cat([self.effect[:, :shorter], self.effect], dim=1)
        return float(_relative(logits[None], expected[None], effect).median())

    @torch.inference_mode()
    def rounding_of_caches(self, run: Run, caches: Sequence[tuple[Tensor, ...]], cache_type: str) -> float:
        """The difference caused by caches of a smaller type, on the same scale as in :meth:`prove`.

        Raises:
            Unsupported: keys or values are beyond the range of the type.
        """
        difference = self.difference(run(self.tokens, self.positions, torch.tensor([0]), caches), self.whole)
        if difference == float("inf"):
            raise Unsupported(f"its keys or values do not fit into a cache of {cache_type}: the logits are not numbers")
        return difference


def sees_what_follows(model: torch.nn.Module) -> str | None:
    """The same as :meth:`Rounding.change_by_later_tokens`, for a model with its own attention."""
    tokens = sample_text(model.config.get_text_config(), TOKENS)
    whole = _logits(model, tokens)
    rounding = Rounding(model, whole, _logits(model, tokens.T).transpose(0, 1))
    prefixes = [_logits(model, tokens[:, :end])[:, -1:] for end in range(1, TOKENS + 1)]
    return rounding.change_by_later_tokens(torch.cat(prefixes, dim=1), whole)


class _Counted(list[Any]):
    """A list of the caches of all layers that counts the uses of each."""

    def __init__(self, caches: Sequence[Any]):
        super().__init__(caches)
        self.uses: Counter[int] = Counter()

    def __getitem__(self, layer: Any) -> Any:
        self.uses[layer] += 1
        return super().__getitem__(layer)


def _logits(model: torch.nn.Module, tokens: Tensor, **arguments: Any) -> Any:
    return model(input_ids=tokens, use_cache=False, **arguments).logits


def _rms_difference(a: Tensor, b: Tensor) -> Tensor:
    """Root of the mean squared difference: [1, s]. Equal infinities count as 0, because some models mask tokens."""
    a, b = a.double(), b.double()
    return torch.where(a == b, 0.0, a - b).square().mean(-1).sqrt()


def _relative(logits: Tensor, expected: Tensor, effect: Tensor) -> Tensor:
    if not logits.isfinite().equal(expected.isfinite()):
        return torch.full((expected.shape[1],), float("inf"))
    scale = torch.maximum(effect, _ROUNDING / EXACT_LIMIT * expected.float().std(-1))
    return (_rms_difference(logits, expected) / scale)[0]


def _check_all_used(used: set[int], layers: int, without: set[int]) -> None:
    if len(used | without) < layers:
        raise Unsupported(f"{len(used)} of its {layers} layers use the decoder's caches")
