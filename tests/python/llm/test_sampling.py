"""Sampling in lowbit.llm: possible tokens, frequencies, and refusals."""

import math
import re

import numpy
import pytest
import torch
from lowbit.llm import sample
from lowbit.llm.sampling import likeliest, nucleus, random_generator

LOGITS = numpy.log(numpy.array([0.15, 0.5, 0.05, 0.3], dtype=numpy.float32))


def drawn(**arguments) -> set[int]:
    generator = random_generator(1)
    return {sample(LOGITS, generator=generator, **arguments) for _ in range(300)}


@pytest.mark.parametrize("kind", [numpy.zeros, torch.zeros])
@pytest.mark.parametrize("shape", [(2, 5), (1, 5), ()])
def test_logits_of_another_shape_are_refused(kind, shape):
    with pytest.raises(ValueError, match=re.escape(f"logits are {list(shape)}; expected [vocabulary]")):
        sample(kind(shape), 0, None, None, random_generator(0))


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
    # All are equally likely, and top_p keeps the first.
    assert drawn(temperature=1e300, top_k=None, top_p=0.1, min_p=1.0) == {0}


def nucleus_of_all(probabilities: numpy.ndarray, top_p: float) -> numpy.ndarray:
    """The nucleus by its definition, which sorts all tokens."""
    order = numpy.argsort(-probabilities, kind="stable")
    sums = probabilities[order].cumsum(dtype=numpy.float64)
    return numpy.sort(order[: 1 + numpy.count_nonzero(sums[:-1] < top_p)])


def softmax(logits: numpy.ndarray) -> numpy.ndarray:
    return torch.from_numpy(logits).softmax(0).numpy()


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 3.5, 8.0])  # from uniform to a single token with nearly all probability
@pytest.mark.parametrize("size", [1, 40, 30000])
def test_the_likeliest_tokens_are_found_without_sorting_all(spread, size):
    logits = random_generator(3).standard_normal(size, dtype=numpy.float32) * numpy.float32(spread)
    for distinct in (logits, logits.round()):  # with many ties
        few = distinct.copy()
        few[5:] = -math.inf  # as after top_k
        for probabilities in (softmax(distinct), softmax(few)):
            for top_p in (0.0, 1e-4, 0.5, 0.9, 0.999, 1 - 2**-24):
                assert numpy.array_equal(nucleus(probabilities, top_p), nucleus_of_all(probabilities, top_p))


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 3])
def test_sampling_refuses_logits_that_are_not_finite(value, at, top_k):
    logits = LOGITS.copy()
    logits[at] = value
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        sample(logits, 1.0, top_k, 0.9, random_generator(0))


def test_sampling_follows_the_probabilities():
    generator = random_generator(2)
    counts = [0] * 4
    for _ in range(4000):
        counts[sample(LOGITS, 1.0, None, None, generator)] += 1
    for count, probability in zip(counts, numpy.exp(LOGITS).tolist(), strict=True):
        assert abs(count / 4000 - probability) < 5 * math.sqrt(probability / 4000)


@pytest.mark.parametrize("size", [1, 7, 64, 5000])
def test_the_largest_logits_are_found_without_a_partition_of_all(size):
    random = random_generator(5)
    for logits in (random.standard_normal(size), random.integers(0, 9, size), -numpy.arange(size), numpy.arange(size)):
        for count in {1, 2, size // 3, size - 1, size} & {*range(1, size + 1)}:
            expected = numpy.flatnonzero(logits >= numpy.sort(logits)[-count])
            assert (likeliest(logits, count) == expected).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_and_numpy_logits_give_the_same_tokens(dtype):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(1)).to(dtype)
    for settings in ((0.0, None, None), (0.8, None, None), (0.8, 20, None), (0.8, None, 0.9), (0.8, 30, 0.8, 0.1)):
        pairs = []
        for given in (logits, logits.float().numpy()):
            before, generator = logits.float().numpy().copy(), random_generator(4)
            pairs.append([sample(given, *settings[:3], generator, *settings[3:]) for _ in range(40)])
            assert (before == logits.float().numpy().copy()).all()  # they are not written to
        assert pairs[0] == pairs[1] and (len(set(pairs[0])) > 5) == (settings[0] > 0)


def test_seeds():
    first = [random_generator(seed).random() for seed in (0, 1, -1, 2**64 - 1)]
    assert first[2] == first[3] and len(set(first)) == 3
