"""Finds the layers of a model that can be packed, checks them, and replaces them by packed layers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from .. import nn
from ..machine.memory import in_huge_pages
from ..packed.header import PackedInfo
from ..packed.rounding import Config, ConvConfig, EmbeddingConfig, LinearConfig, check_layer, quantize_tensor, refuse_nan
from .convolutions import why_float
from .embedding_layers import table_of
from .expert_stacks import Experts, experts_of
from .linear_forms import TRANSPOSED, equivalent_linear, flatten
from .replacing import Prepared, class_name, class_of, refuse_hooked_weights

Layer: TypeAlias = torch.nn.Module | Experts


def kind_of(layer: Layer | None) -> type[LinearConfig | EmbeddingConfig | ConvConfig] | None:
    """The config class for a float layer from :func:`named_layers`; None if it cannot be packed."""
    # Exact types: a subclass may use its weight differently, as the output projection of nn.MultiheadAttention does.
    if isinstance(layer, Experts) or class_of(layer) is torch.nn.Linear:
        return ConvConfig if hasattr(layer, nn.WINDOW) else LinearConfig
    return EmbeddingConfig if table_of(layer) is not None else None


def named_layers(model: torch.nn.Module) -> Iterator[tuple[str, Layer]]:
    """All modules of a model and their float experts, by qualified names.

    A shared module is listed under each of its names; a convolution or other linear layer as an equivalent torch.nn.Linear.
    Modules that compute a weight (parametrizations) are not listed, because that weight is packed as computed.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if "parametrizations" in name.split("."):
            continue
        yield name, _in_its_form(module)
        for leaf, experts in experts_of(module).items():
            yield f"{name}.{leaf}" if name else leaf, experts


def as_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """A torch.nn.Linear equivalent to a layer of another class; None for other modules."""
    return module.as_linear() if isinstance(module, Prepared) else equivalent_linear(module)


def _in_its_form(module: torch.nn.Module) -> torch.nn.Module:
    linear = as_linear(module)
    return module if linear is None else linear


def is_transposed(layer: Layer | None) -> bool:
    """Whether the model stores the weight of a linear layer as [in, out]."""
    return not isinstance(layer, Experts) and getattr(layer, TRANSPOSED, False)


def float_convolutions(model: torch.nn.Module) -> dict[str, str]:
    """The convolutions of a model that lowbit does not pack: name -> reason."""
    reasons = ((name, why_float(module)) for name, module in model.named_modules(remove_duplicate=False))
    return {name: why for name, why in reasons if why is not None}


def oriented(layer: Layer, weight: torch.Tensor) -> torch.Tensor:
    """Converts a tensor from the layout of the layer's parameter to [out, in] or [experts, out, in]."""
    if isinstance(layer, Experts):
        return layer.oriented(weight)
    if kind_of(layer) is ConvConfig:
        return flatten(weight)
    return weight.T if is_transposed(layer) else weight


