"""Tests the reference with exact rational arithmetic."""

from fractions import Fraction

import lowbit
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st

floats = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


def nearest_float32(value: Fraction) -> float:
    """Rounds to nearest, ties to even: compares all candidates exactly."""
    guess = torch.tensor(float(value), dtype=torch.float64).float()
    around = [torch.nextafter(guess, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    candidates = [guess, *around]
    return min(candidates, key=lambda c: (abs(Fraction(c.item()) - value), c.view(torch.int32).item() & 1)).item()


@given(floats, floats, floats)
@example(1.0 + 2.0**-23, 1.0 + 2.0**-23, 2.0**-60)  # above
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-59)  # slightly above a midpoint of float32
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-59))  # slightly below it
def test_fma32_rounds_once(a, b, c):
    found = reference.fma32(torch.tensor(a), torch.tensor(b), torch.tensor(c)).item()
    assert found == nearest_float32(Fraction(a) * Fraction(b) + Fraction(c))


def test_fma32_is_not_the_doubly_rounded_sum():
    # The product is a midpoint of float32, and c breaks the tie but is lost in float64.
    a, c = torch.tensor(1.0 + 2.0**-12), torch.tensor(2.0**-59)
    assert reference.fma32(a, a, c) == 1.0 + 2.0**-11 + 2.0**-23
    assert (a.double() * a.double() + c.double()).float() == 1.0 + 2.0**-11


def test_quantized_row():
    x = torch.zeros(1, 100)
    x[0, :4], x[0, 96:] = torch.tensor([-1.5, 0.0, 2.5, 128.0]), -64.0
    a, scales = reference.quantize_rows(x, 96)
    below = 2.0**-21  # the two lowest of 24 bits are cleared
    assert (1 - below) * 128 / 127 < scales[0, 0].item() <= 128 / 127
    assert (a[0, :4].tolist(), a[0, 96:].tolist()) == ([-1, 0, 2, 127], [-127] * 4)
    assert scales.shape == (1, 3) and scales[0, 1] == 0 and scales[0, 2] == scales[0, 0] / 2


def test_weights_by_hand():
    codes = torch.zeros(1, 17, dtype=torch.uint8)
    codes[0, 0], codes[0, 16] = 3, 1

    packed = lowbit.pack(codes, torch.tensor([[0.5, 2.0]]), bits=2, group_size=16)
    assert reference.take_apart(packed).weight().tolist() == [[0.5] + [-1.0] * 15 + [-2.0]]
    packed = lowbit.pack(
        codes, torch.tensor([[0.5, 2.0]]), torch.tensor([[1.0, -1.0]]), bits=2, group_size=16, mapping="affine"
    )
    assert reference.take_apart(packed).weight().tolist() == [[2.5] + [1.0] * 15 + [1.0]]
