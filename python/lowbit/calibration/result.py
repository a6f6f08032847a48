"""The result of a calibration."""

from __future__ import annotations

from dataclasses import dataclass, field

METHODS = ("auto", "gptq", "importance", "tuned", "distilled")


@dataclass
class Calibration:
    """Result of :func:`lowbit.calibrate`."""

    tokens: int  # number of tokens used
    text_tokens: int  # tokens of the whole text
    # Quantized layer, or expert in a tensor of experts ("...down_proj.5") -> method or "nearest".
    methods: dict[str, str] = field(default_factory=dict)
    unquantized: dict[str, str] = field(default_factory=dict)  # modules whose matrices stay float -> why
    resumed: int = 0  # layers that an earlier, interrupted run had finished
