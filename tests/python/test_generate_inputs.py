"""generate: tokens from wherever they come, and what it refuses rather than write nonsense."""

import copy

import numpy
import pytest
import torch

from command_line import FLOAT
from lowbit import llm
from lowbit.llm.loading import load_model

PROMPT = [5, 9, 300, 21, 9, 300]


@pytest.fixture(scope="module")
def decoder():
    return llm.Decoder(load_model(FLOAT), 48)


def test_tokens_of_any_kind(decoder):
    """A tensor's numbers are in no set and equal to no other, so nothing would stop at them or repeat them."""
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
    "prompt, found",
    [
        (torch.tensor([PROMPT]), r"a Tensor of shape \[1, 6\]"),  # what tokenizers give with return_tensors="pt"
        ([PROMPT], "a list"),
        ({"input_ids": PROMPT}, "a dict"),
        ("text", "a str"),
        ([1.5], "a list"),
        (torch.tensor([1.0]), r"a Tensor of shape \[1\]"),
    ],
)
def test_what_is_no_prompt(decoder, prompt, found):
    with pytest.raises(ValueError, match=f"the prompt is {found}; expected token ids, whole numbers"):
        llm.generate(decoder, prompt, 4, max_length=48)
    with pytest.raises(ValueError, match=f"prompt 1 is {found}; expected token ids, whole numbers"):
        llm.generate_batch(decoder, [PROMPT, prompt], 4)
    with pytest.raises(ValueError, match=f"the text is {found}; expected token ids, whole numbers"):
        decoder.read(prompt)
    with pytest.raises(ValueError, match=f"stop is {found}; expected token ids, whole numbers"):
        llm.generate(decoder, PROMPT, 4, max_length=48, stop=prompt)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite(decoder, value, temperature):
    """The likeliest of them is no token of the model's."""
    model = copy.deepcopy(decoder).model
    broken = llm.Decoder(model, 48)
    model.model.norm.weight.data[3] = value  # after the decoder has looked at it
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
    assert len(llm.generate(decoder, PROMPT, 60, max_length=32).tokens) == 26  # of a decoder that has more
