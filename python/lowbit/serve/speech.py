"""Whisper models: what requests for transcriptions ask for, and their answers."""

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
from ..speech.audio import SAMPLE_RATE, limit_allocations, read_audio
from ..speech.subtitles import subtitle
from ..speech.transcriber import Segment, Transcriber, load_transcriber
from .errors import ApiError, bad
from .protocol import Body

if TYPE_CHECKING:
    import numpy as np

    from ..hf.config import LowBitConfig

MOST_SECONDS = 2 * 3600  # of a recording; its samples take half a gigabyte
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


@dataclass
class SpeechModel:
    """A model that writes down what is said."""

    name: str
    transcriber: Transcriber
    created: int = field(default_factory=lambda: int(time.time()))
    max_length = None  # tokens of a prompt: it takes recordings


def is_speech(path: Path) -> bool:
    """Whether a directory has a Whisper model."""
    return read_config(path).get("model_type") == "whisper"


def load(name: str, path: Path, quantization: LowBitConfig | None, *, cache: str | None, progress: Any) -> SpeechModel:
    """As :func:`lowbit.speech.load_transcriber`; ImportError also without what reads recordings."""
    limit_allocations()
    return SpeechModel(name, load_transcriber(path, quantization, cache=cache, progress=progress))


class Wish(Body):
    """What a request asks for, in OpenAI's format; all values of a form are texts."""

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
    """The samples of a file. A canceled call ends at the next frame of the file.

    Raises:
        ApiError: it is no audio, or too long.
    """
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
    """A transcription that is being written."""

    def __init__(self, model: SpeechModel, samples: np.ndarray, wish: Wish, task: str):
        """Raises ApiError: the model does not know the language or the task."""
        self.wish, self.task, language = wish, task, wish.language or None
        self.duration, self.language = len(samples) / SAMPLE_RATE, language
        self.segments: list[Segment] = []
        try:
            self._stream = model.transcriber.stream(samples, language=language, task=task)
        except ValueError as error:
            raise bad("language" if language else "model", str(error)) from error

    def next(self) -> Segment | None:
        """The next segment; None: there are no more.

        Where a window ends, its successor is computed, so this is for the engine's thread.
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
        head = "WEBVTT\n\n" if self.wish.response_format == "vtt" else ""
        return head + "".join(subtitle(each, number, self.wish.response_format) for number, each in enumerate(self.segments, 1))


def refuse_recording(model: Any) -> ApiError:
    """What a recording gets for a model that does not hear."""
    return bad("model", f"the model {model.name} takes no recordings; expected a Whisper model")
