"""Audio files as the samples that Whisper takes."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..files.untrusted import check_regular

if TYPE_CHECKING:
    import numpy as np

SAMPLE_RATE = 16000  # of every Whisper model, in samples per second


def load_audio(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads the first audio stream of a file: float32 [samples] from -1 to 1, one channel, 16,000 samples per second.

    Args:
        path: of any format that FFmpeg's libraries read (WAV, MP3, FLAC, M4A, the sound of a video).

    Raises:
        ImportError: the package av is not installed.
        OSError: there is no such file, or it cannot be read.
        ValueError: it has no audio, or is damaged.
    """
    path = Path(path)
    check_regular(path)
    return read_audio(str(path), str(path))


def read_audio(file: str | IO[bytes], name: str, most_seconds: float | None = None) -> np.ndarray:
    """As :func:`load_audio`.

    Args:
        file: a path, or an open file.
        name: of the file, for errors.
        most_seconds: ValueError if it is longer; None: as long as memory has room for.
    """
    import numpy as np

    av = import_av()
    pieces: list[np.ndarray] = []
    samples = 0
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    try:
        with av.open(file, metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"{name} has no audio")
            for frame in container.decode(audio=0):
                parts = [part.to_ndarray()[0] for part in resampler.resample(frame)]
                samples += sum(map(len, parts))
                if most_seconds is not None and samples > most_seconds * SAMPLE_RATE:
                    raise ValueError(f"{name} has more than {most_seconds:g} seconds of audio; expected at most so many")
                pieces += parts
        pieces += [part.to_ndarray()[0] for part in resampler.resample(None)]
    except av.FFmpegError as error:
        raise ValueError(f"{name} is no audio that can be read: {error.strerror or error}") from error
    if not pieces:
        raise ValueError(f"{name} has audio of no samples; expected at least one")
    return np.concatenate(pieces)


def import_av() -> Any:
    """PyAV, FFmpeg's libraries."""
    try:
        return import_module("av")
    except ImportError as error:
        raise ImportError("recordings are read by the package av, which is not installed: pip install av") from error
