"""What rotated inputs would gain: Gemma 3 270M, whose inputs of some layers are multiplied by a Hadamard matrix, in float, and
weights of few bits calibrated behind it. lowbit itself rotates no inputs of layers.

    python bench/rotated_weights.py [--bits 2 3] [--tokens 2048] [--directory build/reality]

Signs of the inputs are random, and the matrix has blocks of 128 inputs, the largest power of two that divides Gemma's widths.
KL divergence to the float model, nats, of the text of `make bench-reality`.
"""

import argparse
import copy
import time
from pathlib import Path

import lowbit
import reality_models
import torch
from reality_weights import calibration_text
from torch import Tensor

_BLOCK = 128
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_KINDS: dict[str, tuple[str, ...]] = {"none": (), "down": ("down_proj",), "all": _LAYERS}


class Rotated(torch.nn.Module):
    """A linear layer, and the rotation of its inputs, which its weights undo."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        matrix = torch.ones(1, 1)
        while len(matrix) < _BLOCK:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        self.register_buffer("matrix", matrix / _BLOCK**0.5)
        self.register_buffer("signs", torch.randint(0, 2, (linear.in_features,)) * 2.0 - 1)
        self.linear = copy.deepcopy(linear)
        self.linear.weight.data = self._rotate(linear.weight.data)

    def _rotate(self, x: Tensor) -> Tensor:
        return ((x * self.signs).unflatten(-1, (-1, _BLOCK)) @ self.matrix).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self._rotate(x))


def rotated(model: torch.nn.Module, kinds: tuple[str, ...]) -> torch.nn.Module:
    model = copy.deepcopy(model)
    for name in [name for name, _ in model.named_modules() if name.rpartition(".")[2] in kinds]:
        model.set_submodule(name, Rotated(model.get_submodule(name)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--tokens", type=int, default=2048, help="of the calibration")
    parser.add_argument("--directory", type=Path, default=Path("build/reality"))
    options = parser.parse_args()
    pair = reality_models.gemma(options.directory, 512)
    tokens = torch.tensor([pair.tokens])
    with torch.inference_mode():
        expected = pair.floats(tokens).logits[0].log_softmax(-1)
    print("| rotated inputs | bits | KLD, nats | CPU s |\n|---|---|---|---|")
    for what, kinds in _KINDS.items():
        for bits in options.bits:
            torch.manual_seed(0)
            model, begin = rotated(pair.floats, kinds), time.process_time()
            config = lowbit.LowBitConfig(bits=bits)
            lowbit.calibrate(model, [calibration_text()], config, tokenizer=pair.tokenizer, max_tokens=options.tokens)
            seconds = time.process_time() - begin
            with torch.inference_mode():
                found = model(tokens).logits[0].log_softmax(-1)
            divergence = (expected.exp() * (expected - found)).sum(-1).mean().item()
            print(f"| {what} | {bits} | {divergence:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
