"""Speech to text with Whisper models, over static caches; requires transformers."""

from .audio import SAMPLE_RATE, load_audio
from .exporting import ExportedSpeech, export_speech, load_speech
from .speech_decoder import SpeechDecoder
from .transcriber import Segment, Transcriber, Transcription, load_transcriber

__all__ = [
    "SAMPLE_RATE",
    "ExportedSpeech",
    "Segment",
    "SpeechDecoder",
    "Transcriber",
    "Transcription",
    "export_speech",
    "load_audio",
    "load_speech",
    "load_transcriber",
]
