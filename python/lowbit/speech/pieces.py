"""Transcribes recordings piece by piece with models that mark no times, of which transformers decodes each piece."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch

from .audio import SAMPLE_RATE
from .speech_options import Options
from .transcription import AnyTranscriber, Heard, Segment, Windows
from .words import Word

_WINDOW = 30 * SAMPLE_RATE  # samples of a piece
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
            "no_speech_threshold",
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
            with torch.inference_mode():
                yield [self.segment(inputs, begin / SAMPLE_RATE, end / SAMPLE_RATE, words)]
            begin = end
        return Heard(None, None, len(samples) / SAMPLE_RATE)

    def segment(self, inputs: Any, begin: float, end: float, words: bool) -> Segment:
        """The segment of a piece.

        Args:
            inputs: the result of the feature extractor.
            begin, end: the times of the piece in seconds.
            words: whether the segment has their times.
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


class ParakeetTranscriber(PieceTranscriber):
    """Transcribes with ``ParakeetForCTC``, which gives each 80 milliseconds a token or none."""

    family = "Parakeet"
    more_options = ("word_timestamps",)

    def segment(self, inputs: Any, begin: float, end: float, words: bool) -> Segment:
        made = self.model.generate(
            inputs.input_features.to(self.model.dtype), attention_mask=inputs.attention_mask, return_dict_in_generate=True
        )
        frames = made.sequences[0].tolist()
        chances = made.logits[0].float().log_softmax(-1).max(-1).values.tolist()
        blank = self.model.config.pad_token_id
        starts = [n for n, token in enumerate(frames) if token != blank and (n == 0 or frames[n - 1] != token)]
        tokens = [frames[at] for at in starts]
        text = self.tokenizer.decode(frames, skip_special_tokens=True)
        spoken = self._words(starts, frames, chances, begin, end) if words else None
        return Segment.of_piece(begin, end, text, tokens, sum(chances) / len(chances), spoken)

    def _words(self, starts: list[int], frames: list[int], chances: list[float], begin: float, end: float) -> list[Word]:
        """The words of a piece; ``starts`` are the first frames of its tokens."""
        names = self.tokenizer.convert_ids_to_tokens([frames[at] for at in starts])
        # A token that begins a word has a mark in the place of the space before it.
        firsts = [n for n, name in enumerate(names) if n == 0 or name.startswith(("\u2581", "\u0120"))]
        seconds = self.extractor.hop_length * self.model.config.encoder_config.subsampling_factor / SAMPLE_RATE
        found = []
        for first, last in zip(firsts, [*firsts[1:], len(starts)]):
            places = starts[first:last]
            after = next((n for n in range(places[-1], len(frames)) if frames[n] != frames[places[-1]]), len(frames))
            text = self.tokenizer.decode([frames[at] for at in places], skip_special_tokens=True, group_tokens=False).strip()
            start, stop = (round(min(begin + frame * seconds, end), 2) for frame in (places[0], after))
            found.append(Word(f" {text}", start, stop, round(float(np.exp([chances[at] for at in places]).mean()), 4)))
        return found


def _cut(samples: np.ndarray) -> int:
    """The samples before the quietest pause in the second half of a window; all of them if they fit into a window."""
    if len(samples) <= _WINDOW:
        return len(samples)
    first = _WINDOW // 2
    energy = np.cumsum(np.square(samples[first:_WINDOW], dtype=np.float64))
    return first + _QUIET // 2 + int(np.argmin(energy[_QUIET:] - energy[:-_QUIET]))
