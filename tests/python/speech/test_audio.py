"""Audio files: their formats, damaged and hostile ones, and how channels are mixed."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from command_line import error, invoke
from lowbit.speech import audio, load_audio
from lowbit.speech.audio import read_audio
from recordings import container, sound, write_wave
from speech_models import SECOND


def test_audio_files(tmp_path):
    samples = sound(1.0)
    write_wave(tmp_path / "a.wav", samples)
    assert np.array_equal(load_audio(tmp_path / "a.wav"), (samples * 32767).astype("<i2") / np.float32(32768))
    write_wave(tmp_path / "stereo.wav", np.repeat(np.repeat(samples, 3), 2), 48000, 2)
    loaded = load_audio(tmp_path / "stereo.wav")
    assert loaded.dtype == np.float32 and abs(len(loaded) - SECOND) < 20
    write_wave(tmp_path / "empty.wav", samples[:0])
    with pytest.raises(ValueError, match="empty.wav has audio without samples"):
        load_audio(tmp_path / "empty.wav")
    (tmp_path / "text.wav").write_text("no audio at all")
    with pytest.raises(ValueError, match="text.wav is not readable audio"):
        load_audio(tmp_path / "text.wav")
    with pytest.raises(FileNotFoundError):
        load_audio(tmp_path / "missing.wav")


REFERRING = {
    "concat": "ffconcat version 1.0\nfile other.wav\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nother.wav\n#EXT-X-ENDLIST\n",
    "hls of a protocol": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:other.wav\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT1S">'
    '<Period><AdaptationSet mimeType="audio/wav"><Representation id="0" bandwidth="9"><BaseURL>other.wav</BaseURL>'
    "</Representation></AdaptationSet></Period></MPD>",
    "sdp": "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 0 RTP/AVP 0\r\n",
    "whole names": "ffconcat version 1.0\nfile '{}/other.wav'\n",
}


@pytest.mark.parametrize("kind", REFERRING)
@pytest.mark.parametrize("name", ["a.mp3", "a.wav", "a.sdp", "a.m3u8"])
def test_recordings_that_refer_to_other_files_are_refused(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    write_wave(tmp_path / "other.wav", sound(0.5))
    text = REFERRING[kind].format(tmp_path)
    (tmp_path / name).write_text(text)
    for read in (lambda: load_audio(name), lambda: read_audio(io.BytesIO(text.encode()), name)):
        with pytest.raises(ValueError, match=f"{name} is not readable audio: .*; expected WAV, FLAC, MP3"):
            read()
    assert f"{name} is not readable audio" in error(invoke("transcribe", tmp_path, name))


def test_formats_that_are_allowed_open_nothing_else():
    """No name in the list is an FFmpeg demuxer that opens files, sockets or devices."""
    assert not set(audio._FORMATS.split(",")) & {
        "concat", "concatf", "dash", "ffmetadata", "hls", "imf", "image2", "image2pipe", "lavfi", "rtp", "rtsp", "sap", "sdp",
        "tee", "vobsub", "webm_dash_manifest", "applehttp", "tty", "alsa", "x11grab", "fbdev", "video4linux2", "v4l2", "oss",
    }  # fmt: skip
    assert not {kind for kind in audio._FORMATS.split(",") if kind.endswith("_pipe")}


@pytest.mark.parametrize(
    ("format", "codec"),
    [
        ("wav", "pcm_s16le"), ("wav", "pcm_f32le"), ("wav", "adpcm_ms"), ("w64", "pcm_s24le"), ("flac", "flac"), ("mp3", "mp3"),
        ("ogg", "libopus"), ("ogg", "flac"), ("mp4", "aac"), ("mp4", "alac"), ("matroska", "libopus"), ("webm", "libopus"),
        ("adts", "aac"), ("aiff", "pcm_s16be"), ("mpegts", "mp2"), ("caf", "pcm_s16le"), ("au", "pcm_s16be"), ("avi", "mp3"),
        ("wv", "wavpack"),
    ],
)  # fmt: skip
def test_formats_of_recordings(tmp_path, format, codec):
    rate = 48000 if codec == "libopus" else SECOND
    samples = load_audio(container(tmp_path / "a", format, codec, frames=10, rate=rate))
    assert abs(len(samples) - SECOND) < 4000 and np.abs(np.diff(samples)).max() < 1e-3


@pytest.mark.parametrize("opened", [lambda path: open(path, "rb"), lambda path: io.BytesIO(path.read_bytes())])
def test_headers_that_point_nowhere(tmp_path, capfd, opened):
    """FFmpeg seeks to the end of a chunk whose size is wrong; PyAV prints a traceback if the file's seek raises."""
    path = container(tmp_path / "a.w64", "w64", "pcm_s16le", frames=10)
    whole = path.read_bytes()
    at = whole.index(b"data") + 16
    for size in (1 << 48, (1 << 62) + 24, (1 << 63) - 1, -(1 << 62), -1):
        path.write_bytes(whole[:at] + struct.pack("<q", size) + whole[at + 8 :])
        with opened(path) as file:
            try:
                assert len(read_audio(file, "a.w64"))
            except ValueError as refused:
                assert str(refused).startswith("a.w64 is not readable audio: ")
    assert "Traceback" not in capfd.readouterr().err


