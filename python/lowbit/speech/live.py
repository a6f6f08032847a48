"""Transcribes speech while it is spoken."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, NamedTuple

import numpy as np

from .audio import SAMPLE_RATE
from .features import HOP, log_mel
from .speech_options import Options
from .transcriber import Transcriber, segments_of
from .transcription import AnyTranscriber, Heard, Segment

_NO_SPEECH = 0.6  # the default limit: a microphone often hears silence, in which Whisper finds words
_WAITING = 600  # blocks of samples in the queue


class Piece(NamedTuple):
    """The text that has become certain since the last piece, and the segments that have ended."""

    text: str
    segments: list[Segment]


class Live:
    """Transcribes samples that arrive one block after the other.

    Each pass computes the text of all samples since the last segment that ended. Text is certain when two successive passes
    agree on it (local agreement; Macháček et al., Turning Whisper into Real-Time Transcription System, 2023). Later passes
    begin with the certain tokens, so they never contradict them.
    """

    def __init__(self, transcriber: AnyTranscriber, **options: Any):
        """
        Args:
            options: the attributes of :class:`Options`; ``no_speech_threshold`` is 0.6 by default.

        Raises:
            ValueError: no Whisper model, an option that it does not support, times of words, or no timestamps.
        """
        if not isinstance(transcriber, Transcriber):
            raise ValueError("live transcription needs a model that gives timestamps; expected a Whisper model")
        self._transcriber, self._wish = transcriber, Options(**{"no_speech_threshold": _NO_SPEECH, **options})
        if not self._wish.timestamps or self._wish.word_timestamps:
            raise ValueError("live transcription gives times of segments only; expected timestamps, and no word_timestamps")
        transcriber.check(self._wish)
        self._first = transcriber.no_timestamps + 1
        self._samples = np.zeros(0, np.float32)  # from the begin of the window
        self._added: list[np.ndarray] = []  # further samples, not yet joined to these
        self._begin = 0  # samples before the window
        self._certain: list[int] = []  # tokens of the window
        self._guess: list[int] = []  # tokens of the last pass, compared with the next one
        self._unshown: list[int] = []  # certain tokens that no piece has contained yet
        self._prompt, self._history = transcriber.tokens_of(self._wish.prompt), list[int]()
        self._language, self._probability = self._wish.language, None  # type: str | None, float | None

    @property
    def window(self) -> int:
        """Number of samples in a full window."""
        return self._transcriber.window * HOP

    @property
    def heard(self) -> Heard:
        self._join()
        return Heard(self._language, self._probability, (self._begin + len(self._samples)) / SAMPLE_RATE)

    def add(self, samples: np.ndarray) -> None:
        """Adds float samples, as for :meth:`Transcriber.transcribe`."""
        if len(samples):
            self._added.append(self._transcriber.samples(samples))

    def _join(self) -> None:
        if self._added:
            self._samples, self._added = np.concatenate([self._samples, *self._added]), []

    def advance(self) -> Piece:
        """Computes a pass over all samples since the last segment that ended."""
        self._join()
        segments = list[Segment]()
        while len(self._samples) >= self.window:
            segments += self._finish(self.window)
        if len(self._samples):
            segments += self._agree()
        return Piece(self._text(), segments)

    def end(self) -> Piece:
        """Computes the rest of the text when no more samples will come; all of it is certain."""
        self._join()
        segments = list[Segment]()
        while len(self._samples):
            segments += self._finish(min(self.window, len(self._samples)))
        return Piece(self._text(last=True), segments)

    def _pass(self, samples: np.ndarray) -> Any:
        """The text of some samples; None: silence."""
        transcriber = self._transcriber
        features = log_mel(samples, transcriber.decoder.mel_bins, transcriber.window)
        transcriber.decoder.listen(features[None, :, : transcriber.window])
        if transcriber.languages and self._wish.language is None and not self._begin and not self._certain:
            self._language, self._probability = transcriber.detected()
        previous, seed = [*self._prompt, *self._history], (self._wish.seed, self._begin // HOP)
        written = transcriber.write(self._wish, self._language, previous, seed, self._certain)
        return None if not self._certain and transcriber.is_silence(written, self._wish) else written

    def _finish(self, count: int) -> list[Segment]:
        """Ends the segments of the first ``count`` samples, as :meth:`Transcriber.transcribe` does."""
        written = self._pass(self._samples[:count])
        if written is None:
            self._move(count, [])
            return []
        frames = -(-count // HOP)
        parts, used = segments_of(written.tokens, self._first, frames)
        consumed = sum(len(tokens) for _, _, tokens in parts)
        segments = self._ended(parts, written, frames)
        self._unshown += self._words(written.tokens[len(self._certain) : consumed])
        self._move(min(used * HOP, count), self._certain[consumed:])
        return segments

    def _agree(self) -> list[Segment]:
        """Computes a pass. Tokens on which it and the last one agree become certain; returns the segments that they end."""
        written = self._pass(self._samples)
        if written is None:
            self._guess = []
            return []
        tokens, known = written.tokens, len(self._words(self._certain))
        agreed = 0
        for ours, last in zip(self._words(tokens), self._words(self._guess)):
            if ours != last:
                break
            agreed += 1
        self._guess = tokens
        if agreed > known:
            self._unshown += self._words(tokens)[known:agreed]
            ends = [number for number, token in enumerate(tokens, 1) if token < self._first]
            self._certain = tokens[: ends[agreed - 1]]
        pairs = [n for n in range(1, len(self._certain)) if min(self._certain[n - 1 : n + 1]) >= self._first]
        if not pairs:
            return []
        whole, rest = self._certain[: pairs[-1]], self._certain[pairs[-1] :]
        frames = -(-len(self._samples) // HOP)
        segments = self._ended(segments_of(whole, self._first, frames)[0], written, frames)
        self._guess = self._guess[pairs[-1] :]
        self._move(min((whole[-1] - self._first) * 2 * HOP, len(self._samples)), rest)
        return segments

    def _ended(self, parts: Any, written: Any, frames: int) -> list[Segment]:
        first, duration = self._begin // HOP, (self._begin + len(self._samples)) / SAMPLE_RATE
        segments = self._transcriber.segments(parts, written, (first, frames), duration, self._wish, self._language)
        if self._wish.condition_on_previous_text:
            self._history = [*self._history, *(token for segment in segments for token in segment.tokens)]
            self._history = self._history[-self._transcriber.decoder.max_length :]
        return segments

    def _move(self, samples: int, rest: list[int]) -> None:
        """Moves the begin of the window by some samples; ``rest`` are the certain tokens after it."""
        positions = samples // (2 * HOP)
        self._begin += samples
        self._samples = self._samples[samples:]
        self._certain, self._guess = (
            [token if token < self._first else max(token - positions, self._first) for token in tokens]
            for tokens in (rest, self._guess if rest else [])
        )

    def _words(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token < self._first]

    def _text(self, last: bool = False) -> str:
        text = self._transcriber.decoded(self._unshown)
        if text.endswith("\ufffd") and not last:  # the end of a character is not certain yet
            return ""
        self._unshown = []
        return text


def transcribe_live(
    transcriber: AnyTranscriber, blocks: Iterable[np.ndarray], *, step: float = 1.0, **options: Any
) -> Generator[Piece, None, Heard]:
    """Transcribes blocks of samples while they arrive.

    Args:
        blocks: float samples, as for :meth:`Transcriber.transcribe`; they are read on a thread.
        step: a pass begins after at least as many seconds of new samples. All samples that have arrived are in it, so a slow
            machine computes fewer passes.
        options: as for :class:`Live`.
    """
    live, queue, left = Live(transcriber, **options), Queue[Any](_WAITING), Event()

    def put(item: Any) -> bool:
        """Puts an item into the queue; returns whether the transcription still reads it."""
        while not left.is_set():
            try:
                queue.put(item, timeout=0.5)
                return True
            except Full:
                continue
        return False

    def read() -> None:
        try:
            if all(map(put, blocks)):
                put(None)
        except Exception as error:
            put(error)

    Thread(target=read, daemon=True).start()
    fresh, end = 0, False
    try:
        while not end:
            block = queue.get()
            while block is not None:
                if isinstance(block, Exception):
                    raise block
                live.add(block)
                fresh += len(block)
                if fresh >= live.window:  # a window is full
                    break
                try:
                    block = queue.get_nowait()
                except Empty:
                    break
            end = block is None
            if not end and fresh >= step * SAMPLE_RATE:
                fresh = 0
                yield live.advance()
        yield live.end()
    finally:
        left.set()
    return live.heard
