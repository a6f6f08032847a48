"""Mixed precision per layer: chooses a bit width and group size for each layer with a small loss within a size limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from ..layers.expert_stacks import Experts
from ..layers.packable import Layer, layer_at, names_by_weight
from ..layers.patterns import Patterns
from ..levels import FIT
from ..packed.rotation import rotate_back, rotate_weight
from ..packed.rounding import EmbeddingConfig, LinearConfig
from .capture import MeanSquares, StopRun, answering, inputs_of, removed_after
from .collect import rows_of
from .data import Inputs, mask_of, rows_in_parts, tokens_of
from .expert_inputs import mean_squares
from .float_products import FloatLinears
from .grid import MatrixConfig, with_table
from .importance import search
from .selection import check, lists_of_blocks, select

if TYPE_CHECKING:
    from ..hf.config import LowBitConfig

BITS = tuple(range(1, 9))
GROUP_SIZES = (16, 32, 64, 128)
# Bit widths at which another mapping may replace symmetric. Mins cost bytes, tables cost time, and above 4 bits neither helps.
_AFFINE_BITS = (2, 3, 4)
LEVELS_BITS = (2, 3, 4)
ALTERNATIVES = ("affine", "levels")

_KEPT = ("rotate", "scale", "activation_bits")  # settings that an override may have without fixing the width
_TOKENS = 2048  # largest number of tokens for measuring sensitivities
_PREDICTED = 512  # of a language model, whose head makes them slow
# Calibration removes more of a layer's error than of a table's, which later layers see as an error of their inputs. Measured by
# rounding alone, the losses of a language model's layers are this many times too large beside those of its tables
# (docs/measurements/quality.md, Losses of single layers).
_OVERSTATED = 2
_ROWS = 64  # rows of a matrix on which widths are compared
_BAND_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class Option:
    """A possible config of a matrix, with its bytes and loss."""

    bytes: int
    loss: float
    config: MatrixConfig


@dataclass
class Item:
    """A matrix and the layers that share it as their weight, or the matrices of all experts in one tensor."""

    layers: list[str]
    weights: int
    options: list[Option]
    config: MatrixConfig  # the selected config


# ---- sensitivities


def options_of(model: torch.nn.Module, config: LowBitConfig, alternatives: Collection[str] = ALTERNATIVES) -> list[Item]:
    """The matrices that a config selects, with their options and the bytes of each; losses are 0.

    Args:
        alternatives: mappings that may replace symmetric.

    Raises:
        ValueError: named levels, an unknown mapping, or weights that are not finite.
    """
    unknown = set(alternatives) - set(ALTERNATIVES)
    if isinstance(alternatives, str) or unknown:
        raise ValueError(f"alternatives are {alternatives!r}; expected some of {', '.join(map(repr, ALTERNATIVES))}")
    if config.levels not in (None, FIT):
        raise ValueError(f"levels are {config.levels!r}; expected {FIT!r} or none, where each layer has a width of its own")
    selected, experts, _ = select(model, config)
    check(model, selected | experts)
    pinned = pinned_by(config, selected | experts)
    layers = {name: layer_at(model, name) for name in (*selected, *experts)}
    shared = names_by_weight({name: layers[name] for name in selected})
    items = []
    for names in [*shared.values(), *([name] for name in experts)]:
        config_of_weight, layer = (selected | experts)[names[0]], layers[names[0]]
        weight, bias = layer.weight, getattr(layer, "bias", None) is not None
        choices = [config_of_weight]
        if not pinned & set(names):
            choices = _choices(config_of_weight, weight.shape[-1], alternatives)
        options = [Option(_bytes(weight, choice, bias), 0.0, choice) for choice in choices]
        items.append(Item(names, weight.numel(), options, config_of_weight))
    return items


def _choices(config: MatrixConfig, inputs: int, alternatives: Collection[str]) -> list[MatrixConfig]:
    configs = []
    for bits in BITS:
        mappings = [config.mapping if config.mapping != "levels" or bits in LEVELS_BITS else "symmetric"]
        if config.mapping == "symmetric":
            usable = {"affine": _AFFINE_BITS, "levels": LEVELS_BITS}
            mappings += [other for other in ALTERNATIVES if other in alternatives and bits in usable[other]]
        for mapping in mappings:
            levels = (config.levels or FIT) if mapping == "levels" else None
            for group in GROUP_SIZES:
                if group <= max(GROUP_SIZES[0], inputs):
                    configs.append(replace(config, bits=bits, group_size=group, mapping=mapping, levels=levels))
    return configs


def measure_losses(
    model: torch.nn.Module,
    inputs: list[Inputs],
    items: list[Item],
    reference_bits: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Measures the loss of each option of a float model's matrices, and stores it in the items.

    Each matrix alone is rounded to ``reference_bits`` in groups of 32, with scales searched using the mean squares of its
    inputs, and the model runs on part of the text. The loss is the mean KL divergence of its predictions from the float
    model's or, for a model without logits, the relative squared error of the last hidden states. For other widths and group
    sizes it is scaled by their squared error on some rows, weighted by the same mean squares.

    Args:
        items: from :func:`options_of`. Items with one option are skipped.

    Raises:
        ValueError: outputs that are not finite.
    """
    linear = {name: item.config for item in items if isinstance(item.config, LinearConfig) for name in item.layers}
    batch = _trial(model, inputs)
    importance = _importance(model, inputs, batch, linear)
    runs = _Runs(model, batch, linear)
    expected, predictions = runs.expected, runs.predictions
    if not bool(torch.isfinite(expected).all()):
        raise ValueError("the outputs of the model have NaN or infinite values on the calibration text")
    probabilities = expected.exp() if predictions else None
    for done, item in enumerate(items):
        if progress is not None:
            progress(done, len(items))
        if len(item.options) == 1:
            continue
        layers = [layer_at(model, name) for name in item.layers]
        weight = layers[0].weight.detach().reshape(-1, layers[0].weight.shape[-1])
        counts = next((importance[name] for name in item.layers if name in importance), None)
        reference = replace(item.config, bits=reference_bits, group_size=32, mapping="symmetric", levels=None)
        with _replaced_weight(layers, _rounded(weight, counts, reference)):
            loss = _distance(runs.outputs(item.layers), expected, probabilities)
        if predictions and not any(isinstance(layer, torch.nn.Embedding) for layer in layers):
            loss /= _OVERSTATED
        rows = weight[:: -(-len(weight) // _ROWS)].float()
        reference_error = _error(rows, counts, reference)
        tables: dict[int, MatrixConfig] = {}  # by width; tables for different group sizes are similar
        options = []
        for option in item.options:
            choice = option.config
            if choice.levels == FIT:
                if choice.bits not in tables:
                    tables[choice.bits] = with_table(choice, choice.as_rounded(rows), None if choice.rotate else counts)
                choice = replace(choice, levels=tables[choice.bits].levels)
            ratio = _error(rows, counts, choice) / reference_error if reference_error else 0.0
            options.append(replace(option, loss=loss * ratio))
        item.options = options
    if progress is not None:
        progress(len(items), len(items))


def _bytes(weight: Tensor, config: MatrixConfig, bias: bool) -> int:
    """Packed bytes of a matrix [n, k], or of experts [experts, n, k]."""
    linear = isinstance(config, LinearConfig)
    matrix = config.describe(weight.shape[-2:], bias and linear)
    return int(math.prod(weight.shape[:-2])) * matrix.total_bytes


@contextmanager
def _replaced_weight(layers: list[Layer], weight: Tensor) -> Iterator[None]:
    """A context in which layers that share a weight have another one: [n, k], or [experts * n, k] for experts."""
    first = layers[0]
    if isinstance(first, Experts):
        parameters, leaf = first.holder._parameters, first.leaf
        original = parameters[leaf]
        parameters[leaf] = torch.nn.Parameter(first.oriented(weight.view(first.weight.shape)), requires_grad=False)
        try:
            yield
        finally:
            parameters[leaf] = original
        return
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_with_weight(layer, parameter))
        yield


@contextmanager
def _with_weight(layer: Any, weight: torch.nn.Parameter) -> Iterator[None]:
    """A context in which a layer has another weight, also instead of one that a parametrization computes."""
    if is_parametrized(layer, "weight"):
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (kind,), {"weight": weight})
        try:
            yield
        finally:
            layer.__class__ = kind
        return
    original = layer.weight
    try:
        layer.weight = weight
        yield
    finally:
        layer.weight = original


