"""Speech-to-text models: requests for transcriptions and their answers."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..files.config_json import SPEECH_TYPES, read_config
from ..files.untrusted import one_line
from .bodies import Body
from .errors import ApiError, bad
from .events import log

if TYPE_CHECKING:
    import numpy as np

    from ..hf.config import LowBitConfig
    from ..speech.transcription import AnyTranscriber, Segment

MOST_SECONDS = 2 * 3600  # of a recording, whose samples then take half a gigabyte
_MOST_PROMPT = 1 << 13  # characters; the model sees the last 223 tokens
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}


@dataclass
class SpeechModel:
    """A speech-to-text model."""

    name: str
    transcriber: AnyTranscriber
    created: int = field(default_factory=lambda: int(time.time()))
    max_length = None  # no tokens of a prompt, because it takes recordings


def is_speech(path: Path) -> bool:
    """Whether a directory has a Whisper, Moonshine or Parakeet model."""
    return read_config(path).get("model_type") in SPEECH_TYPES


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
    temperature: str = Field("", max_length=64)
    prompt: str = Field("", max_length=_MOST_PROMPT)
    beams: str = Field("", max_length=64)
    granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list, max_length=2, alias="timestamp_granularities[]"
    )

    @model_validator(mode="after")
    def _check(self) -> Wish:
        if self.stream and self.response_format != "json":
            raise bad("response_format", f"response_format is {self.response_format!r}; expected json with stream")
        if self.granularities and self.response_format != "verbose_json":
            raise bad(
                "timestamp_granularities[]",
                f"response_format is {self.response_format!r}; expected verbose_json with timestamp_granularities[]",
            )
        return self

    def options(self, task: str) -> dict[str, Any]:
        """The arguments of :meth:`lowbit.speech.Transcriber.transcribe`.

        Raises:
            ValueError: the temperature or the number of beams is another text.
        """
        from ..speech.speech_options import beams, temperatures

        return {
            "task": task, "language": self.language or None, "prompt": self.prompt,
            "temperature": temperatures(self.temperature or "0"), "word_timestamps": "word" in self.granularities,
            "beams": beams(self.beams or "1"),
        }  # fmt: skip


def _warn(text: str) -> None:
    """Logs a warning, which has a name that the client has chosen."""
    log.warning("%s", one_line(text))


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
        return await asyncio.to_thread(read_audio, io.BytesIO(data), name, MOST_SECONDS, check, _warn)
    except ValueError as error:
        raise bad("file", str(error)) from error
    finally:
        gone.set()


class Listening:
    """A running transcription."""

    def __init__(self, model: SpeechModel, samples: np.ndarray, wish: Wish, task: str):
        """Raises ApiError: the model does not support what the request asks for."""
        from ..speech.audio import SAMPLE_RATE

        self.wish, self.task, self.duration = wish, task, len(samples) / SAMPLE_RATE
        self.language: str | None = None
        self.segments: list[Segment] = []
        try:
            self._windows = model.transcriber.windows(samples, **wish.options(task))
        except ValueError as error:
            # A message of lowbit.speech begins with the name of the argument.
            name = str(error).partition(" ")[0]
            raise bad(name if name in Wish.model_fields else "model", str(error)) from error

    def next(self) -> list[Segment] | None:
        """The segments of the next window, or None at the end. It computes the window, so call it on the engine's thread."""
        try:
            found = next(self._windows)
        except StopIteration as end:
            self.language = end.value.language
            return None
        self.segments += found
        return found

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def document(self) -> dict[str, Any]:
        """The answer as JSON."""
        usage = {"usage": {"type": "duration", "seconds": -int(-self.duration // 1)}}
        if self.wish.response_format == "json":
            return {"text": self.text, **usage}
        about: dict[str, Any] = {"task": self.task, "language": self.language, "duration": self.duration, "text": self.text}
        parts = [{"id": number, **asdict(each)} for number, each in enumerate(self.segments)]
        timed = [word for part in parts for word in part.pop("words") or []]
        if "word" in self.wish.granularities:
            about["words"] = timed
        if self.wish.granularities != ["word"]:
            about["segments"] = parts
        return about | usage

    def subtitles(self) -> str:
        """The answer as text, SubRip or WebVTT."""
        if self.wish.response_format == "text":
            return self.text + "\n"
        from ..speech.subtitles import subtitle  # one per segment, as the request cannot ask for words here

        head = "WEBVTT\n\n" if self.wish.response_format == "vtt" else ""
        return head + "".join(subtitle(each, number, self.wish.response_format) for number, each in enumerate(self.segments, 1))


def refuse_recording(model: Any) -> ApiError:
    """Raises ApiError for a recording sent to another kind of model."""
    return bad("model", f"the model {model.name} takes no recordings; expected a Whisper, Moonshine or Parakeet model")
