"""Tests lowbit's operators for PyTorch without the Python package: python tests/windows/torch_operators.py LIBRARY.

Activations are integers and scales are powers of two, so float arithmetic is exact.
"""

import sys
from pathlib import Path

import torch


def main(library: str) -> None:
    torch.ops.load_library(str(Path(library).resolve()))
    operators = torch.ops.lowbit
    generator = torch.Generator().manual_seed(1)
    for bits in range(1, 9):
        weight = torch.randn(48, 128, generator=generator)
        codes, _, _ = operators.quantize(weight, bits, 32, False, False)
        scales = 2.0 ** torch.randint(-4, 4, (48, 4), generator=generator)
        packed = operators.pack(codes, scales, None, None, bits, 32)
        unpacked, found, _, _ = operators.unpack(packed)
        assert torch.equal(unpacked, codes) and torch.equal(found, scales)
        # The table of all weights equals the results for one-hot activations.
        dense = operators.embedding(torch.arange(48), packed, 128)
        for rows in (1, 9):
            x = torch.randint(-127, 128, (rows, 128), generator=generator).float()
            x[:, ::32] = 127.0  # the scale of every segment is 1
            expected = (x.double() @ dense.double().T).float()
            assert torch.equal(operators.linear(x, packed, 48), expected), (bits, rows)
    try:
        operators.linear(torch.ones(1, 64), packed, 48)
    except (RuntimeError, ValueError) as error:
        print("refused:", str(error).splitlines()[0])
    else:
        raise AssertionError("activations of a wrong size were accepted")
    print("lowbit's operators run in torch", torch.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
