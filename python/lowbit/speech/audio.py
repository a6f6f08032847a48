"""Reads audio files as samples for Whisper."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..files.untrusted import check_regular, one_line

if TYPE_CHECKING:
    import numpy as np

SAMPLE_RATE = 16000  # samples per second, in every Whisper model
MOST_SECONDS = 12 * 3600.0  # longest recording; its samples take 2.8 GB
# Allowed FFmpeg demuxers: containers that hold audio themselves. Other demuxers open files or sockets named in their input
# (concat, hls, dash, sdp, rtsp, image2) or evaluate it (lavfi).
_FORMATS = "aac,ac3,aiff,amr,asf,au,avi,caf,eac3,flac,flv,matroska,mov,mp3,mpeg,mpegts,ogg,w64,wav,webm,wv"
_SHOWN = "WAV, FLAC, MP3, AAC, M4A, Ogg, Opus, AIFF, WMA, or the sound of an MP4, WebM, Matroska or AVI video"
# Allowed audio decoders. Without a list FFmpeg would also decode images in the files, to determine their sizes.
_CODECS = (
    "aac,aac_latm,ac3,adpcm_ima_qt,adpcm_ima_wav,adpcm_ms,adpcm_swf,adpcm_yamaha,alac,amrnb,amrwb,dca,eac3,flac,g722,g726,gsm,"
    "gsm_ms,libopencore_amrnb,libopencore_amrwb,libopus,mp1,mp1float,mp2,mp2float,mp3,mp3float,nellymoser,opus,pcm_alaw,"
    "pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s8,"
    "pcm_u8,speex,vorbis,wavpack,wmalossless,wmapro,wmav1,wmav2,wmavoice"
)
_RATES = (2000, 768_000)  # allowed samples per second; at 1 Hz a few bytes would become hours
_MOST_CHANNELS = 32
_MOST_PER_FRAME = 1 << 20  # samples per channel; the file's header gives the number, and memory is allocated for it
_MOST_STREAMS = 16  # in a file; FFmpeg allocates tables for each
_MOST_ALLOCATED = 64 << 20  # bytes; a track of 12 hours needs a table of 45 MB, a few malicious bytes can ask for 4 GB
# What a pipe has to deliver.
_RAW = "16,000 samples per second of one channel with 16 bits, raw or WAV: ffmpeg -i FILE -ac 1 -ar 16000 -f s16le -"
# The first bytes of other recordings.
_CONTAINERS = (
    b"ID3", b"OggS", b"fLaC", b"\x1aE\xdf\xa3", b"RIFF", b"RIFX", b"RF64", b"riff", b"FORM", b".snd", b"caff", b"wvpk",
    b"#!AMR", b"FLV\x01", b"0&\xb2u",
)  # fmt: skip
# MP3 and AAC without a container are frames whose headers say how long they are. Raw samples may begin with such a header.
_FRAME_BYTES, _FRAMES = 1 << 14, 3  # headers that have to follow each other within so many bytes
_KBITS = {  # of MPEG audio, by (version 1, layer)
    (True, 1): range(32, 449, 32),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_PCM = (1, 0xFFFE)  # the formats of WAV files with plain numbers
_MOST_CHUNK = 1 << 20  # bytes of a chunk before the samples
_UNKNOWN_SIZE = 0x7FFFE000  # programs that write to pipes put more bytes into the header, such as 0x7FFFEFFC or 0xFFFFFFFF
_NO_END = 1 << 62  # bytes
_MOST_CHUNKS = 64  # before the samples of a WAV file
_LARGEST = 16.0  # the largest sample; a sound that is too loud may exceed 1, and integers exceed this
# Formats whose duration FFmpeg guesses from the first bytes, unless an MP3 has one of these marks.
_ESTIMATED = ("aac", "ac3", "amr", "eac3", "mp3")
_MARKS = (b"Xing", b"Info", b"VBRI")
_FRAMED, _FRAME_HEAD = ("aac", "mp3"), 6  # formats that are frames without a container; bytes of a frame that have its size
_SAME = 0.1  # if the sum of two channels keeps less than this share of their energy, they have opposite phases


def load_audio(path: str | os.PathLike[str], most_seconds: float | None = MOST_SECONDS) -> np.ndarray:
    """Reads the first audio stream of a file: float32 [samples] from -1 to 1, one channel, 16,000 samples per second.

    Two channels are mixed second by second: to their mean, or the louder one if they cancel each other (opposite phase). Warns
    if the file ends before the duration in its header or within a frame of MP3 or AAC, or lacks samples; pauses that it does
    not store are left out.

    Args:
        path: in a format that FFmpeg's libraries read: WAV, FLAC, MP3, AAC, M4A, Ogg, Opus, AIFF, WMA, or the audio of a
            video. Formats that refer to other files or to addresses are refused.
        most_seconds: the longest recording; None: any length that fits into memory.

    Raises:
        ImportError: the package av is not installed.
        OSError: there is no such file, or it cannot be read.
        ValueError: it has no audio, is damaged, is too long, has an implausible sample rate or number of channels, or samples
            that are not finite or far beyond 1.
    """
    path = Path(path)
    check_regular(path)
    with open(path, "rb") as file:
        return read_audio(file, str(path), most_seconds, warn=partial(warnings.warn, stacklevel=3))


def read_audio(
    file: IO[bytes],
    name: str,
    most_seconds: float | None = None,
    check: Callable[[], None] | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> np.ndarray:
    """As :func:`load_audio`.

    Args:
        file: an open file; FFmpeg opens no files itself.
        name: the name of the file, for errors.
        check: called for each decoded frame; an exception from it ends the reading.
        warn: called with a warning. Python keeps each text that ``warnings.warn`` is given, which may have a client's name.
    """
    import numpy as np

    av = import_av()
    kept, begin, last = _kept(file), _after_tags(file), [(b"", 0)]
    samples = bytearray()  # grows in place; joining a list of pieces would need twice the memory
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none", "codec_whitelist": _CODECS}
    options["max_streams"] = str(_MOST_STREAMS)
    try:
        with av.open(_Seekable(file), options=options, metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise ValueError(f"{name} has no audio")
            context = container.streams.audio[0].codec_context
            codec = "unknown" if context is None else context.name  # None: FFmpeg does not know the number in the file
            if codec not in _CODECS.split(","):
                raise ValueError(f"{name} has audio of the codec {codec}, which is not supported; expected {_SHOWN}")
            context.options = {"max_samples": str(_MOST_PER_FRAME)}
            stream = container.streams.audio[0]
            seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            if not seconds and len(container.streams) == 1 and container.duration:
                seconds = container.duration / av.time_base
            if container.format.name in _ESTIMATED and not any(mark in begin for mark in _MARKS):
                seconds = 0.0
            for piece in _one_channel(_resampled(_decoded(container, last), name, check)):
                check_samples(piece, name)
                samples += piece.tobytes()
                if most_seconds is not None and len(samples) > most_seconds * SAMPLE_RATE * 4:
                    raise ValueError(f"{name} has more than {most_seconds:g} seconds of audio; expected no more")
    except av.FFmpegError as error:
        reason = error.strerror or one_line(error)
        raise ValueError(f"{name} is not readable audio: {reason}; expected {_SHOWN}") from error
    if not samples:
        raise ValueError(f"{name} has audio without samples; expected at least one")
    found = len(samples) / (4 * SAMPLE_RATE)
    if not _is_less(found, seconds):  # for some WAV files FFmpeg goes by the header itself
        seconds /= kept
    if _is_less(found, seconds):
        warn(
            f"{name} has {found:.2f} of the {seconds:.2f} seconds that its header announces: it is cut off, damaged, or has "
            "gaps, which are left out"
        )
    elif container.format.name in _FRAMED and last[0][1] < _frame_bytes(last[0][0]):
        warn(f"{name} ends with {last[0][1]} of the {_frame_bytes(last[0][0])} bytes of a frame: it is cut off or damaged")
    return np.frombuffer(samples, np.float32)


def _decoded(container: Any, last: list[tuple[bytes, int]]) -> Iterator[Any]:
    """The frames of the first audio stream. ``last`` becomes the first bytes and the size of the last packet."""
    for packet in container.demux(audio=0):
        if packet.size:
            last[0] = bytes(memoryview(packet)[:_FRAME_HEAD]), packet.size
        yield from packet.decode()


def _is_less(found: float, seconds: float) -> bool:
    """Whether so many seconds of samples are clearly less than those of a header."""
    return seconds - found > 0.1 + 0.01 * seconds


def check_samples(samples: np.ndarray, name: str) -> None:
    """Raises ValueError for samples that are not finite, or integers that were not divided by the largest one."""
    largest = max(float(samples.max(initial=0.0)), -float(samples.min(initial=0.0)))  # NaN if there is one; copies nothing
    if not largest <= _LARGEST:
        raise ValueError(
            f"{name} has samples up to {largest:g}; expected finite numbers from -1 to 1, as 16-bit integers divided by 32768"
        )


def _after_tags(file: IO[bytes]) -> bytes:
    """The first bytes of a file behind its ID3 tag, which may hold a large picture. The file is then at its start."""
    head = file.read(10).ljust(10, b"\0")
    size = 10 + sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    file.seek(size if head[:3] == b"ID3" else 0)
    begin = file.read(1 << 16)
    file.seek(0)
    return begin


def _kept(file: IO[bytes]) -> float:
    """The part of its samples that a WAV file has, by its header; FFmpeg goes by the size of the file. 1 for other files."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    head, kept = file.read(12), 1.0
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        for _ in range(_MOST_CHUNKS):
            chunk = file.read(8)
            size, at = int.from_bytes(chunk[4:], "little"), file.tell()
            if len(chunk) < 8 or chunk[:4] == b"data":
                kept = (end - at) / size if end - at < size < _UNKNOWN_SIZE else 1.0
                break
            file.seek(at + size + size % 2)
    file.seek(0)
    return kept or 1.0


