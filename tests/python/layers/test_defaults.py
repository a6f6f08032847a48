"""torch's default dtype and device, set by a program for its own tensors, do not change lowbit's results."""

import copy
from contextlib import contextmanager

import lowbit
import pytest
import torch
from calibration_models import llama, tokens
from lowbit import LinearConfig
from lowbit.calibration import calibrate
from reference import random_rows


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONFIGS = [
    LinearConfig(bits=3),
    LinearConfig(bits=1, group_size=None),
    LinearConfig(bits=2, mapping="affine", scale="absmax"),
    *(LinearConfig(bits=bits, levels="fit") for bits in (2, 3, 4)),
    LinearConfig(levels="nf4"),
]


def everything(weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """Bytes, codes and results of public functions."""
    found = []
    for config in CONFIGS:
        packed = lowbit.quantize_tensor(weight, config, bias)
        parts, described = lowbit.unpack(packed), lowbit.info(packed)
        again = lowbit.pack(
            parts.codes,
            parts.scales,
            parts.mins,
            parts.bias,
            bits=parts.bits,
            group_size=parts.group_size,
            mapping=parts.mapping,
            levels=described.levels,
        )
        assert again.equal(packed)
        order = torch.arange(95, -1, -1, dtype=torch.int32, device="cpu")
        layer = lowbit.nn.Linear(packed, input_order=order)
        x = weight[:3].clone().requires_grad_()
        y = layer(x)
        y.sum().backward()
        found += [packed, y.detach(), x.grad, layer.dequantize(), layer.bias.clone(), layer.weight.clone()]
        found += [lowbit.slice_rows(packed, 0, 16), lowbit.concat([packed, packed]), lowbit.repack(packed, "panel16")]
        if parts.levels is not None:
            found.append(parts.levels)
    return found


WEIGHT, BIAS = random_rows(32, 96), random_rows(32)


@pytest.fixture(scope="module")
def usual():
    return everything(WEIGHT, BIAS)


def same(found: list[torch.Tensor], usual: list[torch.Tensor]) -> bool:
    return all(a.dtype == b.dtype and a.device == b.device and a.equal(b) for a, b in zip(found, usual, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_default_dtype(usual, dtype):
    with default_dtype(dtype):
        found = everything(WEIGHT, BIAS)
    assert same(found, usual)


def test_a_default_device(usual):
    with torch.device("meta"):
        found = everything(WEIGHT, BIAS)
    assert same(found, usual)


def test_threads_are_tuned_in_a_default_dtype(monkeypatch):
    monkeypatch.setattr("lowbit.machine.threads._SHAPES_BYTES", 1)  # imports the module
    with default_dtype(torch.bfloat16):
        assert lowbit.tune_threads([(32, 64)], seconds=0.01, apply=False).threads >= 1


@pytest.mark.parametrize(
    "method, config", [("importance", LinearConfig(bits=3, mapping="affine")), ("tuned", LinearConfig(bits=2, levels="fit"))]
)
def test_calibration_in_a_default_dtype(method, config):
    model = llama()
    model.model.layers = model.model.layers[:1]
    usual, found = copy.deepcopy(model), copy.deepcopy(model)
    calibrate(usual, tokens(2), config, method)
    with default_dtype(torch.bfloat16):
        calibrate(found, tokens(2), config, method)
    assert same(list(found.state_dict().values()), list(usual.state_dict().values()))
