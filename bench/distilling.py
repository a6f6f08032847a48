"""Measures distillation: Gemma 3 270M at few bits, calibrated by auto, then with its scales learned.

    python bench/distilling.py [--target-bits 2.5] [--auto-tokens 8192] [--tokens 16384] [--steps 56] [--rate 0.001]
                               [--directory build/reality]

Without --target-bits: 2 bits with fitted levels. Inputs are rotated. Prints the KL divergence to the float model in nats,
before and after, on the text of `make bench-reality`.
"""

import argparse
import time
from pathlib import Path

import lowbit
import reality_models
import torch
from lowbit.calibration.data import Sample, batches
from lowbit.calibration.distilling import Teacher, distilled
from lowbit.calibration.learning import put_weights
from lowbit.calibration.model import evaluating
from reality_weights import calibrate, calibration_text, packed_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target-bits", type=float, help="mixed widths with this mean number of bits per weight")
    parser.add_argument("--auto-tokens", type=int, default=8192, help="tokens of the text for auto")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of the text for distillation")
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--directory", type=Path, default=Path("build/reality"))
    options = parser.parse_args()
    pair = reality_models.gemma(options.directory, 512)
    divergences = reality_models.divergences_from(pair)

    def row(name: str, model: torch.nn.Module, begin: float) -> None:
        seconds = time.process_time() - begin
        divergence = divergences(model)[:-1].mean()
        print(f"| {name} | {packed_size(model)[1]:.2f} | {divergence:.3f} | {seconds:.0f} |", flush=True)

    print("| method | bits per weight | KLD, nats | CPU s |\n|---|---|---|---|")
    begin = time.process_time()
    levels = {} if options.target_bits is not None else {"bits": 2, "levels": "fit"}
    config = lowbit.LowBitConfig(rotate=True, **levels)
    model = calibrate(pair, options.auto_tokens, config, options.target_bits)
    row("auto", model, begin)
    inputs, _ = batches(model, [calibration_text()], pair.tokenizer, 512, options.tokens)
    begin = time.process_time()
    with evaluating(pair.floats), evaluating(model):
        teacher, head = Teacher(pair.floats, inputs), model.get_output_embeddings()
        layers = {name: module for name, module in model.named_modules() if isinstance(module, lowbit.nn.Packed)}
        names = [name for name, module in layers.items() if module.packed_weight is not head.packed_weight]
        held_out = Sample(inputs).held_out
        put_weights(model, distilled(model, teacher, names, held_out, set(names), options.steps, options.rate))
    row("distilled", model, begin)


if __name__ == "__main__":
    main()
