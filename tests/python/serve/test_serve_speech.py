"""`/v1/audio/transcriptions` and `/v1/audio/translations` of a packed Whisper model give lowbit.speech's texts."""

import asyncio
import io
import json
import threading
import time
import uuid
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import lowbit
import numpy as np
import pytest
from needs import need_packages

need_packages("starlette", "uvicorn", "python_multipart", "av")

from lowbit.serve import speech
from lowbit.serve.events import deltas
from lowbit.serve.routes import Limits
from lowbit.speech import load_audio, load_transcriber
from lowbit.speech.subtitles import subtitle
from recordings import container, sound
from served_models import Client, serving
from speech_models import SECOND, tiny_whisper
from starlette.datastructures import UploadFile

PACKED = lowbit.LowBitConfig(bits=4, group_size=32)
SECONDS = (4.3, 0.7, 2.0)


def recording(seconds, seed=0):
    samples = sound(seconds, seed) if seconds else np.zeros(0)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SECOND)
        writer.writeframes((samples * 32767).astype(np.int16).tobytes())
    return file.getvalue()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("heard")
    tiny_whisper(made / "model")
    for number, seconds in enumerate(SECONDS):
        (made / f"{number}.wav").write_bytes(recording(seconds, number))
    return made


@pytest.fixture(scope="module")
def client(directory):
    model = speech.load("whisper", directory / "model", PACKED, cache=None)
    with serving([model], Limits(recording_bytes=200_000)) as (port, _):
        yield Client(port)


@pytest.fixture(scope="module")
def expected(directory):
    """lowbit.speech's text for each recording."""
    transcriber = load_transcriber(directory / "model", PACKED)
    return [transcriber.transcribe(directory / f"{number}.wav", language="en") for number in range(len(SECONDS))]


def form(data, name="talk.wav", **fields):
    """A body and its type."""
    border = uuid.uuid4().hex
    pairs = [(key, each) for key, value in fields.items() for each in (value if isinstance(value, list) else [value])]
    parts = [f'--{border}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n' for key, value in pairs]
    if data is not None:
        parts.append(f'--{border}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n')
    body = "".join(parts).encode() + (b"" if data is None else data + b"\r\n") + f"--{border}--\r\n".encode()
    return body, f"multipart/form-data; boundary={border}"


def send(client, data, path="/v1/audio/transcriptions", **fields):
    body, kind = form(data, **{"language": "en", **fields})
    return client.send(path, body, **{"Content-Type": kind})


def sent(client, data, **fields):
    status, headers, found = send(client, data, **fields)
    assert status == 200, found
    return headers["content-type"], found.decode()


def refused(client, data, status=400, **fields):
    found, _, document = send(client, data, **fields)
    error = json.loads(document)["error"]
    assert found == status, error
    return error["param"], error["message"]


def test_recordings_at_the_same_time_have_their_own_texts(client, directory, expected):
    assert len({each.text for each in expected}) == 3 and len(expected[0].segments) > 3
    with ThreadPoolExecutor(6) as pool:
        numbers = [0, 1, 2] * 4
        files = [(directory / f"{number}.wav").read_bytes() for number in numbers]
        for number, (_, found) in zip(numbers, pool.map(lambda data: sent(client, data), files), strict=True):
            assert json.loads(found)["text"] == expected[number].text


def test_formats(client, directory, expected):
    data, wanted = (directory / "0.wav").read_bytes(), expected[0]
    found = json.loads(sent(client, data, response_format="verbose_json", model="whisper")[1])
    segments = [{"id": number, **asdict(each)} for number, each in enumerate(wanted.segments)]
    assert all(segment.pop("words") is None for segment in segments)
    assert found == {
        "task": "transcribe", "language": "en", "duration": 4.3, "text": wanted.text, "segments": segments,
        "usage": {"type": "duration", "seconds": 5},
    }  # fmt: skip
    assert sent(client, data, response_format="text") == ("text/plain; charset=utf-8", wanted.text + "\n")
    for name, kind in (("srt", "application/x-subrip"), ("vtt", "text/vtt; charset=utf-8")):
        lines = "".join(subtitle(each, number, name) for number, each in enumerate(wanted.segments, 1))
        assert sent(client, data, response_format=name) == (kind, ("WEBVTT\n\n" if name == "vtt" else "") + lines)


