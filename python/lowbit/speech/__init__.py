"""Speech to text with Whisper, Moonshine and Parakeet models; requires transformers unless a model has its plans."""

from importlib import import_module
from typing import TYPE_CHECKING

from .audio import SAMPLE_RATE, load_audio
from .live import Live, transcribe_live
from .speech_options import Options
from .transcriber import Transcriber, load_transcriber
from .transcription import Heard, Segment, Transcription
from .words import Word

if TYPE_CHECKING:
    from .exporting import ExportedSpeech as ExportedSpeech
    from .exporting import export_speech as export_speech
    from .exporting import load_speech as load_speech
    from .pieces import MoonshineTranscriber as MoonshineTranscriber
    from .pieces import ParakeetTranscriber as ParakeetTranscriber
    from .speech_decoder import SpeechDecoder as SpeechDecoder

# Public name -> its module, which needs torch, imported on first use.
_LAZY = {
    "ExportedSpeech": ".exporting",
    "MoonshineTranscriber": ".pieces",
    "ParakeetTranscriber": ".pieces",
    "SpeechDecoder": ".speech_decoder",
    "export_speech": ".exporting",
    "load_speech": ".exporting",
}

if not TYPE_CHECKING:  # a type checker would conclude that every name exists

    def __getattr__(name: str):
        if name not in _LAZY:
            raise AttributeError(f"module 'lowbit.speech' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name], __name__), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "SAMPLE_RATE",
    "ExportedSpeech",
    "Heard",
    "Live",
    "MoonshineTranscriber",
    "Options",
    "ParakeetTranscriber",
    "Segment",
    "SpeechDecoder",
    "Transcriber",
    "Transcription",
    "Word",
    "export_speech",
    "load_audio",
    "load_speech",
    "load_transcriber",
    "transcribe_live",
]
