"""Training of models that will be packed: layers that compute, in float and with gradients, what packed ones will.

>>> import torch, lowbit
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
>>> _ = lowbit.qat.prepare_(model, lowbit.LinearConfig(bits=2, group_size=32))
>>> model(torch.randn(1, 64)).sum().backward()  # train it as any other model
>>> _ = lowbit.qat.convert_(model)
>>> model[0].info.bits
2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from . import ops
from .layers import Prepared, check_layers, names_by_weight, replace_layers
from .nn import Packed
from .quantize import Config, EmbeddingConfig, LinearConfig
from .quantize_model import choose_layers, described_to_transformers

# As kernels/round_to_nearest.cpp and kernels/pack.cpp have them.
_SMALLEST_STEP = 2.0**-120
_SMALLEST_FACTOR = 2.0**-126
_LARGEST_SCALE = 2.0**15


def stored(scales: Tensor, mins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and mins as :func:`lowbit.pack` stores them: float16 behind one float32 factor per row.

    Args:
        scales, mins: float32 [n, groups], finite; mins None: symmetric.

    Returns:
        The same shapes, with the values that the kernels use.
    """
    both = scales if mins is None else torch.cat([scales, mins], 1)
    largest = both.abs().amax(1, keepdim=True)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 16).clamp(min=_SMALLEST_FACTOR)
    halves = (both / power).half().float()
    exact = (halves * power == both).all(1, keepdim=True)
    factor = torch.where(exact, power, (largest / _LARGEST_SCALE).clamp(min=_SMALLEST_FACTOR))
    factor = torch.where(largest == 0, 1.0, factor)
    values = factor * (both / factor).half().float()
    groups = scales.shape[1]
    return (values, None) if mins is None else (values[:, :groups], values[:, groups:])


def _in_groups(values: Tensor, config: Config) -> Tensor:
    """[n, k] -> [n, groups, group size]; a short last group is filled up with zeros."""
    n, k = values.shape
    group = config.group_size or k
    return functional.pad(values, (0, -k % group)).view(n, -1, group)


def _codes(weight: Tensor, scales: Tensor, mins: Tensor | None, config: Config) -> tuple[Tensor, Tensor]:
    """Codes of a weight [n, k], in groups, for scales and mins as they are stored, and the same before rounding.

    The formulas of ``lowbit::quantize``, to the bit.
    """
    top, half = 2**config.bits - 1, 2 ** (config.bits - 1)
    if mins is not None:
        step, low = scales, mins
    else:
        step, low = (2 * scales, -scales) if config.bits == 1 else (scales, -scales * half)
    usable = step.abs() >= _SMALLEST_STEP
    inverse = torch.where(usable, 1.0 / step, 0.0)
    exact = (_in_groups(weight, config) - low[:, :, None]) * inverse[:, :, None]
    if mins is None:
        exact = torch.where(usable[:, :, None], exact, half)  # without a step: level 0
    return exact.clamp(0, top).round(), exact


class _FakeQuantised(torch.autograd.Function):
    """Weight [n, k], scales and mins [n, groups] -> the weight that is stored, float32 [n, k]."""

    @staticmethod
    def forward(ctx, weight, scale, min, config):
        n, k = weight.shape
        scales, mins = stored(scale.float(), None if min is None else min.float())
        codes, exact = _codes(weight.float(), scales, mins, config)
        ctx.config, ctx.dtypes = config, (weight.dtype, scale.dtype)
        ctx.save_for_backward(codes, exact, scales)
        if mins is not None:  # one rounding, as an fma
            values = (scales.double()[:, :, None] * codes + mins.double()[:, :, None]).float()
        else:
            values = scales[:, :, None] * _levels(codes, config)
        return values.reshape(n, -1)[:, :k]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        codes, exact, scales = ctx.saved_tensors
        config, k = ctx.config, grad.shape[1]
        grad = _in_groups(grad, config)
        of_min = None
        if config.bits == 1 and config.mapping == "symmetric":
            # A sign does not depend on the scale, and no weight is beyond the range.
            of_weight, of_scale = grad, (grad * _levels(codes, config)).sum(2)
        else:
            inside = (exact >= 0) & (exact <= 2**config.bits - 1)
            of_weight = torch.where(inside, grad, 0.0)
            # What the scale multiplies, less what follows the weight: the error of rounding, in steps.
            reached = codes if config.mapping == "affine" else _levels(codes, config)
            of_scale = (grad * torch.where(inside, codes - exact, reached)).sum(2)
            if config.mapping == "affine":
                of_min = torch.where(inside, 0.0, grad).sum(2)
        weight_dtype, scale_dtype = ctx.dtypes
        of_weight = of_weight.reshape(len(codes), -1)[:, :k].to(weight_dtype)
        return of_weight, of_scale.to(scale_dtype), None if of_min is None else of_min.to(scale_dtype), None


