"""A step over transformers' own caches and attention, for models that :class:`Decoder` refuses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hf import decoding
from ..hf.continuing import OwnCaches
from .decoder import check_call
from .proof import EXACT, PIECES, TOKENS, Rounding, sample_text, seen

# Of what the text before does to the logits, as in proof.py. Mamba's caches are wrong by 0.1 behind a second prompt, so what
# rounds is held to less; caches that round more are not used, which costs time only.
_ONE_BY_ONE = 0.05
_ONE_ROUNDING = 0.01  # where an activation is rounded to the other side: 0.002 was seen


class Fallback:
    """One step of a causal language model as transformers computes it: its attention, its caches.

    For what :class:`Decoder` refuses: attention that is code of its own, recurrent layers, convolutions. It takes a text in
    pieces as a decoder does, but is not compiled, not exported, and guesses nothing.

    Caches differ in what they can do: some continue a text by many tokens, some by one only, some not at all; some can be cut
    back, states cannot. At construction a few tokens go through the model whole and in pieces, and what agrees is used: where
    caches do not continue right, all of the text is computed with each token.
    """

    def __init__(self, model: torch.nn.Module, max_length: int = 2048):
        """
        Args:
            model: a transformers causal language model, quantized or not, in eval mode. A decoder that has it is released.
            max_length: the longest text in tokens, prompt included.

        Raises:
            ValueError: max_length is not positive or beyond the model's positions; or the model does not run, or computes a
                token's logits with those behind it. The sentence says what was found.
        """
        config = model.config.get_text_config()
        limit = decoding.position_limit(config)
        if max_length <= 0:
            raise ValueError(f"max_length is {max_length}; expected a positive number")
        if limit is not None and limit < max_length:
            raise ValueError(f"max_length is {max_length}; expected at most the model's {limit} positions")
        if model.training:
            raise ValueError("the model is in training mode; call its eval() first")
        decoding.give_back(model)
        self.model, self.max_length, self.vocabulary = model, max_length, config.vocab_size
        self.many = self.one = self.cuts = False  # tokens that its caches continue a text by; whether they can be cut back
        self.refusal: str | None = None  # why a decoder is not used, for who knows it
        self.measured: dict[str, float] = {}
        self._text: list[int] = []  # the tokens of the text
        self._caches = OwnCaches(model)  # of some at its beginning
        try:
            with torch.inference_mode():
                self._prove()
        except Exception as error:
            found = str(error).strip().split("\n")[0].rstrip(".")
            if not isinstance(error, decoding.Unsupported):
                found = f"the model raises {type(error).__name__}: {found}"
            raise decoding.Refusal(
                f"{type(model).__name__} (model_type {model.config.model_type}) writes no text token by token: {found}"
            ) from error
        self._forget()

    @property
    def how(self) -> str:
        """How a text is continued, in a sentence without its end."""
        if not self.one:
            return "its caches do not continue a text, so each token is computed with all of the text"
        by = "by any number of tokens" if self.many else "token by token"
        return f"its caches continue a text {by}, and " + (
            "can be cut back" if self.cuts else "cannot be cut back: a text that changes is computed anew"
        )

    def _forget(self) -> None:
        self._text = []
        self._caches.reset()

    def kept(self, count: int) -> int:
        """How many of the first `count` tokens of the text before the next call need not be computed in it."""
        computed = self._caches.count
        return min(count, computed) if self.one and (computed <= count or self.cuts) else 0

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, start: Tensor) -> Tensor:
        """
        Args:
            tokens: [1, s] int64.
            start: [1] int64: how many tokens of the text came before. The text may be cut back by it, also where caches
                cannot.

        Returns:
            [1, vocabulary] of the model's dtype: the logits behind the last token.

        Raises:
            ValueError: tokens or start of another shape or dtype, or a token that is not in the vocabulary.
            IndexError: the text is longer than max_length, or start beyond the text.
        """
        check_call(tokens, start, self.vocabulary, self.max_length)
        begin = int(start)
        if begin > len(self._text):
            raise IndexError(f"start is {begin}; expected at most {len(self._text)}, the tokens that came before")
        self._text[begin:] = tokens[0].tolist()
        return self._behind(begin)[:, -1]

    def _behind(self, begin: int, keep: int = 1) -> Tensor:
        """The logits behind the text's tokens; those from `begin` on are new."""
        text, caches = torch.tensor([self._text]), self._caches
        if not self.kept(begin):
            caches.reset()
        elif caches.count > begin:
            caches.cut(begin)
        if not caches.count or self.many:
            return caches.run(text, keep)
        for end in range(caches.count + 1, text.shape[1] + 1):
            logits = caches.run(text[:, :end], 1)
        return logits

    def _prove(self) -> None:
        """Finds out what the caches can do, beside the model's own forward over a whole text.

        Raises:
            decoding.Unsupported: says what was found.
            Exception: whatever the model raises.
        """
        model = self.model
        tokens = sample_text(model.config.get_text_config(), min(TOKENS, self.max_length))
        count = tokens.shape[1]
        whole = model(input_ids=tokens, use_cache=False).logits
        rounding = Rounding(model, whole, model(input_ids=tokens.T, use_cache=False).logits.transpose(0, 1))
        most = EXACT if rounding.exact else _ONE_BY_ONE

        def pieces(*sizes: int) -> Tensor:
            self._caches.reset()
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            return torch.cat([self._caches.run(tokens[:, :end], 0) for end in ends], dim=1)

        def near(name: str, most: float, *sizes: int) -> bool:
            try:
                logits = pieces(*sizes)
            except Exception:  # its caches are not made for this
                return False
            if logits.shape != whole.shape:
                return False
            off = rounding.differences(logits, whole)[1:]
            # Where layers round, some token may go to another expert, and only most of them can be held to it.
            self.measured[name] = float(off.max() if rounding.exact or name == "pieces" else off.quantile(0.75))
            return self.measured[name] <= most

        first = min(3, count)
        sizes: Sequence[int] = PIECES if count == sum(PIECES) else [1, count - 1]
        # In this order: from here on a text comes behind another one.
        self.one = near("behind a prompt", most, first, *[1] * (count - first)) and near("one by one", most, *[1] * count)
        if self.one:
            # Beside what rounding does to single tokens, which may be nothing.
            self.many = near("pieces", min(most, max(_ONE_ROUNDING, 3 * self.measured["behind a prompt"])), *sizes)
            self.cuts = self._cuts(tokens, rounding, whole, most)
            return
        # Each token with all of the text: right if what is behind a token does not change its logits.
        behind = []
        for end in range(1, count + 1):
            self._caches.reset()
            behind.append(self._caches.run(tokens[:, :end], 1))
        self.measured["whole"] = rounding.difference(torch.cat(behind, dim=1), whole)
        follows = seen(rounding, torch.cat(behind, dim=1), whole)
        if follows is not None:
            raise decoding.Unsupported(follows)

    def _cuts(self, tokens: Tensor, rounding: Rounding, whole: Tensor, most: float) -> bool:
        """Whether caches that are cut back continue as if the rest had never been."""
        count = tokens.shape[1]
        half = count // 2
        self._caches.reset()
        try:
            self._caches.run(torch.cat([tokens[:, :half], tokens[:, :half]], dim=1), 1)
            if not half or not self._caches.cut(half):
                return False
            found = [self._caches.run(tokens[:, :end], 1) for end in range(half + 1, count + 1)]
        except Exception:
            return False
        off = rounding.differences(torch.cat([whole[:, :half], *found], dim=1), whole)[half:]
        self.measured["cut back"] = float(off.max() if rounding.exact else off.quantile(0.75))
        return self.measured["cut back"] <= most