def test_options(client, directory):
    """The text before the recording, the temperatures, and the times of words are lowbit.speech's."""
    transcriber = load_transcriber(directory / "model", PACKED)
    data = (directory / "2.wav").read_bytes()
    for fields, options in (
        ({"prompt": "Ada"}, {"prompt": "Ada"}), ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"temperature": "0,1"}, {"temperature": (0, 1)}), ({"temperature": "", "prompt": ""}, {}),
        ({"beams": "3"}, {"beams": 3}),
    ):  # fmt: skip
        expected = transcriber.transcribe(directory / "2.wav", language="en", **options)
        assert json.loads(sent(client, data, **fields)[1])["text"] == expected.text
    expected = transcriber.transcribe(directory / "2.wav", language="en", word_timestamps=True)
    words = [asdict(word) for segment in expected.segments for word in segment.words]
    assert len(words) > 2
    for kinds in (["word"], ["word", "segment"], ["segment"]):
        fields = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": kinds}
        found = json.loads(sent(client, data, **fields)[1])
        assert found.get("words") == (words if "word" in kinds else None)
        assert len(found.get("segments", [])) == (len(expected.segments) if "segment" in kinds else 0)
        assert found["text"] == expected.text


def test_a_stream_has_each_segment(client, directory, expected):
    kind, found = sent(client, (directory / "0.wav").read_bytes(), stream="true")
    *events, end, rest = found.split("\n\n")
    assert kind.startswith("text/event-stream") and (end, rest) == ("data: [DONE]", "")
    *deltas, done = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [each["delta"] for each in deltas] == [segment.text for segment in expected[0].segments]
    assert (done["type"], done["text"]) == ("transcript.text.done", expected[0].text)


def test_translations_and_the_spoken_language(client, directory):
    transcriber = load_transcriber(directory / "model", PACKED)
    wanted = transcriber.transcribe(load_audio(directory / "0.wav"), task="translate")
    body, kind = form((directory / "0.wav").read_bytes(), response_format="verbose_json")
    status, _, found = client.send("/v1/audio/translations", body, **{"Content-Type": kind})
    document = json.loads(found)
    assert (status, document["text"], document["task"]) == (200, wanted.text, "translate")
    assert document["language"] == wanted.language


def test_refusals(client, directory):
    data = (directory / "1.wav").read_bytes()
    assert refused(client, data, language="xx") == ("language", "language is 'xx'; expected en, fi")
    assert refused(client, data, model="other", status=404)[0] == "model"
    assert refused(client, b"no audio", name="talk.wav")[1].startswith("talk.wav is not readable audio")
    assert refused(client, recording(0))[1] == "talk.wav has audio without samples; expected at least one"
    assert refused(client, None) == ("file", "file is missing; expected a recording")
    assert refused(client, data, response_format="xml")[1].endswith("'srt', 'verbose_json' or 'vtt'")
    assert refused(client, data, response_format="srt", stream="true")[1].endswith("expected json with stream")
    assert refused(client, data, stream="yes")[1] == "stream is 'yes'; expected true or false"
    for temperature in ("2", "-1", "warm", "nan", "0,0,0,0,0,0,0,0,0"):
        name, message = refused(client, data, temperature=temperature)
        assert name == "temperature" and "from 0 to 1" in message
    for beams in ("0", "9", "x", "1.5", "-1", "1" * 30):
        name, message = refused(client, data, beams=beams)
        assert (name, message.replace("'", "")) == ("beams", f"beams is {beams}; expected 1 to 8")
    assert refused(client, data, beams="2", temperature="0.5")[0] == "beams"
    assert refused(client, data, prompt="a <|en|> b") == ("prompt", "prompt has the special token <|en|>; expected only text")
    assert refused(client, data, prompt="a" * 10_000)[0] == "prompt"
    words = {"timestamp_granularities[]": ["word"]}
    assert refused(client, data, **words)[1].endswith("expected verbose_json with timestamp_granularities[]")
    words["timestamp_granularities[]"] = ["letter"]
    assert refused(client, data, response_format="verbose_json", **words)[0].startswith("timestamp_granularities")
    assert refused(client, data, voice="alto")[0] == "voice"
    assert refused(client, recording(30), status=413)[1] == "the body has more than 200000 bytes; expected fewer"
    error, _ = client.refused("/v1/audio/transcriptions", {"file": "talk.wav"}, 400)
    assert error["message"].endswith("expected multipart/form-data with a file")
    status, _, found = client.send("/v1/audio/transcriptions", b"--x", **{"Content-Type": "multipart/form-data"})
    assert status == 400 and b"Missing boundary" in found
    body, kind = form(data, model="\\")
    long, _ = form(data, prompt="b" * 100_000)  # punycode takes a minute for it
    for charset in ("undefined", "punycode", "idna"):
        for each in (body, long):
            status, _, found = client.send("/v1/audio/transcriptions", each, **{"Content-Type": f"{kind}; charset={charset}"})
            assert status == 400 and b"its charset is" in found, found
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/tokenize", {"content": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        error, _ = client.refused(path, body, 400)
        assert "the model whisper transcribes recordings" in error["message"]


