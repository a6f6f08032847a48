"""Speculative decoding with a model's multi-token prediction (MTP) head, which some checkpoints include."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..files.safetensors import files_of, read_files
from ..hf import decoding
from ..nn import Packed
from ..plan.recording import reason_of
from .decoder import Decoder
from .planning import MtpPlan
from .sampling import common, most_likely
from .texts_call import PIECE

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

_LOG = logging.getLogger(__name__)
_KEPT = 64  # hidden states that are kept: a call may start over at most this many tokens before the end of the text


class Mtp:
    """The multi-token prediction head of a checkpoint, used as the draft model.

    The head is a decoder layer with separate caches. From the model's hidden state at a token and the token after it, it
    drafts the token after that. With its own result as the next hidden state it drafts more. It records the hidden
    states of every call of the decoder, until :meth:`release`.
    """

    def __init__(self, decoder: Decoder, path: str | os.PathLike[str] | None = None, quantization: LowBitConfig | None = None):
        """
        Args:
            decoder: the decoder of the model, not compiled.
            path: the directory of the model's checkpoint; None: the one from which it was loaded.
            quantization: how to quantize the head of a float checkpoint; None: not at all.

        Raises:
            OSError, ValueError: the checkpoint has no such head, or its tensors do not fit the model.
        """
        from ..hf.mtp_layers import load_head

        if not isinstance(decoder, Decoder):
            raise ValueError(f"a {type(decoder).__name__} gives no hidden states; expected a Decoder, not compiled")
        decoder.check()
        directory = Path(decoder.model.config.name_or_path if path is None else path)
        head = load_head(decoder.model, directory, read_files(*files_of(directory)), quantization)
        if head is None:
            raise ValueError(
                f"{directory} has no multi-token prediction (MTP) head; expected tensors mtp.*, or a layer after the last one "
                "with eh_proj: quantize a checkpoint that has them, or use a draft model or prompt lookup"
            )
        model: Any = decoder.model
        self._decoder = weakref.ref(decoder)
        self.max_length, self.vocabulary = decoder.max_length, decoder.vocabulary
        self._head, self._layer = head, decoder.layers
        self._takeover = decoding.Takeover(head, self.max_length)
        self._embed, self._logits = model.get_input_embeddings(), model.get_output_embeddings()
        base = model.get_decoder()
        self._rotary, self._size = base.rotary_emb, base.config.hidden_size
        with torch.inference_mode():
            asked, nothing = decoding.Asked(), torch.zeros(1, 1, self._size, dtype=model.dtype)
            head(nothing, nothing, torch.tensor([[0]]), self._rotary, asked, torch.tensor([0]))
        self._heads, *self._widths = asked.shapes[self._layer]
        self._caches = self._new_caches(-(-self.max_length // 16) * 16)
        self._reset(0)
        decoder.observe(self._see)
        self.plan_refusal = decoder.plan_refusal  # why drafts run the head's Python code
        self._plan: MtpPlan | None = None
        if self.plan_refusal is None:
            self._make_plan(decoder.exact)

    def _make_plan(self, exact: bool) -> None:
        modules = torch.nn.ModuleList([self._head, self._embed, self._logits])
        exact = exact and not any(isinstance(module, Packed) for module in modules.modules())
        try:
            self._plan = MtpPlan(self._compute, self._new_caches, modules, self._size, exact)
        except Exception as reason:  # the head's own code runs, too, so nothing is lost
            self._drop_plan(reason_of(reason))
        else:
            self._planned_caches = self._plan.caches(self._caches)

    @torch.inference_mode(False)  # as those of the decoder
    def _new_caches(self, length: int) -> list[tuple[Tensor, ...]]:
        dtype = self._head.dtype
        return [tuple(torch.zeros(1, self._heads, length, width, dtype=dtype) for width in self._widths)]

    def _drop_plan(self, reason: str) -> None:
        self._plan, self.plan_refusal = None, reason
        _LOG.info("each draft runs the Python code of the multi-token prediction head: %s", reason)

    def is_of(self, decoder: Any) -> bool:
        """Whether this head belongs to the decoder."""
        return self._decoder() is decoder

    def release(self) -> None:
        """Frees the head; the decoder's hidden states are not recorded any more."""
        if (decoder := self._decoder()) is not None:
            decoder.end_observing(self._see)
        self._takeover.end(self._head)
        self._caches.clear()
        self._plan = None

    # The recorded text starts at position `_base`. Earlier positions were copied to the caches, so their hidden states are
    # unknown. Entry i of the head's caches is computed from hidden state i and token i + 1.

    def _reset(self, base: int) -> None:
        self._base = base
        self._ids: list[int] = []  # from _base on
        self._hidden: list[Tensor] = []  # [size] each, of the last tokens
        self._filled = base  # entries before this one are up to date

    def _see(self, start: int, tokens: Tensor, hidden: Tensor) -> None:
        self.note(start, tokens[0].tolist(), hidden[0])

    def note(self, start: int, ids: Sequence[int], hidden: Tensor) -> None:
        """Records the hidden states [s, size] of a call with these tokens after ``start`` earlier ones."""
        known, first = self._base + len(self._ids), self._base + len(self._ids) - len(self._hidden)
        # Entry start - 1 depends on the token at start, which may have changed.
        again = start - 1 if first < start else start
        if not self._base <= start <= known or (self._filled < again and first >= start):
            self._reset(start)
        else:
            del self._ids[start - self._base :], self._hidden[max(0, start - first) :]
            self._filled = min(self._filled, max(again, self._base))
        self._ids += ids
        self._hidden += hidden.detach().unbind()
        end = self._base + len(self._ids)
        while end - 1 - self._filled >= PIECE:
            self._fill(self._filled + PIECE, self._ids)
        del self._hidden[: max(0, len(self._hidden) - max(_KEPT, end - self._filled))]

    def _fill(self, until: int, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Computes the entries before ``until``; ids from `_base` on, to the token at ``until``. Returns as :meth:`_run`."""
        first = self._base + len(self._ids) - len(self._hidden)
        hidden = torch.stack(self._hidden[self._filled - first : until - first])
        result = self._run(self._filled, hidden, ids[self._filled + 1 - self._base : until + 1 - self._base])
        self._filled = until
        return result

    def _run(self, place: int, hidden: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Computes entries from ``place`` on, for hidden states [s, size] and the next tokens.

        Returns:
            The last result [1, size], and its logits [vocabulary].
        """
        start, rows = place - self._base, torch.arange(len(ids))
        if self._plan is not None and not self._plan.fits():
            self._drop_plan("the model has been changed since the head was loaded")
        inputs = torch.tensor([list(ids)]), hidden, start + rows, rows[-1:]
        if self._plan is None or torch.is_grad_enabled():
            result, logits = self._compute(*inputs, torch.tensor([start]), self._caches)
        else:
            result, logits = self._plan.run(inputs, start, self._planned_caches)
        return result, logits[0]

    def _compute(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, keep: Tensor, start: Tensor, caches: list[tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """The results [kept, size] of the head at the rows ``keep``, and their logits [kept, vocabulary]."""
        layers = {self._layer: caches[0]}
        result = self._head(hidden[None], self._embed(ids), positions[None], self._rotary, layers, start)[0, keep]
        return [result, self._logits(result)]

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` draft tokens; none unless all tokens of the text except the last are recorded."""
        last = len(text) - 1
        first = self._base + len(self._ids) - len(self._hidden)
        ids = list(text[self._base :])
        if most < 1 or last - 1 < max(self._base, first) or common(ids, self._ids) < last - self._base:
            return []
        self._filled = min(self._filled, last - 1)
        place, guess = last, []
        result, logits = self._fill(last, ids)
        while True:
            guess.append(most_likely(logits[: self.vocabulary]))
            if len(guess) == most:
                return guess
            result, logits = self._run(place, result, guess[-1:])
            place += 1
