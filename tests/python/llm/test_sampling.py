"""Sampling in lowbit.llm: possible tokens, frequencies, and refusals."""

import math

import pytest
import torch

pytest.importorskip("transformers")

from lowbit.llm import sample
from lowbit.llm.sampling import nucleus

LOGITS = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()


def drawn(**arguments) -> set[int]:
    generator = torch.Generator().manual_seed(1)
    return {sample(LOGITS.clone(), generator=generator, **arguments) for _ in range(300)}


def test_sampling():
    assert drawn(temperature=0, top_k=None, top_p=None) == {1}
    assert drawn(temperature=1, top_k=None, top_p=None) == {0, 1, 2, 3}
    assert drawn(temperature=1, top_k=2, top_p=None) == {1, 3}
    assert drawn(temperature=5, top_k=1, top_p=None) == {1}
    assert drawn(temperature=1, top_k=99, top_p=1.0) == {0, 1, 2, 3}
    assert drawn(temperature=1, top_k=None, top_p=0.45) == {1}
    assert drawn(temperature=1, top_k=None, top_p=0.7) == {1, 3}
    assert drawn(temperature=1, top_k=None, top_p=0.9) == {0, 1, 3}
    assert drawn(temperature=1, top_k=None, top_p=0) == {1}
    assert drawn(temperature=0.05, top_k=None, top_p=None) == {1}
    for temperature in (1e-3, 1e-38, 1e-320):
        assert drawn(temperature=temperature, top_k=None, top_p=None) == {1}
    assert drawn(temperature=1e300, top_k=None, top_p=None) == {0, 1, 2, 3}


def nucleus_of_all(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """By definition: sorts all tokens."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    ordered[1:][ordered.cumsum(0)[:-1] >= top_p] = 0
    return torch.zeros_like(probabilities).scatter_(0, order, ordered)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 3.5, 8.0])  # from uniform to a single token with nearly all probability
@pytest.mark.parametrize("size", [1, 40, 30000])
def test_the_likeliest_tokens_are_found_without_sorting_all(spread, size):
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * spread
    for distinct in (logits, logits.round()):  # with many ties
        few = distinct.clone()
        few[5:] = -math.inf  # as after top_k
        for probabilities in (distinct.softmax(0), few.softmax(0)):
            for top_p in (0.0, 1e-4, 0.5, 0.9, 0.999, 1 - 2**-24):
                assert torch.equal(nucleus(probabilities, top_p), nucleus_of_all(probabilities, top_p))


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_sampling_refuses_logits_that_are_not_finite(value, at, top_k):
    logits = LOGITS.clone()
    logits[at] = value
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        sample(logits, 1.0, top_k, 0.9, torch.Generator())


def test_sampling_follows_the_probabilities():
    generator = torch.Generator().manual_seed(2)
    counts = [0] * 4
    for _ in range(4000):
        counts[sample(LOGITS.clone(), 1.0, None, None, generator)] += 1
    for count, probability in zip(counts, LOGITS.exp().tolist(), strict=True):
        assert abs(count / 4000 - probability) < 5 * math.sqrt(probability / 4000)