def read_samples(file: IO[bytes], name: str) -> Iterator[np.ndarray]:
    """Samples of a pipe while they arrive, float32: 16,000 per second of one channel, 16-bit numbers, as raw bytes or WAV.

    Raises:
        ValueError: the first bytes are those of another format.
    """
    import numpy as np

    head, left = _exactly(file, 12), _NO_END
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        left = _skip_header(file, name)
        head = b""
    elif _frame_bytes(head):
        head += _exactly(file, _FRAME_BYTES)
    if head.startswith(_CONTAINERS) or head[4:8] == b"ftyp" or _has_frames(head):
        raise ValueError(f"{name} is a compressed recording; expected {_RAW}")
    pending = head
    while True:
        whole = len(pending) // 2 * 2
        if whole:
            yield np.frombuffer(pending[:whole], "<i2").astype(np.float32) / np.float32(32768)
        more: bytes = file.read1(min(1 << 16, left)) if left else b""  # type: ignore[attr-defined]
        if not more:
            return
        left -= len(more)
        pending = pending[whole:] + more


def _has_frames(data: bytes) -> bool:
    """Whether frames of MP3 or AAC follow each other from the first byte on."""
    at = 0
    for _ in range(_FRAMES):
        size = _frame_bytes(data[at : at + 6])
        if not size:
            return False
        at += size
    return True


