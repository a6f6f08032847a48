"""generate: kinds of token inputs, and invalid inputs that it refuses."""

import copy
import pickle
import re
import threading

import lowbit
import numpy
import pytest
import torch
from command_line import FLOAT
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer
from transformers import BatchEncoding

PROMPT = [5, 9, 300, 21, 9, 300]


@pytest.fixture(scope="module")
def decoder():
    return llm.Decoder(load_model(FLOAT), 48)


def test_tokens_of_any_kind(decoder):
    """A tensor's elements do not compare equal to set members, so stop tokens and penalties would not work with them."""
    settings = {"repetition_penalty": 1.5, "guesses": 2, "max_length": 48}
    expected = llm.generate(decoder, PROMPT, 12, **settings).tokens
    stop = expected[4]
    for kind in (list, tuple, torch.tensor, numpy.array, lambda ids: torch.tensor(ids, dtype=torch.int32)):
        assert llm.generate(decoder, kind(PROMPT), 12, **settings).tokens == expected
        found = llm.generate(decoder, PROMPT, 12, stop=kind([1999, stop]), **settings)
        assert (found.tokens, found.stopped) == (expected[: expected.index(stop)], "stop")
        (found,) = llm.generate_batch(decoder, [kind(PROMPT)], 12, repetition_penalty=1.5, stop=kind([stop]))
        assert (found.tokens, found.stopped) == (expected[: expected.index(stop)], "stop")


@pytest.mark.parametrize(
    "kind",
    [
        lambda ids: torch.tensor([ids]),  # return_tensors="pt"
        lambda ids: [ids],
        lambda ids: numpy.array([ids]),
        lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)},
        lambda ids: BatchEncoding({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}),
    ],
)
def test_prompts_as_tokenizers_give_them(decoder, kind):
    expected = llm.generate(decoder, PROMPT, 6).tokens
    assert llm.generate(decoder, kind(PROMPT), 6).tokens == expected
    (found,) = llm.generate_batch(decoder, [kind(PROMPT)], 6)
    assert found.tokens == expected
    assert decoder.read(kind(PROMPT)).tokens == PROMPT


def test_a_chat_template_and_a_batch_of_a_tokenizer(decoder):
    tokenizer = load_tokenizer(FLOAT)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    said = [{"role": "user", "content": "Return the number"}]
    ids = tokenizer.apply_chat_template(said, return_dict=False)
    expected = llm.generate(decoder, ids, 6).tokens
    for options in ({}, {"return_dict": False}, {"return_tensors": "pt"}, {"return_tensors": "pt", "return_dict": False}):
        assert llm.generate(decoder, tokenizer.apply_chat_template(said, **options), 6).tokens == expected
    texts = ["Return the number", "Return"]
    found = llm.generate_batch(decoder, tokenizer(texts), 6)
    assert [each.tokens for each in found] == [llm.generate(decoder, tokenizer(text), 6).tokens for text in texts]


def test_the_default_max_length_is_the_decoders(decoder):
    found = llm.generate(decoder, PROMPT, 100)
    assert (len(found.tokens), found.stopped) == (48 - len(PROMPT), "max_length")
    with pytest.raises(ValueError, match="max_length is None; expected a number of tokens, because a function has no limit"):
        llm.generate(lambda tokens, start: decoder(tokens, start), PROMPT, 4)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("text", "{} is a str; expected token ids, whole numbers"),
        ([1.5], "{} is a list; expected token ids, whole numbers"),
        (7, "{} is a int; expected token ids, whole numbers"),
        (torch.tensor([1.0]), r"{} is a Tensor of shape \[1\]; expected token ids, whole numbers"),
        (torch.tensor([[[1, 2]]]), r"{} is a Tensor of shape \[1, 1, 2\]; expected token ids, whole numbers"),
        ({"ids": PROMPT}, "{} is a dict; expected token ids, whole numbers"),
        (torch.tensor([PROMPT, PROMPT]), r"{} is a batch of 2 texts; expected one \(lowbit.llm.generate_batch takes several\)"),
        ({"input_ids": PROMPT, "attention_mask": [0, 1, 1, 1, 1, 1]}, "{} is padded; expected tokens without padding"),
    ],
)
def test_invalid_prompts(decoder, prompt, message):
    with pytest.raises(ValueError, match=message.format("the prompt")):
        llm.generate(decoder, prompt, 4)
    with pytest.raises(ValueError, match=message.format("prompt 1")):
        llm.generate_batch(decoder, [PROMPT, prompt], 4)
    with pytest.raises(ValueError, match=message.format("the text")):
        decoder.read(prompt)
    if not isinstance(prompt, dict) and "batch" not in message:
        with pytest.raises(ValueError, match=message.format("stop")):
            llm.generate(decoder, PROMPT, 4, stop=prompt)


