"""Beam search compared with transformers, with a search over whole texts, and with calls of the decoder for each text."""

import numpy as np
import pytest
import torch
import transformers
from lowbit.llm.loading import load_speech_model
from lowbit.speech import Options, SpeechDecoder, Transcriber
from lowbit.speech.beams import log_sum, search
from recordings import sound
from speech_models import POSITIONS, SECOND, tiny_whisper
from test_speech import PACKED
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

SAMPLES = sound(1.0, 3)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    directory = tmp_path_factory.mktemp("beams") / "model"
    tiny_whisper(directory)
    return directory


def opened(directory, ends=(), likely=0.5, config=None, **settings):
    """A transcriber, and transformers' model and features.

    Args:
        ends: tokens whose logits are high where the text shall end; a model with random weights would never end it.
        likely: factor of the sum of these logits.
    """
    model, theirs = load_speech_model(directory, config), load_speech_model(directory)
    for each in (model, theirs):
        vars(each.generation_config).update(settings)
        if ends:
            table = each.model.decoder.embed_tokens.weight.data  # also the output head
            table[each.generation_config.eos_token_id] = table[list(ends)].sum(0) * likely
    processor = transformers.WhisperProcessor.from_pretrained(directory)
    features = processor(SAMPLES, sampling_rate=SECOND, return_tensors="pt").input_features
    return Transcriber(model, processor), theirs, features


def written(transcriber, features, **options):
    """The text of the window."""
    transcriber.decoder.listen(features)
    return transcriber.write(Options(**options), "en", [], (0, 0))


def naive_search(model, features, prompt, beams, timestamps):
    """The rules of OpenAI's Whisper, with a call of transformers' model for all tokens of the texts in each step."""
    settings, end = model.generation_config, model.generation_config.eos_token_id
    rules = [
        SuppressTokensLogitsProcessor(settings.suppress_tokens),
        SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, len(prompt)),
    ]
    if timestamps:
        rules.append(WhisperTimeStampLogitsProcessor(settings, len(prompt)))
    texts, ended = [(0.0, list(prompt))], []
    with torch.no_grad():
        states = model.model.encoder(features)[0]
        while len(ended) < beams and len(texts[0][1]) < model.config.max_target_positions:
            given = torch.tensor([tokens for _, tokens in texts])
            logits = model(encoder_outputs=(states.expand(len(texts), -1, -1),), decoder_input_ids=given).logits[:, -1]
            logprobs = LogitsProcessorList(rules)(given, logits).log_softmax(-1)
            found = [
                (total + value, [*tokens, token])
                for (total, tokens), row in zip(texts, logprobs.tolist(), strict=True)
                for token, value in enumerate(row)
            ]
            texts = []
            for total, tokens in sorted(found, reverse=True):
                (ended if tokens[-1] == end else texts).append((total, tokens))
                if len(texts) == beams:
                    break
    ended = [*ended, *texts][:beams]
    best = max(ended, key=lambda text: text[0] / (len(text[1]) - len(prompt)))[1][len(prompt) :]
    return best[:-1] if best[-1] == end else best


@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize(("seed", "ends"), [(0, [212]), (2, [141])])
@pytest.mark.parametrize("beams", [2, 5])
def test_the_text_is_that_of_a_naive_search(tmp_path, seed, ends, beams, timestamps):
    tiny_whisper(tmp_path / "model", seed)
    transcriber, theirs, features = opened(tmp_path / "model", ends, 0.99)
    settings = theirs.generation_config
    prompt = [settings.decoder_start_token_id, settings.lang_to_id["<|en|>"], settings.task_to_id["transcribe"]]
    expected = naive_search(theirs, features, prompt + [settings.no_timestamps_token_id] * (not timestamps), beams, timestamps)
    found = written(transcriber, features, timestamps=timestamps, beams=beams)
    assert found.tokens == expected != written(transcriber, features, timestamps=timestamps).tokens


@pytest.mark.parametrize(("seed", "ends"), [(0, [203, 105, 112, 32]), (2, [240, 180, 196, 134])])
@pytest.mark.parametrize("beams", [2, 5])
def test_the_text_is_that_of_transformers(tmp_path, seed, ends, beams):
    """Without rules for tokens, after which transformers' log-probabilities no longer add up to 1."""
    tiny_whisper(tmp_path / "model", seed)
    transcriber, theirs, features = opened(tmp_path / "model", ends, suppress_tokens=[], begin_suppress_tokens=[])
    for model in (transcriber.decoder.model, theirs):  # with random weights, they would be likely
        model.model.decoder.embed_tokens.weight.data[model.generation_config.no_timestamps_token_id :] = 0
    expected = theirs.generate(features, language="en", task="transcribe", num_beams=beams, early_stopping=True)[0].tolist()
    end = theirs.generation_config.eos_token_id
    found = written(transcriber, features, timestamps=False, beams=beams)
    assert found.tokens == [token for token in expected if token != end]
    assert len(found.logprobs) == len(found.tokens) + 1  # and the end


