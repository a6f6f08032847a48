"""Float layers for quantization-aware training that compute, differentiably, what packed layers will (``lowbit.qat``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..packed.groups import in_groups
from ..packed.matrix import check_activation_bits, pack
from ..packed.rotation import rotate_back
from ..packed.rounding import Config
from .embedding_layers import Table
from .replacing import Prepared

# Must agree with kernels/rounding/weight_grid.h and kernels/pack.cpp.
_SMALLEST_STEP = 2.0**-120
_SMALLEST_FACTOR = 2.0**-126
_LARGEST_SCALE = 2.0**15

SEGMENT_INPUTS = 64  # kSegmentInputs of kernels/format.h


def stored(scales: Tensor, mins: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and mins as :func:`lowbit.pack` stores them: float16 times one float32 factor per row.

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


def _codes(weight: Tensor, scales: Tensor, mins: Tensor | None, config: Config) -> tuple[Tensor, Tensor]:
    """Codes of a weight [n, k] for stored scales and mins, and the codes before rounding; both [n, groups, group size].

    Bit for bit as ``lowbit::quantize`` computes them.
    """
    top, half = 2**config.bits - 1, 2 ** (config.bits - 1)
    if mins is not None:
        step, low = scales, mins
    else:
        step, low = (2 * scales, -scales) if config.bits == 1 else (scales, -scales * half)
    usable = step.abs() >= _SMALLEST_STEP
    inverse = torch.where(usable, 1.0 / step, 0.0)
    exact = (in_groups(weight, config.group_size) - low[:, :, None]) * inverse[:, :, None]
    if mins is None:
        exact = torch.where(usable[:, :, None], exact, half)  # groups without a usable scale get level 0
    return exact.clamp(0, top).round(), exact


class _FakeQuantized(torch.autograd.Function):
    """Weight [n, k], scales and mins [n, groups] -> the dequantized weight, float32 [n, k], and its partial derivatives with
    respect to the weight and the scale."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, scale: Tensor, min: Tensor | None, config: Config) -> tuple[Tensor, Tensor, Tensor]:
        scales, mins = stored(scale.float(), None if min is None else min.float())
        codes, exact = _codes(weight.float(), scales, mins, config)
        levels = codes if mins is not None else _levels(codes, config)
        if mins is not None:  # rounded once, as by an fma
            values = (scales.double()[:, :, None] * codes + mins.double()[:, :, None]).float()
        else:
            values = scales[:, :, None] * levels
        if config.bits == 1 and mins is None:
            # At 1 bit the code is a sign: it does not depend on the scale, and no weight is out of range.
            inside, per_scale = torch.ones_like(codes, dtype=torch.bool), levels
        else:
            inside = (exact >= 0) & (exact <= 2**config.bits - 1)
            # LSQ: in range, the rounding error in steps; out of range, the level at the end of the range.
            per_scale = torch.where(inside, codes - exact, levels)
        return values.flatten(1)[:, : weight.shape[1]], inside, per_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        weight, scale, min, config = inputs
        ctx.group_size, ctx.inputs = config.group_size, weight.shape[1]
        ctx.has_min, ctx.dtypes = min is not None, (weight.dtype, scale.dtype)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        inside, per_scale = ctx.saved_tensors
        weight_dtype, scale_dtype = ctx.dtypes
        grad = in_groups(grad, ctx.group_size)
        of_weight = torch.where(inside, grad, 0.0).flatten(1)[:, : ctx.inputs].to(weight_dtype)
        of_min = torch.where(inside, 0.0, grad).sum(2).to(scale_dtype) if ctx.has_min else None
        return of_weight, (grad * per_scale).sum(2).to(scale_dtype), of_min, None


