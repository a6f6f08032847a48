"""Quantization with a calibration text, which is better than round-to-nearest, above all at 4 bits and below.

``calibrate`` quantizes a model; ``calibration.gptq`` and ``calibration.importance`` quantize a matrix.
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
    """Quantizes a model of transformers in place, calibrated on a text similar to what the model will be used on.

    Like :func:`lowbit.quantize_`, but scales and codes are chosen so that the layers' outputs on the text change little.
    Blocks are quantized in order, each with inputs from the quantized blocks before it, so that later layers correct the
    errors of earlier ones. Besides the model this needs memory for three hidden states per token, one float block, two
    float32 matrices [k, k] for a layer with k inputs, and up to 512 MB of inputs of the block's layers.

    Experts stored in one tensor are calibrated one by one, each with the tokens that are routed to it, after the other layers
    of their block. A head that is tied to an embedding is calibrated, and the embedding shares the packed weight. Tables of an
    embedding model are quantized by GPTQ from 2 bits up, with moments from gradients
    (:func:`lowbit.calibration.tables.moments_of_tables`), unless the method is importance; other tables are rounded to
    nearest.

    Args:
        model: a language or embedding model in eval mode, on the CPU.
        data: texts, which require a ``tokenizer``; or inputs of the model, each int64 [batch, tokens] or a dict with
            "input_ids". Texts of a language model are joined and split into windows; other models take each text separately.
            Ten thousand tokens are enough; more are better below 4 bits.
        config: as for :func:`lowbit.quantize_`, or a :class:`lowbit.LowBitConfig`.
        method: one of these:

            * "gptq": :func:`lowbit.calibration.gptq_solver.gptq`; takes about ten passes over the text.
            * "importance": :func:`lowbit.calibration.importance.search` with the mean square of each input; one pass.
            * "auto": gptq for layers with at least as many tokens as inputs, otherwise importance.
            * "tuned": auto, then learns the scales of each block (:func:`lowbit.calibration.tuning.tuned`). Better below 3
              bits, but takes three times as long, and memory for the gradients of a block.
            * "distilled": auto, then learns all scales from the float model's answers
              (:func:`lowbit.calibration.distilling.distilled`). Needs memory for the gradients of the model.
        tokenizer: the model's tokenizer, for texts.
        window: tokens per input of a language model.
        max_tokens: largest number of tokens to use; of longer texts, evenly spread parts are used. Memory holds three hidden
            states of each token.
        target_bits: mixed precision per layer with this mean number of bits per weight, from :func:`assign_widths`; requires
            a :class:`lowbit.LowBitConfig`.
        progress: called as ``progress(layers done, layers)``.

    Raises:
        TypeError, ValueError: an unknown method, a wrong config, a text that is too short or has unknown tokens, or weights
            or activations that are not finite. Errors before the first run leave the model unchanged.
    """
    from .model import run

    if target_bits is not None:
        data = [data] if isinstance(data, str) else list(data)  # a list, because it is used twice
        config = assign_widths(model, data, config, target_bits, tokenizer=tokenizer, window=window, max_tokens=max_tokens)
    reported = -1

    def report(done: int, total: int, name: str) -> None:
        nonlocal reported
        if progress is not None and done != reported:
            progress(done, total)
        reported = done

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
    """Mixed precision per layer: chooses a bit width and group size for each layer, for a mean number of bits per weight.

    Each matrix is rounded alone, and the change of the model's outputs on part of the text is measured
    (:func:`lowbit.calibration.widths.measure_losses`); then bits are assigned to the layers where they reduce the loss most
    (:func:`lowbit.calibration.widths.assign`). The model is unchanged.

    Args:
        model, data, tokenizer, window, max_tokens: as for :func:`calibrate`.
        config: a :class:`lowbit.LowBitConfig`; layers named by its overrides or ``embedding_bits`` keep their widths.
        target_bits: mean number of bits per weight of the packed weights, scales included.
        alternatives: mappings that may replace symmetric at 2 to 4 bits if they reduce the loss; ``("affine",)`` for
            :func:`lowbit.qat.prepare_`, which does not train levels.
        progress: called as ``progress(matrices measured, matrices)``.

    Returns:
        A :class:`lowbit.LowBitConfig` with an override for each layer.

    Raises:
        TypeError, ValueError: as :func:`calibrate`, or a target that cannot be reached; the message gives the range.
    """
    from ..layers.packable import with_linears
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
