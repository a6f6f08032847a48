"""``lowbit transcribe``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..machine.facts import keep_freed_memory
from . import options
from .models import by_torch
from .output import Output, print_piece, set_stdout_errors

if TYPE_CHECKING:
    from ..speech import Segment


def transcribe(
    output: Output,
    model: options.Model,
    audio: Annotated[
        list[Path], typer.Argument(metavar="AUDIO...", help="Recordings: WAV, MP3, FLAC, M4A, video.", show_default=False)
    ],
    *,
    language: Annotated[
        str | None, typer.Option(help="Code of the spoken language, such as en.", show_default="detected")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="Transcribe the speech, or translate it to English.")
    ] = "transcribe",
    format: Annotated[
        Literal["text", "lines", "srt", "vtt"], typer.Option("--format", help="Text alone, lines with times, or subtitles.")
    ] = "text",
    quantizing: options.Quantizing,
    cache: options.Cache = None,
    threads: options.Threads = None,
) -> None:
    """Transcribe recordings with a Whisper model."""
    from ..speech import SAMPLE_RATE, load_audio
    from ..speech.audio import limit_allocations
    from ..speech.planned_speech import open_transcriber

    config = quantizing.config()
    keep_freed_memory()
    set_stdout_errors("replace")
    limit_allocations()
    recordings = [(path, load_audio(path)) for path in audio]  # before the model is loaded, which takes longer
    loading = partial(by_torch, output, model, threads)
    transcriber = open_transcriber(Path(model), config, cache=cache, threads=threads, loading=loading, note=output.note)
    documents = []
    for path, samples in recordings:
        begin = time.perf_counter()
        if output.as_json:
            result = transcriber.transcribe(samples, language=language, task=task)
            documents.append({"file": str(path), "seconds": time.perf_counter() - begin, **asdict(result)})
            continue
        if len(recordings) > 1 and format in ("text", "lines"):
            print(f"{path}:")
        if format == "vtt":
            print("WEBVTT\n")
        written = None  # the last character printed
        for number, segment in enumerate(transcriber.stream(samples, language=language, task=task), 1):
            print_piece(_shown(segment, number, format))
            written = segment.end
        if format == "text" and written is not None:
            print()
        seconds = time.perf_counter() - begin
        duration = len(samples) / SAMPLE_RATE
        print(f"{path}: {duration:.1f} s of audio in {seconds:.1f} s", file=sys.stderr)
    if output.as_json:
        output.result({"model": str(model), "recordings": documents})


def _shown(segment: Segment, number: int, format: str) -> str:
    from ..speech.subtitles import subtitle

    if format == "text":
        return segment.text if number > 1 else segment.text.lstrip()
    return subtitle(segment, number, format)
