"""Quantization with a calibration text: better than rounding to nearest, above all at 4 bits and below.

``calibrate`` does a model; ``calibration.gptq`` and ``calibration.importance`` do one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from .result import METHODS, Calibration


def calibrate(
    model: Any,
    data: Iterable[Any],
    config: Any,
    method: str = "auto",
    *,
    tokenizer: Any = None,
    window: int = 512,
    max_tokens: int = 32768,
    target_bits: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Quantizes a model of transformers in place, with the help of a text that is like what it will be used on.

    As :func:`lowbit.quantize_`, but scales and codes are chosen for little change of the layers' outputs on the text.
    It goes through the blocks of the model in order: the inputs of a block come from the quantized blocks before it, so
    that later layers make up for the errors of earlier ones. Besides the model, memory for two activations per token,
    for one float block and for two float32 matrices [k, k] per input of k features is needed.

    Experts whose weights are one tensor are calibrated one by one, each with the tokens that are routed to it, behind the
    other layers of their block. A head that shares its weight with an embedding is calibrated, and then shares the packed
    weight. Tables of an embedding model are quantized by GPTQ from 2 bits up, with what gradients say of their errors
    (:func:`lowbit.calibration.tables.moments_of_tables`), unless the method is importance; other tables are rounded to
    nearest.

    Args:
        model: a language or embedding model in eval mode, on the CPU.
        data: texts, for which a ``tokenizer`` is needed; or inputs of the model, each int64 [batch, tokens] or a dict
            with "input_ids". Of a language model's texts all tokens are put behind each other and cut into windows;
            other models see each text by itself. Ten thousand tokens do; more are better below 4 bits.
        config: as for :func:`lowbit.quantize_`, or a :class:`lowbit.LowBitConfig`.
        method: "gptq" (:func:`lowbit.calibration.gptq.gptq`, the better one, which takes as long as some ten passes over
            the text), "importance" (:func:`lowbit.calibration.importance.search` with the mean square of each input; one
            pass), "auto": gptq where a layer saw at least as many tokens as it has inputs, else importance, or "tuned":
            auto, and behind each block its scales are learned (:func:`lowbit.calibration.tuning.tuned`), which pays below
            3 bits, takes some three times as long, and gradients' memory for one block; or "distilled": auto, and then
            all scales are learned together towards the float model's answers
            (:func:`lowbit.calibration.distilling.distilled`), with gradients' memory for the whole model.
        tokenizer: of the model, for texts.
        window: tokens of a language model's inputs.
        max_tokens: of texts that are used; of longer ones, parts that lie evenly in them. Memory is needed for two
            hidden states of each.
        target_bits: widths by layer for this mean of bits per weight, from :func:`assign_widths`; the config is then a
            :class:`lowbit.LowBitConfig`.
        progress: called as ``progress(layers done, layers)``.

    Raises:
        TypeError, ValueError: an unknown method, a wrong config, a text that is too short or has tokens the model does
            not know, weights or activations that are not finite. Up to the first activations the model is unchanged.
    """
    from .model import run

    if target_bits is not None:
        data = [data] if isinstance(data, str) else list(data)  # for both: an iterator is there once
        config = assign_widths(model, data, config, target_bits, tokenizer=tokenizer, window=window, max_tokens=max_tokens)
    said = -1

    def report(done: int, total: int, name: str) -> None:
        nonlocal said
        if progress is not None and done != said:
            progress(done, total)
        said = done

    return run(model, data, config, method, tokenizer=tokenizer, window=window, max_tokens=max_tokens, progress=report)


def assign_widths(
    model: Any,
    data: Iterable[Any],
    config: Any,
    target_bits: float,
    *,
    tokenizer: Any = None,
    window: int = 512,
    max_tokens: int = 32768,
    alternatives: Collection[str] = ("affine", "levels"),
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """A width and a group size for each layer of a float model, for a mean of bits per weight; the model stays as it is.

    Each matrix alone is rounded, and the change of the model's outputs on some of the text measured
    (:func:`lowbit.calibration.widths.measure_losses`); then bits go where they gain most
    (:func:`lowbit.calibration.widths.assign`).

    Args:
        model, data, tokenizer, window, max_tokens: as for :func:`calibrate`.
        config: a :class:`lowbit.LowBitConfig`; layers that its overrides or ``embedding_bits`` name keep their widths.
        target_bits: bits per quantized weight, scales and all that a packed weight has besides included.
        alternatives: mappings that may take the place of a symmetric one at 2 to 4 bits, where they gain;
            ``("affine",)`` for :func:`lowbit.qat.prepare_`, which trains no levels.
        progress: called as ``progress(matrices measured, matrices)``.

    Returns:
        A :class:`lowbit.LowBitConfig` with an override for each layer.

    Raises:
        TypeError, ValueError: as :func:`calibrate`, or a target that cannot be had; the message says what can.
    """
    from .._layers import with_linears
    from ..transformers import LowBitConfig
    from .data import batches
    from .model import evaluating
    from .widths import check_bits, config_of, measure_losses, options_of, whole_bits, within

    if not isinstance(config, LowBitConfig):
        raise TypeError(f"config is a {type(config).__name__}; expected a lowbit.LowBitConfig")
    reference_bits = whole_bits(target_bits)
    inputs, _ = batches(model, data, tokenizer, window, max_tokens)
    with with_linears(model, config.select(model, experts=False)), evaluating(model):
        items = options_of(model, config, alternatives)
        check_bits(items, target_bits)
        measure_losses(model, inputs, items, reference_bits, progress)
    return config_of(config, items, within(items, target_bits))


__all__ = ["METHODS", "Calibration", "assign_widths", "calibrate"]