class _FakeQuantizedForward(_FakeQuantized):
    """Adds forward-mode derivatives (torch.func.jvp, jacfwd); separate because torch.compile does not support jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _FakeQuantized.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*output[1:])

    @staticmethod
    def jvp(ctx: Any, weight: Tensor | None, scale: Tensor | None, min: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        inside, per_scale = ctx.saved_tensors
        change = torch.zeros_like(per_scale)
        if weight is not None:
            change = change + torch.where(inside, in_groups(weight.float(), ctx.group_size), 0.0)
        if scale is not None:
            change = change + scale.float()[:, :, None] * per_scale
        if min is not None:
            change = change + torch.where(inside, 0.0, min.float()[:, :, None])
        return change.flatten(1)[:, : ctx.inputs], None, None


def _fake_quantized(weight: Tensor, scale: Tensor, min: Tensor | None, config: Config) -> Tensor:
    function = _FakeQuantized if forward_ad._current_level < 0 else _FakeQuantizedForward
    values: Tensor = function.apply(weight, scale, min, config)[0]
    return values


def _levels(codes: Tensor, config: Config) -> Tensor:
    return 2 * codes - 1 if config.bits == 1 else codes - 2 ** (config.bits - 1)


def fake_quantize_activations(x: Tensor, group_size: int | None, activation_bits: int = 8) -> Tensor:
    """Fake-quantizes activations as packed linear layers do: to int8, with a scale per segment of at most 64 inputs.

    Args:
        x: [..., k] of any float dtype.
        group_size: the group size of the layer's weight; each group is divided into segments. None: one group.
        activation_bits: 8, or 16: two int8 planes, the second for the rounding error of the first.

    Returns:
        float32 [..., k]. The gradient passes unchanged (a straight-through estimator: Bengio et al., 2013). A segment with a
        NaN, an infinity or a magnitude of 127 * 2**104 or more is NaN.

    Raises:
        TypeError, ValueError: ``activation_bits`` is not 8 or 16.
    """
    check_activation_bits(activation_bits)
    function = _FakeQuantizedActivations if forward_ad._current_level < 0 else _FakeQuantizedActivationsForward
    return function.apply(x, group_size, activation_bits)


def _int8_plane(segments: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of segments [..., inputs], bit for bit as the kernels compute them."""
    # The two lowest mantissa bits are cleared (see kernels/ukernel.h).
    scales = ((segments.abs().amax(-1, keepdim=True) * (1 / 127)).view(torch.int32) & ~3).view(torch.float32)
    usable = (scales >= 2.0**-126) & (scales < 2.0**104)
    inverse = torch.where(usable, 1.0 / scales, 0.0)
    scales = torch.where(usable, scales, torch.where(scales < 2.0**-126, 0.0, torch.nan))
    return (segments * inverse).round_(), scales


class _FakeQuantizedActivations(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group_size: int | None, activation_bits: int) -> Tensor:
        k = x.shape[-1]
        group = min(group_size or k, k + -k % SEGMENT_INPUTS)
        segment = min(group, SEGMENT_INPUTS)
        groups = functional.pad(x.float(), (0, -k % group)).unflatten(-1, (-1, group))
        segments = functional.pad(groups, (0, -group % segment)).unflatten(-1, (-1, segment))
        codes, scales = _int8_plane(segments)
        if activation_bits == 8:
            values = codes.mul_(scales)
        else:  # in float64, where the products and the rounding error are exact
            first = codes.double() * scales
            codes, scales = _int8_plane((segments - first).float())
            values = (first + codes.double() * scales).float()
        return values.flatten(-2)[..., :group].flatten(-2)[..., :k]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None, None


class _FakeQuantizedActivationsForward(_FakeQuantizedActivations):
    """The same as :class:`_FakeQuantizedForward`."""

    @staticmethod
    def jvp(ctx: Any, x: Tensor, *_: Any) -> Tensor:
        return x.float().clone()  # not the input itself


def _format(config: Config) -> tuple[int, int, int]:
    flags = (config.mapping == "affine") + 2 * config.rotate + 4 * (config.activation_bits == 16)
    return config.bits, config.group_size or 0, flags


def _described(format: tuple[int, ...] | None) -> str:
    if format is None or len(format) != 3:
        return "an unknown config (there is no weight_format)"
    bits, group, flags = format
    more = f"{', rotate=True' if flags & 2 else ''}{', activation_bits=16' if flags & 4 else ''}"
    return f"bits={bits}, group_size={group or None}, mapping={('symmetric', 'affine')[flags & 1]!r}{more}"


