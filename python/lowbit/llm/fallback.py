"""A decoding step over transformers' caches and attention, for models that :class:`Decoder` refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hf import decoding
from ..hf.continuing import OwnCaches
from ..machine.one_text import OneText
from .proof import EXACT_LIMIT, PIECES, TOKENS, Rounding, sample_text
from .sampling import check_max_length
from .token_calls import check_call

# Limits for differences, relative to the effect of the preceding text on the logits, as in proof.py. Mamba's caches are wrong
# by 0.1 after a second prompt, so the limit is below that. Caches with larger rounding differences are not used, which only
# costs time.
_ONE_BY_ONE_LIMIT = 0.05
_ROUNDED_ACTIVATION = 0.01  # an activation rounded to the next int8 value; the largest observed difference is 0.002


class Fallback:
    """A decoding step of a causal language model with transformers' attention and caches.

    For models that :class:`Decoder` refuses: custom attention code, other recurrent layers, convolutions. A text may be split
    into calls as with a decoder, but there is no compilation, export or speculative decoding.

    Some caches can continue a text by many tokens, some by one token, some not at all; keys and values can be truncated,
    recurrent states cannot. At construction a few tokens are run through the model at once and in pieces to find out what its
    caches support. If they do not continue a text correctly, each step computes the whole text.
    """

    def __init__(self, model: torch.nn.Module, max_length: int = 2048):
        """
        Args:
            model: a transformers causal language model, quantized or not, in eval mode. Its decoder, if any, is released.
            max_length: the longest text in tokens, prompt included.

        Raises:
            ValueError: max_length is not positive or beyond the model's positions; or the model does not run, or a token's
                logits depend on later tokens.
        """
        config = model.config.get_text_config()
        max_length = check_max_length(max_length, decoding.position_limit(config))
        if model.training:
            raise ValueError("the model is in training mode; call its eval() first")
        decoding.give_back(model)
        self.model, self.max_length, self.vocabulary = model, max_length, config.vocab_size
        # Whether the caches can continue a text by many tokens and by one token, and whether they can be truncated.
        self.many = self.one = self.cuts = False
        self.refusal: str | None = None  # why a decoder is not used; set by the caller
        self.measured: dict[str, float] = {}
        self._text: list[int] = []
        self.one_text = OneText()
        self._caches = OwnCaches(model)  # of the text's first tokens
        try:
            with torch.inference_mode():
                self._prove()
        except Exception as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            if not isinstance(error, decoding.Unsupported):
                reason = f"the model raises {type(error).__name__}: {reason}"
            raise decoding.Refusal(
                f"{type(model).__name__} (model_type {model.config.model_type}) writes no text token by token: {reason}"
            ) from error
        self._forget()

    @property
    def how(self) -> str:
        """Describes how a text is continued, as a sentence without a period."""
        if not self.one:
            return "its caches do not continue a text, so each token is computed with all of the text"
        by = "by any number of tokens" if self.many else "token by token"
        return f"its caches continue a text {by}, and " + (
            "can be cut back" if self.cuts else "cannot be cut back: a text that changes is computed again"
        )

    def _forget(self) -> None:
        self._text = []
        self._caches.reset()

    def kept(self, count: int) -> int:
        """Number of the text's first ``count`` tokens that the caches keep for the next call."""
        cached = self._caches.count
        return min(count, cached) if self.one and (cached <= count or self.cuts) else 0

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """Computes a step, as :meth:`Decoder.forward`.

        Args:
            tokens: [1, s] int64.
            start: [1] int64, the number of earlier tokens of the text. A smaller one cuts the text back, with any caches.

        Returns:
            [1, vocabulary] of the model's dtype: the logits after the last token.

        Raises:
            ValueError: tokens or start has another shape or dtype, or a token is not in the vocabulary.
            IndexError: the text is longer than max_length, or start is beyond the text.
            RuntimeError: the step is computing another text.
        """
        with self.one_text:
            check_call(tokens, start, self.vocabulary, self.max_length, len(self._text))
            begin = int(start)
            self._text[begin:] = tokens[0].tolist()
            return self._last_logits(begin)[:, -1]

    def _last_logits(self, begin: int) -> Tensor:
        """Logits [1, 1, vocabulary] after the text, whose tokens from ``begin`` on are new."""
        text, caches = torch.tensor([self._text]), self._caches
        if not self.kept(begin):
            caches.reset()
        elif caches.count > begin:
            caches.cut(begin)
        if not caches.count or self.many:
            return caches.run(text, 1)
        for end in range(caches.count + 1, text.shape[1] + 1):
            logits = caches.run(text[:, :end], 1)
        return logits

    def _prove(self) -> None:
        """Finds out what the caches can do, by the logits of a whole text without caches.

        Raises:
            decoding.Unsupported: a token's logits depend on later tokens.
            Exception: whatever the model raises.
        """
        model = self.model
        tokens = sample_text(model.config.get_text_config(), min(TOKENS, self.max_length))
        count = tokens.shape[1]
        whole = model(input_ids=tokens, use_cache=False).logits
        rounding = Rounding(model, whole, model(input_ids=tokens.T, use_cache=False).logits.transpose(0, 1))
        limit = EXACT_LIMIT if rounding.exact else _ONE_BY_ONE_LIMIT

        def pieces(*sizes: int) -> Tensor:
            self._caches.reset()
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            return torch.cat([self._caches.run(tokens[:, :end], 0) for end in ends], dim=1)

        def agrees(name: str, limit: float, *sizes: int) -> bool:
            try:
                logits = pieces(*sizes)
            except Exception:  # not supported by the caches
                return False
            if logits.shape != whole.shape:
                return False
            differences = rounding.differences(logits, whole)[1:]
            # Rounding may route a token to another expert, so only most tokens can be expected to agree.
            strict = rounding.exact or name == "pieces"
            self.measured[name] = float(differences.max() if strict else differences.quantile(0.75))
            return self.measured[name] <= limit

        first = min(3, count)
        sizes: Sequence[int] = PIECES if count == sum(PIECES) else [1, count - 1]
        # In this order, because a state that is not reset shows only in a second text.
        self.one = agrees("after a prompt", limit, first, *[1] * (count - first)) and agrees("one by one", limit, *[1] * count)
        if self.one:
            # The limit depends on the effect of rounding on single tokens, which may be zero.
            self.many = agrees("pieces", min(limit, max(_ROUNDED_ACTIVATION, 3 * self.measured["after a prompt"])), *sizes)
            self.cuts = self._can_cut(tokens, rounding, whole, limit)
            return
        # Each step computes the whole text: correct if later tokens do not change the logits of a token.
        steps = []
        for end in range(1, count + 1):
            self._caches.reset()
            steps.append(self._caches.run(tokens[:, :end], 1))
        prefixes = torch.cat(steps, dim=1)
        self.measured["whole"] = rounding.difference(prefixes, whole)
        reason = rounding.change_by_later_tokens(prefixes, whole)
        if reason is not None:
            raise decoding.Unsupported(reason)

    def _can_cut(self, tokens: Tensor, rounding: Rounding, whole: Tensor, limit: float) -> bool:
        """Whether truncated caches continue as if the removed tokens had never existed."""
        count = tokens.shape[1]
        half = count // 2
        self._caches.reset()
        try:
            self._caches.run(torch.cat([tokens[:, :half], tokens[:, :half]], dim=1), 1)
            if not half or not self._caches.cut(half):
                return False
            steps = [self._caches.run(tokens[:, :end], 1) for end in range(half + 1, count + 1)]
        except Exception:
            return False
        differences = rounding.differences(torch.cat([whole[:, :half], *steps], dim=1), whole)[half:]
        self.measured["cut back"] = float(differences.max() if rounding.exact else differences.quantile(0.75))
        return self.measured["cut back"] <= limit
