"""Speculative decoding: fewer calls of the model, and exactly the text of plain decoding."""

import json
import shutil

import lowbit
import pytest
import torch
import transformers
from command_line import FLOAT, document, invoke
from lowbit import llm
from lowbit.llm.batch import Batch, Text
from lowbit.llm.guessing import Draft, Lookup
from lowbit.llm.loading import load_tokenizer

pytestmark = pytest.mark.first

MAX_LENGTH = 256
REPEATED = "The list contains the following items: one, two, three. " * 3 + "The list contains"
PLAIN = "Return the number of items"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(FLOAT)


@pytest.fixture(scope="module", params=[4, 2])
def decoder(request):
    model = transformers.AutoModelForCausalLM.from_pretrained(FLOAT, dtype=torch.float32).eval()
    config = {"*": lowbit.LinearConfig(request.param, 32), "*embed_tokens": lowbit.EmbeddingConfig(request.param, 32)}
    return llm.Decoder(lowbit.quantize_(model, config), MAX_LENGTH)


@torch.inference_mode()
def test_logits_do_not_depend_on_how_many_tokens_a_call_has(decoder, tokenizer):
    text = torch.tensor([tokenizer(REPEATED)["input_ids"]])
    one_by_one = [decoder(text[:, i : i + 1], torch.tensor([i])) for i in range(text.shape[1])]
    for size in (2, 7, text.shape[1]):
        found = [decoder.all_logits(text[:, i : i + size], torch.tensor([i]))[0] for i in range(0, text.shape[1], size)]
        assert torch.equal(torch.cat(found), torch.cat(one_by_one))


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}],
    ids=["likeliest", "drawn", "penalized"],
)
@pytest.mark.parametrize("prompt", [REPEATED, PLAIN], ids=["repeated", "plain"])
def test_the_text_is_that_of_plain_decoding(decoder, tokenizer, prompt, settings):
    ids = tokenizer(prompt)["input_ids"]
    plain = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, **settings)
    assert plain.decode_calls == plain.decode_steps == 59 and plain.guessed == plain.accepted == 0
    for guesses in (1, 3, 16):
        seen = []
        found = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, guesses=guesses, on_token=seen.append, **settings)
        assert found.tokens == seen == plain.tokens and found.stopped == plain.stopped
        assert found.decode_steps == 59 and found.decode_calls == 59 - found.accepted
        assert found.accepted <= found.guessed <= guesses * found.decode_calls
    if not settings and prompt is REPEATED:
        assert found.accepted > 0  # otherwise nothing was tested


def test_where_a_text_ends(decoder, tokenizer):
    """At a stop token among accepted guesses, at the requested number of tokens, and at the end of the caches."""
    ids = tokenizer(REPEATED)["input_ids"]
    plain = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH).tokens
    for stop in set(plain[5:40]):
        expected = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, stop=[stop])
        found = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, stop=[stop], guesses=8)
        assert (found.tokens, found.stopped, found.decode_steps) == (expected.tokens, "stop", expected.decode_steps)
    for count in (1, 2, 3, 10):
        assert llm.generate(decoder, ids, count, max_length=MAX_LENGTH, guesses=8).tokens == plain[:count]
    filled = (ids * 10)[: MAX_LENGTH - 7]
    expected = llm.generate(decoder, filled, 60, max_length=MAX_LENGTH)
    found = llm.generate(decoder, filled, 60, max_length=MAX_LENGTH, guesses=8)
    assert found.tokens == expected.tokens and len(found.tokens) == 7 and found.stopped == "max_length"


def test_lookup():
    lookup, text = Lookup(), [1, 2, 3, 4, 1, 2]
    assert lookup.guess(text, 5) == [3, 4, 1, 2, 3]  # the ending 1 2 occurred before, and the continuation overlaps itself
    assert lookup.guess(text, 0) == []
    assert lookup.guess([*text, 9], 5) == []  # 2 9 is new
    assert Lookup().guess([], 3) == Lookup().guess([7], 3) == []
    assert Lookup().guess([5, 5, 5], 4) == [5, 5, 5, 5]
    # The longest matching ending counts, at its last occurrence.
    assert Lookup().guess([1, 2, 3, 7, 0, 2, 3, 8, 6, 2, 3, 9, 1, 2, 3], 1) == [7]
    assert Lookup().guess([0, 2, 3, 8, 6, 2, 3, 9, 4, 2, 3], 1) == [9]


