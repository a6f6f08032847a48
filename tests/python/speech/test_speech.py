"""Whisper models: transcription compared with transformers' generation, CTranslate2's files, and `lowbit transcribe`."""

import copy
import io
import json
import struct
import tracemalloc
import wave
import zlib

import av
import lowbit
import numpy as np
import pytest
import torch
import transformers
from command_line import document, documented_keys, error, invoke, keys_in
from lowbit.llm.loading import load_speech_model
from lowbit.speech import Segment, SpeechDecoder, Transcriber, audio, load_audio, load_transcriber
from lowbit.speech.audio import read_audio
from lowbit.speech.features import filters, log_mel
from speech_models import POSITIONS, SECOND, save_ctranslate2, tiny_whisper

PACKED = lowbit.LowBitConfig(bits=4, group_size=32)
# Tested alone, because in later packed layers a CPU-dependent difference in the last bit sometimes moves an activation.
CONVOLUTIONS = lowbit.LowBitConfig(conv_bits=8, overrides={"*": None, "*.conv*": {"bits": 8}})


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whisper") / "model"
    tiny_whisper(directory)
    return directory


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Tones that change ten times a second."""
    generator = np.random.default_rng(seed)
    pieces = [
        generator.uniform(0.05, 0.8) * np.sin(2 * np.pi * generator.uniform(100, 4000) * np.arange(SECOND // 10) / SECOND)
        for _ in range(int(seconds * 10))
    ]
    return np.concatenate(pieces).astype(np.float32)


def generated(model, features, **options):
    """The tokens of transformers' generation, without prompt and stop token."""
    result = model.generate(features, language="en", task="transcribe", return_segments=True, **options)
    return [segment["tokens"].tolist() for segment in result["segments"][0]], result["segments"][0]


@pytest.mark.parametrize(
    ("config", "seed"),
    [(None, 0), (None, 1), (None, 2), (PACKED, 0), (CONVOLUTIONS, 0)],
    ids=["float, 0", "float, 1", "float, 2", "packed", "with convolutions"],
)
def test_the_tokens_are_those_of_transformers(whisper, tmp_path, config, seed):
    """With float layers. The last bits of torch's float operators depend on the CPU and the number of rows, so int8 activations
    may change the token at near ties. With packed layers the logits are compared instead, as in the constructor of
    Transcriber."""
    tiny_whisper(tmp_path / "model", seed)
    model = load_speech_model(tmp_path / "model", config)
    processor = transformers.WhisperProcessor.from_pretrained(tmp_path / "model")
    transcriber = Transcriber(copy.deepcopy(model), processor)
    samples = sound(4.3, seed)
    several = 0
    for seconds, timestamps in ((1.0, True), (4.3, True), (0.7, True), (1.0, False)):
        part = samples[: int(seconds * SECOND)]
        more = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
        inputs = processor(part, sampling_rate=SECOND, return_tensors="pt", return_attention_mask=True, **more)
        masks = {"attention_mask": inputs.attention_mask} if seconds > 1 else {}
        if not timestamps:  # a model with random weights would write timestamps anyway
            last = model.config.vocab_size
            model.generation_config.suppress_tokens = [1, 2, *range(257, last)]
            transcriber = Transcriber(copy.deepcopy(model), processor)
        result = transcriber.transcribe(part, language="en", timestamps=timestamps)
        with torch.no_grad():
            if timestamps:
                tokens, segments = generated(model, inputs.input_features, return_timestamps=True, **masks)
                end = model.generation_config.eos_token_id
                tokens = [[token for token in one if token != end] for one in tokens]
                # transformers keeps both timestamps of a window's last pair.
                times = model.generation_config.no_timestamps_token_id
                tokens = [one[:-1] if min(one[-2:]) > times and len(one) > 1 else one for one in tokens]
                if seconds < 1:  # transformers continues in the silence after the recording
                    assert len(result.segments) <= len(tokens)
                    tokens = tokens[: len(result.segments)]
                starts = [min(float(segment["start"]), len(part) / SECOND) for segment in segments[: len(tokens)]]
                if config is None:
                    assert [segment.start for segment in result.segments] == pytest.approx(starts, abs=0.006)
            else:
                output = model.generate(inputs.input_features, language="en", task="transcribe")[0].tolist()
                tokens = [[token for token in output if token != model.generation_config.eos_token_id]]
        if config is None:
            assert [segment.tokens for segment in result.segments] == tokens
        assert all(segment.tokens for segment in result.segments) and result.segments
        several += len(tokens) > 1
        assert result.text == "".join(segment.text for segment in result.segments).strip()
        assert (result.duration, result.language) == (len(part) / SECOND, "en")
    assert several


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8,int4", "int4"])
def test_a_text_in_several_calls_has_the_same_bits(whisper, cache):
    decoder = SpeechDecoder(load_speech_model(whisper, PACKED), cache)
    decoder.listen(torch.randn(1, 16, 2 * POSITIONS))
    tokens = torch.randint(0, 200, (1, 12))
    whole = decoder(tokens, torch.tensor([0]))
    decoder.listen(torch.randn(1, 16, 2 * POSITIONS))
    assert not torch.equal(decoder(tokens, torch.tensor([0])), whole)  # the audio matters
    torch.manual_seed(0)
    decoder.listen(torch.randn(1, 16, 2 * POSITIONS))
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        last = decoder(tokens[:, begin:end], torch.tensor([begin]))
    again = decoder(tokens, torch.tensor([0]))
    assert torch.equal(last, again)


