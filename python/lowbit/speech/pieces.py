"""Transcribes recordings piece by piece with models that give no timestamps; transformers decodes each piece."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from .audio import SAMPLE_RATE
from .speech_options import Options
from .transcription import AnyTranscriber, Heard, Segment, Windows
from .words import Word

_WINDOW = 30 * SAMPLE_RATE  # most samples of a piece
_LEAST = SAMPLE_RATE // 10  # samples; convolutions need 895
_QUIET = SAMPLE_RATE // 5  # samples of a pause in which a recording is cut


class PieceTranscriber(AnyTranscriber):
    """Transcribes recordings of any length; each piece of up to 30 seconds, cut at a pause, becomes one segment.

    transformers decodes; the layers may be packed.
    """

    family: ClassVar[str]
    more_options: ClassVar[tuple[str, ...]] = ()  # that the family supports

    def __init__(self, model: torch.nn.Module, processor: Any):
        """
        Args:
            model: a model of transformers, quantized or not, in eval mode.
            processor: an object with the model's ``feature_extractor`` and ``tokenizer``.

        Raises:
            ValueError: another sampling rate than 16,000.
        """
        self.model: Any = model
        self.extractor, self.tokenizer = processor.feature_extractor, processor.tokenizer
        if (rate := getattr(self.extractor, "sampling_rate", None)) != SAMPLE_RATE:
            raise ValueError(f"the feature extractor has sampling_rate {rate}; expected {SAMPLE_RATE}")

    def windows(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> Windows:
        samples, wish = self.samples(audio), Options(**options)
        self._check(wish)
        return self._windows(samples, wish.word_timestamps)

    def _check(self, wish: Options) -> None:
        """Raises ValueError for options that need a Whisper model."""
        plain = Options()
        for name in (
            "language", "task", "timestamps", "word_timestamps", "prompt", "condition_on_previous_text", "temperatures",
            "no_speech_threshold", "beams",
        ):  # fmt: skip
            found, expected = getattr(wish, name), getattr(plain, name)
            if found != expected and name not in self.more_options:
                raise ValueError(f"{name} is {found!r}; expected {expected!r} with a {self.family} model")

    def _windows(self, samples: np.ndarray, words: bool) -> Windows:
        begin = 0
        while begin < len(samples):
            end = begin + _cut(samples[begin:])
            padded = np.pad(samples[begin:end], (0, max(0, _LEAST - (end - begin))))
            inputs = self.extractor(padded, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            with torch.inference_mode():  # not around the yield, where code of the caller runs
                segment = self.segment(inputs, begin / SAMPLE_RATE, end / SAMPLE_RATE, words)
            yield [segment]
            begin = end
        return Heard(None, None, len(samples) / SAMPLE_RATE)

    def segment(self, inputs: Any, begin: float, end: float, words: bool) -> Segment:
        """The segment of a piece.

        Args:
            inputs: the result of the feature extractor.
            begin, end: the times of the piece in seconds.
            words: whether to compute the times of words.
        """
        raise NotImplementedError


class MoonshineTranscriber(PieceTranscriber):
    """Transcribes with ``MoonshineForConditionalGeneration``, whose encoder reads samples."""

    family = "Moonshine"
    _tokens_per_second = 6.5  # at most (Jeffries et al., Moonshine, 2024)

    def segment(self, inputs: Any, begin: float, end: float, words: bool) -> Segment:
        samples = inputs.input_values.to(self.model.dtype)
        most = int(samples.shape[1] / SAMPLE_RATE * self._tokens_per_second)
        made = self.model.generate(
            samples, max_new_tokens=min(max(1, most), self.model.config.max_position_embeddings - 1), do_sample=False,
            num_beams=1, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        written = made.sequences[0, -len(made.scores) :]
        chances = torch.stack(made.scores, 1)[0].float().log_softmax(-1).gather(1, written[:, None])
        ends = self.model.generation_config.eos_token_id
        tokens = [token for token in written.tolist() if token not in (ends if isinstance(ends, list) else [ends])]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Segment.of_piece(begin, end, text, tokens, float(chances.mean()), None)


class _Token(NamedTuple):
    """A token with its first frame and the one after its last; None: its log-probability is unknown."""

    token: int
    first: int
    after: int
    logprob: float | None


class ParakeetTranscriber(PieceTranscriber):
    """Transcribes with ``ParakeetForCTC``, which gives each frame of 80 milliseconds a token or none."""

    family = "Parakeet"
    more_options = ("word_timestamps",)

    def segment(self, inputs: Any, begin: float, end: float, words: bool) -> Segment:
        found, avg_logprob = self._tokens(inputs.input_features.to(self.model.dtype), inputs.attention_mask)
        tokens = [each.token for each in found]
        spoken = self._words(found, begin, end) if words else None
        return Segment.of_piece(begin, end, self._decoded(tokens), tokens, avg_logprob, spoken)

    def _tokens(self, features: torch.Tensor, mask: torch.Tensor) -> tuple[list[_Token], float | None]:
        """The tokens of a piece, and the mean log-probability of its frames."""
        made = self.model.generate(features, attention_mask=mask, return_dict_in_generate=True)
        frames, blank = made.sequences[0].tolist(), self.model.config.pad_token_id
        chances = made.logits[0].float().log_softmax(-1).max(-1).values.tolist()
        changes = [n for n, token in enumerate(frames) if n == 0 or frames[n - 1] != token]
        spans = zip(changes, [*changes[1:], len(frames)])
        found = [_Token(frames[n], n, after, chances[n]) for n, after in spans if frames[n] != blank]
        return found, sum(chances) / len(chances)

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, group_tokens=False)
        return text

    def _words(self, tokens: list[_Token], begin: float, end: float) -> list[Word]:
        names = self.tokenizer.convert_ids_to_tokens([each.token for each in tokens])
        # A token that begins a word has a mark instead of the space before the word.
        firsts = [n for n, name in enumerate(names) if n == 0 or name.startswith(("\u2581", "\u0120"))]
        seconds = self.extractor.hop_length * self.model.config.encoder_config.subsampling_factor / SAMPLE_RATE
        found = []
        for first, last in zip(firsts, [*firsts[1:], len(tokens)]):
            parts = tokens[first:last]
            text = self._decoded([each.token for each in parts]).strip()
            start, stop = (round(min(begin + frame * seconds, end), 2) for frame in (parts[0].first, parts[-1].after))
            logprobs = [each.logprob for each in parts if each.logprob is not None]
            found.append(Word(f" {text}", start, stop, round(float(np.exp(logprobs).mean()), 4) if logprobs else None))
        return found


class TransducerTranscriber(ParakeetTranscriber):
    """Transcribes with ``ParakeetForTDT`` or ``ParakeetForRNNT``; transformers gives no probabilities of their tokens."""

    def _tokens(self, features: torch.Tensor, mask: torch.Tensor) -> tuple[list[_Token], float | None]:
        made = self.model.generate(features, attention_mask=mask)
        blank, at = self.model.config.blank_token_id, 0
        found = []
        for token, frames in zip(made.sequences[0].tolist(), made.durations[0].tolist(), strict=True):
            if token != blank:
                found.append(_Token(token, at, at + max(frames, 1), None))
            at += frames
        return found, None


def _cut(samples: np.ndarray) -> int:
    """The samples before the quietest pause in the second half of a window; all of them if they fit into a window."""
    if len(samples) <= _WINDOW:
        return len(samples)
    first = _WINDOW // 2
    energy = np.cumsum(np.square(samples[first:_WINDOW], dtype=np.float64))
    return first + _QUIET // 2 + int(np.argmin(energy[_QUIET:] - energy[:-_QUIET]))
