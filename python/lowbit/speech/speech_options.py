"""The options of a transcription."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_TEMPERATURES = 8
MOST_BEAMS = 8


@dataclass(frozen=True)
class Options:
    """How a recording is transcribed: the arguments of :meth:`Transcriber.transcribe`.

    Attributes:
        language: the code of the spoken language, such as "en"; None: the model detects it in the first window.
        task: "transcribe", or "translate" to English.
        timestamps: whether the model marks the begin and end of segments. Without timestamps, a recording may have at most
            one window (30 seconds) and becomes one segment.
        word_timestamps: whether segments have the times of their words.
        prompt: text that comes before that of the recording, for example names and their spelling. The model sees its last
            tokens, at most half of its positions.
        condition_on_previous_text: whether the model also sees the text of earlier windows.
        temperature: 0: the likeliest tokens; above 0, up to 1: random tokens. Of several temperatures, the next one is tried
            if the text of a window is repetitive or unlikely by the two thresholds below; the last one is kept.
        compression_ratio_threshold: text that zlib compresses by a larger ratio is repetitive; None: no limit.
        logprob_threshold: text whose tokens have a lower mean log-probability is unlikely; None: no limit.
        no_speech_threshold: a window with a larger probability of silence has no text, unless its text is likely by
            ``logprob_threshold``; None: no limit.
        seed: the seed of random tokens; equal seeds give equal texts.
        beams: at temperature 0, the number of texts of a window that are continued side by side; the likeliest of as many whole
            texts is taken, by the mean log-probability of its tokens and end. 1: only the likeliest token of each step.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = True
    word_timestamps: bool = False
    prompt: str = ""
    condition_on_previous_text: bool = False
    temperature: float | Sequence[float] = 0.0
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = None
    seed: int = 0
    beams: int = 1

    def __post_init__(self) -> None:
        temperatures = self.temperatures
        if not 1 <= len(temperatures) <= MOST_TEMPERATURES or not all(0 <= each <= 1 for each in temperatures):
            raise ValueError(f"temperature is {self.temperature}; expected 1 to {MOST_TEMPERATURES} numbers from 0 to 1")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; expected a finite number")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected 0 or more")
        if not 1 <= self.beams <= MOST_BEAMS:
            raise ValueError(f"beams is {self.beams}; expected 1 to {MOST_BEAMS}")
        if self.beams > 1 and 0 not in temperatures:
            raise ValueError(f"beams is {self.beams} at temperature {self.temperature}; expected 1, or temperature 0 too")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures in the order in which they are tried."""
        value = self.temperature
        return (float(value),) if isinstance(value, (int, float)) else tuple(map(float, value))


def beams(text: str) -> int:
    """The number in a text.

    Raises:
        ValueError: the text is not a number.
    """
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"beams is {text!r}; expected 1 to {MOST_BEAMS}") from None


def temperatures(text: str) -> tuple[float, ...]:
    """The numbers of a text such as "0,0.2,0.4".

    Raises:
        ValueError: something else is in the text.
    """
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ValueError(f"temperature is {text!r}; expected numbers from 0 to 1, separated by commas") from None
