"""Transcribes whole recordings with a Whisper model."""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .audio import SAMPLE_RATE, load_audio
from .features import HOP, check_extractor, log_mel

if TYPE_CHECKING:
    import torch

    from ..hf.config import LowBitConfig

# The generator's return value is language and duration.
_Segments: TypeAlias = "Generator[Segment, None, tuple[str | None, float]]"
_FRAMES_PER_POSITION = 2  # feature frames per encoder position and per timestamp
_SECONDS_PER_POSITION = _FRAMES_PER_POSITION * HOP / SAMPLE_RATE
# The settings of generation that transcription uses.
SETTINGS = (
    "decoder_start_token_id", "eos_token_id", "no_timestamps_token_id", "lang_to_id", "task_to_id", "suppress_tokens",
    "begin_suppress_tokens", "max_initial_timestamp_index",
)  # fmt: skip


@dataclass(frozen=True)
class Segment:
    """A piece of a transcription: text, tokens, and begin and end in the recording in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Transcription:
    """The transcription of a recording; ``language`` is a code such as "en", or None for an English-only model."""

    text: str
    segments: list[Segment]
    language: str | None
    duration: float  # seconds


class Transcriber:
    """Transcribes recordings of any length with a Whisper model and its processor.

    Decoding is greedy. Longer recordings are read in windows of 30 seconds, each starting where the last segment of the
    previous one ended (Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, 2022). Later windows are not
    conditioned on the text of earlier ones.
    """

    decoder: Any  # SpeechDecoder, or the same without torch

    def __init__(self, model: torch.nn.Module, processor: Any, cache: str | None = None):
        """
        Args:
            model: transformers' ``WhisperForConditionalGeneration``, quantized or not, in eval mode. It is changed:
                :class:`SpeechDecoder`.
            processor: transformers' ``WhisperProcessor``.
            cache: as of :class:`SpeechDecoder`.

        Raises:
            ValueError: as :class:`SpeechDecoder`; or the generation settings or those of features are not Whisper's.
        """
        from .speech_decoder import SpeechDecoder

        check_extractor(processor.feature_extractor)
        decoder = SpeechDecoder(model, cache)
        settings: Any = copy.copy(decoder.model.generation_config)
        _complete(settings, processor.tokenizer.get_added_vocab())
        self._begin(decoder, settings, processor.tokenizer)

    def _begin(self, decoder: Any, settings: Any, tokenizer: Any) -> None:
        self.decoder, self._settings, self._tokenizer = decoder, settings, tokenizer.backend_tokenizer
        for name in ("no_timestamps_token_id", "decoder_start_token_id", "eos_token_id"):
            if not isinstance(getattr(self._settings, name, None), int):
                raise ValueError(f"the model's generation_config has no {name}; expected a token, as in Whisper's files")
        self._languages: dict[str, int] = {name.strip("<|>"): token for name, token in self._settings.lang_to_id.items()}

    @property
    def languages(self) -> list[str]:
        """Codes of the languages that the model knows; empty for an English-only model."""
        return sorted(self._languages)

    def transcribe(
        self,
        audio: str | os.PathLike[str] | np.ndarray | torch.Tensor,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
    ) -> Transcription:
        """Transcribes a recording.

        Args:
            audio: a file (:func:`load_audio`), or float samples [samples], one channel, 16,000 per second.
            language: code of the spoken language, such as "en"; None: the model detects it in the first 30 seconds.
            task: "transcribe", or "translate" to English.
            timestamps: whether the model marks the begin and end of segments. Without timestamps, a recording may have at
                most 30 seconds and becomes one segment.

        Returns:
            The text, with its segments.

        Raises:
            ImportError, OSError: as :func:`load_audio`.
            ValueError: no audio, samples of another shape, an unknown language or task, or a longer recording without
                timestamps.
        """
        segments = []
        windows = self.stream(audio, language=language, task=task, timestamps=timestamps)
        while True:
            try:
                segments.append(next(windows))
            except StopIteration as end:
                language, duration = end.value
                break
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, segments, language, duration)

    def stream(
        self,
        audio: str | os.PathLike[str] | np.ndarray | torch.Tensor,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = True,
    ) -> _Segments:
        """As :meth:`transcribe`, segment by segment while the model computes; the iterator returns language and duration."""
        samples = self._samples(audio)
        self._check(language, task)
        window = self.decoder.positions * _FRAMES_PER_POSITION
        if not timestamps and len(samples) > window * HOP:
            raise ValueError(
                f"the recording has {len(samples) / SAMPLE_RATE:.1f} seconds; expected at most "
                f"{window * HOP / SAMPLE_RATE:.0f} without timestamps"
            )
        # Computed here and not with the first segment, so that a server can do it in parallel with the model's other work.
        features = log_mel(samples, self.decoder.mel_bins, window)
        return self._stream(features, len(samples), window, language, task, timestamps)

    def _samples(self, audio: str | os.PathLike[str] | np.ndarray | torch.Tensor) -> np.ndarray:
        if isinstance(audio, (str, os.PathLike)):
            return load_audio(audio)
        samples = np.asarray(audio)
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise ValueError(f"audio is {samples.dtype} {list(samples.shape)}; expected floats [samples], one channel")
        if not len(samples):
            raise ValueError("audio has no samples; expected at least one")
        if not np.isfinite(samples).all():
            raise ValueError("audio has samples that are not finite numbers")
        return samples.astype(np.float32, copy=False)

    def _check(self, language: str | None, task: str) -> None:
        tasks = self._settings.task_to_id
        if task not in ("transcribe", "translate") or (task == "translate" and task not in tasks):
            known = " or ".join(tasks) if tasks else "transcribe"
            raise ValueError(f"task is {task!r}; expected {known}")
        if language is not None and language not in self._languages:
            known = ", ".join(self.languages) if self._languages else "None, as the model knows English alone"
            raise ValueError(f"language is {language!r}; expected {known}")

    def _stream(
        self, features: np.ndarray, samples: int, window: int, language: str | None, task: str, timestamps: bool
    ) -> _Segments:
        duration = samples / SAMPLE_RATE
        frames = -(-samples // HOP)  # the features may have more frames, which are silent
        seek = 0
        while seek < frames:
            count = min(window, frames - seek)
            piece = features[:, seek : seek + window]
            self.decoder.listen(np.pad(piece, ((0, 0), (0, window - piece.shape[1])))[None])
            if self._languages and language is None:
                language = self._detect()
            tokens = self._write(self._prompt(language, task, timestamps), timestamps)
            if timestamps:
                segments, used = _segments(tokens, self._settings.no_timestamps_token_id + 1, count)
            else:
                segments, used = [(0, count // _FRAMES_PER_POSITION, tokens)], count
            for begin, end, part in segments:
                offset = seek * HOP / SAMPLE_RATE
                words = [token for token in part if token <= self._settings.no_timestamps_token_id]
                text = self._tokenizer.decode(words, skip_special_tokens=True)
                start, stop = (min(offset + position * _SECONDS_PER_POSITION, duration) for position in (begin, end))
                yield Segment(round(start, 2), round(stop, 2), text, part)
            seek += used
        return language, duration

    def _detect(self) -> str:
        logits = self.decoder.feed([self._settings.decoder_start_token_id], 0)
        codes = list(self._languages)
        return codes[int(logits[[self._languages[code] for code in codes]].argmax())]

    def _prompt(self, language: str | None, task: str, timestamps: bool) -> list[int]:
        prompt = [self._settings.decoder_start_token_id]
        if self._languages:
            assert language is not None
            prompt += [self._languages[language], self._settings.task_to_id[task]]
        return prompt if timestamps else [*prompt, self._settings.no_timestamps_token_id]

    def _suppressed(self, name: str) -> list[int]:
        return list(getattr(self._settings, name, None) or [])

    def _write(self, prompt: Sequence[int], timestamps: bool) -> list[int]:
        """The tokens of a window after the prompt, without the last one, which ends it."""
        never, not_first = self._suppressed("suppress_tokens"), self._suppressed("begin_suppress_tokens")
        tokens: list[int] = []
        step, start = list(prompt), 0
        while len(prompt) + len(tokens) < self.decoder.max_length:
            logits = self.decoder.feed(step, start)
            logits[never] = -np.inf
            if not tokens:
                logits[not_first] = -np.inf
            if timestamps:
                self._limit_times(logits, tokens)
            token = int(logits.argmax())
            if token == self._settings.eos_token_id:
                break
            start = len(prompt) + len(tokens)
            tokens.append(token)
            step = [token]
        return tokens

    def _limit_times(self, logits: np.ndarray, tokens: Sequence[int]) -> None:
        """Applies Whisper's rules for timestamps (Radford et al., section 4.5): they come in pairs except for the last, never
        decrease, and begin the text; they win if together they are likelier than any other token."""
        first = self._settings.no_timestamps_token_id + 1
        logits[first - 1] = -np.inf
        is_last, is_pair = (bool(tokens) and tokens[-1] >= first), len(tokens) < 2 or tokens[-2] >= first
        if is_last and is_pair:
            logits[first:] = -np.inf
        elif is_last:
            logits[: self._settings.eos_token_id] = -np.inf
        times = [token for token in tokens if token >= first]
        if times:
            logits[first : times[-1] + (0 if is_last and not is_pair else 1)] = -np.inf
        if not tokens:
            logits[:first] = -np.inf
            latest = getattr(self._settings, "max_initial_timestamp_index", None)
            if latest is not None:
                logits[first + latest + 1 :] = -np.inf
        most = logits[first:].max()
        if most > -np.inf and most + np.log(np.exp(logits[first:] - most).sum()) > logits[:first].max():
            logits[:first] = -np.inf


def _complete(settings: Any, tokens: dict[str, int]) -> None:
    """Completes generation settings, which fine-tuned models often lack, from the tokenizer's special tokens: languages come
    after the token that begins a text and before the tasks."""
    found: dict[str, Any] = {
        "no_timestamps_token_id": tokens.get("<|notimestamps|>"),
        "decoder_start_token_id": tokens.get("<|startoftranscript|>"),
        "lang_to_id": {},
        "task_to_id": {},
    }
    tasks = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate") if f"<|{task}|>" in tokens}
    if len(tasks) == 2 and getattr(settings, "is_multilingual", True):
        first, last = found["decoder_start_token_id"] or 0, min(tasks.values())
        found["lang_to_id"] = {name: token for name, token in tokens.items() if first < token < last}
        found["task_to_id"] = tasks
    for name, value in found.items():
        if not getattr(settings, name, None):
            setattr(settings, name, value)


def _segments(tokens: list[int], first: int, frames: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """The segments of a window, each with begin, end and tokens, and the number of frames that the window has used.

    Two adjacent timestamps end a segment and begin the next. What follows the last such pair is unfinished and is heard again
    in the next window, unless a single timestamp ends the text, which means that there is no speech after it.

    Args:
        tokens: the tokens of the window.
        first: the timestamp token of the window's begin; later ones have larger ids.
        frames: the frames of the window.
    """
    is_time = [token >= first for token in tokens]
    cuts = [number for number in range(1, len(tokens)) if is_time[number - 1] and is_time[number]]
    whole = is_time[-2:] == [False, True]
    if not cuts:
        times = [token - first for token in tokens if token >= first]
        end = times[-1] if times and times[-1] > 0 else frames // _FRAMES_PER_POSITION
        return ([(0, end, tokens)] if tokens else []), frames
    ends = [*cuts, len(tokens)] if whole else [*cuts[:-1], cuts[-1]]
    segments, begin = [], 0
    for end in ends:
        part = tokens[begin:end]
        segments.append((part[0] - first, part[-1] - first, part))
        begin = end
    return segments, frames if whole else (tokens[cuts[-1] - 1] - first) * _FRAMES_PER_POSITION


def load_transcriber(
    path: str | os.PathLike[str], quantization: LowBitConfig | None = None, *, cache: str | None = None, progress: Any = None
) -> Transcriber:
    """Loads a Whisper model with its processor.

    Args:
        path: a directory with config.json, safetensors files, tokenizer.json and preprocessor_config.json, float or packed.
        quantization: how to quantize a float checkpoint while it is loaded; None: not at all.
        cache: as of :class:`SpeechDecoder`.
        progress: called as ``progress(tensors loaded, tensors)``.

    Raises:
        ImportError: transformers is not installed.
        OSError, ValueError: as :func:`lowbit.llm.loading.load_model`, or the processor's files are missing or damaged.
    """
    from ..llm.loading import load_speech_model, load_speech_processor

    directory = Path(path)
    model = load_speech_model(directory, quantization, progress=progress)
    return Transcriber(model, load_speech_processor(directory), cache)