def put_linears(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Replaces layers that store their weight as [in, out] by an equivalent torch.nn.Linear; returns the replaced layers."""
    before = {}
    for name in names:
        linear = layer_at(model, name)
        if isinstance(linear, torch.nn.Linear) and is_transposed(linear):
            delattr(linear, TRANSPOSED)
            before[name] = model.get_submodule(name)
            model.set_submodule(name, linear)
    return before


@contextmanager
def with_linears(model: torch.nn.Module, names: Iterable[str]) -> Iterator[None]:
    """A context manager around :func:`put_linears` that restores each replaced layer unless it was replaced again meanwhile."""
    before = put_linears(model, names)
    linears = {name: model.get_submodule(name) for name in before}
    try:
        yield
    finally:
        for name, layer in before.items():
            if model.get_submodule(name) is linears[name]:
                model.set_submodule(name, layer)


def layer_at(model: torch.nn.Module, name: str) -> Layer:
    """A module, or the experts in a parameter, by its qualified name.

    Raises:
        AttributeError: no such module or parameter.
    """
    parent, _, leaf = name.rpartition(".")
    return experts_of(model.get_submodule(parent)).get(leaf) or _in_its_form(model.get_submodule(name))


def put_packed(
    model: torch.nn.Module,
    name: str,
    layer: Layer,
    packed: torch.Tensor | PackedInfo,
    dtype: torch.dtype,
    input_order: torch.Tensor | None = None,
) -> nn.Packed:
    """Replaces a float layer by the packed layer of this weight or header; returns the packed layer."""
    if isinstance(layer, Experts):
        experts = nn.LinearExperts(packed, dtype)
        layer.put(experts.train(layer.holder.training))
        return experts
    module = nn.in_place_of(layer, packed, dtype, input_order)
    model.set_submodule(name, module)
    return module


def check_whole_experts(layers: Mapping[str, Layer], selected: Collection[str]) -> None:
    """Raises ValueError if only some matrices of a layer's experts are selected: all must be packed, or none."""
    for name in selected:
        layer = layers.get(name)
        if isinstance(layer, Experts):
            holder = name.rpartition(".")[0]
            for leaf in experts_of(layer.holder):
                other = f"{holder}.{leaf}" if holder else leaf
                if other not in selected:
                    raise ValueError(
                        f"{name} has a config and {other}, of the same experts, has none; give both a config, or None to both"
                    )


def refuse_prepared(model: torch.nn.Module) -> None:
    """Raises ValueError if layers are prepared for training."""
    for name, module in model.named_modules():
        if isinstance(module, Prepared):
            raise ValueError(f"{name or type(module).__name__} is prepared for training; lowbit.qat.convert_ packs it")


def warn_of_floats(
    model: torch.nn.Module,
    selected: Mapping[str, Config],
    chosen: set[str],
    reasons: Mapping[str, str] | None = None,
    stacklevel: int = 2,
) -> None:
    """Warns if more than 1 % of the bytes of a model's matrices stay float without the user having chosen so.

    Args:
        model: may be on the meta device.
        selected: the layers that will be packed.
        chosen: layers that the user leaves float.
        reasons: name -> why, for packable layers that stay float. All other layers are of kinds that lowbit does not pack.
    """
    reasons = reasons or {}
    packed, total = 0, 0
    unasked: Counter[str] = Counter()  # bytes by kind of layer, or by reason
    examples: dict[str, str] = {}
    seen: set[int] = set()
    tied = getattr(model, "all_tied_weights_keys", {})  # transformers ties them only after loading
    # Selected layers come first: a matrix with several names is packed if one of its layers is.
    for path, module in sorted(model.named_modules(), key=lambda pair: pair[0] not in selected):
        name = path.partition(".parametrizations.")[0]  # the layer whose weight is computed from these tensors
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or id(parameter) in seen or f"{name}.{leaf}" in tied:
                continue
            seen.add(id(parameter))
            size = parameter.numel() * parameter.element_size()  # sparse tensors have no nbytes
            total += size
            names = {name, (f"{name}.{leaf}" if name else leaf).removesuffix("_bias")}  # of the layer, or of experts
            if not names.isdisjoint(selected):
                packed += size
            elif names.isdisjoint(chosen):
                explained = next((layer for layer in sorted(names) if layer in reasons), None)
                # A subclass often has the name of its base class.
                is_subclass = isinstance(module, torch.nn.Linear | torch.nn.Embedding)
                kind = class_name(module) if is_subclass else type(module).__name__
                why = kind if explained is None else reasons[explained]
                unasked[why] += size
                if explained is not None:
                    examples.setdefault(why, explained)
    float_bytes = unasked.total()
    if float_bytes <= total / 100:
        return
    share = f"{100 * float_bytes / total:.0f} % of the bytes of this {type(model).__name__}'s matrices stay float"
    only = "" if float_bytes < total / 2 else f"only {100 * packed / total:.0f} % are packed: "
    kinds = [why for why, _ in unasked.most_common() if why not in examples]
    parts = [f"as {name} does: {why}" for why, name in examples.items()]
    if kinds:
        others = len(kinds) - 1
        more = "" if not others else f" and {others} other {'kind' if others == 1 else 'kinds'} of layers"
        packs = "torch.nn.Linear, torch.nn.Embedding and transformers' Conv1D, FalconLinear, experts and scaled tables"
        parts.append(f"in {kinds[0]}{more}; lowbit packs {packs}")
    warnings.warn(f"{only}{share}, {'; and '.join(parts)}", stacklevel=stacklevel + 1)


def warn_of_training(model: torch.nn.Module) -> None:
    """Warns if most weights of a model about to be trained are packed and it has no adapters."""
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        return
    infos = [module.info for module in model.modules() if isinstance(module, nn.Packed)]
    packed = sum(info.out_features * info.in_features * (info.experts or 1) for info in infos)
    parameters = list(model.parameters())
    total = packed + sum(parameter.numel() for parameter in parameters)
    if packed > total / 2:
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        warnings.warn(
            f"training changes {100 * trained / total:.2g} % of the weights of this {type(model).__name__}: "
            f"{100 * packed / total:.0f} % are packed and stay as they are. Train before quantizing, or train adapters (peft).",
            stacklevel=2,
        )


def leave_fused_paths(model: torch.nn.Module) -> None:
    """Makes torch's encoder layers call their linear layers where these are packed or prepared for training."""

    # In eval mode torch's encoder layers pass the float weights of their linear layers to one fused operator. With these
    # two attributes, which they also set themselves, they call the linear layers instead.
    def is_quantized(layer: torch.nn.Module) -> bool:
        return isinstance(layer, torch.nn.TransformerEncoderLayer) and any(
            isinstance(linear, nn.Packed | Prepared) for linear in (layer.linear1, layer.linear2)
        )

    for module in model.modules():
        if is_quantized(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, torch.nn.TransformerEncoder) and any(map(is_quantized, module.layers)):
            module.use_nested_tensor = False


def names_by_weight(modules: Mapping[str, Layer]) -> dict[int, list[str]]:
    """Maps the id of each weight to the names of the layers that share it."""
    names: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight = module.weight
        # A parametrization computes a new tensor on each access, and the next layer's tensor may reuse its id.
        names.setdefault(id(weight if weight is module.weight else module), []).append(name)
    return names


def check_weights(name: str, layer: Layer, config: Config) -> None:
    """Raises TypeError or ValueError for weights that :func:`lowbit.quantize_tensor` refuses."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if not isinstance(layer, Experts):
        check_layer(weight, bias, config, f"{name}.")
        return
    for number, matrix in enumerate(weight):
        check_layer(matrix, None if bias is None else bias[number], config, f"expert {number} of {name}: ")


def check_floats(model: torch.nn.Module, packed: Collection[str]) -> None:
    """Raises ValueError for a float tensor with NaN values. As in checkpoints, buffers that are not stored may have some.

    Args:
        packed: layers and experts that :func:`check_layers` checks.
    """
    for path, module in model.named_modules():
        stored = [leaf for leaf in module._buffers if leaf not in module._non_persistent_buffers_set]
        for leaf in () if path in packed else (*module._parameters, *stored):
            name = f"{path}.{leaf}" if path else leaf
            tensor = getattr(module, leaf)
            if name not in packed and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                refuse_nan(name, tensor.detach())


def check_layers(modules: Mapping[str, Layer], selected: Mapping[str, Config]) -> None:
    """Raises TypeError or ValueError for layers that :func:`replace_layers` refuses."""
    for names in names_by_weight(modules).values():
        first = names[0]
        for name in names:
            if isinstance(modules[name], torch.nn.Module):
                refuse_hooked_weights(modules[name], f"{name}.")
            check_weights(name, modules[name], selected[name])
            if modules[name].weight.dtype == torch.float64:
                raise TypeError(
                    f"{name}.weight has dtype torch.float64; expected torch.float32, torch.bfloat16 or torch.float16, "
                    "in which the layer then computes (model.float())"
                )
            max_norm = getattr(modules[name], "max_norm", None)
            if max_norm is not None:
                raise ValueError(f"{name} has max_norm={max_norm}; expected None: it changes the weights")
            if vars(selected[name]) != vars(selected[first]):
                raise ValueError(
                    f"{first} and {name} share one weight but have different configs, {selected[first]} and "
                    f"{selected[name]}; give both the same, or None to one of them"
                )


def pack_experts(weight: torch.Tensor, config: Config, bias: torch.Tensor | None) -> torch.Tensor:
    """Quantizes and packs experts: weight [experts, out, in], bias [experts, out] or None -> uint8 [experts, bytes]."""
    packed = None
    for number, matrix in enumerate(weight):
        expert = quantize_tensor(matrix, config, None if bias is None else bias[number])
        packed = expert.new_empty(len(weight), len(expert)) if packed is None else packed
        packed[number] = expert
    assert packed is not None  # there is at least one expert
    return packed


def pack_layer(layer: Layer, config: Config, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Packs ``weight``, the layer's own or another of its shape, as the packed weight of ``layer``."""
    if isinstance(layer, Experts):
        return pack_experts(weight, config, bias)
    return quantize_tensor(weight, config, bias=bias)


def _pack(layer: Layer, config: Config, bias: torch.Tensor | None) -> torch.Tensor:
    return layer.pack(bias) if isinstance(layer, Prepared) else pack_layer(layer, config, layer.weight, bias)


def replace_layers(model: torch.nn.Module, selected: Mapping[str, Config]) -> None:
    """Packs layers of a model, in place.

    Args:
        selected: qualified name -> config, for layers that :func:`kind_of` knows, prepared layers and experts. A shared
            weight is packed once and stays shared.

    Raises:
        TypeError, ValueError: weights that are not finite or not on the CPU, or different configs for layers that share
            a weight. The model is then unchanged.
    """
    # Check everything before the first change.
    modules: dict[str, Any] = {name: layer_at(model, name) for name in selected}
    check_layers(modules, selected)
    by_weight = names_by_weight(modules)
    for names in by_weight.values():
        # A packed weight holds one bias, so linear layers that share a weight but not a bias are packed separately. An
        # embedding ignores the bias.
        linears = [modules[name] for name in names if isinstance(modules[name], torch.nn.Linear | Experts)]
        biases = {id(linear.bias): linear.bias for linear in linears}
        shared = None
        replaced: dict[int, torch.nn.Module] = {}
        for name in names:
            module = modules[name]
            if id(module) not in replaced:
                if len(biases) > 1:
                    packed = in_huge_pages(_pack(module, selected[name], getattr(module, "bias", None)))
                else:
                    if shared is None:
                        bias = next(iter(biases.values()), None)
                        shared = in_huge_pages(_pack(module, selected[name], bias))
                    packed = shared
                replaced[id(module)] = put_packed(model, name, module, packed, module.weight.dtype)
            else:
                model.set_submodule(name, replaced[id(module)])
            modules[name] = None  # frees the float weight as soon as it is packed
    leave_fused_paths(model)
