"""generate: kinds of token inputs, and invalid inputs that it refuses."""

import copy

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
