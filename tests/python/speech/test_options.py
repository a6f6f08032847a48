"""Prompts, thresholds, temperatures, languages and word times compared with transformers, and by plans."""

import functools
import json
import zlib

import lowbit
import numpy as np
import pytest
import torch
import transformers
from lowbit.checkpoint import quantize_checkpoint
from lowbit.llm.loading import load_speech_model
from lowbit.speech import Options, load_transcriber
from lowbit.speech.planned_speech import PlannedTranscriber, open_transcriber
from lowbit.speech.speech_options import temperatures
from lowbit.speech.words import _warped, words
from recordings import sound
from speech_models import POSITIONS, SECOND, tiny_whisper
from transformers.models.whisper import generation_whisper, tokenization_whisper

SAMPLES = sound(4.3)
SHORT = SAMPLES[: 2 * SECOND]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("options") / "model"
    tiny_whisper(directory)
    return directory


@pytest.fixture(scope="module")
def transcriber(whisper):
    return load_transcriber(whisper)


@pytest.fixture(scope="module")
def theirs(whisper):
    """transformers' model and processor."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper, attn_implementation="eager").eval()
    processor = transformers.WhisperProcessor.from_pretrained(whisper)
    model.generation_config.prev_sot_token_id = processor.tokenizer.convert_tokens_to_ids("<|startofprev|>")
    return model, processor


def segments_of(theirs, samples=SAMPLES, **options):
    model, processor = theirs
    more = {"truncation": False, "padding": "longest"} if len(samples) > SECOND else {}
    inputs = processor(samples, sampling_rate=SECOND, return_tensors="pt", return_attention_mask=True, **more)
    found = model.generate(
        inputs.input_features, attention_mask=inputs.attention_mask, language="en", task="transcribe", return_segments=True,
        return_timestamps=True, **options,
    )  # fmt: skip
    return found["segments"][0]


@pytest.fixture(scope="module")
def with_times(theirs):
    """Segments of transformers with times of tokens, by the attention heads that give them."""

    @functools.cache
    def found(heads: str) -> list[dict]:
        theirs[0].generation_config.alignment_heads = json.loads(heads)
        try:
            return segments_of(theirs, return_token_timestamps=True)
        finally:
            del theirs[0].generation_config.alignment_heads

    return lambda heads: found(json.dumps(heads))


def without_last_pair(tokens, model):
    """transformers keeps both timestamps of a window's last pair, and the stop token."""
    first = model.generation_config.no_timestamps_token_id + 1
    tokens = [token for token in tokens.tolist() if token != model.generation_config.eos_token_id]
    return tokens[:-1] if len(tokens) > 1 and min(tokens[-2:]) >= first else tokens


@pytest.mark.parametrize("prompt", ["", "Ada, Grace", "a text that is longer than half of the positions"])
@pytest.mark.parametrize("condition", [False, True])
def test_prompts_and_the_text_before(transcriber, theirs, prompt, condition):
    model, processor = theirs
    options = {"condition_on_prev_tokens": condition}
    if prompt:
        most = model.config.max_target_positions // 2 - 1
        ids = processor.get_prompt_ids(prompt, return_tensors="pt")
        options["prompt_ids"] = torch.cat([ids[:1], ids[1:][-most:]])
    expected = [without_last_pair(each["tokens"], model) for each in segments_of(theirs, **options)]
    found = transcriber.transcribe(SAMPLES, language="en", prompt=prompt, condition_on_previous_text=condition)
    assert [segment.tokens for segment in found.segments] == expected
    plain = transcriber.transcribe(SAMPLES, language="en")
    assert (found.text != plain.text) is bool(prompt or condition)


def test_probabilities(transcriber, theirs):
    """Mean log-probabilities, and those of silence: of transformers' scores and logits. Both round in their own way."""
    model, processor = theirs
    segments = segments_of(theirs, logprob_threshold=-1e9, temperature=0.0, return_dict_in_generate=True)
    found = transcriber.transcribe(SAMPLES, language="en").segments
    assert len(found) == len(segments) and len({segment.avg_logprob for segment in found}) > 2
    for ours, each in zip(found, segments, strict=True):
        result = each["result"]
        written = result["sequences"][-len(result["scores"]) :]
        chosen = [scores.log_softmax(-1)[token] for scores, token in zip(result["scores"], written, strict=True)]
        assert ours.avg_logprob == pytest.approx(float(torch.stack(chosen).mean()), abs=1e-4)
    features = processor(SAMPLES[:SECOND], sampling_rate=SECOND, return_tensors="pt").input_features
    with torch.no_grad():
        start = torch.tensor([[model.generation_config.decoder_start_token_id]])
        chances = model(features, decoder_input_ids=start).logits[0, 0].softmax(-1)
    silence = float(chances[model.generation_config.no_timestamps_token_id - 1])
    first = transcriber.transcribe(SAMPLES[:SECOND], language="en").segments[0]
    assert first.no_speech_prob == pytest.approx(silence, abs=1e-5) and 0 < silence < 1
    languages = transcriber.detect_language(SAMPLES[:SECOND])
    tokens = model.generation_config.lang_to_id
    among = chances[[tokens[f"<|{name}|>"] for name in languages]]
    assert list(languages.values()) == pytest.approx((among / among.sum()).tolist(), abs=1e-4)
    heard = transcriber.transcribe(SAMPLES[:SECOND])
    assert [(heard.language, heard.language_probability)] == list(languages.items())[:1]
    assert transcriber.transcribe(SAMPLES[:SECOND], language="en").language_probability is None


