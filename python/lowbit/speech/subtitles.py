"""Formats segments of a transcription as lines or subtitles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .transcription import Segment
    from .words import Word


def cues(segment: Segment) -> list[Segment] | list[Word]:
    """What gets a line or subtitle of its own: the words of a segment, if their times are known, or all of it."""
    return [segment] if segment.words is None else segment.words


def subtitle(segment: Segment | Word, number: int, format: str) -> str:
    """A segment or word as text, with the line ends after it.

    Args:
        number: its number, from 1.
        format: "lines", "srt" (SubRip) or "vtt" (WebVTT, whose file begins with a line "WEBVTT" and an empty one).
    """
    text = segment.text.strip()
    if format == "lines":
        return f"[{segment.start:.2f} - {segment.end:.2f}] {text}\n"
    times = " --> ".join(_clock(seconds, "," if format == "srt" else ".") for seconds in (segment.start, segment.end))
    return f"{number}\n{times}\n{text}\n\n" if format == "srt" else f"{times}\n{text}\n\n"


def _clock(seconds: float, point: str) -> str:
    """A time in the format of subtitles: 01:02:03,450."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