def _importance(
    model: torch.nn.Module, inputs: list[Inputs], trial: list[Inputs], configs: Mapping[str, MatrixConfig]
) -> dict[str, Tensor]:
    """Mean squares of the inputs of layers; for experts, which need extra computation, on the trial only."""
    squares = MeanSquares()
    layers = {name: layer_at(model, name) for name in configs}
    experts = {name: configs[name] for name, layer in layers.items() if isinstance(layer, Experts)}
    modules = {name: layer for name, layer in layers.items() if not isinstance(layer, Experts)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for batch in inputs:
        missing = set(modules)

        def take(name: str, x: Tensor, mask: Tensor | None = mask_of(batch), missing: set[str] = missing) -> None:
            squares.add(name, rows_of(x, mask))
            missing.discard(name)
            if not missing and modules[name] is head:
                raise StopRun  # its logits are not needed

        with inputs_of(modules, take), FloatLinears(), suppress(StopRun):
            model(**batch)
    means = squares.means()
    if experts:
        means |= mean_squares(model, experts, trial)
    for name, mean in means.items():
        if not bool(torch.isfinite(mean).all()):
            raise ValueError(f"the inputs of {name} have NaN or infinite values on the calibration text")
    return {name: mean + 1e-4 * mean.mean() for name, mean in means.items()}


def _trial(model: torch.nn.Module, inputs: list[Inputs]) -> list[Inputs]:
    """Rows of batches that are spread over the text, from the first on, until they have enough tokens; one batch may do."""
    most = _PREDICTED if getattr(model, "can_generate", lambda: False)() else _TOKENS
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


class _Runs:
    """Runs a model on some batches, without the blocks before those whose weights have changed."""

    def __init__(self, model: torch.nn.Module, batches: list[Inputs], names: Iterable[str]):
        """
        Args:
            names: the names of the layers whose weights may change.
        """
        self.model, self.batches = model, batches
        self.lists = {name: list(model.get_submodule(name)) for name in lists_of_blocks(model, names)}
        self.recorded: list[dict[torch.nn.Module, Any]] = [{} for _ in batches]  # outputs of the blocks of the float model
        parts, order = [], list[torch.nn.Module]()
        for batch, recorded in zip(batches, self.recorded, strict=True):

            def keep(block: torch.nn.Module, _: Any, output: Any, recorded: dict[Any, Any] = recorded) -> None:
                recorded[block] = output
                order.append(block)

            every = [block for blocks in self.lists.values() for block in blocks]
            with removed_after([block.register_forward_hook(keep) for block in every]):
                parts.append(_output(model, batch))
        self.expected, self.predictions = torch.cat([part for part, _ in parts]), parts[0][1]
        for name, blocks in list(self.lists.items()):
            # Blocks may use more of earlier blocks than their outputs, for example their keys and values. A model may also call
            # them several times, or in another order, so that a block comes after a changed one that follows it in the list.
            in_order = [block for block in order if block in blocks] == blocks * len(batches)
            with suppress(Exception):
                if in_order and torch.equal(self._run(blocks[:-1]), self.expected):
                    continue
            del self.lists[name]

    def outputs(self, names: Sequence[str]) -> Tensor:
        """The outputs of the model if only the weights of these layers have changed."""
        skipped: list[torch.nn.Module] = []
        for name, blocks in self.lists.items() if len(names) == 1 else ():
            if names[0].startswith(f"{name}."):
                skipped = blocks[: int(names[0].removeprefix(f"{name}.").split(".")[0])]
        return self._run(skipped)

    def _run(self, skipped: list[torch.nn.Module]) -> Tensor:
        parts = []
        for batch, recorded in zip(self.batches, self.recorded, strict=True):
            with ExitStack() as stack:
                for block in skipped:
                    stack.enter_context(answering(block, partial(_returned, recorded[block])))
                parts.append(_output(self.model, batch)[0])
        return torch.cat(parts)


def _returned(output: Any, /, *_: Any, **__: Any) -> Any:
    return output


def _output(model: torch.nn.Module, batch: Inputs) -> tuple[Tensor, bool]:
    """Log-probabilities, float32 [tokens, vocabulary], and True; or hidden states [tokens, features], and False."""
    with FloatLinears():
        output = model(**batch)
    logits = getattr(output, "logits", None)
    if logits is not None and logits.dim() == 3:
        return rows_of(logits.flatten(0, 1).float().log_softmax(1), mask_of(batch)), True
    states = getattr(output, "last_hidden_state", None)
    return rows_of((output[0] if states is None else states).float(), mask_of(batch)), False


def _distance(outputs: Tensor, expected: Tensor, probabilities: Tensor | None) -> float:
    """The loss of :func:`measure_losses` from two results of :class:`_Runs`; overwrites ``outputs``."""
    difference = outputs.sub_(expected)
    if probabilities is not None:
        return float(-difference.mul_(probabilities).sum(1).clamp(max=0).mean())
    return float(difference.square().sum() / expected.square().sum())


def _rounded(weight: Tensor, importance: Tensor | None, config: MatrixConfig) -> Tensor:
    """Quantized and dequantized weights, in the dtype of ``weight``."""
    result = torch.empty_like(weight)
    rows = max(1, _BAND_WEIGHTS // weight.shape[1])
    for begin in range(0, len(weight), rows):
        result[begin : begin + rows] = _rounded_rows(weight[begin : begin + rows].float(), importance, config)
    return result


def _rounded_rows(rows: Tensor, importance: Tensor | None, config: MatrixConfig) -> Tensor:
    """The same as :func:`_rounded`, for some rows float32 [n, k]."""
    block = config.rotated_inputs(rows.shape[1])
    if block and importance is not None:  # approximates the mean squares of rotated inputs, assuming uncorrelated inputs
        importance = importance.view(-1, block).mean(1).repeat_interleave(block)
    return rotate_back(search(rotate_weight(rows, block), importance, config).dequantize(), block)


def _error(rows: Tensor, importance: Tensor | None, config: MatrixConfig) -> float:
    error = (_rounded_rows(rows, importance, config) - rows).square()
    return float((error if importance is None else error * importance).double().mean())


# ---- assignment


def assign(items: list[Item], most: int) -> list[Option]:
    """An option for each item, at most ``most`` bytes together, with a small loss; deterministic.

    All items start at their smallest option, and only options on the lower convex hull of (bytes, loss) are used. Steps along
    the hulls are taken in the order of their gain per byte, as long as they fit, as with a Lagrange multiplier.

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
    for _, index, at in steps:  # gains along a hull decrease, so its steps come in order
        hull = hulls[index]
        more = hull[at + 1].bytes - hull[chosen[index]].bytes
        if chosen[index] <= at and total + more <= most:
            total += more
            chosen[index] = at + 1
    return [hull[at] for hull, at in zip(hulls, chosen, strict=True)]


def _hull(options: list[Option]) -> list[Option]:
    """The options on the lower convex hull of (bytes, loss), in the order of bytes."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-2], option) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.loss - first.loss) / (second.bytes - first.bytes)


def extremes(items: list[Item]) -> tuple[int, int]:
    """Total bytes of the smallest options and of the largest options."""
    sizes = [[option.bytes for option in item.options] for item in items]
    return sum(map(min, sizes)), sum(map(max, sizes))


def check_bits(items: list[Item], target_bits: float) -> None:
    """Raises ValueError if no options have this mean number of bits per weight; the message gives the range."""
    weights = sum(item.weights for item in items)
    smallest, largest = (8 * size / weights for size in extremes(items))
    if not smallest <= target_bits <= largest:
        raise ValueError(
            f"{target_bits:g} bits per weight cannot be reached; this model takes {smallest:.3f} to {largest:.3f}, scales "
            "included"
        )


def within(items: list[Item], target_bits: float) -> list[Option]:
    """:func:`assign` for a mean number of bits per weight, scales and headers included.

    Raises:
        ValueError: as :func:`check_bits`.
    """
    check_bits(items, target_bits)
    return assign(items, int(target_bits * sum(item.weights for item in items) / 8))


def config_of(base: LowBitConfig, items: list[Item], chosen: list[Option]) -> LowBitConfig:
    """A config with an override for each layer, after the overrides of ``base``."""
    from ..transformers import LowBitConfig

    overrides: list[tuple[str, Any]] = [(pattern, change) for pattern, change in base.overrides]
    for item, option in zip(items, chosen, strict=True):
        config = option.config
        change: dict[str, Any] = {"bits": config.bits, "group_size": config.group_size}
        if config.mapping != base.mapping:
            # Levels are fitted to the whole matrix later.
            change |= {"mapping": config.mapping, "levels": FIT if config.mapping == "levels" else None}
        # Only the last matching override applies, so this one must repeat what differs from the base.
        change |= {name: getattr(config, name) for name in _KEPT if getattr(config, name) != getattr(base, name)}
        overrides += [(escape(name), change) for name in item.layers if len(item.options) > 1]
    return LowBitConfig(
        base.bits, base.group_size, base.mapping, base.scale, base.embedding_bits, overrides, base.levels, base.conv_bits,
        base.rotate, base.activation_bits,
    )  # fmt: skip


def pinned_by(config: LowBitConfig, selected: Mapping[str, MatrixConfig]) -> set[str]:
    """Names of layers whose width a pattern or ``embedding_bits`` sets."""
    patterns = Patterns((pattern, change) for pattern, change in config.overrides)

    def says_width(name: str) -> bool:
        override = patterns.last(name)
        return override is not None and not (override[1] or {}).keys() <= set(_KEPT)

    return {
        name
        for name, layer_config in selected.items()
        if says_width(name) or (isinstance(layer_config, EmbeddingConfig) and config.embedding_bits is not None)
    }


def whole_bits(bits: Any) -> int:
    """Rounds a mean number of bits per weight down to the bit width at which sensitivities are measured.

    Raises:
        ValueError: it is not a finite number.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not math.isfinite(bits):
        raise ValueError(f"target_bits is {bits!r}; expected a number of bits per weight")
    return min(max(BITS[0], int(bits)), BITS[-1])
