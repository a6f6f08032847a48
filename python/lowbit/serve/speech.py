"""Whisper models: requests for transcriptions and their answers."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..files.config_json import read_config
from .errors import ApiError, bad
from .protocol import Body

if TYPE_CHECKING:
    import numpy as np

    from ..hf.config import LowBitConfig
    from ..speech.transcriber import Segment, Transcriber

MOST_SECONDS = 2 * 3600  # of a recording, whose samples then take half a gigabyte
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


@dataclass
class SpeechModel:
    """A speech-to-text model."""

    name: str
    transcriber: Transcriber
    created: int = field(default_factory=lambda: int(time.time()))
    max_length = None  # no tokens of a prompt, because it takes recordings


def is_speech(path: Path) -> bool:
    """Whether a directory has a Whisper model."""
    return read_config(path).get("model_type") == "whisper"


def load(name: str, path: Path, quantization: LowBitConfig | None = None, **more: Any) -> SpeechModel:
    """As :func:`lowbit.speech.planned_speech.open_transcriber`; also raises ImportError if the library for audio is missing."""
    from ..speech.audio import limit_allocations
    from ..speech.planned_speech import open_transcriber

    limit_allocations()
    return SpeechModel(name, open_transcriber(path, quantization, **more))


class Wish(Body):
    """The parameters of a request in OpenAI's format; all values of a form are texts."""

    language: str | None = Field(None, max_length=64)
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    stream: Annotated[bool, BeforeValidator(lambda value: {"true": True, "false": False}.get(value.lower(), value))] = False
    temperature: Literal["", "0", "0.0"] = "0"
    prompt: Literal[""] = ""
    granularities: list[Literal["segment"]] = Field(default_factory=list, alias="timestamp_granularities[]")

    @model_validator(mode="after")
    def _check(self) -> Wish:
        if self.stream and self.response_format != "json":
            raise bad("response_format", f"response_format is {self.response_format!r}; expected json with stream")
        return self


async def read_recording(data: bytes, name: str) -> np.ndarray:
    """Decodes the samples of a file. A canceled call ends at the next frame of the file.

    Raises:
        ApiError: the file is not audio, or too long.
    """
    from ..speech.audio import read_audio

    gone = threading.Event()

    def check() -> None:
        if gone.is_set():
            raise InterruptedError

    try:
        return await asyncio.to_thread(read_audio, io.BytesIO(data), name, MOST_SECONDS, check)
    except ValueError as error:
        raise bad("file", str(error)) from error
    finally:
        gone.set()


class Listening:
    """A running transcription."""

    def __init__(self, model: SpeechModel, samples: np.ndarray, wish: Wish, task: str):
        """Raises ApiError: the model does not know the language or the task."""
        from ..speech.audio import SAMPLE_RATE

        self.wish, self.task, language = wish, task, wish.language or None
        self.duration, self.language = len(samples) / SAMPLE_RATE, language
        self.segments: list[Segment] = []
        try:
            self._stream = model.transcriber.stream(samples, language=language, task=task)
        except ValueError as error:
            raise bad("language" if language else "model", str(error)) from error

    def next(self) -> Segment | None:
        """The next segment, or None at the end.

        At the end of a window it computes the next one, so call it on the engine's thread.
        """
        try:
            self.segments.append(next(self._stream))
        except StopIteration as end:
            self.language = end.value[0]
            return None
        return self.segments[-1]

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def document(self) -> dict[str, Any]:
        """The answer as JSON."""
        usage = {"usage": {"type": "duration", "seconds": -int(-self.duration // 1)}}
        if self.wish.response_format == "json":
            return {"text": self.text, **usage}
        segments = [{"id": number, **asdict(each), "temperature": 0.0} for number, each in enumerate(self.segments)]
        about = {"task": self.task, "language": self.language, "duration": self.duration}
        return {**about, "text": self.text, "segments": segments, **usage}

    def subtitles(self) -> str:
        """The answer as text, SubRip or WebVTT."""
        if self.wish.response_format == "text":
            return self.text + "\n"
        from ..speech.subtitles import subtitle

        head = "WEBVTT\n\n" if self.wish.response_format == "vtt" else ""
        return head + "".join(subtitle(each, number, self.wish.response_format) for number, each in enumerate(self.segments, 1))


def refuse_recording(model: Any) -> ApiError:
    """Raises ApiError for a recording sent to a model that is not a Whisper model."""
    return bad("model", f"the model {model.name} takes no recordings; expected a Whisper model")