def test_headers_that_ask_for_much_memory(tmp_path):
    """A header may be compressed to a thousandth of its size."""

    def atom(kind, *parts):
        return struct.pack(">I", 8 + sum(map(len, parts))) + kind + b"".join(parts)

    def compressed(more):
        header = moov[8:] + atom(b"free", bytes(more))
        packed = struct.pack(">I", len(header) + 8) + zlib.compress(atom(b"moov", header))
        return io.BytesIO(rest + atom(b"moov", atom(b"cmov", atom(b"dcom", b"zlib"), atom(b"cmvd", packed))))

    data = container(tmp_path / "a", "mov", "pcm_s16le", frames=10).read_bytes()
    at = data.index(b"moov") - 4
    rest, moov = data[:at], data[at:]
    audio.limit_allocations()
    assert len(read_audio(compressed(1000), "a.mov"))
    with pytest.raises(ValueError, match="a.mov is not readable audio: Cannot allocate memory"):
        read_audio(compressed(70 << 20), "a.mov")


def test_the_sound_of_a_video(tmp_path):
    """The video stream is not decoded."""
    assert len(load_audio(container(tmp_path / "a", "mp4", "aac", frames=10, video=True))) > SECOND / 2
    with pytest.raises(ValueError, match="has audio of the codec tta, which is not supported; expected WAV"):
        load_audio(container(tmp_path / "a", "matroska", "tta"))


def test_an_unknown_codec(tmp_path):
    file = container(tmp_path / "a", "wav", "pcm_s16le")
    data = bytearray(file.read_bytes())
    data[20:22] = b"\x77\x77"  # the number of the codec
    file.write_bytes(data)
    with pytest.raises(ValueError, match="has audio of the codec unknown, which is not supported; expected WAV"):
        load_audio(file)