def test_numbers_that_are_not_whole_are_refused(decoder):
    one, several = (lambda *new, **more: llm.generate(decoder, PROMPT, *new, **more)), llm.generate_batch
    for call, message in (
        (lambda: one(5.5), "max_new_tokens is 5.5; expected a whole number, 1 or more"),
        (lambda: one("5"), "max_new_tokens is '5'; expected a whole number, 1 or more"),
        (lambda: one(4, guesses=1.5), "guesses is 1.5; expected a whole number, 0 or more"),
        (lambda: one(4, cached=1.5), "cached is 1.5; expected a whole number, 0 to 5"),
        (lambda: one(4, max_length=32.5), "max_length is 32.5; expected a whole number, at most 48"),
        (lambda: one(4, seed=None), "seed is None; expected a whole number, a number of 64 bits"),
        (lambda: several(decoder, [PROMPT], 5.5), "max_new_tokens is 5.5; expected a whole number"),
        (lambda: several(decoder, [PROMPT], [5.5]), "a number of max_new_tokens is 5.5; expected a whole number"),
        (lambda: several(decoder, [PROMPT], 4, rows=1.5), "rows is 1.5; expected a whole number, 1 or more"),
        (lambda: llm.Decoder(decoder.model, "256"), "max_length is '256'; expected a whole number, a positive multiple of 16"),
        (lambda: llm.Decoder(decoder.model, 256.0), "max_length is 256.0; expected a whole number, a positive multiple of 16"),
        (lambda: llm.Decoder(None), "the model is a NoneType; expected a causal language model"),
        (lambda: decoder.new_caches(16.0), "length is 16.0; expected a whole number, a positive multiple of 16"),
        (lambda: lowbit.window_length(1.5), "window is 1.5; expected a whole number, 1 or more"),
        (lambda: lowbit.window_length(-1), "window is -1; expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert one(numpy.int64(4), guesses=numpy.int32(1), seed=numpy.int64(3)).tokens == one(4).tokens


def test_a_start_beyond_the_text_is_refused(decoder):
    """The caches have nothing for these positions, so the tokens would be others."""
    fresh = llm.Decoder(copy.deepcopy(decoder).release(), 48)
    for step in (fresh, llm.Step(fresh.run_eagerly, fresh.run_eagerly, fresh)):
        assert step.kept(5) == 0
        with pytest.raises(IndexError, match="start is 5; expected at most 0, the tokens that came before"):
            step(torch.tensor([PROMPT[5:]]), torch.tensor([5]))
        with pytest.raises(IndexError, match="start is 5; expected at most 0"):
            llm.generate(step, PROMPT, 4, cached=5)
    with pytest.raises(IndexError, match="start is 5; expected at most 0"):
        fresh.all_logits(torch.tensor([PROMPT[5:]]), torch.tensor([5]))
    expected = llm.generate(fresh, PROMPT, 4).tokens
    assert fresh.kept(99) == len(PROMPT) + 3
    with torch.inference_mode():
        fresh(torch.tensor([PROMPT[:3]]), torch.tensor([0]))  # the rest of the text is that of another one now
    assert fresh.kept(99) == 3
    with pytest.raises(IndexError, match="start is 5; expected at most 3"):
        llm.generate(fresh, PROMPT, 4, cached=5)
    assert llm.generate(fresh, PROMPT, 4, cached=fresh.begin(fresh.read(PROMPT), PROMPT)).tokens == expected


def test_two_texts_at_once_are_refused(decoder):
    """They would overwrite each other in the decoder's caches, whether another thread or the text's own function begins one."""
    expected = llm.generate(decoder, PROMPT, 6).tokens
    found: list = []

    def other() -> None:
        for call in (
            lambda: llm.generate(decoder, PROMPT[:2], 2),
            lambda: llm.generate(copied, PROMPT[:2], 2, guesses=1, draft=decoder),
            lambda: decoder(torch.tensor([PROMPT]), torch.tensor([0])),
            lambda: decoder.all_logits(torch.tensor([PROMPT]), torch.tensor([0])),
            lambda: decoder.begin(read, PROMPT),
        ):
            try:
                call()
            except RuntimeError as error:
                found.append(str(error))

    def in_a_thread(token: int) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    copied, read = copy.deepcopy(decoder), decoder.read(PROMPT)
    assert llm.generate(decoder, PROMPT, 6, on_token=in_a_thread).tokens == expected
    assert len(found) == 5 * 6 and all("this decoder is computing another text; expected one" in text for text in found)
    with pytest.raises(RuntimeError, match="is computing another text"):
        llm.generate(decoder, PROMPT, 6, on_token=lambda token: llm.generate(decoder, PROMPT, 1))
    # The caches of these texts are their own.
    batches: list = []
    llm.generate(decoder, PROMPT, 2, on_token=lambda token: batches.append(llm.generate_batch(decoder, [PROMPT], 6)[0].tokens))
    assert batches == [expected] * 2
    assert llm.generate(decoder, PROMPT, 6).tokens == expected


def test_a_decoder_is_not_pickled(decoder):
    with pytest.raises(TypeError, match="a Decoder cannot be pickled; save its model, and make a new Decoder of it"):
        pickle.dumps(decoder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite(decoder, value, temperature):
    """Their maximum is not a valid token."""
    model = copy.deepcopy(decoder).model
    broken = llm.Decoder(model, 48)
    model.model.norm.weight.data[3] = value  # after the decoder has tried the model
    settings = {"temperature": temperature}
    for call in (
        lambda: llm.generate(broken, PROMPT, 4, max_length=48, **settings),
        lambda: llm.generate_batch(broken, [PROMPT], 4, **settings),
        lambda: llm.generate(broken, PROMPT, 4, max_length=48, guesses=2, **settings),
    ):
        with pytest.raises(ValueError, match="the model's logits are not finite: its weights are damaged"):
            call()


def test_numbers_out_of_their_range(decoder):
    with pytest.raises(ValueError, match="max_length is 64; expected at most 48, that of the decoder"):
        llm.generate(decoder, PROMPT, 60, max_length=64)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ValueError, match=f"seed is {seed}; expected a number of 64 bits"):
            llm.generate(decoder, PROMPT, 4, max_length=48, temperature=1, seed=seed)
        with pytest.raises(ValueError, match=f"seed is {seed}; expected a number of 64 bits"):
            llm.generate_batch(decoder, [PROMPT], 4, temperature=1, seed=[seed])
    assert len(llm.generate(decoder, PROMPT, 60, max_length=32).tokens) == 26  # in a decoder with a larger maximum
