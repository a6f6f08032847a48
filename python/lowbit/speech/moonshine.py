"""Transcribes recordings with a Moonshine model of transformers, which takes samples of any length."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from .audio import SAMPLE_RATE
from .options import Options
from .transcriber import AnyTranscriber, Heard, Segment, _Windows, compression_ratio

# Jeffries et al., Moonshine, 2024: the models were trained with up to 30 seconds, and write at most 6.5 tokens per second.
_WINDOW, _TOKENS_PER_SECOND = 30 * SAMPLE_RATE, 6.5
_LEAST = SAMPLE_RATE // 10  # samples; the convolutions need 895
_QUIET = SAMPLE_RATE // 5  # samples of a pause in which a recording is cut


class MoonshineTranscriber(AnyTranscriber):
    """Transcribes recordings of any length; each piece of up to 30 seconds, cut at a pause, becomes one segment.

    transformers decodes; the layers may be packed.
    """

    def __init__(self, model: torch.nn.Module, processor: Any):
        """
        Args:
            model: transformers' ``MoonshineForConditionalGeneration``, quantized or not, in eval mode.
            processor: has its ``feature_extractor`` and ``tokenizer``.

        Raises:
            ValueError: the features are not those of Moonshine.
        """
        self.model: Any = model
        self._extractor, self._tokenizer = processor.feature_extractor, processor.tokenizer
        if (rate := getattr(self._extractor, "sampling_rate", None)) != SAMPLE_RATE:
            raise ValueError(f"the feature extractor has sampling_rate {rate}; expected {SAMPLE_RATE}")

    def windows(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> _Windows:
        samples = self.samples(audio)
        _check(Options(**options))
        return self._windows(samples)

    def _windows(self, samples: np.ndarray) -> _Windows:
        begin = 0
        while begin < len(samples):
            end = begin + _cut(samples[begin:])
            yield [self._segment(samples[begin:end], begin)]
            begin = end
        return Heard(None, None, len(samples) / SAMPLE_RATE)

    def _segment(self, samples: np.ndarray, begin: int) -> Segment:
        padded = np.pad(samples, (0, max(0, _LEAST - len(samples))))
        inputs = self._extractor(padded, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        count = min(max(1, int(len(padded) / SAMPLE_RATE * _TOKENS_PER_SECOND)), self.model.config.max_position_embeddings - 1)
        with torch.inference_mode():
            made = self.model.generate(
                inputs.input_values.to(self.model.dtype), max_new_tokens=count, do_sample=False, num_beams=1,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        written = made.sequences[0, -len(made.scores) :]
        chances = torch.stack(made.scores, 1)[0].float().log_softmax(-1).gather(1, written[:, None])
        ends = self.model.generation_config.eos_token_id
        tokens = [token for token in written.tolist() if token not in (ends if isinstance(ends, list) else [ends])]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True).strip()
        text = f" {text}" if text else ""
        times = (round(place / SAMPLE_RATE, 2) for place in (begin, begin + len(samples)))
        return Segment(*times, text, tokens, 0.0, float(chances.mean()), compression_ratio(text), None)


def _check(wish: Options) -> None:
    """Raises ValueError for options that need a Whisper model."""
    plain = Options()
    for name in (
        "language", "task", "timestamps", "word_timestamps", "prompt", "condition_on_previous_text", "temperatures",
        "no_speech_threshold",
    ):  # fmt: skip
        found, expected = getattr(wish, name), getattr(plain, name)
        if found != expected:
            raise ValueError(f"{name} is {found!r}; expected {expected!r} with a Moonshine model")


def _cut(samples: np.ndarray) -> int:
    """The samples before the quietest pause in the second half of a window; all of them if they fit into a window."""
    if len(samples) <= _WINDOW:
        return len(samples)
    first = _WINDOW // 2
    energy = np.cumsum(np.square(samples[first:_WINDOW], dtype=np.float64))
    return first + _QUIET // 2 + int(np.argmin(energy[_QUIET:] - energy[:-_QUIET]))
