"""Penalties, bias, log-probabilities and stop strings, compared with plain definitions, alone and with other texts."""

import json
import math
import random

import pytest
import torch
from command_line import FLOAT, PROMPT, document, invoke
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.penalties import Drawer, Repetitions, token_logprobs
from lowbit.llm.sampling import SamplingArguments, random_generator
from lowbit.llm.stopping import BREAKERS

ALL = {
    "temperature": 0.9, "top_k": 200, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.4,
    "frequency_penalty": 0.3, "dry_multiplier": 0.8, "dry_allowed_length": 1, "logit_bias": {5: 3.0, 300: -2.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(packed):
    return load_model(packed[0])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FLOAT)


def changed(logits, prompt=(), text=(), **settings):
    """The logits from which the next token is sampled."""
    drawer = Drawer(llm.Sampling(**settings), prompt, 0)
    for token in text:
        drawer.append(token)
    return torch.as_tensor(drawer._penalized(logits))


@pytest.mark.parametrize("min_p", [1e-3, 0.05, 0.4, 1.0])
def test_min_p_is_that_of_transformers(min_p):
    from transformers import MinPLogitsWarper

    logits = torch.randn(60, generator=torch.Generator().manual_seed(4)) * 2
    left = (MinPLogitsWarper(min_p)(None, logits[None]) > -math.inf)[0].nonzero()[:, 0].tolist()
    generator = random_generator(1)
    found = {llm.sample(logits, 1.0, None, None, generator, min_p) for _ in range(3000)}
    assert found <= set(left) and (min_p < 0.05 or found == set(left))
    for top_k, top_p in ((3, None), (None, 0.5)):  # both apply
        fewer = {llm.sample(logits, 1.0, top_k, top_p, generator, min_p) for _ in range(300)}
        assert fewer <= {llm.sample(logits, 1.0, top_k, top_p, generator) for _ in range(3000)} & set(left)


def test_presence_and_frequency_count_the_text_alone():
    """OpenAI's definition: mu[j] - c[j] * frequency - (c[j] > 0) * presence, with counts c of the new tokens."""
    logits = torch.randn(10, generator=torch.Generator().manual_seed(5))
    text = [3, 7, 3, 3]
    counts = torch.bincount(torch.tensor(text), minlength=10).float()
    for presence, frequency in ((0.5, 0.0), (0.0, 0.25), (-1.0, 0.75)):
        expected = logits - counts * frequency - (counts > 0) * presence
        found = changed(logits, [1, 3], text, presence_penalty=presence, frequency_penalty=frequency)
        torch.testing.assert_close(found, expected)
    assert torch.equal(changed(logits, [1, 3], [], presence_penalty=1.0), logits)


def test_bias_comes_before_the_repetition_penalty():
    logits = torch.tensor([1.0, -1.0, 0.5])
    before = logits.clone()
    found = changed(logits, [0, 1], logit_bias={0: 2.0, 2: -0.25}, repetition_penalty=2.0)
    assert found.tolist() == [1.5, -2.0, 0.25] and torch.equal(logits, before)


def repetitions(text, least, breakers):
    """DRY's lengths by definition: each place where a token follows a copy of the text's ending."""
    found = {}
    for at in range(len(text) - 1):
        length = 0
        while length <= at and text[at - length] == text[len(text) - 1 - length] and text[at - length] not in breakers:
            length += 1
        token = text[at + 1]
        if length >= least and token not in breakers:
            found[token] = max(length, found.get(token, 0))
    return found


@pytest.mark.parametrize("breakers", [(), (2,), (0, 3)])
def test_dry_follows_its_definition(breakers):
    chance = random.Random(6)
    grown, text, several = Repetitions([], breakers), [], 0
    for _ in range(300):
        text.append(chance.choice([0, 0, 1, 2, 3]))
        grown.append(text[-1])
        for least in (1, 2, 4):
            expected = repetitions(text, least, breakers)
            assert grown.lengths(least) == expected
            several += len(expected) > (0 if breakers else 1)
    assert several > 20
    text.append(1)
    for least in (1, 2):
        expected = repetitions(text, least, breakers)
        settings = {"dry_multiplier": 0.5, "dry_base": 1.5, "dry_allowed_length": least, "dry_breakers": breakers}
        off = [0.0 if token not in expected else -0.5 * 1.5 ** (expected[token] - least) for token in range(4)]
        torch.testing.assert_close(changed(torch.zeros(4), text, **settings), torch.tensor(off))
        assert torch.equal(changed(torch.zeros(4), text[:9], text[9:], **settings), changed(torch.zeros(4), text, **settings))


def test_a_long_repetition_leaves_logits_finite():
    found = changed(torch.zeros(2), [1] * 2000, dry_multiplier=1e20, dry_base=10.0)
    assert found[0] == 0 and -math.inf < found[1] < -1e20
    assert llm.sample(found, 1.0, None, None, random_generator(0)) == 0


def test_breakers_are_tokens_with_their_text(tokenizer):
    found = llm.breakers(tokenizer)
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    assert set(found) == {token for token, text in texts.items() if any(each in text for each in BREAKERS)}
    assert 3 < len(found) < len(tokenizer) // 2
    assert llm.breakers(tokenizer, ["zzzzzz"]) == ()


def test_every_setting_is_a_keyword():
    assert SamplingArguments.__annotations__.keys() == llm.Sampling.__annotations__.keys()


def test_a_text_is_the_same_alone_among_others_and_with_guesses(model, tokenizer):
    prompts = [tokenizer(text)["input_ids"] for text in (PROMPT, "one, two, one, two, one,", "Raises", "The list")]
    settings = ALL | {"dry_breakers": llm.breakers(tokenizer)}
    decoder = llm.Decoder(model, 128)
    expected = [llm.generate(decoder, each, 12, seed=3 + i, logprobs=2, **settings) for i, each in enumerate(prompts)]
    found = llm.generate_batch(decoder, prompts, 12, seed=3, logprobs=2, at_once=3, rows=5, **settings)
    assert [(each.tokens, each.logprobs) for each in found] == [(each.tokens, each.logprobs) for each in expected]
    draft = llm.Decoder(load_model(FLOAT), 128)
    guessed = llm.generate(decoder, prompts[1], 12, seed=4, guesses=3, draft=draft, **settings)
    assert guessed.tokens == expected[1].tokens and guessed.accepted
    for left in ("min_p", "presence_penalty", "frequency_penalty", "logit_bias"):
        fewer = {name: value for name, value in settings.items() if name != left}
        others = llm.generate_batch(decoder, prompts, 12, seed=3, **fewer)
        assert [each.tokens for each in others] != [each.tokens for each in expected], left  # each parameter has an effect


def test_dry_ends_a_repetition(model, tokenizer):
    prompt = tokenizer("The list contains the items: one, two, three. " * 3 + "The list contains")["input_ids"]
    decoder = llm.Decoder(model, 128)
    (repeated,) = llm.generate(decoder, prompt, 1).tokens
    assert repeated in Repetitions(prompt, ()).lengths(3)
    assert llm.generate(decoder, prompt, 1, dry_multiplier=8.0).tokens != [repeated]


@torch.inference_mode()
def test_logprobs_are_those_of_the_models_logits(model, tokenizer):
    decoder = llm.Decoder(model, 64)
    prompt = tokenizer(PROMPT)["input_ids"]
    found = llm.generate(decoder, prompt, 6, temperature=2.0, top_k=5, logit_bias={9: 3.0}, logprobs=3)
    logits = decoder.all_logits(torch.tensor([prompt + found.tokens]), torch.tensor([0]))[0, len(prompt) - 1 : -1]
    for row, token, said in zip(logits, found.tokens, found.logprobs, strict=True):
        expected = row.double().log_softmax(0).float()
        assert said.token == token and said.logprob == float(expected[token])
        assert [value for _, value in said.top] == expected.topk(3).values.tolist()
        assert said == token_logprobs(row, token, 3)
    assert llm.generate(decoder, prompt, 2, logprobs=0).logprobs[0].top == []
    assert llm.generate(decoder, prompt, 2).logprobs == []


def cut(text, strings):
    """The text before the stop string that ends first, or the longest of several; found character by character."""
    for end in range(len(text) + 1):
        hits = [string for string in strings if text[:end].endswith(string)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


def test_text_ends_at_the_string_that_ends_first(tokenizer):
    chance = random.Random(7)
    text = "def names(self):\n    return the number of the names, naïve … 東京 the end."
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = tokenizer("x\n", add_special_tokens=False)["input_ids"]
    whole = llm.TextUntil(tokenizer, prompt)
    assert not any(map(whole, tokens))
    text = whole.finish()
    ended = 0
    for _ in range(300):
        strings = []
        for _ in range(chance.randint(0, 3)):
            at = chance.randrange(len(text))
            strings.append(text[at : at + chance.randint(1, 9)] + chance.choice(["", "", "?"]))
        pieces = []
        found = llm.TextUntil(tokenizer, prompt, strings, pieces.append)
        ends = [found(token) for token in tokens]
        expected, stopped = cut(text, strings)
        assert (found.finish(), any(ends), "".join(pieces)) == (expected, stopped, expected), strings
        assert not any(map(found.text.__contains__, strings)) and "" not in pieces
        ended += stopped
    assert 50 < ended < 290


def test_a_generation_ends_at_a_string(model, tokenizer):
    decoder = llm.Decoder(model, 64)
    prompts = [tokenizer(text)["input_ids"] for text in (PROMPT, "The list contains")]
    texts = [llm.TextUntil(tokenizer, prompt) for prompt in prompts]
    whole = [llm.generate(decoder, prompt, 12, until=text) for prompt, text in zip(prompts, texts, strict=True)]
    assert {each.stopped for each in whole} == {"max_new_tokens"}
    strings = [text.finish()[9:12] for text in texts]
    found = [llm.TextUntil(tokenizer, prompt, [string]) for prompt, string in zip(prompts, strings, strict=True)]
    ended = llm.generate_batch(decoder, prompts, 12, until=found)
    for text, until, string, each, all_ in zip(texts, found, strings, ended, whole, strict=True):
        assert until.finish() == text.text[: text.text.find(string)]
        assert each.stopped == "until" and each.tokens == all_.tokens[: len(each.tokens)] != all_.tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_p": -0.1}, "min_p is -0.1; expected 0 to 1"),
        ({"min_p": math.nan}, "min_p is nan; expected 0 to 1"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf; expected a number from -1e[+]30 to 1e[+]30"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; expected a number"),
        ({"dry_multiplier": -1}, "dry_multiplier is -1; expected a number from 0 to"),
        ({"dry_base": 0.5}, "dry_base is 0.5; expected a number from 1 to"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0; expected 1 or more"),
        ({"dry_breakers": ["\n"]}, "dry_breakers is a tuple; expected token ids|dry_breakers is a list; expected token ids"),
        ({"logit_bias": [3]}, "logit_bias is a list; expected token ids and their numbers"),
        ({"logit_bias": {3: math.inf}}, "logit_bias of token 3 is inf; expected a number from"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias is a dict; expected token ids"),
        ({"logit_bias": {2048: 1.0}}, "logit_bias has token 2048; expected 0 to 2047"),
        ({"logprobs": -1}, "logprobs is -1; expected 0 or more"),
        ({"logprobs": 1.5}, "logprobs is 1.5; expected a whole number, 0 or more"),
        ({"top_k": 1.5}, "top_k is 1.5; expected a whole number, 1 or more"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length is 1.5; expected a whole number, 1 or more"),
        ({"temperature": "1"}, "temperature is '1'; expected a number, 0 or more"),
        ({"temperature": None}, "temperature is None; expected a number, 0 or more"),
        ({"min_p": None}, "min_p is None; expected a number, 0 to 1"),
        ({"dry_base": "2"}, "dry_base is '2'; expected a number from 1 to"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty is 1e-320; expected a number from 1e-30"),
        ({"logit_bias": {3: "1"}}, "logit_bias of token 3 is '1'; expected a number from"),
        ({"seed": 1.5}, "seed is 1.5; expected a whole number|seed is 1.5; expected one number"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(model, settings, message):
    decoder = llm.Decoder(model, 64)
    for generate in (
        lambda: llm.generate(decoder, [3], 2, **settings),
        lambda: llm.generate_batch(decoder, [[3]], 2, **settings),
    ):
        with pytest.raises(ValueError, match=message):
            generate()


def test_bad_stop_strings_are_refused(model, tokenizer):
    with pytest.raises(ValueError, match="stop has ''; expected texts of at least one character"):
        llm.TextUntil(tokenizer, [3], ["a", ""])
    with pytest.raises(ValueError, match="until has 1 functions; expected 2, one for each prompt"):
        llm.generate_batch(llm.Decoder(model, 64), [[3], [4]], 2, until=[None])


def test_the_commands_options_are_the_librarys(packed, model, tokenizer, tmp_path):
    prompt = tokenizer(PROMPT)["input_ids"]
    options = (
        "--temperature", 0.9, "--top-k", 200, "--top-p", 0.95, "--min-p", 0.02, "--repetition-penalty", 1.1,
        "--presence-penalty", 0.4, "--frequency-penalty", 0.3, "--dry-multiplier", 0.8, "--dry-allowed-length", 1,
        "--logit-bias", "5=1.5", "--logit-bias", "300=-2", "--seed", 3, "--max-new-tokens", 12,
    )  # fmt: skip
    settings = ALL | {"dry_breakers": llm.breakers(tokenizer)}
    decoder = llm.Decoder(model, 64)
    written = llm.TextUntil(tokenizer, prompt)
    expected = llm.generate(decoder, prompt, 12, seed=3, logprobs=1, until=written, **settings)
    text = written.finish()
    said = document(invoke("generate", packed[0], "--prompt", PROMPT, *options, "--logprobs", 1, "--json"))
    assert (said["tokens"], said["text"], said["stopped"]) == (expected.tokens, text, "max_new_tokens")
    assert said["logprobs"] == json.loads(json.dumps([vars(each) for each in expected.logprobs]))
    stop = ("--stop", text[6:9], "--stop", "never comes")
    result = invoke("generate", packed[0], "--prompt", PROMPT, *options, *stop)
    assert result.stdout == text[: text.find(text[6:9])] + "\n", result.stderr
    (tmp_path / "prompts.txt").write_text(PROMPT)
    result = invoke("generate", packed[0], "--prompts", tmp_path / "prompts.txt", *options, *stop)
    line = json.loads(result.stdout)
    assert (line["text"], line["stopped"], line["logprobs"]) == (text[: text.find(text[6:9])], "until", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--min-p", 0.1), "--min-p"),
        (("--dry-base", 2), "--dry-base"),
        (("--logit-bias", "x=1"), "'x=1'; expected a token id and a number, as in 42=-5"),
        (("--logprobs", 1), "it requires --json or --prompts"),
        (("--presence-penalty", "nan"), "nan is not a finite number"),
    ],
)
def test_the_command_refuses_options(packed, options, message):
    result = invoke("generate", packed[0], "--prompt", PROMPT, *options)
    assert result.exit_code == 2 and message in " ".join(result.stderr.replace("│", " ").split())
