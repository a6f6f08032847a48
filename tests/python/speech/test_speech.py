"""Whisper models: transcription compared with transformers' generation, CTranslate2's files, and `lowbit transcribe`."""

import copy
import json

import lowbit
import numpy as np
import pytest
import torch
import transformers
from command_line import document, documented_keys, error, invoke, keys_in
from lowbit.llm.loading import load_speech_model
from lowbit.speech import Segment, SpeechDecoder, Transcriber, load_transcriber
from lowbit.speech.features import filters, log_mel
from recordings import sound, write_wave
from speech_models import POSITIONS, SECOND, save_ctranslate2, tiny_whisper

PACKED = lowbit.LowBitConfig(bits=4, group_size=32)
# Tested alone, because in later packed layers a CPU-dependent difference in the last bit sometimes moves an activation.
CONVOLUTIONS = lowbit.LowBitConfig(conv_bits=8, overrides={"*": None, "*.conv*": {"bits": 8}})


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whisper") / "model"
    tiny_whisper(directory)
    return directory


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