def make_small(max_length: int = MAX_LENGTH):
    """A draft of only the model's first layer, at 3 bits; with the model's head it guesses some tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FLOAT, dtype=torch.float32).eval()
    del model.model.layers[4:]
    model.config.num_hidden_layers = len(model.model.layers)
    config = {"*": lowbit.LinearConfig(3, 32), "*embed_tokens": lowbit.EmbeddingConfig(3, 32)}
    return llm.Decoder(lowbit.quantize_(model, config), max_length)


@pytest.fixture(scope="module")
def small():
    return make_small()


@pytest.mark.more
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 3}], ids=["likeliest", "drawn"])
def test_the_text_with_a_draft_is_that_of_plain_decoding(decoder, small, tokenizer, settings):
    right = 0
    for prompt in (PLAIN, REPEATED):  # in sequence, so that the caches contain the previous text
        ids = tokenizer(prompt)["input_ids"]
        plain = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, **settings)
        for guesses in (1, 4):
            found = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, guesses=guesses, draft=small, **settings)
            assert found.tokens == plain.tokens and found.stopped == plain.stopped
            assert found.decode_calls == 59 - found.accepted and 0 < found.guessed <= guesses * found.decode_calls
            right += found.accepted
    assert right > 0


def test_a_draft_that_is_the_model_itself(small, tokenizer):
    """All its guesses are right, so its caches hold the text, whatever was guessed and rejected before."""
    ids = tokenizer(PLAIN)["input_ids"]
    plain = llm.generate(small, ids, 60, max_length=MAX_LENGTH)
    found = llm.generate(small, ids, 60, max_length=MAX_LENGTH, guesses=3, draft=make_small())
    assert found.tokens == plain.tokens and found.accepted == found.guessed == 44 and found.decode_calls == 15


def test_a_draft_with_other_tokens():
    """It guesses no token that the model lacks, and none after a token that it lacks itself."""

    class Counting:
        vocabulary, max_length = 8, 100

        def __call__(self, tokens, start):
            assert int(tokens.max()) < self.vocabulary
            return torch.eye(8)[(tokens[:, -1] + 1) % 8]

    draft, text = Draft(Counting(), vocabulary=5), [1, 2]
    assert draft.guess(text, 2) == [3, 4] and draft.guess(text, 0) == []
    assert draft.guess(text, 4)[:2] == [3, 4] and max(draft.guess(text, 4)) < 5
    assert draft.guess([*text, 9], 3) == []
    assert draft.guess([*text, 9, 1], 3) == []


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.1}], ids=["likeliest", "drawn"]
)
def test_texts_of_a_batch(decoder, small, tokenizer, settings):
    """A single text uses guesses, several texts do not; each equals plain decoding."""
    prompts = [tokenizer(text)["input_ids"] for text in (REPEATED, PLAIN, REPEATED)]
    counts = [50, 12, 50]
    plain = [llm.generate(decoder, ids, n, max_length=MAX_LENGTH, seed=7, **settings) for ids, n in zip(prompts, counts)]
    guessed = {}
    for draft in (None, small):
        batch = Batch(decoder)
        batch.speculate(5, draft)
        kept = {}
        batch.ending = lambda text, caches: kept.update({text: list(caches.tokens)})
        texts = [Text(ids, count, llm.Sampling(**settings), 7) for ids, count in zip(prompts, counts, strict=True)]
        batch.add(texts[0])
        while len(getattr(texts[0].result, "tokens", [])) < 20:
            batch.step()
        before = texts[0].result.guessed
        batch.add(texts[1])  # starts while the first one runs, and ends before it
        while texts[1] in batch.waiting or texts[1] in batch.running:
            assert texts[0].result.guessed == before and len(texts[0].result.tokens) < 50
            batch.step()
        while batch.step():
            pass
        batch.add(texts[2])
        while batch.step():
            pass
        for text, expected in zip(texts, plain, strict=True):
            found = text.result
            assert (found.tokens, found.stopped, found.decode_steps) == (
                expected.tokens,
                expected.stopped,
                expected.decode_steps,
            )
            assert found.decode_calls == found.decode_steps - found.accepted and found.accepted <= found.guessed
            assert kept[text] == text.prompt + found.tokens[:-1]  # without rejected guesses
        assert texts[1].result.guessed == 0
        guessed[draft] = [before, *(text.result.guessed for text in texts)]
    assert 0 < guessed[small][0] < guessed[small][1] and (settings or guessed[None][3] > 0)


@pytest.mark.more
def test_where_a_text_of_a_batch_ends(decoder, tokenizer):
    """As for a single text: at a stop token among accepted guesses, by a stop function, at the end of the caches, at invalid
    logits."""
    ids = tokenizer(REPEATED)["input_ids"]
    batch = Batch(decoder)
    batch.speculate(8)

    def write(text):
        batch.add(text)
        while batch.step():
            pass
        return text.result

    plain = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH).tokens
    for stop in set(plain[5:40]):
        expected = llm.generate(decoder, ids, 60, max_length=MAX_LENGTH, stop=[stop])
        found = write(Text(ids, 60, stop=frozenset([stop])))
        assert (found.tokens, found.stopped) == (expected.tokens, "stop")
    assert write(Text(ids, 60, until=lambda token: token == plain[30])).tokens == plain[: plain.index(plain[30]) + 1]
    filled = (ids * 10)[: MAX_LENGTH - 7]
    expected = llm.generate(decoder, filled, 60, max_length=MAX_LENGTH)
    found = write(Text(filled, 60))
    assert (found.tokens, found.stopped) == (expected.tokens, "max_length")

    def fail(token):
        if token == plain[20]:
            raise RuntimeError("no more")
        return False

    errors = []
    assert len(write(Text(ids, 60, until=fail, on_error=errors.append)).tokens) == plain.index(plain[20]) + 1
    assert str(errors[0]) == "no more" and not batch.running
    assert write(Text(ids, 60)).tokens == plain


def test_what_a_batch_refuses(decoder):
    batch = Batch(decoder)
    with pytest.raises(ValueError, match="guesses is 0; expected 1 or more"):
        batch.speculate(0)
    with pytest.raises(ValueError, match="the draft's max_length is 32; expected the decoder's 256 or more"):
        batch.speculate(2, make_small(32))


def test_refused_drafts(decoder, small, packed, tmp_path):
    with pytest.raises(ValueError, match="guesses is 0; expected 1 or more with a draft"):
        llm.generate(decoder, [1, 2], 5, max_length=MAX_LENGTH, draft=small)
    with pytest.raises(ValueError, match="the draft's max_length is 32; expected the decoder's 256 or more"):
        llm.generate(decoder, [1, 2], 5, max_length=MAX_LENGTH, guesses=2, draft=make_small(32))
    result = invoke("generate", FLOAT, "--prompt", "a", "--draft", FLOAT, "--guesses", 0)
    assert result.exit_code == 2 and "expected 1 or more with --draft" in result.stderr
    shutil.copytree(packed[0], tmp_path / "other")
    tokens = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokens))
    result = invoke("generate", packed[0], "--prompt", "a", "--draft", tmp_path / "other")
    assert result.exit_code == 1 and "has other tokens than" in result.stderr


def test_refusals(decoder):
    with pytest.raises(ValueError, match="guesses is -1; expected 0 or more"):
        llm.generate(decoder, [1, 2], 5, max_length=MAX_LENGTH, guesses=-1)
    with pytest.raises(ValueError, match="a function gives no logits for guesses; expected a Decoder"):
        llm.generate(lambda tokens, start: decoder(tokens, start), [1, 2], 5, max_length=MAX_LENGTH, guesses=2)
    result = invoke("generate", FLOAT, "--prompt", "a", "--guesses", 4, "--compile")
    assert result.exit_code == 2 and "compiled decoders give no logits for guesses" in result.stderr


def test_the_command(packed):
    target, _ = packed
    plain, found = (
        document(invoke("generate", target, "--prompt", REPEATED, "--max-new-tokens", 40, "--json", "--guesses", guesses))
        for guesses in (0, 6)
    )
    assert found["text"] == plain["text"] and found["tokens"] == plain["tokens"]
    assert plain["decode_calls"] == 39 and found["decode_calls"] == 39 - found["accepted"] < 39
    assert found["guessed"] >= found["accepted"] > 0 and plain["guessed"] == 0
    drafted = document(invoke(
        "generate", target, "--prompt", REPEATED, "--max-new-tokens", 40, "--json", "--draft", target, "--guesses", 3
    ))  # fmt: skip
    assert drafted["tokens"] == plain["tokens"] and drafted["accepted"] == drafted["guessed"] > 20