@pytest.mark.parametrize("cache", [None, "bfloat16", "int8,int4"])
@pytest.mark.parametrize("planned", [True, False])
def test_beams_are_texts_of_their_own(whisper, cache, planned):
    """In each step their logits and queries have the bits of calls with one text, whichever beams are continued."""
    decoder = SpeechDecoder(load_speech_model(whisper, PACKED), cache)
    decoder.listen(torch.randn(1, 16, 2 * POSITIONS, generator=torch.Generator().manual_seed(0)))
    assert decoder.plan is not None
    decoder.plan = decoder.plan if planned else None
    prompt = list(range(18))  # longer than a panel of keys
    decoder.feed(prompt, 0)
    texts, steps = [prompt], []
    for sources in ([0, 0, 0], [2, 0, 0], [1, 1, 1], [0, 1, 2], [2, 1], [1, 0, 0, 1]):
        texts = [[*texts[source], 30 + 7 * len(texts[0]) + number] for number, source in enumerate(sources)]
        logits = decoder.feed_beams([text[-1] for text in texts], sources, len(texts[0]) - 1)
        steps.append((texts, logits, decoder.queries))
    for texts, logits, queries in steps:
        for text, row, each in zip(texts, logits, queries, strict=True):
            decoder.feed(text[:-1], 0)
            assert np.array_equal(decoder.feed(text[-1:], len(text) - 1), row)
            assert np.array_equal(decoder.queries[0], each)
    assert len({row.tobytes() for _, logits, _ in steps for row in logits}) == sum(len(texts) for texts, _, _ in steps)


def test_facts_of_the_chosen_text(whisper):
    """The log-probabilities and queries are those of a text that is not one of several."""
    transcriber, _, features = opened(whisper, config=PACKED)
    found, decoder = written(transcriber, features, beams=4, word_timestamps=True), transcriber.decoder
    settings = transcriber._settings
    logits = decoder.feed([settings.decoder_start_token_id, transcriber._languages["en"], settings.task_to_id["transcribe"]], 0)
    logprobs, queries = [], []
    for number, token in enumerate([*found.tokens, settings.eos_token_id][: len(found.logprobs)]):
        transcriber._limit(logits, found.tokens[:number], Options())
        logprobs.append(float(logits[token] - log_sum(logits)))
        if 3 + number == decoder.max_length:
            break
        logits = decoder.feed([token], 3 + number)
        queries += decoder.queries
    assert found.logprobs == logprobs and len(found.queries) > 3
    for ours, expected in zip(found.queries, queries):
        assert np.array_equal(ours, expected)
    (window,) = [*transcriber.windows(SAMPLES[:SECOND], language="en", beams=4, word_timestamps=True)][:1]
    assert all(segment.words for segment in window if segment.text)


def test_options(whisper):
    """Temperatures above 0 have no beams. Further beams find likelier texts, or the same."""
    transcriber, theirs, _ = opened(whisper)
    plain = transcriber.transcribe(SAMPLES, language="en")
    several = transcriber.transcribe(SAMPLES, language="en", beams=5)
    assert several != plain and transcriber.transcribe(SAMPLES, language="en", beams=1) == plain
    wish = {"language": "en", "temperature": (0, 0.4), "logprob_threshold": 0.0}
    assert transcriber.transcribe(SAMPLES, beams=5, **wish) == transcriber.transcribe(SAMPLES, **wish)
    assert transcriber.transcribe(SAMPLES, beams=5, **wish | {"logprob_threshold": None}) == several
    for options, message in (
        ({"beams": 0}, "beams is 0; expected 1 to 8"), ({"beams": 9}, "beams is 9; expected 1 to 8"),
        ({"beams": 2, "temperature": 0.5}, "beams is 2 at temperature 0.5; expected 1, or temperature 0 too"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            transcriber.transcribe(SAMPLES, **options)


def test_a_text_as_long_as_the_model_allows(whisper):
    """Without an end, the likeliest of the running texts is taken; a prompt of all positions leaves none."""
    transcriber, _, features = opened(whisper, begin_suppress_tokens=[])
    transcriber._settings.suppress_tokens = [transcriber._settings.eos_token_id]
    found = written(transcriber, features, timestamps=False, beams=3)
    assert len(found.tokens) == len(found.logprobs) == transcriber.decoder.max_length - 4
    assert len(found.queries) == len(found.tokens) - 1
    known = found.tokens[:-1] + [5]
    again = transcriber.write(Options(timestamps=False, beams=3), "en", [], (0, 0), known)
    assert again.tokens == known and again.logprobs == []


def test_the_search_ends_when_as_many_texts_have_ended():
    """Tokens: 0 ends a text, 1 and 2 continue it. Ended texts are compared by the mean, running ones by the sum."""
    chances = {(): (0.3, 0.5, 0.2), (1,): (0.6, 0.3, 0.1), (2,): (0.98, 0.01, 0.01), (1, 1): (0.9, 0.05, 0.05)}
    calls, running = [], [[]]

    def advance(tokens, sources):
        running[:] = [[*running[source], token] for token, source in zip(tokens, sources, strict=True)]
        calls.append([tuple(text) for text in running])
        rows = [chances.get(tuple(text), (0.1, 0.1, 0.8)) for text in running]
        return np.log(np.array(rows, np.float32)), [[] for _ in running]

    first = np.log(np.array(chances[()], np.float32))
    assert search(2, first, [], 0, lambda row, tokens: None, advance).tokens == [1]
    assert calls == [[(1,), (2,)]]  # the texts [] and [1] end, before [2] does
    with pytest.raises(ValueError, match="no token may follow the text"):
        search(2, np.full(3, np.nan, np.float32), [], 0, lambda row, tokens: None, advance)