def _levels(codes: Tensor, config: Config) -> Tensor:
    return 2 * codes - 1 if config.bits == 1 else codes - 2 ** (config.bits - 1)


def rounded_rows(x: Tensor) -> Tensor:
    """Activations [..., k] of any float dtype as the operators round them, to int8 per row: float32 [..., k].

    The gradient passes straight through. A row with a NaN or an infinity is NaN.
    """
    return _RoundedRows.apply(x)


class _RoundedRows(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        x = x.float()
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        step = high / 255 - low / 255
        finite = torch.isfinite(low) & torch.isfinite(high)
        usable = finite & (step >= 2.0**-126)
        inverse = torch.where(usable, 1.0 / step, 0.0)
        zero = torch.where(usable, ((-low * inverse).round() - 128).clamp(max=127), 0.0)
        # The kernels' fma: the product is exact in float64.
        values = torch.addcmul(zero.double(), x.double(), inverse.double()).float().round_().clamp_(-128, 127)
        step = torch.where(usable, step, torch.where(finite, 0.0, torch.nan))
        return values.sub_(zero).mul_(step)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.to(ctx.dtype)


class _Layer(Prepared):
    """Beside the float ``weight`` a ``weight_scale`` and, if affine, a ``weight_min``: float32 [n, groups], trained."""

    weight: Tensor

    def _prepare(self, config: Config, owner: _Layer | None) -> None:
        """``owner``: the layer that has the scales, where several share one weight."""
        self._config = config
        self._owner = () if owner is None else (owner,)  # in a tuple it is no part of this module
        if owner is not None:
            return
        affine = config.mapping == "affine"
        weight = self.weight.detach()
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        _, scales, mins = torch.ops.lowbit.quantize(
            weight, config.bits, config.group_size or 0, affine, config.scale == "mse"
        )
        self.weight_scale = torch.nn.Parameter(scales)
        self.weight_min = torch.nn.Parameter(mins) if affine else None

    def _grid(self) -> tuple[Tensor, Tensor | None]:
        owner = self._owner[0] if self._owner else self
        return owner.weight_scale, owner.weight_min

    def pack(self, bias: Tensor | None) -> Tensor:
        config, (scale, min) = self._config, self._grid()
        with torch.no_grad():
            scales, mins = scale.float(), None if min is None else min.float()
            codes, _ = _codes(self.weight.float(), *stored(scales, mins), config)
            codes = codes.reshape(len(codes), -1)[:, : self.weight.shape[1]].to(torch.uint8)
        return ops.pack(
            codes,
            scales.detach(),
            None if mins is None else mins.detach(),
            None if bias is None else bias.detach().float(),
            bits=config.bits,
            group_size=config.group_size,
            mapping=config.mapping,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._config}"  # type: ignore[misc]


def _refuse_export() -> None:
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise ValueError("the model is prepared for training; lowbit.qat.convert_ packs it, before it is exported")


class Linear(_Layer, torch.nn.Linear):
    """What :func:`prepare_` makes of a torch.nn.Linear."""

    def fake_quantised(self) -> Tensor:
        """The weight that will be stored, float32 [out, in], with gradients."""
        return _FakeQuantised.apply(self.weight, *self._grid(), self._config)

    def forward(self, x: Tensor) -> Tensor:
        _refuse_export()
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return functional.linear(rounded_rows(x), self.fake_quantised(), bias).to(x.dtype)


class Embedding(_Layer, torch.nn.Embedding):
    """What :func:`prepare_` makes of a torch.nn.Embedding."""

    def forward(self, indices: Tensor) -> Tensor:
        _refuse_export()
        config = self._config
        rows = [  # those that are looked up; the rest of the table need not be computed
            None
            if table is None
            else functional.embedding(
                indices.flatten(), table, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse
            )
            for table in (self.weight, *self._grid())
        ]
        values = _FakeQuantised.apply(*rows, config)
        return values.to(self.weight.dtype).view(*indices.shape, -1)


_KINDS = {torch.nn.Linear: Linear, torch.nn.Embedding: Embedding}


def prepare_(
    model: torch.nn.Module,
    config: LinearConfig | EmbeddingConfig | Mapping[str, LinearConfig | EmbeddingConfig | None],
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
) -> torch.nn.Module:
    """Prepares a model for training with quantised weights and activations, in place.

    The chosen layers compute what packed ones will: weights from the very codes and scales that :func:`convert_`
    stores, activations int8 per row. Only the order of float sums differs. Their weights stay float parameters, the same
    objects, and get gradients straight through the rounding (Bengio et al., 2013) where they are within the range of
    their group. Scales and mins are parameters too, ``weight_scale`` and ``weight_min``, with the gradients of LSQ
    (Esser et al., Learned step size quantization, ICLR 2020) and LSQ+ (Bhalgat et al., 2020), one for each group as in
    EfficientQAT (Chen et al., 2024). They begin as :func:`lowbit.quantize_` chooses them, so that a model that is
    converted without training has the same bytes.

    Any optimiser trains it, on any device; scales want no weight decay. Checkpoints of training are state dicts: what
    ``save_pretrained`` writes before ``convert_`` is a float model with the scales beside it.

    Args:
        model, config, filter_fn: as for :func:`lowbit.quantize_`, on the CPU; symmetric or affine.

    Returns:
        The model. What shares a weight shares the scales.

    Raises:
        TypeError, ValueError: as :func:`lowbit.quantize_`; or layers that are packed or prepared already. The model is
            then unchanged.
    """
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules():
            if isinstance(module, Packed):
                raise ValueError(f"{name or 'model'} is packed already; expected a float model to prepare")
    selected = choose_layers(model, config, filter_fn)
    for name, chosen in selected.items():
        if chosen.mapping not in ("symmetric", "affine"):
            raise ValueError(f"{name} has mapping {chosen.mapping!r}; expected 'symmetric' or 'affine' for training")
    modules = {name: model.get_submodule(name) for name in selected}
    for name, module in modules.items():
        if type(module) not in _KINDS:
            raise ValueError(f"{name} is a {type(module).__name__}, which cannot be trained packed; give it the config None")
    check_layers(modules, selected)
    for names in names_by_weight(modules).values():
        owner = None
        for name in names:
            module = modules[name]
            if not isinstance(module, Prepared):  # else it is there under several names
                module.__class__ = _KINDS[type(module)]  # keeps its hooks, its attributes, and who else refers to it
                module._prepare(selected[name], owner)
            owner = owner or module
    return model


def convert_(model: torch.nn.Module) -> torch.nn.Module:
    """Packs the layers that :func:`prepare_` prepared, in place: the layers of :func:`lowbit.quantize_`, as trained.

    Args:
        model: on the CPU.

    Returns:
        The model. What shares a weight is packed once; a model of transformers can be saved with ``save_pretrained``.

    Raises:
        TypeError, ValueError: nothing is prepared, or trained weights or scales are not finite or not on the CPU. The
            model is then unchanged.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, Prepared):
        raise TypeError("model is itself a prepared layer; convert_ takes the model that holds it")
    modules = {
        name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, _Layer)
    }
    if not modules:
        packed = sum(isinstance(module, Packed) for module in model.modules())
        found = f"; {packed} are packed already" if packed else ""
        raise ValueError(f"the model has no layers that lowbit.qat.prepare_ has prepared{found}")
    selected = {name: module._config for name, module in modules.items()}
    for name, module in modules.items():
        for values, what in zip(module._grid(), ("weight_scale", "weight_min"), strict=True):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name}.{what} has NaN or infinite values; expected finite values")
    check_layers(modules, selected)
    with described_to_transformers(model):
        replace_layers(model, selected)
    return model


__all__ = ["Embedding", "Linear", "convert_", "prepare_", "rounded_rows", "stored"]
