"""Speech to text with Whisper models, over static caches; requires transformers."""

from .audio import SAMPLE_RATE, load_audio
from .decoder import SpeechDecoder
from .transcriber import Segment, Transcriber, Transcription, load_transcriber

__all__ = ["SAMPLE_RATE", "Segment", "SpeechDecoder", "Transcriber", "Transcription", "load_audio", "load_transcriber"]