HEADS = [[[0, 1], [1, 0]], [[1, 1]]]
NO_HEADS = [None, [[7, 0]], 5, "ab", {"0": 1}, [[0, 1], 5], [["0", "1"]], [[0, 1, 1]], [[0]], [[True, 0]]]


@pytest.mark.parametrize("heads", [*HEADS, *NO_HEADS], ids=str)
def test_times_of_tokens(whisper, theirs, with_times, heads):
    """The positions at which transformers' tokens end; without heads that exist, the upper half of the layers is used."""
    segments = with_times(heads if heads in HEADS else [[1, 0], [1, 1]])
    model = load_speech_model(whisper)
    model.generation_config.alignment_heads = heads
    transcriber = lowbit.speech.Transcriber(model, theirs[1])
    found, ends, follow = [], [], transcriber._token_ends
    transcriber._token_ends = lambda *arguments: ends.append(follow(*arguments)) or ends[-1]
    for window in transcriber.windows(SAMPLES, language="en", word_timestamps=True):
        found += [(at, segment, ends[-1]) for at, segment in zip(np.cumsum([0, *(len(s.tokens) for s in window)]), window)]
    assert len(found) == len(segments) > 3
    several = set()
    for (at, segment, times), each in zip(found, segments, strict=True):
        count = len(segment.tokens)
        offset = float(each["token_timestamps"][0]) - times[at + 1]
        expected = [round(float(time) - offset, 2) for time in each["token_timestamps"][:count]]
        assert [round(time, 2) for time in times[at + 1 : at + count + 1]] == expected
        several |= set(expected)
        assert all(segment.start <= word.start <= word.end <= segment.end for word in segment.words)
        assert "".join(word.word for word in segment.words) == segment.text
        assert all(0 <= word.probability <= 1 for word in segment.words)
    assert len(several) > 5


def test_dynamic_time_warping():
    """The path is the cheapest one, also if costs are equal."""
    generator = np.random.default_rng(0)
    for rows, columns in ((1, 1), (1, 9), (9, 1), (5, 5), (12, 40), (40, 12)):
        for costs in (generator.normal(size=(rows, columns)), generator.integers(0, 2, (rows, columns)).astype(float)):
            text, time = generation_whisper._dynamic_time_warping(costs)
            starts = time[np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)]
            assert _warped(costs).tolist() == starts.tolist()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (" Hello, world (yes)! 3.5% of it...", "en"),
        (' "Größe" -naïve', "de"),
        ("東京。「はい」", "ja"),
        (" don't -x", "en"),
        ("", "en"),
    ],
)
def test_tokens_of_words(theirs, text, language):
    tokenizer = theirs[1].tokenizer
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    names = {"en": "english", "de": "german", "ja": "japanese"}
    expected, _, indices = tokenization_whisper._combine_tokens_into_words(tokenizer, tokens, names[language])
    times = [float(number) for number in range(2 * len(tokens))]
    found = words(tokens, times, [0.5] * len(tokens), lambda part: tokenizer.backend_tokenizer.decode(part), language)
    if language == "en" and "." in text:  # one word for us: a number, and an ellipsis
        assert [word.word for word in found] == [" Hello,", " world", " (yes)!", " 3.5%", " of", " it..."]
        return
    if "'" in text:
        assert [word.word for word in found] == [" don't", " -x"]
        return
    assert [word.word for word in found] == expected
    assert [(word.start, word.end) for word in found] == [(2.0 * part[0], 2.0 * part[-1] + 1) for part in indices]