@pytest.mark.parametrize(("format", "codec"), [("wav", "pcm_s16le"), ("aiff", "pcm_s16be"), ("matroska", "pcm_s16le")])
def test_a_recording_that_is_cut_off(tmp_path, recwarn, format, codec):
    path = container(tmp_path / "a", format, codec, frames=10)
    assert len(load_audio(path)) == SECOND and not recwarn.list
    path.write_bytes(path.read_bytes()[: SECOND // 2])
    with pytest.warns(
        UserWarning, match="a has 0.2. of the 1.00 seconds that its header announces: it is cut off, damaged, or"
    ):
        assert SECOND / 6 < len(load_audio(path)) < SECOND / 3


@pytest.mark.parametrize(("format", "codec"), [("wav", "adpcm_ms"), ("mp3", "mp3")])
def test_a_recording_with_its_length_in_the_header_that_is_cut_off(tmp_path, recwarn, format, codec):
    """The number of samples of a WAV file with a fact chunk; an MP3 with the mark Info."""
    path = container(tmp_path / "a", format, codec, frames=40)
    assert len(load_audio(path)) >= 4 * SECOND and not recwarn.list
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(UserWarning, match=r"a has [12]\.\d+ of the 4\.[012]\d seconds that its header announces"):
        load_audio(path)


def test_frames_without_a_length_that_are_cut_off(tmp_path, recwarn):
    """The last frame tells, unless the cut is between two frames. Half a frame of AAC cannot be decoded."""
    for format, codec, options in (("mp3", "mp3", {"write_xing": "0"}), ("adts", "aac", {})):
        path = container(tmp_path / "a", format, codec, frames=40, options=options)
        whole = path.read_bytes()
        for tag in (b"", b"TAG" + bytes(125)):
            path.write_bytes(whole + tag)
            assert len(load_audio(path)) >= 4 * SECOND and not recwarn.list
        path.write_bytes(whole[:-1])
        if format == "mp3":
            with pytest.warns(UserWarning, match=r"a ends with \d+ of the \d+ bytes of a frame: it is cut off or damaged"):
                load_audio(path)
        else:
            with pytest.raises(ValueError, match="a is not readable audio"):
                load_audio(path)


def test_a_mark_behind_a_large_picture(tmp_path):
    path = container(tmp_path / "a", "mp3", "mp3", frames=40)
    data = path.read_bytes()
    end = 10 + (data[8] << 7 | data[9])
    assert data[:3] == b"ID3" and data[6:8] == bytes(2) and b"Info" in data[end : end + 100]
    tag = b"ID3\x04\0\0\0\x06\0\0" + b"TXXX\0\x05\x7f\x76\0\0" + bytes((6 << 14) - 10)
    path.write_bytes((tag + data[end:])[: len(tag) + (len(data) - end) // 2])
    with pytest.warns(UserWarning, match=r"a has [12]\.\d+ of the 4\.[012]\d seconds that its header announces"):
        load_audio(path)


def test_whole_recordings_without_a_known_length(tmp_path, recwarn):
    """AMR has no length; sox writes these sizes into WAV files when it writes to a pipe."""
    (tmp_path / "a.amr").write_bytes(b"#!AMR\n" + 50 * (b"\x3c" + bytes(31)))  # frames of 20 ms with 12.2 kbit/s
    assert len(load_audio(tmp_path / "a.amr")) == SECOND
    write_wave(tmp_path / "a.wav", sound(1.0))
    data = (tmp_path / "a.wav").read_bytes()
    for size in (0x7FFFEFFC, 0x7FFFEFFF):
        (tmp_path / "a.wav").write_bytes(data[:40] + struct.pack("<I", size) + data[44:])
        assert len(load_audio(tmp_path / "a.wav")) == SECOND
    assert not recwarn.list


@pytest.mark.parametrize("sample", [np.nan, np.inf, 3000.0])
def test_a_recording_whose_samples_are_no_sound(tmp_path, sample):
    path = container(tmp_path / "a", "wav", "pcm_f32le", frames=10)
    data = path.read_bytes()
    path.write_bytes(data[:-4000] + struct.pack("<f", sample) + data[-3996:])
    with pytest.raises(ValueError, match=f"a has samples up to {sample:g}; expected finite numbers from -1 to 1"):
        load_audio(path)


def test_the_check_of_samples_copies_nothing():
    samples = np.zeros(1 << 20, np.float32)
    tracemalloc.start()
    try:
        audio.check_samples(samples, "a")
        assert tracemalloc.get_traced_memory()[1] < samples.nbytes / 2
    finally:
        tracemalloc.stop()
    samples[5] = -17.0
    with pytest.raises(ValueError, match="a has samples up to 17; expected"):
        audio.check_samples(samples, "a")


def test_limits_of_recordings(tmp_path):
    samples = sound(0.2)
    for rate in (1, 1999, 800_000, 2**31 - 1):
        write_wave(tmp_path / "a.wav", samples, rate)
        with pytest.raises(ValueError, match=f"a.wav has {rate} samples per second; expected 2000 to 768000"):
            load_audio(tmp_path / "a.wav")
    for rate in (2000, 768_000):
        write_wave(tmp_path / "a.wav", samples, rate)
        assert abs(len(load_audio(tmp_path / "a.wav")) - len(samples) * SECOND / rate) < 20
    write_wave(tmp_path / "a.wav", np.repeat(samples, 33), SECOND, 33)
    with pytest.raises(ValueError, match="a.wav has 33 channels; expected 1 to 32"):
        load_audio(tmp_path / "a.wav")
    container(tmp_path / "a.flac", "flac", "flac", frames=600)
    assert (tmp_path / "a.flac").stat().st_size < 50_000  # a minute
    with pytest.raises(ValueError, match="a.flac has more than 2 seconds of audio; expected no more"):
        load_audio(tmp_path / "a.flac", 2)
    seen = []
    with pytest.raises(ValueError, match="a.flac has more than 2 seconds"), open(tmp_path / "a.flac", "rb") as file:
        read_audio(file, "a.flac", 2, lambda: seen.append(1))
    assert len(seen) < 40  # decoded frames; the rest is skipped
    assert len(load_audio(tmp_path / "a.flac")) == 60 * SECOND


def test_a_header_that_promises_large_frames(tmp_path, monkeypatch):
    monkeypatch.setattr(audio, "_MOST_PER_FRAME", 1000)
    with pytest.raises(ValueError, match="a is not readable audio"):
        load_audio(container(tmp_path / "a", "flac", "flac"))


def test_channels_in_opposite_phase(tmp_path):
    """Their mean is silence, so the louder one is used. Other channels are averaged."""
    one, other = sound(2.5), sound(2.5, 1)
    write_wave(tmp_path / "one.wav", one)
    wanted = load_audio(tmp_path / "one.wav")
    for right in (-one, -0.9 * one):
        write_wave(tmp_path / "two.wav", np.stack([one, right], 1).ravel(), SECOND, 2)
        assert np.array_equal(load_audio(tmp_path / "two.wav"), wanted)
    silent = np.zeros_like(one)
    for left, right in ((one, one), (one, other), (one, silent), (silent, silent)):
        write_wave(tmp_path / "two.wav", np.stack([left, right], 1).ravel(), SECOND, 2)
        mean = ((left * 32767).astype("<i2") / np.float32(32768) + (right * 32767).astype("<i2") / np.float32(32768)) / 2
        assert np.array_equal(load_audio(tmp_path / "two.wav"), mean)
    # Separately for each second
    write_wave(tmp_path / "two.wav", np.stack([one, np.where(np.arange(len(one)) < SECOND, one, -one)], 1).ravel(), SECOND, 2)
    assert np.abs(load_audio(tmp_path / "two.wav")[2 * SECOND :]).max() > 0.04
