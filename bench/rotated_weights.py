"""Measures rotated inputs: Gemma 3 270M at few bits, calibrated, with the inputs of no, some or all layers rotated.

    python bench/rotated_weights.py [--bits 2 3] [--tokens 2048] [--directory build/reality]

Prints the KL divergence to the float model in nats, on the text of `make bench-reality`.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import lowbit
import reality_models
from reality_weights import calibration_text

_NOT: dict[str, Any] = {"rotate": False}
_CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "down": {"overrides": {"*down_proj": {"rotate": True}}},
    "all but the table, which is also the head": {"rotate": True, "overrides": {"lm_head": _NOT, "*embed*": _NOT}},
    "all": {"rotate": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the calibration text")
    parser.add_argument("--directory", type=Path, default=Path("build/reality"))
    options = parser.parse_args()
    pair = reality_models.gemma(options.directory, 512)
    divergences = reality_models.divergences_from(pair)
    print("| rotated inputs | bits | KLD, nats | CPU s |\n|---|---|---|---|")
    for what, config in _CONFIGS.items():
        for bits in options.bits:
            model, begin = copy.deepcopy(pair.floats), time.process_time()
            chosen = lowbit.LowBitConfig(bits=bits, **config)
            lowbit.calibrate(model, [calibration_text()], chosen, tokenizer=pair.tokenizer, max_tokens=options.tokens)
            seconds = time.process_time() - begin
            print(f"| {what} | {bits} | {divergences(model).mean():.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