def test_a_long_recording_is_refused_while_it_is_read(client, directory, monkeypatch):
    monkeypatch.setattr(speech, "MOST_SECONDS", 2)
    message = refused(client, (directory / "0.wav").read_bytes())[1]
    assert message == "talk.wav has more than 2 seconds of audio; expected no more"


def test_invalid_recordings(client, tmp_path, monkeypatch):
    """Files that refer to other files of the server, and more audio than memory can hold."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.wav").write_bytes(recording(1))
    for text in (
        "ffconcat version 1.0\nfile other.wav\n",
        "#EXTM3U\n#EXTINF:9,\nother.wav\n",
        "v=0\r\nm=audio 0 RTP/AVP 0\r\n",
    ):
        assert refused(client, text.encode(), name="a.mp3")[1].startswith("a.mp3 is not readable audio")
    slow = bytearray(recording(1))
    slow[24:28] = (1).to_bytes(4, "little")
    assert refused(client, bytes(slow))[1] == "talk.wav has 1 samples per second; expected 2000 to 768000"
    silence = container(tmp_path / "a.flac", "flac", "flac", frames=100).read_bytes()
    monkeypatch.setattr(speech, "MOST_SECONDS", 5)
    assert refused(client, silence)[1] == "talk.wav has more than 5 seconds of audio; expected no more"


def test_few_recordings_are_in_memory_at_a_time(directory, expected, monkeypatch):
    """Other requests wait, streamed or not."""
    model = speech.load("whisper", directory / "model", PACKED, cache=None)
    held, most, follow = set(), [], speech.Listening.next

    def following(listening):
        held.add(id(listening))
        most.append(len(held))
        if (segments := follow(listening)) is None:
            held.remove(id(listening))
        return segments

    beside, read = [], UploadFile.read

    async def reading(file, size=-1):
        beside.append(len(held))
        return await read(file, size)

    monkeypatch.setattr(speech.Listening, "next", following)
    monkeypatch.setattr(UploadFile, "read", reading)
    with serving([model], Limits(recordings=1)) as (port, server), ThreadPoolExecutor(4) as pool:
        data = (directory / "0.wav").read_bytes()
        found = list(pool.map(lambda n: sent(Client(port), data, stream="true" if n % 2 else "false")[1], range(4)))
        assert (
            sum(
                expected[0].text in json.loads(text.split("data: ")[-2] if "data: " in text else text)["text"] for text in found
            )
            == 4
        )
        assert set(most) == {1} and beside == [0] * 4  # including the bytes of the files
        while server.gate.busy:
            time.sleep(0.01)


def test_a_transcription_does_not_wait_for_a_slow_client():
    """Otherwise its samples would stay in memory."""
    heard = []

    async def hear(tell):
        for text in "abc":
            tell(text)
            await asyncio.sleep(0)
        heard.append("all")
        return type("Listening", (), {"document": lambda self: {"text": "abc"}})()

    async def read():
        events = deltas(hear)
        found = [await anext(events)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert heard == ["all"]
        return [*found, *[each async for each in events]]

    *told, done = asyncio.run(read())
    assert [each["delta"] for each in told] == ["a", "b", "c"] and done["text"] == "abc"


def test_warnings_about_recordings_are_logged(recwarn, caplog):
    """Python would keep the text of each warning, with the name that the client has chosen."""
    for name in ("a", "b\n", "c"):
        asyncio.run(speech.read_recording(recording(1.0)[:16000], name))
    assert not recwarn.list and [record.getMessage()[:6] for record in caplog.records] == ["a has ", "b has ", "c has "]


def test_decoding_ends_when_the_client_has_gone(monkeypatch):
    started, ended = threading.Event(), threading.Event()

    def endless(file, name, most, check, warn):
        started.set()
        try:
            while True:
                check()
                time.sleep(0.001)
        finally:
            ended.set()

    async def leave():
        reading = asyncio.ensure_future(speech.read_recording(b"", "x"))
        while not started.is_set():
            await asyncio.sleep(0.001)
        reading.cancel()

    monkeypatch.setattr("lowbit.speech.audio.read_audio", endless)
    asyncio.run(leave())
    assert ended.wait(60)
