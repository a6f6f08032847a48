"""Recordings for tests: samples, WAV files, and files of other formats that FFmpeg writes."""

import wave

import av
import numpy as np
from speech_models import SECOND


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that change ten times a second."""
    generator = np.random.default_rng(seed)
    pieces = [
        generator.uniform(0.05, 0.8) * np.sin(2 * np.pi * generator.uniform(100, 4000) * np.arange(SECOND // 10) / SECOND)
        for _ in range(int(seconds * 10))
    ]
    return np.concatenate(pieces).astype(np.float32)


def write_wave(path, samples, rate=SECOND, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def container(path, format, codec, layout="mono", frames=1, rate=SECOND, video=False, options=None):
    """An FFmpeg file with frames of a tenth of a second of zeros."""
    with av.open(path, "w", format=format, options=options) as made:
        if video:
            picture = made.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        stream = made.add_stream(codec, rate=rate, layout=layout)
        if video:
            made.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
            made.mux(picture.encode(None))
        for number in range(frames):
            frame = av.AudioFrame(stream.codec_context.format, layout, rate // 10)
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            frame.sample_rate, frame.pts = rate, number * (rate // 10)
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))
    return path
