"""What calibration says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

METHODS = ("auto", "gptq", "importance", "tuned", "distilled")


@dataclass
class Calibration:
    """What :func:`lowbit.calibrate` did."""

    tokens: int  # of the text, as often as the model saw them
    there: int  # tokens that the text has; more than were used where there are more than asked for
    # Of each quantized layer, and of each expert of a tensor of experts ("...down_proj.5"): a method, or "nearest".
    methods: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # what stays float though it holds weights to multiply with: why
    resumed: int = 0  # layers that an earlier run, which was killed, had finished
