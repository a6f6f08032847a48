"""``lowbit transcribe``."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..machine.facts import keep_freed_memory
from . import options
from .models import by_torch
from .output import Output, print_piece, set_stdout_errors

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..speech import Heard, Segment
    from ..speech.live import Piece


def transcribe(
    output: Output,
    model: options.Model,
    audio: Annotated[
        list[Path],
        typer.Argument(
            metavar="AUDIO...", help="Recordings: WAV, MP3, FLAC, M4A, video; -: live samples from stdin.", show_default=False
        ),
    ],
    *,
    language: Annotated[
        str | None, typer.Option(help="Code of the spoken language, such as en.", show_default="detected")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="Transcribe the speech, or translate it to English.")
    ] = "transcribe",
    format: Annotated[
        Literal["text", "lines", "srt", "vtt"], typer.Option("--format", help="Plain text, lines with times, or subtitles.")
    ] = "text",
    words: Annotated[bool, typer.Option("--words", help="Also compute the times of words.")] = False,
    prompt: Annotated[str, typer.Option(help="Text shown before the recording, such as names.", show_default="none")] = "",
    previous: Annotated[bool, typer.Option("--previous", help="Show each window the text of earlier windows.")] = False,
    temperature: Annotated[
        str, typer.Option(metavar="T[,T...]", help="Of sampling, 0 to 1; the next one is tried if a text is unlikely.")
    ] = "0",
    compression_ratio: Annotated[float, typer.Option(help="A text that compresses by a larger ratio is repetitive.")] = 2.4,
    logprob: Annotated[float, typer.Option(help="A text with a lower mean log-probability is unlikely.")] = -1.0,
    no_speech: Annotated[
        float | None, typer.Option(help="Windows with a larger probability of silence have no text.", show_default="none")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    beams: Annotated[int, typer.Option(help="Texts that are continued side by side at temperature 0.")] = 1,
    quantizing: options.Quantizing,
    cache: options.Cache = None,
    threads: options.Threads = None,
) -> None:
    """Transcribe recordings with a Whisper, Moonshine or Parakeet model."""
    from ..speech import Options, Transcription, load_audio
    from ..speech.audio import limit_allocations, read_samples
    from ..speech.live import transcribe_live
    from ..speech.planned_speech import open_transcriber
    from ..speech.speech_options import temperatures

    config = quantizing.config()
    wish: dict[str, Any] = {
        "language": language, "task": task, "word_timestamps": words, "prompt": prompt, "condition_on_previous_text": previous,
        "temperature": temperatures(temperature), "compression_ratio_threshold": compression_ratio,
        "logprob_threshold": logprob, "seed": seed, "beams": beams,
    }  # fmt: skip
    if no_speech is not None:
        wish["no_speech_threshold"] = no_speech
    Options(**wish)  # checks before the model is loaded, which takes longer
    live = Path("-") in audio
    if live and (len(audio) > 1 or words):
        raise ValueError(
            f"{'--words' if words else 'another recording'} is given with -, which is transcribed live; expected only -"
        )
    keep_freed_memory()
    set_stdout_errors("replace")
    limit_allocations()
    recordings = [(path, None if live else load_audio(path)) for path in audio]
    loading = partial(by_torch, output, model, threads)
    transcriber = open_transcriber(Path(model), config, cache=cache, threads=threads, loading=loading, note=output.note)
    documents = []
    for path, samples in recordings:
        begin = time.perf_counter()
        if samples is None:
            _survive_one_interrupt()
            pieces = transcribe_live(transcriber, read_samples(sys.stdin.buffer, "stdin"), **wish)
        else:
            pieces = _pieces(transcriber.windows(samples, **wish))
        if not output.as_json and len(recordings) > 1 and format in ("text", "lines"):
            print(f"{path}:")
        if not output.as_json and format == "vtt":
            print("WEBVTT\n")
        heard, segments = _written(pieces, None if output.as_json else format)
        seconds = time.perf_counter() - begin
        if output.as_json:
            text = "".join(segment.text for segment in segments).strip()
            result = Transcription(text, segments, *heard)
            documents.append({"file": str(path), "seconds": seconds, **asdict(result)})
            continue
        spoken = "" if heard.language_probability is None else f"; language {heard.language} ({heard.language_probability:.0%})"
        print(f"{path}: {heard.duration:.1f} s of audio in {seconds:.1f} s{spoken}", file=sys.stderr)
    if output.as_json:
        output.result({"model": str(model), "recordings": documents})


def _survive_one_interrupt() -> None:
    """Ignores the first Ctrl-C: it also ends the recorder at the other end of the pipe, after which the rest is printed."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, before))


def _pieces(windows: Generator[list[Segment], None, Heard]) -> Generator[Piece, None, Heard]:
    from ..speech.live import Piece

    while True:
        try:
            segments = next(windows)
        except StopIteration as end:
            heard: Heard = end.value
            return heard
        yield Piece("".join(segment.text for segment in segments), segments)


def _written(pieces: Generator[Piece, None, Heard], format: str | None) -> tuple[Heard, list[Segment]]:
    """Prints what is transcribed; None: nothing."""
    from ..speech.subtitles import cues, subtitle

    segments: list[Segment] = []
    number, begun = 0, False
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            if format == "text" and begun:
                print()
            return end.value, segments
        segments += piece.segments
        if format == "text" and piece.text:
            print_piece(piece.text if begun else piece.text.lstrip())
            begun = True
        for cue in (cue for segment in piece.segments if format not in ("text", None) for cue in cues(segment)):
            number += 1
            print_piece(subtitle(cue, number, str(format)))
