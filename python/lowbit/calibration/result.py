"""Methods and results of calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

METHODS = ("auto", "gptq", "importance", "tuned", "distilled")


@dataclass
class Calibration:
    """Result of :func:`lowbit.calibrate`."""

    tokens: int  # tokens of the text that were used
    text_tokens: int  # tokens of the whole text
    # A method or "nearest" for each quantized layer, and for each expert of a tensor of experts ("...down_proj.5").
    methods: dict[str, str] = field(default_factory=dict)
    unquantized: dict[str, str] = field(default_factory=dict)  # modules whose matrices stay float -> why
    resumed: int = 0  # layers that an earlier, interrupted run had finished
