"""Products of float matrices in calibration: oneDNN's, with gradients, and torch's own where oneDNN cannot be used."""

import lowbit.calibration.float_products as products
import pytest
import torch
from lowbit.calibration.float_products import FloatLinears, add_products, outputs
from torch.nn.functional import linear

pytestmark = pytest.mark.first


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def library(request, monkeypatch):
    """With oneDNN, and without."""
    if request.param and not products._by_onednn():
        pytest.skip("this CPU has no AVX-512")
    if not request.param:
        monkeypatch.setattr(products, "_by_onednn", lambda: False)


@pytest.mark.parametrize("x", [random(3, 40, 48), random(40, 48), random(2, 48), random(48), random(48, 40).T, random(0, 48)])
@pytest.mark.parametrize("weight", [random(70, 48, seed=1), random(48, 70, seed=1).T, random(0, 48)])
def test_outputs_are_those_of_linear(library, x, weight):
    bias = random(len(weight), seed=2)
    for each in (None, bias):
        torch.testing.assert_close(outputs(x, weight, each), linear(x, weight, each), rtol=1e-5, atol=1e-5)
    with FloatLinears():
        assert torch.equal(linear(x, weight, bias), outputs(x, weight, bias))
        assert torch.equal(linear(input=x, weight=weight), linear(x, weight))
    low = [each.bfloat16() for each in (x, weight, bias)]
    assert torch.equal(outputs(*low), linear(*low))


def test_gradients_are_those_of_linear(library):
    found = []
    for function in (outputs, linear):
        leaves = [
            random(3, 40, 48).requires_grad_(),
            random(70, 48, seed=1).requires_grad_(),
            random(70, seed=2).requires_grad_(),
        ]
        function(*leaves).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_a_context_for_the_linear_layers_of_a_model(monkeypatch):
    seen, layer = [], torch.nn.Linear(48, 70)
    monkeypatch.setattr(products, "outputs", lambda *args: seen.append(len(args)) or linear(*args))
    with FloatLinears():
        layer(random(9, 48))
    layer(random(9, 48))
    assert seen == [3]


@pytest.mark.parametrize("tokens", [0, 5, 300])
def test_sums_of_products(library, tokens):
    a, b = random(600, tokens), random(600, tokens, seed=1)
    sums = torch.ones(600, 600)
    add_products(sums, a, b)
    torch.testing.assert_close(sums, 1 + a @ b.T, rtol=1e-5, atol=1e-4)
    half = torch.zeros(600, 600)
    add_products(half, a, a, triangle=True)
    torch.testing.assert_close(half.triu(), (a @ a.T).triu(), rtol=1e-5, atol=1e-4)
    assert not half[512:, :512].any()
