"""The features of Whisper models: log-mel spectrograms, in numpy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .audio import SAMPLE_RATE

HOP = 160  # samples per frame
_WINDOW = 400  # samples that a frame sees
_MOST_HERTZ = 8000.0
_BLOCK = 1024  # frames that are computed at a time, which bounds the memory
_LINEAR = 15.0  # mels below 1000 Hz, where the scale is linear
_PER_OCTAVE = 27.0 / np.log(6.4)
# What these functions compute, by the names of transformers' WhisperFeatureExtractor.
_EXPECTED = {"n_fft": _WINDOW, "hop_length": HOP, "sampling_rate": SAMPLE_RATE, "padding_value": 0.0, "dither": 0.0}


def check_extractor(extractor: Any) -> None:
    """Raises ValueError if a feature extractor of transformers has other settings than these features."""
    for name, expected in _EXPECTED.items():
        if (found := getattr(extractor, name, expected)) != expected:
            raise ValueError(f"the feature extractor has {name} {found}; expected {expected}, as in Whisper's files")


@lru_cache(2)
def filters(bins: int) -> np.ndarray:
    """The share of each frequency in each bin, [frequencies, bins]: triangles of Slaney's mel scale with an area of 1."""
    most = _LINEAR + _PER_OCTAVE * np.log(_MOST_HERTZ / 1000.0)
    mels = np.linspace(0.0, most, bins + 2)
    edges = np.where(mels < _LINEAR, mels * (200.0 / 3.0), 1000.0 * np.exp((mels - _LINEAR) / _PER_OCTAVE))
    widths = np.diff(edges)
    slopes = edges - np.linspace(0.0, _MOST_HERTZ, 1 + _WINDOW // 2)[:, None]
    triangles = np.maximum(0.0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    result: np.ndarray = triangles * (2.0 / (edges[2:] - edges[:-2]))
    return result


def log_mel(samples: np.ndarray, bins: int, frames: int) -> np.ndarray:
    """Features [bins, frames or more], float32, of samples float32 [n], followed by silence up to ``frames``."""
    if len(samples) < frames * HOP:
        samples = np.pad(samples, (0, frames * HOP - len(samples)))
    count, half = len(samples) // HOP, _WINDOW // 2
    window = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(_WINDOW) / _WINDOW)
    result = np.empty((bins, count), np.float32)
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        first, last = begin * HOP - half, (end - 1) * HOP + half
        piece = samples[max(0, first) : last].astype(np.float64)
        piece = np.pad(piece, (max(0, -first), max(0, last - len(samples))), mode="reflect")
        spectrum = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(piece, _WINDOW)[::HOP] * window)
        power = np.square(spectrum.real) + np.square(spectrum.imag)
        result[:, begin:end] = np.log10(np.maximum(power @ filters(bins), 1e-10)).T
    np.maximum(result, result.max() - np.float32(8), out=result)
    result += np.float32(4)
    result /= np.float32(4)
    return result