class PreparedLayer(Prepared):
    """A layer with additional parameters ``weight_scale`` and, if affine, ``weight_min``, float32 [n, groups].

    The buffer ``weight_format`` (int32: bits, group size or 0, 1 if affine plus 2 if rotated plus 4 with activations of 16
    bits) records in the state dict which config the scales belong to.
    """

    weight: Tensor

    def matrix(self) -> Tensor:
        """The weight as a differentiable [n, k]."""
        return self.weight

    def prepare(self, config: Config, owner: PreparedLayer | None) -> None:
        """Adds the parameters, or shares those of ``owner``, a layer with the same weight."""
        self._config = config
        self._owner = () if owner is None else (owner,)  # in a tuple, so that it is not registered as a submodule
        if owner is not None:
            return
        affine = config.mapping == "affine"
        weight = config.as_rounded(self.matrix().detach())
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        _, scales, mins = torch.ops.lowbit.quantize(weight, config.bits, config.group_size or 0, affine, config.scale == "mse")
        self.weight_scale = torch.nn.Parameter(scales)
        self.weight_min = torch.nn.Parameter(mins) if affine else None
        formats = torch.tensor(_format(config), dtype=torch.int32)
        self.register_buffer("weight_format", formats)  # type: ignore[attr-defined]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Scales for another width may have the same shape.
        stored_format, expected = state_dict.get(prefix + "weight_format"), _format(self._config)
        if not self._owner and (stored_format is not None or prefix + "weight_scale" in state_dict):
            values = None if stored_format is None else tuple(stored_format.tolist())
            if values != expected:
                arguments[-1].append(  # error_msgs
                    f"{prefix}weight_scale: the state dict has scales for {_described(values)}; the model was prepared for "
                    f"{_described(expected)}"
                )
                return
        own = [name for name in ("weight_scale", "weight_min") if getattr(self, name, None) is not None]
        missing = [name for name in own if prefix + name not in state_dict]
        if prefix + "weight" in state_dict and missing:  # with strict=False, the old scales would stay
            arguments[-1].append(
                f"{prefix}weight: the state dict has no {' and no '.join(missing)} for it, and the model is prepared for "
                "training; load float weights before lowbit.qat.prepare_"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # type: ignore[misc]

    def follow(self, other: PreparedLayer) -> None:
        """Shares the config and the scales of another prepared layer."""
        self._config, self._owner = other._config, other._owner or (other,)

    def grid(self) -> tuple[Tensor, Tensor | None]:
        """Scales and mins, float32 [n, groups]; mins None: symmetric."""
        owner = self._owner[0] if self._owner else self
        return owner.weight_scale, owner.weight_min

    def pack(self, bias: Tensor | None) -> Tensor:
        config, (scale, min) = self._config, self.grid()
        with torch.no_grad():
            scales, mins = scale.float(), None if min is None else min.float()
            weight = config.as_rounded(self.matrix().float())
            codes, _ = _codes(weight, *stored(scales, mins), config)
            codes = codes.flatten(1)[:, : weight.shape[1]].to(torch.uint8)
        return pack(
            codes,
            scales.detach(),
            None if mins is None else mins.detach(),
            None if bias is None else bias.detach().float(),
            bits=config.bits,
            group_size=config.group_size,
            mapping=config.mapping,
            rotated_inputs=config.rotated_inputs(weight.shape[1]),
            activation_bits=config.activation_bits,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self._config}"  # type: ignore[misc]

    def __prepare_scriptable__(self) -> None:
        _refuse(True)


def _refuse_export() -> None:
    _refuse(torch.compiler.is_exporting() or torch.jit.is_tracing())


def _refuse(exported: bool) -> None:
    if exported:
        raise ValueError("the model is prepared for training; lowbit.qat.convert_ packs it, before it is exported")


class LinearLayer(PreparedLayer):
    """A linear layer prepared for training, with its weight stored as [out, in] or [in, out]."""

    bias: Tensor | None

    def fake_quantized(self) -> Tensor:
        """The dequantized weight that the packed layer will have, for rotated inputs if it rotates them: float32 [out, in]."""
        return _fake_quantized(self._config.as_rounded(self.matrix()), *self.grid(), self._config)

    def forward(self, x: Tensor) -> Tensor:
        _refuse_export()
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:  # as the packed layer will do
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            config = self._config
            rounded = fake_quantize_activations(config.rotated(x), config.group_size, config.activation_bits)
            return functional.linear(rounded, self.fake_quantized(), bias).to(x.dtype)


class Linear(LinearLayer, torch.nn.Linear):
    """The prepared form of a torch.nn.Linear (:func:`lowbit.qat.prepare_`)."""


class Embedding(PreparedLayer, torch.nn.Embedding):
    """The prepared form of a torch.nn.Embedding or of a table that scales or normalizes its rows."""

    _table: Table

    def forward(self, indices: Tensor) -> Tensor:
        _refuse_export()
        config = self._config

        def looked_up(table: Tensor) -> Tensor:  # fake-quantizes only these rows
            rows: Tensor = functional.embedding(
                indices.flatten(), table, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse
            )
            return rows

        scale, low = self.grid()
        weight = config.as_rounded(looked_up(self.weight))
        values = _fake_quantized(weight, looked_up(scale), None if low is None else looked_up(low), config)
        values = rotate_back(values, config.rotated_inputs(self.embedding_dim))
        rows = values.to(self.weight.dtype).view(*indices.shape, self.embedding_dim)
        return self._table.finish(rows, self)