def _frame_bytes(head: bytes) -> int:
    """The size of the frame of MPEG audio or AAC (ADTS) with this header of 6 bytes; 0: it is none."""
    if len(head) < 6 or head[0] != 0xFF or head[1] < 0xE0:
        return 0
    if head[1] & 0xF6 == 0xF0:  # AAC
        size = (head[3] & 3) << 11 | head[4] << 3 | head[5] >> 5
        return size if size >= 7 else 0
    version, layer, kbits, rate = head[1] >> 3 & 3, 4 - (head[1] >> 1 & 3), head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer == 4 or kbits in (0, 15) or rate == 3:
        return 0
    hertz = (44100, 48000, 32000)[rate] >> {3: 0, 2: 1, 0: 2}[version]  # MPEG 1, 2 and 2.5
    bits = 1000 * _KBITS[version == 3, layer][kbits - 1]
    padding = head[2] >> 1 & 1
    if layer == 1:
        return 4 * (12 * bits // hertz + padding)
    return (72 if layer == 3 and version != 3 else 144) * bits // hertz + padding


def _exactly(file: IO[bytes], count: int) -> bytes:
    """Reads this many bytes, or fewer if the file ends before."""
    data = b""
    while len(data) < count and (more := file.read(count - len(data))):
        data += more
    return data


def _skip_header(file: IO[bytes], name: str) -> int:
    """Reads the chunks of a WAV file before its samples; returns the number of bytes of the samples."""
    known = False
    while True:
        chunk = _exactly(file, 8)
        size = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data":
            if not known:
                raise ValueError(f"{name} is a damaged WAV file: it has no format before its samples")
            return size if 0 < size < _UNKNOWN_SIZE else _NO_END
        if len(chunk) < 8 or size > _MOST_CHUNK:
            raise ValueError(f"{name} is a damaged WAV file: it has no samples after its header")
        content = _exactly(file, size + size % 2)
        if chunk[:4] == b"fmt ":
            known = True
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16].ljust(16, b"\0"))
            if kind not in _PCM or (channels, rate, bits) != (1, SAMPLE_RATE, 16):
                raise ValueError(
                    f"{name} has {channels} channels with {rate} samples per second of {bits} bits, format {kind}; "
                    f"expected {_RAW}"
                )


