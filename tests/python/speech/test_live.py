"""Transcription of samples that arrive: by `lowbit.speech.live`, and by `lowbit transcribe -`."""

import io
import signal
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from command_line import PROGRAM, error, invoke
from lowbit.speech import load_transcriber
from lowbit.speech.audio import read_samples
from lowbit.speech.live import Live, transcribe_live
from lowbit.speech.transcriber import Written
from recordings import sound, write_wave
from speech_models import SECOND, tiny_whisper

SAMPLES = sound(2.6)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("live") / "model"
    tiny_whisper(directory)
    return directory


@pytest.fixture
def transcriber(whisper):
    return load_transcriber(whisper)


def raw(samples):
    return (samples * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize(("block", "beams"), [(0.13, 1), (0.5, 1), (1.7, 1), (0.5, 3)])
def test_the_pieces_are_the_segments(transcriber, block, beams):
    """What was shown is never changed, in whatever blocks the samples arrive."""
    live = Live(transcriber, language="en", no_speech_threshold=None, beams=beams)
    pieces = []
    for begin in range(0, len(SAMPLES), int(block * SECOND)):
        live.add(SAMPLES[begin : begin + int(block * SECOND)])
        pieces.append(live.advance())
    pieces.append(live.end())
    segments = [segment for piece in pieces for segment in piece.segments]
    assert "".join(piece.text for piece in pieces) == "".join(segment.text for segment in segments)
    assert live.heard == ("en", None, len(SAMPLES) / SECOND) and len(segments) > 2
    times = [time for segment in segments for time in (segment.start, segment.end)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 2.6


@pytest.mark.parametrize("beams", [1, 3])
def test_samples_that_arrive_at_once_are_a_recording(transcriber, beams):
    samples = SAMPLES[:SECOND]
    live = Live(transcriber, prompt="Ada", no_speech_threshold=None, beams=beams)
    live.add(samples)
    expected = transcriber.transcribe(samples, prompt="Ada", beams=beams)
    window = next(transcriber.windows(samples, prompt="Ada", beams=beams))
    assert window and live.end().segments[: len(window)] == window
    assert live.heard == (expected.language, expected.language_probability, 1.0)
    live.add(np.zeros(SECOND, np.float32))
    assert Live(transcriber, language="en", no_speech_threshold=0.0, logprob_threshold=None).end() == ("", [])


def test_text_is_certain_when_two_passes_agree(transcriber, monkeypatch):
    """Text is not certain within a character. A segment ends when its end is certain, and the next window begins there."""
    first, passes, begins = transcriber.no_timestamps + 1, [], []

    def written(wish, language, previous, seed, begin):
        begins.append(list(begin))
        tokens = [first + part if type(part) is int else transcriber.tokens_of("x" + part)[2:] for part in passes.pop(0)]
        flat = [token for part in tokens for token in (part if isinstance(part, list) else [part])]
        assert flat[: len(begin)] == list(begin)
        return Written(flat, [], [], 0.0, 1.0, 0.0)

    monkeypatch.setattr(transcriber, "write", written)
    live = Live(transcriber, language="en")
    shown = []
    for tokens in ([0, "a b"], [0, "a c"], [0, "a c", 20], [0, "a cd", 25, 25, "é"], [0, "a cd", 25, 25, "éf", 30]):
        passes.append(tokens)
        live.add(SAMPLES[: SECOND // 8])
        shown.append(live.advance())
    assert [piece.text for piece in shown] == ["", "a ", "c", "", "dé"]
    assert [len(piece.segments) for piece in shown] == [0, 0, 0, 0, 1]
    (segment,) = shown[-1].segments
    assert (segment.start, segment.end, segment.text) == (0.0, 0.5, "a cd")
    passes.append([0, "éf", 5])
    (rest,) = live.end().segments
    assert begins[-1] == [first, *transcriber.tokens_of("xé")[2:]]
    assert (rest.start, rest.end, rest.text) == (0.5, 0.6, "éf")


def test_silence_has_no_text(transcriber):
    live = Live(transcriber, language="en", no_speech_threshold=0.0, logprob_threshold=None)
    for _ in range(3):
        live.add(SAMPLES[: SECOND // 2])
        assert live.advance() == ("", [])
    assert live.end() == ("", []) and live.heard.duration == 1.5


def test_samples_that_arrive_while_a_pass_runs(transcriber):
    blocks = np.array_split(SAMPLES, 20)
    pieces = transcribe_live(transcriber, iter(blocks), step=0.3, language="en", no_speech_threshold=None)
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            assert end.value == ("en", None, 2.6)
            break
    assert "".join(piece.text for piece in found) == "".join(each.text for piece in found for each in piece.segments) != ""

    def broken():
        yield blocks[0]
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        list(transcribe_live(transcriber, broken()))


def test_a_fast_pipe_and_a_reader_that_leaves(transcriber, monkeypatch):
    """A pass has at most one window more than the last one. While no piece is read, nothing is read from the pipe."""
    added, given = [0], []
    advance = Live.advance

    def counting(live):
        added.append(sum(map(len, live._added)))
        return advance(live)

    def blocks():
        while True:
            given.append(2000)
            yield SAMPLES[:2000]

    monkeypatch.setattr(Live, "advance", counting)
    options = {"language": "en", "no_speech_threshold": None}
    window = Live(transcriber, **options).window
    before = threading.active_count()
    pieces = transcribe_live(transcriber, blocks(), step=0.01, **options)
    for _ in range(3):
        next(pieces)
    assert 0 < max(added) < window + max(given)
    pieces.close()
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.1)
    assert threading.active_count() == before


class Pipe(io.BytesIO):
    """Gives few bytes at a time, an odd number."""

    def read1(self, count=-1):
        return super().read1(min(count, 1001))


def wave_of(samples, channels=1, rate=SECOND, bits=16, more=b"", size=0xFFFFFFFF):
    head = struct.pack("<HHIIHH", 1, channels, rate, rate * 2, 2, bits)
    data = b"data" + struct.pack("<I", size) + raw(samples)
    return b"RIFF\xff\xff\xff\xffWAVE" + more + b"fmt " + struct.pack("<I", 16) + head + data


MP3 = b"\xff\xfb\x90\0" + bytes(413)  # 128 kbit/s at 44.1 kHz


def test_samples_of_a_pipe():
    expected = np.frombuffer(raw(SAMPLES), "<i2").astype(np.float32) / np.float32(32768)
    size = 2 * len(SAMPLES)
    for data in (
        raw(SAMPLES), raw(SAMPLES) + b"\0", wave_of(SAMPLES),
        wave_of(SAMPLES, more=b"LIST\x03\0\0\0abc\0"),
        wave_of(SAMPLES, size=size) + b"LIST\x04\0\0\0abcd", wave_of(SAMPLES, size=0), wave_of(SAMPLES, size=0x7FFFEFFC),
    ):  # fmt: skip
        blocks = list(read_samples(Pipe(data), "stdin"))
        assert np.array_equal(np.concatenate(blocks), expected) and len(blocks) > 50
    for start in (b"\xff\xfb" + b"\xfb\xff" * 999, MP3[:4] + bytes(800), MP3 + MP3):  # look like frames of MP3
        data = start + raw(SAMPLES)
        found = np.concatenate(list(read_samples(Pipe(data), "stdin")))
        assert np.array_equal(found, np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768))
    assert list(read_samples(Pipe(b""), "stdin")) == list(read_samples(Pipe(b"a"), "stdin")) == []
    for data, message in (
        (
            wave_of(SAMPLES, 2),
            "stdin has 2 channels with 16000 samples per second of 16 bits, format 1; expected 16,000 samples",
        ),
        (wave_of(SAMPLES, rate=8000), "with 8000 samples per second"),
        (b"RIFF\0\0\0\0WAVEfmt ", "stdin is a damaged WAV file"),
        (b"RIFF\0\0\0\0WAVEdata\4\0\0\0abcd", "stdin is a damaged WAV file: it has no format before its samples"),
        (b"RIFF\0\0\0\0WAVELIST\xff\xff\xff\xff", "stdin is a damaged WAV file"),
        (b"fLaC" + bytes(20), "stdin is a compressed recording; expected 16,000 samples"),
        (b"\0\0\0\x18ftypM4A " + bytes(20), "stdin is a compressed recording"),
        (b"RF64" + wave_of(SAMPLES)[4:], "stdin is a compressed recording"),
        *((frame * 30, "stdin is a compressed recording") for frame in (MP3, b"\xff\xf1\x60\x40\x2e\xbf\xfc" + bytes(366))),
    ):
        with pytest.raises(ValueError, match=message):
            list(read_samples(Pipe(data), "stdin"))


def test_refusals(transcriber):
    for options in ({"word_timestamps": True}, {"timestamps": False}):
        with pytest.raises(ValueError, match="live transcription gives times of segments only"):
            Live(transcriber, **options)
    with pytest.raises(ValueError, match="language is 'xx'; expected en, fi"):
        Live(transcriber, language="xx")


def test_the_command_with_a_pipe(whisper, tmp_path):
    found = invoke("transcribe", whisper, "-", "--language", "en", "--format", "srt", stdin=wave_of(SAMPLES))
    assert found.exit_code == 0 and found.stdout.startswith("1\n00:00:00,"), found.stderr
    assert "-: 2.6 s of audio in " in found.stderr
    command = [sys.executable, "-c", PROGRAM, "transcribe", str(whisper), "-", "--language", "en", "--format", "srt"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(raw(SAMPLES))
        process.stdin.flush()
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)  # which the recorder gets, too
        rest = process.communicate(timeout=600)[0]
    assert process.returncode == 0 and (first + rest).count(b" --> ") > 1 and first == b"1\n"
    write_wave(tmp_path / "a.wav", SAMPLES)
    assert "another recording is given with -" in error(invoke("transcribe", whisper, "-", tmp_path / "a.wav"))
