"""A width and a group size for each layer, so that all together fit and lose least."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._experts import Experts
from .._layers import Layer, layer_at
from .._packed import describe
from .._patterns import Patterns
from .._rounding import EmbeddingConfig, LinearConfig
from ..levels import FIT
from .capture import MeanSquares, inputs_of
from .collect import rows_of
from .data import Batch, mask_of, rows_in_parts, tokens_of
from .experts import mean_squares
from .grid import Config, with_table
from .importance import search
from .selection import check_experts, check_weights, select

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

BITS = tuple(range(1, 9))
GROUP_SIZES = (16, 32, 64, 128)
# What may take the place of a symmetric weight: a min costs bytes and a table costs time, and neither gains at more bits.
_AFFINE_BITS = (2, 3, 4)
LEVELS_BITS = (2, 3, 4)
ALTERNATIVES = ("affine", "levels")

_TOKENS = 2048  # by which sensitivities are measured, or fewer, so that logits are at most ...
_LOGITS = 1 << 27
_ROWS = 64  # of a matrix, on which widths are compared
_BAND_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class Option:
    """What a matrix can become."""

    bytes: int
    loss: float
    config: Config


@dataclass
class Item:
    """A matrix and the layers that it is the weight of; or one of each expert, in one tensor."""

    layers: list[str]
    weights: int
    options: list[Option]
    config: Config  # what was selected for it


# ---- sensitivities


def options_of(model: torch.nn.Module, config: LowBitConfig, alternatives: Collection[str] = ALTERNATIVES) -> list[Item]:
    """What each matrix that a config selects may become, and the bytes of that; nothing is lost yet.

    Args:
        alternatives: mappings that may take the place of a symmetric weight's.

    Raises:
        ValueError: levels other than fitted ones, an unknown mapping, or weights that are not finite.
    """
    unknown = set(alternatives) - set(ALTERNATIVES)
    if isinstance(alternatives, str) or unknown:
        raise ValueError(f"alternatives are {alternatives!r}; expected some of {', '.join(map(repr, ALTERNATIVES))}")
    if config.levels not in (None, FIT):
        raise ValueError(f"levels are {config.levels!r}; expected {FIT!r} or none, where each layer has a width of its own")
    selected, experts = select(model, config)
    check_weights(model, selected)
    check_experts(model, experts)
    pinned = pinned_by(config, selected | experts)
    layers = {name: layer_at(model, name) for name in (*selected, *experts)}
    by_weight: dict[int, list[str]] = {}
    for name in selected:
        by_weight.setdefault(id(layers[name].weight), []).append(name)
    items = []
    for names in [*by_weight.values(), *([name] for name in experts)]:
        own, layer = (selected | experts)[names[0]], layers[names[0]]
        weight, bias = layer.weight, getattr(layer, "bias", None) is not None
        choices = [own] if pinned & set(names) else _choices(own, weight.shape[-1], alternatives)
        items.append(Item(names, weight.numel(), [Option(_bytes(weight, each, bias), 0.0, each) for each in choices], own))
    return items


def _choices(config: Config, inputs: int, alternatives: Collection[str]) -> list[Config]:
    found = []
    for bits in BITS:
        mappings = [config.mapping if config.mapping != "levels" or bits in LEVELS_BITS else "symmetric"]
        if config.mapping == "symmetric":
            usable = {"affine": _AFFINE_BITS, "levels": LEVELS_BITS}
            mappings += [each for each in ALTERNATIVES if each in alternatives and bits in usable[each]]
        for mapping in mappings:
            levels = (config.levels or FIT) if mapping == "levels" else None
            for group in GROUP_SIZES:
                if group <= max(GROUP_SIZES[0], inputs):
                    found.append(replace(config, bits=bits, group_size=group, mapping=mapping, levels=levels))
    return found


def measure_losses(
    model: torch.nn.Module,
    inputs: list[Batch],
    items: list[Item],
    reference_bits: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Finds what a float model's outputs lose by each option of its matrices.

    Each matrix alone is rounded to ``reference_bits`` in groups of 32, its scales searched with the mean squares of its
    inputs, and the model run on some of the text: the loss is the mean Kullback-Leibler divergence of its predictions
    from the float model's, or of a model without logits the relative squared error of the last hidden states. For other
    widths and group sizes it is scaled by their squared error, weighted with the same mean squares, on some rows.

    Args:
        items: from :func:`options_of`. Those with one option are left alone.

    Raises:
        ValueError: outputs that are not finite.
    """
    linear = {name: item.config for item in items if isinstance(item.config, LinearConfig) for name in item.layers}
    batch = _trial(model, inputs)
    importance = _importance(model, inputs, batch, linear)
    wanted, predictions = _outputs(model, batch)
    if not bool(torch.isfinite(wanted).all()):
        raise ValueError("the outputs of the model have NaN or infinite values on the calibration text")
    for done, item in enumerate(items):
        if progress is not None:
            progress(done, len(items))
        if len(item.options) == 1:
            continue
        layers = [layer_at(model, name) for name in item.layers]
        weight = layers[0].weight.detach().reshape(-1, layers[0].weight.shape[-1])
        counts = next((importance[name] for name in item.layers if name in importance), None)
        reference = replace(item.config, bits=reference_bits, group_size=32, mapping="symmetric", levels=None)
        with _in_the_place_of(layers, _rounded(weight, counts, reference)):
            loss = _distance(_outputs(model, batch)[0], wanted, predictions)
        rows = weight[:: -(-len(weight) // _ROWS)].float()
        whole = _error(rows, counts, reference)
        tables: dict[int, Config] = {}  # one of a width for all group sizes: they differ little
        options = []
        for option in item.options:
            tried = option.config
            if tried.levels == FIT:
                if tried.bits not in tables:
                    tables[tried.bits] = with_table(tried, rows, counts)
                tried = replace(tried, levels=tables[tried.bits].levels)
            lost = loss * (_error(rows, counts, tried) / whole if whole else 0.0)
            options.append(replace(option, loss=lost))
        item.options = options
    if progress is not None:
        progress(len(items), len(items))


def _bytes(weight: Tensor, config: Config, bias: bool) -> int:
    """Of [n, k], or of experts [experts, n, k]."""
    linear = isinstance(config, LinearConfig)
    matrix = describe(weight.shape[-2:], config.bits, config.group_size, config.mapping, bias and linear)
    return int(math.prod(weight.shape[:-2])) * matrix.total_bytes


@contextmanager
def _in_the_place_of(layers: list[Layer], weight: Tensor) -> Iterator[None]:
    """Another weight [n, k] for layers that share one, or [experts * n, k] for experts, for a while."""
    first = layers[0]
    if isinstance(first, Experts):
        parameters, leaf = first.holder._parameters, first.leaf
        kept = parameters[leaf]
        parameters[leaf] = torch.nn.Parameter(first.oriented(weight.view(first.weight.shape)), requires_grad=False)
        try:
            yield
        finally:
            parameters[leaf] = kept
        return
    owners = [layer.weight for layer in layers]
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    try:
        for layer in layers:
            layer.weight = parameter
        yield
    finally:
        for layer, own in zip(layers, owners, strict=True):
            layer.weight = own


def _importance(
    model: torch.nn.Module, inputs: list[Batch], trial: list[Batch], configs: Mapping[str, Config]
) -> dict[str, Tensor]:
    """Mean squares of the inputs of layers; those of experts, which are computed for it, on the trial alone."""
    squares = MeanSquares()
    layers = {name: layer_at(model, name) for name in configs}
    experts = {name: configs[name] for name, layer in layers.items() if isinstance(layer, Experts)}
    modules = {name: layer for name, layer in layers.items() if not isinstance(layer, Experts)}
    for batch in inputs:

        def take(name: str, x: Tensor, mask: Tensor | None = mask_of(batch)) -> None:
            squares.add(name, rows_of(x, mask))

        with inputs_of(modules, take):
            model(**batch)
    means = squares.means()
    if experts:
        means |= mean_squares(model, experts, trial)
    for name, mean in means.items():
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"the inputs of {name} have NaN or infinite values on the calibration text")
    return {name: mean + 1e-4 * mean.mean() for name, mean in means.items()}


def _trial(model: torch.nn.Module, inputs: list[Batch]) -> list[Batch]:
    """Some of the inputs, evenly over the text: the first rows of some batches."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 1
    most = max(128, min(_TOKENS, _LOGITS // vocabulary))
    chosen, count = [], 0
    step = max(1, len(inputs) // 8)
    for batch in inputs[::step]:
        rows = batch["input_ids"].shape[0]
        part = max(1, min(rows, (most - count) // max(1, batch["input_ids"].shape[1])))
        chosen.append(rows_in_parts(batch, part)[0])
        count += tokens_of(chosen[-1])
        if count >= most:
            break
    return chosen


def _outputs(model: torch.nn.Module, batches: list[Batch]) -> tuple[Tensor, bool]:
    """Log-probabilities [tokens, vocabulary], float32, and True; or hidden states [tokens, features], and False."""
    found, predictions = [], False
    for batch in batches:
        output = model(**batch)
        logits = getattr(output, "logits", None)
        if logits is not None and logits.dim() == 3:
            found.append(logits.flatten(0, 1).float().log_softmax(1))
            predictions = True
        else:
            states = getattr(output, "last_hidden_state", None)
            found.append((output[0] if states is None else states).float())
        found[-1] = rows_of(found[-1], mask_of(batch))
    return torch.cat(found), predictions


def _distance(found: Tensor, wanted: Tensor, predictions: bool) -> float:
    """As :func:`measure_losses` says, of what :func:`_outputs` gives."""
    if predictions:
        return float((wanted.exp() * (wanted - found)).sum(1).clamp(min=0).mean())
    return float((found - wanted).square().sum() / wanted.square().sum())


def _rounded(weight: Tensor, importance: Tensor | None, config: Config) -> Tensor:
    """The weights that a layer would compute with, in their own dtype."""
    result = torch.empty_like(weight)
    rows = max(1, _BAND_WEIGHTS // weight.shape[1])
    for begin in range(0, len(weight), rows):
        band = weight[begin : begin + rows].float()
        result[begin : begin + rows] = search(band, importance, config).dequantize()
    return result


def _error(rows: Tensor, importance: Tensor | None, config: Config) -> float:
    error = (search(rows, importance, config).dequantize() - rows).square()
    return float((error if importance is None else error * importance).double().mean())


# ---- assignment


def assign(items: list[Item], most: int) -> list[Option]:
    """An option for each item, at most ``most`` bytes together, with little loss; the same every time.

    All begin at their smallest option. Of each item only options on the lower convex hull of (bytes, loss) count; the
    step along a hull that gains most per byte is taken first, as long as it fits, as a Lagrange multiplier would.

    Raises:
        ValueError: the smallest options take more than ``most``.
    """
    hulls = [_hull(item.options) for item in items]
    total = sum(hull[0].bytes for hull in hulls)
    if total > most:
        raise ValueError(f"the smallest widths take {total} bytes; expected at most {most}")
    steps = sorted(
        (-(hull[at].loss - hull[at + 1].loss) / (hull[at + 1].bytes - hull[at].bytes), index, at)
        for index, hull in enumerate(hulls)
        for at in range(len(hull) - 1)
    )
    chosen = [0] * len(hulls)
    for _, index, at in steps:  # slopes of a hull fall, so its steps come in their order
        hull = hulls[index]
        more = hull[at + 1].bytes - hull[chosen[index]].bytes
        if chosen[index] <= at and total + more <= most:
            total += more
            chosen[index] = at + 1
    return [hull[at] for hull, at in zip(hulls, chosen, strict=True)]


def _hull(options: list[Option]) -> list[Option]:
    """The options that are best for some price of a byte, by bytes."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda each: (each.bytes, each.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.loss - first.loss) / (second.bytes - first.bytes)


def extremes(items: list[Item]) -> tuple[int, int]:
    """The bytes of the smallest and of the largest options."""
    return sum(min(each.bytes for each in item.options) for item in items), sum(
        max(each.bytes for each in item.options) for item in items
    )


def check_bits(items: list[Item], target_bits: float) -> None:
    """Raises ValueError if no options have this mean of bits per weight; the message says what can be had."""
    weights = sum(item.weights for item in items)
    smallest, largest = (8 * size / weights for size in extremes(items))
    if not smallest <= target_bits <= largest:
        raise ValueError(
            f"{target_bits:g} bits per weight cannot be had; this model takes {smallest:.3f} at the least and "
            f"{largest:.3f} at the most, scales included"
        )


def within(items: list[Item], target_bits: float) -> list[Option]:
    """:func:`assign` for a mean of bits per weight, scales and heads of files included.

    Raises:
        ValueError: as :func:`check_bits`.
    """
    check_bits(items, target_bits)
    return assign(items, int(target_bits * sum(item.weights for item in items) / 8))


def config_of(base: LowBitConfig, items: list[Item], chosen: list[Option]) -> LowBitConfig:
    """A config with an override for each layer; the base's own ones come first."""
    from ..transformers import LowBitConfig

    overrides: list[tuple[str, Any]] = [(pattern, change) for pattern, change in base.overrides]
    for item, option in zip(items, chosen, strict=True):
        own = option.config
        change: dict[str, Any] = {"bits": own.bits, "group_size": own.group_size}
        if own.mapping != base.mapping:
            # The table is fitted to the whole matrix when its turn comes.
            change |= {"mapping": own.mapping, "levels": FIT if own.mapping == "levels" else None}
        overrides += [(escape(name), change) for name in item.layers if len(item.options) > 1]
    return LowBitConfig(base.bits, base.group_size, base.mapping, base.scale, base.embedding_bits, overrides, base.levels)


def pinned_by(config: LowBitConfig, selected: Mapping[str, Config]) -> set[str]:
    """The layers whose width the user has given by a pattern, or as the embeddings'."""
    patterns = Patterns((pattern, change) for pattern, change in config.overrides)
    return {
        name
        for name, own in selected.items()
        if patterns.last(name) is not None or (isinstance(own, EmbeddingConfig) and config.embedding_bits is not None)
    }


def whole_bits(bits: Any) -> int:
    """The whole number of bits nearest below a mean, which sensitivities are measured at.

    Raises:
        ValueError: no number.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not math.isfinite(bits):
        raise ValueError(f"target_bits is {bits!r}; expected a number of bits per weight")
    return min(max(BITS[0], int(bits)), BITS[-1])