@pytest.mark.parametrize("config", [None, PACKED, CONVOLUTIONS], ids=["float", "packed", "with convolutions"])
@pytest.mark.parametrize("cache", [None, "int8,int4"])
def test_the_encoder_runs_by_its_plan(whisper, config, cache):
    """Its results are those of its own code up to rounding, and a changed model runs as it is."""
    decoder = SpeechDecoder(load_speech_model(whisper, config), cache)
    assert decoder.listen_refusal is None and decoder.listen_plan is not None
    features = torch.randn(1, 16, 2 * POSITIONS, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = decoder.model.model.encoder(features)[0]
        difference = (decoder.listen_plan.listen(features) - expected).norm() / expected.norm()
    # Convolutions and GELU have another rounding, which int8 activations amplify.
    assert difference < (0.01 if config is PACKED else 1e-5)
    decoder.listen(features)
    by_plan, last = (decoder(torch.arange(5)[None], torch.tensor([0])) for _ in range(2))
    assert torch.equal(by_plan, last)
    plan, decoder.listen_plan = decoder.listen_plan, None
    decoder.listen(features)
    own = decoder(torch.arange(5)[None], torch.tensor([0]))
    assert (own - by_plan).std() < 0.1 * own.std()
    decoder.listen_plan = plan
    with torch.no_grad():
        decoder.model.model.encoder.layer_norm.bias += 1
    decoder.listen(features)
    assert decoder.listen_plan is None and "has been changed" in decoder.listen_refusal
    assert not torch.equal(decoder(torch.arange(5)[None], torch.tensor([0])), own)


def test_the_language_is_detected(whisper):
    model = load_speech_model(whisper)
    processor = transformers.WhisperProcessor.from_pretrained(whisper)
    samples = sound(1.0)
    features = processor(samples, sampling_rate=SECOND, return_tensors="pt").input_features
    token = int(model.detect_language(input_features=features, generation_config=model.generation_config)[0])
    languages = {number: name.strip("<|>") for name, number in model.generation_config.lang_to_id.items()}
    assert Transcriber(model, processor).transcribe(samples).language == languages[token]


def test_settings_that_the_tokenizer_completes(whisper):
    """Fine-tuned models often have a generation_config with little more than stop tokens."""
    model, samples = load_speech_model(whisper), sound(2.0)
    expected = load_transcriber(whisper).transcribe(samples)
    for name in ("no_timestamps_token_id", "lang_to_id", "task_to_id", "is_multilingual"):
        delattr(model.generation_config, name)
    transcriber = Transcriber(model, transformers.WhisperProcessor.from_pretrained(whisper))
    assert transcriber.languages == ["en", "fi"]
    assert transcriber.transcribe(samples) == expected
    assert not hasattr(model.generation_config, "lang_to_id")  # the model's config is unchanged


def test_refusals(whisper):
    transcriber = load_transcriber(whisper)
    for audio, message in (
        (np.zeros(0, np.float32), "audio has no samples; expected at least one"),
        (np.zeros((2, 100), np.float32), r"audio is float32 \[2, 100\]; expected floats \[samples\], one channel"),
        (np.zeros(100, np.int16), r"audio is int16 \[100\]; expected floats"),
        (np.full(100, np.nan, np.float32), "audio has samples up to nan; expected finite numbers from -1 to 1"),
        (sound(1) * 32767, "audio has samples up to 2.*; expected finite .*, as 16-bit integers divided by 32768"),
    ):
        with pytest.raises(ValueError, match=message):
            transcriber.transcribe(audio)
    with pytest.raises(ValueError, match="language is 'xx'; expected en, fi"):
        transcriber.transcribe(sound(1), language="xx")
    with pytest.raises(ValueError, match="task is 'sing'; expected transcribe or translate"):
        transcriber.transcribe(sound(1), task="sing")
    with pytest.raises(ValueError, match="the recording has 2.0 seconds; expected at most 1 without timestamps"):
        transcriber.transcribe(sound(2), timestamps=False)
    decoder = transcriber.decoder
    with pytest.raises(ValueError, match=r"features is \[1, 16, 99\]; expected \[1, 16, 100\]"):
        decoder.listen(torch.zeros(1, 16, 99))
    fresh = SpeechDecoder(load_speech_model(whisper))
    with pytest.raises(RuntimeError, match="has no audio"):
        fresh(torch.tensor([[1]]), torch.tensor([0]))
    fresh.listen(torch.zeros(1, 16, 2 * POSITIONS))
    with pytest.raises(
        IndexError, match="start is 31 and there are 2 tokens; expected a start from 0 and no more than the max_length of 32"
    ):
        fresh(torch.tensor([[1, 2]]), torch.tensor([31]))
    with pytest.raises(ValueError, match="cache is 'int2'; expected one of 'float32'"):
        SpeechDecoder(load_speech_model(whisper), "int2")
    with pytest.raises(ValueError, match="the model is Linear; expected WhisperForConditionalGeneration"):
        SpeechDecoder(torch.nn.Linear(2, 2))
    changed = load_speech_model(whisper)
    changed.model.decoder.layers[1].self_attn.scaling *= 3
    changed.model.decoder.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ValueError, match="gives other logits than lowbit's decoder"):
        SpeechDecoder(changed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_ctranslate2_import(whisper, tmp_path, dtype):
    save_ctranslate2(whisper, tmp_path / "ct2", dtype)
    summary = lowbit.import_checkpoint(tmp_path / "ct2", tmp_path / "imported")
    assert summary.format == "CTranslate2"
    expected = load_speech_model(whisper)
    model = load_speech_model(tmp_path / "imported")
    if dtype is torch.int8:
        assert {tensor.kind for tensor in summary.tensors if tensor.source == "int8"} == {"exact"}
        assert isinstance(model.model.encoder.layers[0].fc1, lowbit.nn.Linear)
        for name in ("model.encoder.layers.1.self_attn.v_proj", "model.decoder.layers.0.encoder_attn.k_proj", "proj_out"):
            weight = expected.get_submodule(name).weight
            packed = model.get_submodule(name)
            scales = 127 / weight.abs().amax(1, keepdim=True).clamp(min=1e-6)
            values = (weight * scales).round()
            unpacked = lowbit.unpack(packed.packed_weight)
            assert torch.equal(unpacked.codes.int() - 128, values.int())
            assert torch.equal(unpacked.scales, 1 / scales)
    else:
        state = expected.to(dtype).float().state_dict()
        assert {name: torch.equal(value, state[name]) for name, value in model.state_dict().items()} == dict.fromkeys(
            state, True
        )
    settings, wanted = model.generation_config, expected.generation_config
    for name in (
        "suppress_tokens",
        "begin_suppress_tokens",
        "lang_to_id",
        "task_to_id",
        "no_timestamps_token_id",
        "eos_token_id",
    ):
        assert getattr(settings, name) == getattr(wanted, name), name
    transcriber = load_transcriber(tmp_path / "imported")
    assert transcriber.transcribe(sound(1), language="fi").segments


def test_ctranslate2_files_that_are_damaged(whisper, tmp_path):
    save_ctranslate2(whisper, tmp_path / "good", torch.float16)
    data = (tmp_path / "good/model.bin").read_bytes()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tmp_path / "good" / name).read_bytes())

    def refused(content: bytes, message: str) -> None:
        (tmp_path / "model.bin").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            lowbit.import_checkpoint(tmp_path, tmp_path / "out")

    refused(b"\x07" + data[1:], "has the version 7 of CTranslate2's format; expected one of 5, 6")
    refused(data.replace(b"WhisperSpec", b"WhisperSpek"), "is CTranslate2's WhisperSpek; lowbit imports WhisperSpec")
    refused(data.replace(b"encoder/conv1/bias", b"encoder/conv3/bias"), "has no encoder/conv1/bias")
    refused(data.replace(b"layer_1/", b"layer_2/"), "has the layers 0, 2 in its encoder; expected 0, 1, ...")
    generator = np.random.default_rng(0)
    for cut in [*range(60), *generator.integers(60, len(data), 100)]:
        refused(data[:cut], "ends|cut|would take|has no|layers")
    for _ in range(200):  # any change in the first kilobyte gives one sentence or an equal model
        at, byte = int(generator.integers(1000)), bytes([generator.integers(256)])
        (tmp_path / "model.bin").write_bytes(data[:at] + byte + data[at + 1 :])
        try:
            lowbit.importing.open_source(tmp_path)
        except (ValueError, OSError) as failed:
            assert len(str(failed)) < 500
    (tmp_path / "model.bin").write_bytes(data)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"tokenizer.json does not exist; expected Whisper's tokenizer next to the model"
    ):
        lowbit.import_checkpoint(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(("seconds", "bins"), [(0.3, 80), (1.0, 16), (7.3, 80), (31.7, 128)])
def test_features_are_those_of_transformers(monkeypatch, seconds, bins):
    """Of whole recordings and of pieces, loud and quiet ones."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=1)
    assert np.abs(filters(bins) - extractor.mel_filters).max() < 1e-15
    samples = sound(seconds)
    samples[SECOND : 3 * SECOND] *= 1e-4
    samples[5 * SECOND :] *= 0.01
    more = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
    expected = extractor(samples, sampling_rate=SECOND, return_tensors="np", **more).input_features[0]
    found = log_mel(samples, bins, 100)
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-4  # torch's float32 in quiet bins
    monkeypatch.setattr("lowbit.speech.features._BLOCK", 33)
    assert np.abs(log_mel(samples, bins, 100) - found).max() < 1e-6


def test_other_features_are_refused(whisper):
    processor = transformers.WhisperProcessor.from_pretrained(whisper)
    processor.feature_extractor.n_fft = 512
    with pytest.raises(ValueError, match="the feature extractor has n_fft 512; expected 400"):
        Transcriber(load_speech_model(whisper), processor)


def write_wave(path, samples, rate=SECOND, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


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


def container(path, format, codec, layout="mono", frames=1, rate=SECOND, video=False, options=None):
    """An FFmpeg file with frames of a tenth of a second of zeros."""
    with av.open(path, "w", format=format, options=options) as made:
        if video:
            picture = made.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p")
        stream = made.add_stream(codec, rate=rate, layout=layout)
        if video:
            made.mux(picture.encode(av.VideoFrame(32, 32, "yuv420p")))
            made.mux(picture.encode(None))
        for number in range(frames):
            frame = av.AudioFrame(stream.codec_context.format, layout, rate // 10)
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            frame.sample_rate, frame.pts = rate, number * (rate // 10)
            made.mux(stream.encode(frame))
        made.mux(stream.encode(None))
    return path


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


def test_the_command(whisper, tmp_path, monkeypatch):
    write_wave(tmp_path / "a.wav", sound(2.4))
    write_wave(tmp_path / "b.wav", sound(0.5, seed=1))
    files = (tmp_path / "a.wav", tmp_path / "b.wav")
    result = invoke("transcribe", whisper, *files, "--language", "en", "--json")
    said = document(result)
    assert set(said) | keys_in(said["recordings"]) == documented_keys("transcribe")
    transcriber = load_transcriber(whisper)
    for path, recording in zip(files, said["recordings"], strict=True):
        expected = transcriber.transcribe(path, language="en")
        assert (recording["text"], recording["language"], recording["duration"]) == (
            expected.text, "en", expected.duration
        )  # fmt: skip
        assert [Segment(**segment) for segment in recording["segments"]] == expected.segments
    segments = transcriber.transcribe(files[0], language="en").segments
    lines = invoke("transcribe", whisper, files[0], "--language", "en", "--format", "lines").stdout
    assert lines.startswith(f"[{segments[0].start:.2f} - {segments[0].end:.2f}] ")
    subtitles = invoke("transcribe", whisper, files[0], "--language", "en", "--format", "srt").stdout
    assert subtitles.startswith("1\n00:00:00,")
    assert " --> 00:00:0" in subtitles
    assert invoke("transcribe", whisper, files[0], "--language", "en", "--format", "vtt").stdout.startswith(
        "WEBVTT\n\n00:00:00."
    )
    words = [
        word
        for segment in transcriber.transcribe(files[0], language="en", word_timestamps=True).segments
        for word in segment.words
    ]
    lines = invoke("transcribe", whisper, files[0], "--language", "en", "--words", "--format", "lines").stdout
    assert lines.count("\n[") + 1 == len(words) and lines.startswith(f"[{words[0].start:.2f} - {words[0].end:.2f}] ")
    told = ("--prompt", "Ada", "--previous", "--temperature", "0,1", "--logprob", "0", "--no-speech", "1", "--seed", "3")
    options = {"prompt": "Ada", "condition_on_previous_text": True, "temperature": (0, 1), "logprob_threshold": 0.0, "seed": 3}
    for words, chosen in ((told, options), (("--beams", "4"), {"beams": 4})):
        (recording,) = document(invoke("transcribe", whisper, files[1], *words, "--json"))["recordings"]
        expected = transcriber.transcribe(files[1], **chosen)
        assert (recording["text"], recording["language_probability"]) == (expected.text, expected.language_probability)
    assert "beams is 9; expected 1 to 8" in error(invoke("transcribe", whisper, files[0], "--beams", "9"))
    assert "expected numbers from 0 to 1, separated by commas" in error(
        invoke("transcribe", whisper, files[0], "--temperature", "x")
    )
    assert "language is 'xx'; expected en, fi" in error(invoke("transcribe", whisper, files[0], "--language", "xx"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64
        )
    ).save_pretrained(tmp_path / "llama")
    assert "has model_type 'llama'; expected 'whisper' or 'moonshine' or 'parakeet_ctc'" in error(
        invoke("transcribe", tmp_path / "llama", files[0])
    )
