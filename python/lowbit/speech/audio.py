"""Audio files as the samples that Whisper takes."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    import numpy as np

    path = Path(path)
    check_regular(path)
    try:
        av: Any = import_module("av")
    except ImportError as error:
        raise ImportError(f"{path} is read by the package av, which is not installed: pip install av") from error
    pieces = []
    resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
    try:
        with av.open(str(path), metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"{path} has no audio")
            for frame in container.decode(audio=0):
                pieces += [part.to_ndarray()[0] for part in resampler.resample(frame)]
        pieces += [part.to_ndarray()[0] for part in resampler.resample(None)]
    except av.FFmpegError as error:
        raise ValueError(f"{path} is no audio that can be read: {error.strerror or error}") from error
    if not pieces:
        raise ValueError(f"{path} has audio of no samples; expected at least one")
    return np.concatenate(pieces)
