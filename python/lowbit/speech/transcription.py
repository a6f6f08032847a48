"""Transcriptions, and the base class of the transcribers of all kinds of models."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from .audio import check_samples, load_audio
from .words import Word

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Segment:
    """A piece of a transcription.

    Attributes:
        start, end: the times in the recording, in seconds.
        tokens: the tokens, with the timestamps.
        temperature, avg_logprob, compression_ratio, no_speech_prob: facts about the window with this segment: the temperature
            of its text, the mean log-probability of the tokens, the ratio by which zlib compresses the text, and the
            probability of silence. Only Whisper models have the last one, and Parakeet's transducers have no log-probability.
        words: the words with their times, if they were asked for.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None
    words: list[Word] | None = None

    @classmethod
    def of_piece(
        cls, start: float, end: float, text: str, tokens: list[int], avg_logprob: float | None, words: list[Word] | None
    ) -> Segment:
        """A segment of a model without timestamps and a probability of silence."""
        text = f" {text.strip()}" if text.strip() else ""
        return cls(round(start, 2), round(end, 2), text, tokens, 0.0, avg_logprob, compression_ratio(text), None, words)


class Heard(NamedTuple):
    """Facts about a recording."""

    language: str | None
    language_probability: float | None
    duration: float


Segments: TypeAlias = Generator[Segment, None, Heard]
Windows: TypeAlias = Generator[list[Segment], None, Heard]


@dataclass(frozen=True)
class Transcription:
    """The transcription of a recording.

    Attributes:
        language: a code such as "en"; None for an English-only model.
        language_probability: the probability of the detected language; None if the language was given.
        duration: the length of the recording in seconds.
    """

    text: str
    segments: list[Segment]
    language: str | None
    language_probability: float | None
    duration: float


class AnyTranscriber:
    """Base class of the transcribers of all kinds of models."""

    @property
    def languages(self) -> list[str]:
        """Codes of the languages that the model knows; empty for a model of one language."""
        return []

    def windows(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> Windows:
        """As :meth:`stream`, but yields lists: the segments of each window, which may be empty."""
        raise NotImplementedError

    def transcribe(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> Transcription:
        """Transcribes a recording.

        Args:
            audio: a file (:func:`load_audio`), or float samples [samples], one channel, 16,000 per second.
            options: the attributes of :class:`Options`.

        Returns:
            The text, with its segments.

        Raises:
            ImportError, OSError: as :func:`load_audio`.
            ValueError: no audio, samples of another shape, an option that the model does not support, or a longer recording
                without timestamps.
        """
        segments, found = [], self.stream(audio, **options)
        while True:
            try:
                segments.append(next(found))
            except StopIteration as end:
                heard: Heard = end.value
                break
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, segments, *heard)

    def stream(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor, **options: Any) -> Segments:
        """As :meth:`transcribe`, segment by segment while the model computes; the iterator returns a :class:`Heard`."""
        return _flattened(self.windows(audio, **options))

    def samples(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor) -> np.ndarray:
        """A recording as float32 [samples]; raises as :meth:`transcribe`."""
        if isinstance(audio, (str, os.PathLike)):
            return load_audio(audio)
        samples = np.asarray(audio)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise ValueError(f"audio is {samples.dtype} {list(samples.shape)}; expected floats [samples], one channel")
        if not len(samples):
            raise ValueError("audio has no samples; expected at least one")
        check_samples(samples, "audio")
        return samples.astype(np.float32, copy=False)


def compression_ratio(text: str) -> float:
    """The ratio by which zlib compresses a text."""
    content = text.strip().encode()
    return len(content) / len(zlib.compress(content))


def _flattened(windows: Windows) -> Segments:
    while True:
        try:
            segments = next(windows)
        except StopIteration as end:
            heard: Heard = end.value
            return heard
        yield from segments