def test_the_next_temperature_is_tried(transcriber):
    """The temperature rises until a text passes the thresholds; equal seeds give equal texts."""
    plain = transcriber.transcribe(SHORT, language="en")
    wish = {"language": "en", "temperature": (0.0, 0.4, 1.0)}
    lenient = {"compression_ratio_threshold": None, "logprob_threshold": None}
    assert transcriber.transcribe(SHORT, **wish, **lenient) == plain
    strict = transcriber.transcribe(SHORT, **wish, logprob_threshold=0.0)
    assert {segment.temperature for segment in strict.segments} == {1.0} and strict.text != plain.text
    assert transcriber.transcribe(SHORT, **wish, logprob_threshold=0.0) == strict
    assert transcriber.transcribe(SHORT, **wish, logprob_threshold=0.0, seed=1).text != strict.text
    between = transcriber.transcribe(SHORT, **wish, logprob_threshold=None, compression_ratio_threshold=0.9)
    assert all(each.temperature in (0.0, 0.4, 1.0) for each in between.segments)
    assert all(each.compression_ratio <= 0.9 or each.temperature == 1.0 for each in between.segments)
    text = transcriber.transcribe(SAMPLES[:SECOND], language="en", timestamps=False)
    content = text.text.encode()
    assert text.segments[0].compression_ratio == len(content) / len(zlib.compress(content))


def test_windows_of_silence(transcriber):
    options = {"language": "en", "no_speech_threshold": 0.0}
    assert transcriber.transcribe(SHORT, **options, logprob_threshold=None).segments == []
    kept = transcriber.transcribe(SHORT, **options, logprob_threshold=-1e9)  # whose text is likely
    assert kept == transcriber.transcribe(SHORT, language="en")
    assert len(list(transcriber.windows(SHORT, **options, logprob_threshold=None))) == 2


def test_plans_give_the_same(whisper, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBIT_PLAN", "1")
    quantize_checkpoint(whisper, tmp_path / "model", lowbit.LowBitConfig(bits=4, group_size=32))
    by_torch = open_transcriber(tmp_path / "model")
    planned = PlannedTranscriber(tmp_path / "model")
    assert by_torch.decoder.plan is not None
    for options in (
        {"word_timestamps": True}, {"word_timestamps": True, "timestamps": False, "language": "fi"},
        {"prompt": "Ada", "condition_on_previous_text": True, "word_timestamps": True},
        {"temperature": (0, 0.5, 1), "logprob_threshold": -0.1, "language": "en"}, {"no_speech_threshold": 0.01},
        {"beams": 5, "word_timestamps": True, "language": "en"}, {"beams": 3, "prompt": "Ada", "timestamps": False},
    ):  # fmt: skip
        samples = SHORT[: SECOND if "timestamps" in options else None]
        assert planned.transcribe(samples, **options) == by_torch.transcribe(samples, **options)
    assert planned.detect_language(SHORT) == by_torch.detect_language(SHORT)
    by_torch.decoder.plan = by_torch.decoder.listen_plan = None
    found, expected = (each.transcribe(SAMPLES[:SECOND], word_timestamps=True) for each in (planned, by_torch))
    assert found.segments[0].words == pytest.approx(expected.segments[0].words) or found.text != expected.text
    quantized = load_transcriber(tmp_path / "model", cache="int8").transcribe(SAMPLES, word_timestamps=True)
    assert all(segment.words for segment in quantized.segments if segment.text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1.5}, "temperature is 1.5; expected 1 to 8 numbers from 0 to 1"),
        ({"temperature": ()}, r"temperature is \(\); expected 1 to 8"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"logprob_threshold": float("inf")}, "logprob_threshold is inf; expected a finite number"),
        ({"seed": -1}, "seed is -1; expected 0 or more"),
        ({"prompt": "a <|en|> b"}, r"prompt has the special token <\|en\|>; expected only text"),
        ({"language": "xx"}, "language is 'xx'; expected en, fi"),
    ],
)
def test_options_that_are_refused(transcriber, options, message):
    with pytest.raises(ValueError, match=message):
        transcriber.transcribe(SAMPLES, **options)


def test_temperatures_as_text():
    assert temperatures("0,0.5, 1") == (0.0, 0.5, 1.0) == Options(temperature=temperatures("0,0.5, 1")).temperatures
    for text in ("", "warm", "0;1"):
        with pytest.raises(ValueError, match="expected numbers from 0 to 1, separated by commas"):
            temperatures(text)


def test_a_model_without_the_token_for_earlier_text(whisper, transcriber, monkeypatch):
    monkeypatch.setattr(transcriber._settings, "prev_sot_token_id", None)
    for options in ({"prompt": "Ada"}, {"condition_on_previous_text": True}):
        with pytest.raises(ValueError, match=r"the model has no token <\|startofprev\|>"):
            transcriber.transcribe(SAMPLES, **options)
    assert transcriber.transcribe(SAMPLES[: POSITIONS * 320], prompt=" ").segments


def test_the_smallest_temperatures(whisper):
    """Logits divided by them would overflow."""
    transcriber = load_transcriber(whisper)
    least = transcriber.transcribe(SAMPLES[:SECOND], language="en", temperature=(5e-324,))
    assert least.text == transcriber.transcribe(SAMPLES[:SECOND], language="en", temperature=(0.0,)).text
