"""Speculative decoding with a model's multi-token prediction (MTP) head, which some checkpoints include."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..files.safetensors import files_of, read_files
from ..hf import decoding
from .decoder import PIECE, Decoder
from .sampling import common, most_likely

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

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
        self._rotary = base.rotary_emb
        with torch.inference_mode():
            asked, nothing = decoding.Asked(), torch.zeros(1, 1, base.config.hidden_size, dtype=model.dtype)
            head(nothing, nothing, torch.tensor([[0]]), self._rotary, asked, torch.tensor([0]))
        heads, *widths = asked.shapes[self._layer]
        length = -(-self.max_length // 16) * 16
        with torch.inference_mode(False):  # as those of the decoder
            self._caches = {self._layer: tuple(torch.zeros(1, heads, length, width, dtype=model.dtype) for width in widths)}
        self._reset(0)
        decoder.drop_plan("its layer for speculative decoding needs hidden states")
        self._hook = base.register_forward_hook(self._see, with_kwargs=True)

    def is_of(self, decoder: Any) -> bool:
        """Whether this head belongs to the decoder."""
        return self._decoder() is decoder

    def release(self) -> None:
        """Frees the head and removes its hook from the decoder."""
        self._hook.remove()
        self._takeover.end(self._head)
        self._caches.clear()

    # The recorded text starts at position `_base`. Earlier positions were copied to the caches, so their hidden states are
    # unknown. Entry i of the head's caches is computed from hidden state i and token i + 1.

    def _reset(self, base: int) -> None:
        self._base = base
        self._ids: list[int] = []  # from _base on
        self._hidden: list[Tensor] = []  # [size] each, of the last tokens
        self._filled = base  # entries before this one are up to date

    def _see(self, module: Any, args: Any, arguments: dict[str, Any], output: Any) -> None:
        caches, tokens = arguments.get("caches"), arguments.get("input_ids")
        if torch.compiler.is_compiling() or caches is None or tokens is None:
            return
        start = arguments["start"]
        if isinstance(caches, decoding.Texts):
            if len(caches.parts) > 1:
                return  # no speculative decoding for several texts
            start = caches.parts[0].start
        self.note(int(start), tokens[0].tolist(), output[0][0])

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

    def _fill(self, until: int, ids: Sequence[int]) -> Tensor:
        """Computes the entries before ``until``; ids from `_base` on, to the token at ``until``. Returns the last result."""
        first = self._base + len(self._ids) - len(self._hidden)
        hidden = torch.stack(self._hidden[self._filled - first : until - first])
        result = self._run(self._filled, hidden, ids[self._filled + 1 - self._base : until + 1 - self._base])
        self._filled = until
        return result

    def _run(self, place: int, hidden: Tensor, ids: Sequence[int]) -> Tensor:
        """Computes entries from ``place`` on, for hidden states [s, size] and the next tokens; returns the last result."""
        start = torch.tensor([place - self._base])
        positions = start + torch.arange(len(ids))
        embedding = self._embed(torch.tensor([list(ids)]))
        return cast(Tensor, self._head(hidden[None], embedding, positions[None], self._rotary, self._caches, start))[0, -1:]

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` draft tokens; none unless all tokens of the text except the last are recorded."""
        last = len(text) - 1
        first = self._base + len(self._ids) - len(self._hidden)
        ids = list(text[self._base :])
        if most < 1 or last - 1 < max(self._base, first) or common(ids, self._ids) < last - self._base:
            return []
        self._filled = min(self._filled, last - 1)
        place, guess = last, []
        result = self._fill(last, ids)
        while True:
            guess.append(most_likely(self._logits(result[None])[0, -1, : self.vocabulary]))
            if len(guess) == most:
                return guess
            result = self._run(place, result, guess[-1:])
            place += 1
