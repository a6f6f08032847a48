"""Moonshine and Parakeet models: the text is that of transformers with the same weights."""

import json

import lowbit
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from command_line import document, error, invoke
from lowbit.checkpoint import quantize_checkpoint
from lowbit.serve.speech import is_speech
from lowbit.speech import MoonshineTranscriber, ParakeetTranscriber, load_transcriber, pieces
from lowbit.speech.live import Live
from recordings import sound, write_wave
from speech_models import SECOND, save_tokenizer
from tokenizers import Tokenizer

SAMPLES = sound(4.3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of a float model, and a packed one."""
    made = tmp_path_factory.mktemp("moonshine")
    end = save_tokenizer(made / "float")["<|endoftext|>"]
    torch.manual_seed(0)
    config = transformers.MoonshineConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2, decoder_num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=end + 1, decoder_start_token_id=end + 1, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    transformers.MoonshineForConditionalGeneration(config).save_pretrained(made / "float")
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(made / "float")
    (made / "float/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    quantize_checkpoint(made / "float", made / "packed", lowbit.LowBitConfig(bits=4, group_size=32))
    return made


@pytest.mark.parametrize("kind", ["float", "packed"])
def test_the_text_is_that_of_transformers(models, kind):
    transcriber = load_transcriber(models / kind)
    assert type(transcriber) is MoonshineTranscriber and transcriber.languages == [] and is_speech(models / kind)
    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(models / kind).eval()
    packed = sum(type(module) is lowbit.nn.Linear for module in transcriber.model.modules())
    assert packed == (0 if kind == "float" else 33)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / kind)
    texts = set()
    for seconds in (4.3, 1.0, 0.6):
        part = SAMPLES[: int(seconds * SECOND)]
        most = int(seconds * 6.5)
        with torch.no_grad():
            expected = model.generate(torch.from_numpy(part)[None], max_new_tokens=most, do_sample=False)[0]
            states = model(torch.from_numpy(part)[None], decoder_input_ids=expected[None, :-1]).logits[0].log_softmax(-1)
        found = transcriber.transcribe(part)
        (segment,) = found.segments
        assert found.text == tokenizer.decode(expected, skip_special_tokens=True).strip() != ""
        assert segment.avg_logprob == pytest.approx(float(states.gather(1, expected[1:, None]).mean()), abs=1e-3)
        assert (segment.start, segment.end, found.duration) == (0.0, len(part) / SECOND, len(part) / SECOND)
        texts.add(found.text)
    assert len(texts) == 3
    assert transcriber.transcribe(SAMPLES[:10]).duration == 10 / SECOND


PARAKEETS = {"ctc": transformers.ParakeetForCTC, "rnnt": transformers.ParakeetForRNNT, "tdt": transformers.ParakeetForTDT}


@pytest.fixture(scope="module")
def parakeets(tmp_path_factory):
    """A float and a packed model of each kind, with tokens for letters within and at the begin of words."""
    made = tmp_path_factory.mktemp("parakeet")
    letters = [chr(number) for number in range(97, 123)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", *letters, *(f"\u2581{each}" for each in letters)])}
    backend = Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Metaspace()
    encoder = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, subsampling_conv_channels=32,
        num_mel_bins=16, initializer_range=0.2,
    )  # fmt: skip
    options = {"vocab_size": 54, "pad_token_id": 53, "encoder_config": encoder}
    for kind, model in PARAKEETS.items():
        torch.manual_seed(0)
        more = {} if kind == "ctc" else {"blank_token_id": 53, "decoder_hidden_size": 64, "max_symbols_per_step": 2}
        directory = made / kind / "float"
        made_model = model(model.config_class(**options, **more))
        if kind != "ctc":
            made_model.generation_config.decoder_start_token_id = 53
            with torch.no_grad():  # the durations' logits are never the largest, as in a trained model
                made_model.joint.head.weight[54:] *= 0.01
                made_model.joint.head.bias[54:] = torch.arange(len(made_model.joint.head.bias) - 54) / 100 - 9
        made_model.save_pretrained(directory)
        backend.save(str(directory / "tokenizer.json"))
        names = {"tokenizer_class": "ParakeetTokenizer", "pad_token": "<pad>", "unk_token": "<unk>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
        transformers.ParakeetFeatureExtractor(feature_size=16).save_pretrained(directory)
        quantize_checkpoint(directory, made / kind / "packed", lowbit.LowBitConfig(bits=4, group_size=32))
    return made


@pytest.mark.parametrize("weights", ["float", "packed"])
@pytest.mark.parametrize("kind", PARAKEETS)
def test_the_text_of_parakeet(parakeets, kind, weights):
    """Also the times of words: those of the frames with their tokens."""
    directory = parakeets / kind / weights
    transcriber = load_transcriber(directory)
    assert isinstance(transcriber, ParakeetTranscriber) and is_speech(directory)
    packed = sum(type(module) is lowbit.nn.Linear for module in transcriber.model.modules())
    assert packed == 0 if weights == "float" else packed > 18
    model, tokenizer = PARAKEETS[kind].from_pretrained(directory).eval(), transformers.AutoTokenizer.from_pretrained(directory)
    inputs = transformers.ParakeetFeatureExtractor(feature_size=16)(SAMPLES, sampling_rate=SECOND, return_tensors="pt")
    made = model.generate(**inputs, return_dict_in_generate=True)
    steps = made.sequences[0].tolist()
    (segment,) = transcriber.transcribe(SAMPLES).segments
    expected = tokenizer.decode(steps, skip_special_tokens=True, group_tokens=kind == "ctc").strip()
    assert segment.text.strip() == expected != ""
    assert segment.words is None and segment.no_speech_prob is None and (segment.avg_logprob is None) is (kind != "ctc")
    (timed,) = transcriber.transcribe(SAMPLES, word_timestamps=True).segments
    assert timed.text == segment.text == "".join(word.word for word in timed.words) and len(timed.words) > 1
    names = tokenizer.convert_ids_to_tokens(steps)
    if kind == "ctc":
        begins = [n for n, name in enumerate(names) if name.startswith("\u2581") and (n == 0 or name != names[n - 1])]
    else:
        frames = np.cumsum([0, *made.durations[0].tolist()])
        begins = [int(frame) for name, frame in zip(names, frames) if name.startswith("\u2581")]
    assert [word.start for word in timed.words][1:] == [round(n * 0.08, 2) for n in begins][-len(timed.words) + 1 :]
    assert all(0 <= word.start <= word.end <= 4.3 for word in timed.words)
    assert all((word.probability is None) is (kind != "ctc") for word in timed.words)
    assert transcriber.transcribe(SAMPLES[:10]).duration == 10 / SECOND


def test_long_recordings_are_cut_in_a_pause(models, monkeypatch):
    monkeypatch.setattr(pieces, "_WINDOW", 2 * SECOND)
    samples = SAMPLES.copy()
    samples[int(1.4 * SECOND) : int(1.7 * SECOND)] = 0
    transcriber = load_transcriber(models / "float")
    first, *_, last = segments = transcriber.transcribe(samples).segments
    assert 1.45 < first.end < 1.65 and last.end == 4.3 and len(segments) in (3, 4)
    assert [each.end for each in segments[:-1]] == [each.start for each in segments[1:]]
    assert all(each.end - each.start <= 2 for each in segments)
    cut = round(first.end * SECOND)
    assert transcriber.transcribe(samples[:cut]).segments == [first]


def test_refusals(models):
    transcriber = load_transcriber(models / "float")
    for options in (
        {"language": "en"}, {"task": "translate"}, {"timestamps": False}, {"word_timestamps": True}, {"prompt": "Ada"},
        {"condition_on_previous_text": True}, {"temperature": 0.5}, {"no_speech_threshold": 0.5}, {"beams": 2},
    ):  # fmt: skip
        (name,) = options
        with pytest.raises(ValueError, match=rf"{name}s? is .*; expected .* with a Moonshine model"):
            transcriber.transcribe(SAMPLES, **options)
    with pytest.raises(ValueError, match="live transcription needs .*; expected a Whisper model"):
        Live(transcriber)
    with pytest.raises(ValueError, match="cache is 'int8'; expected None with a Moonshine model"):
        load_transcriber(models / "float", cache="int8")
    processor = type("Processor", (), {"feature_extractor": transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)})
    processor.tokenizer = None
    with pytest.raises(ValueError, match="has sampling_rate 8000; expected 16000"):
        MoonshineTranscriber(transcriber.model, processor)
    with pytest.raises(ValueError, match="audio has samples up to nan; expected finite numbers"):
        transcriber.transcribe(np.full(100, np.nan, np.float32))


def test_the_command(models, tmp_path):
    write_wave(tmp_path / "a.wav", SAMPLES)
    expected = load_transcriber(models / "packed").transcribe(tmp_path / "a.wav")
    (recording,) = document(invoke("transcribe", models / "packed", tmp_path / "a.wav", "--json"))["recordings"]
    assert (recording["text"], recording["duration"], recording["language"]) == (expected.text, 4.3, None)
    assert invoke("transcribe", models / "packed", tmp_path / "a.wav").stdout.strip() == expected.text
    refused = error(invoke("transcribe", models / "packed", tmp_path / "a.wav", "--words"))
    assert "word_timestamps is True; expected False with a Moonshine model" in refused


def test_inference_mode_ends_with_each_segment(models, monkeypatch):
    """Code that runs between two segments is not affected."""
    monkeypatch.setattr(pieces, "_WINDOW", SECOND)
    windows = load_transcriber(models / "float").windows(SAMPLES)
    assert next(windows) and not torch.is_inference_mode_enabled()