class _Seekable:
    """A file for FFmpeg. Damaged headers make FFmpeg seek to offsets that no file has; it expects an error code."""

    def __init__(self, file: IO[bytes]):
        self.read, self.tell, self._seek = file.read, file.tell, file.seek

    def seek(self, offset: int, whence: int) -> int:
        try:
            return self._seek(offset, whence)
        except (OSError, ValueError, OverflowError):
            return -errno.EINVAL


def _resampled(frames: Iterator[Any], name: str, check: Callable[[], None] | None) -> Iterator[np.ndarray]:
    """Frames as float32 [1 or 2 channels, samples]; more than two channels are mixed by FFmpeg."""
    av = import_av()
    resampler: Any = None
    last = None
    for frame in frames:
        if check is not None:
            check()
        rate, channels = frame.sample_rate, frame.layout.nb_channels
        if not _RATES[0] <= rate <= _RATES[1]:
            raise ValueError(f"{name} has {rate} samples per second; expected {_RATES[0]} to {_RATES[1]}")
        if not 1 <= channels <= _MOST_CHANNELS:
            raise ValueError(f"{name} has {channels} channels; expected 1 to {_MOST_CHANNELS}")
        kind = (rate, frame.layout.name, frame.format.name)
        if kind != last:
            if resampler is not None:
                yield from (part.to_ndarray() for part in resampler.resample(None))
            resampler = av.AudioResampler(format="fltp", layout="stereo" if channels == 2 else "mono", rate=SAMPLE_RATE)
            last = kind
        yield from (part.to_ndarray() for part in resampler.resample(frame))
    if resampler is not None:
        yield from (part.to_ndarray() for part in resampler.resample(None))


def _one_channel(pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Mixes pieces [1 or 2 channels, samples] to [samples]."""
    import numpy as np

    held: list[np.ndarray] = []  # a second of two channels
    for piece in pieces:
        if held and (len(piece) == 1 or sum(each.shape[1] for each in held) >= SAMPLE_RATE):
            yield _mixed(np.concatenate(held, axis=1))
            held = []
        if len(piece) == 1:
            yield piece[0]
        else:
            held.append(piece)
    if held:
        yield _mixed(np.concatenate(held, axis=1))


def _mixed(pair: np.ndarray) -> np.ndarray:
    """Mixes two channels: their mean, or the louder one if the mean loses most of their energy."""
    import numpy as np

    mean: np.ndarray = pair.mean(axis=0)
    energies = np.square(pair).sum(axis=1)
    if np.square(mean).sum() < _SAME * energies.mean():
        mean = pair[energies.argmax()]
    return mean


def limit_allocations() -> None:
    """Limits the size of each piece of memory that FFmpeg's libraries allocate in this process.

    For programs that read untrusted files: headers of a few bytes can ask for gigabytes.
    """
    core = import_av()._core
    with contextlib.suppress(AttributeError, OSError):  # on Windows a module hides the libraries that it links
        ctypes.CDLL(core.__file__).av_max_alloc(ctypes.c_size_t(_MOST_ALLOCATED))


def import_av() -> Any:
    """Imports PyAV, the binding of FFmpeg's libraries; raises ImportError with instructions if it is missing."""
    try:
        return import_module("av")
    except ImportError as error:
        raise ImportError("recordings are read by the package av, which is not installed: pip install av") from error
