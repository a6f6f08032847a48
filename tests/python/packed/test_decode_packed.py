"""examples/decode_packed.py, implemented from docs/format.md alone, has the bits of lowbit's dequantization."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import pytest
import torch
from reference import MAPPINGS, WEIGHTS, WIDTHS, random_packed
from safetensors import safe_open
from test_pack import GOLDEN, golden_bytes

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
import decode_packed


def assert_same_bits(data: bytes) -> None:
    packed = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    info = lowbit.info(packed)
    expected = lowbit.embedding(torch.arange(info.out_features), packed, info.in_features, dtype=torch.float32)
    weight, bias = decode_packed.decode(data)
    np.testing.assert_array_equal(weight, expected.numpy())  # treats NaNs as equal
    assert weight.dtype == np.float32 and weight.shape == info.shape
    found = lowbit.unpack(packed).bias
    assert (bias is None) == (found is None)
    if found is not None:
        np.testing.assert_array_equal(bias, found.numpy())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_golden_matrices(bits, mapping):
    data = golden_bytes(bits, mapping)
    assert hashlib.sha256(data).hexdigest() == GOLDEN[mapping][bits - 1]
    assert_same_bits(data)


@pytest.mark.parametrize("bits, mapping", WEIGHTS)
@pytest.mark.parametrize(
    "n, k, group_size", [(1, 1, 16), (17, 70, 32), (3, 100, 16), (33, 130, 48), (5, 490, None), (2, 3, 4096)]
)
def test_random_matrices(bits, mapping, n, k, group_size):
    torch.manual_seed(bits)
    groups = 1 if group_size is None else -(-k // group_size)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    # Factors that are not powers of two, so that products and sums round. One row exceeds float16, one overflows.
    scales = torch.randn(n, groups) * torch.logspace(-30, 30, n)[:, None]
    mins = torch.randn(n, groups) * scales if mapping == "affine" else None
    bias = torch.randn(n) if bits % 2 else None
    levels = torch.randint(-127, 128, (2**bits,), dtype=torch.int8) if mapping == "levels" else None
    packed = lowbit.pack(codes, scales, mins, bias, bits=bits, group_size=group_size, mapping=mapping, levels=levels)
    assert_same_bits(bytes(packed.tolist()))


@pytest.mark.parametrize("mapping", ["symmetric", "affine", "levels"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_rotated_inputs(mapping, block):
    assert_same_bits(bytes(random_packed(33, 3 * block, 3, 32, mapping, bias=True, rotated_inputs=block).tolist()))


def test_altered_bytes_are_detected():
    for mapping in MAPPINGS:
        data = golden_bytes(3, mapping)
        for at in [*range(64), 64, 100, len(data) - 1]:
            altered = bytearray(data)
            altered[at] ^= 16
            with pytest.raises(ValueError, match="checksum|magic"):
                decode_packed.decode(bytes(altered))
        with pytest.raises(ValueError, match="bytes"):
            decode_packed.decode(data[:-64])


def test_the_placement_is_that_of_the_document():
    from test_format_doc import TABLES

    for bits, lines in decode_packed.PLACEMENT.items():
        cells = {entry: (line, 7 - column) for line, text in enumerate(lines) for column, entry in enumerate(text.split())}
        assert {f"{j}.{t}": place for (j, t), place in TABLES[bits].items()} == cells


def header_order(file: Path) -> list[str]:
    data = file.read_bytes()
    return list(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def test_a_checkpoint_from_the_command_line(tmp_path):
    source, target = EXAMPLES / "tiny_llama" / "model", tmp_path / "packed"
    lowbit.quantize_checkpoint(source, target, lowbit.LowBitConfig(bits=3, group_size=32, mapping="affine"))
    script, file = EXAMPLES / "decode_packed.py", target / "model.safetensors"
    listed = subprocess.run([sys.executable, script, file], capture_output=True, text=True, check=True).stdout.splitlines()
    with safe_open(file, "pt") as tensors:
        assert [line.split(": ")[0] for line in listed] == [key for key in header_order(file) if key.endswith(".packed_weight")]
        name, output = listed[3].split(": ")[0], tmp_path / "weight.npy"
        packed = tensors.get_tensor(name)
    subprocess.run([sys.executable, script, file, name, output], check=True)
    info = lowbit.info(packed)
    assert f"{name}: {info.out_features} x {info.in_features}, 3 bits, {info.total_bytes} bytes" == listed[3]
    expected = lowbit.embedding(torch.arange(info.out_features), packed, info.in_features)
    np.testing.assert_array_equal(np.load(output), expected.numpy())
    matrix = tmp_path / "matrix.bin"
    matrix.write_bytes(packed.numpy().tobytes())
    subprocess.run([sys.executable, script, matrix, tmp_path / "again.npy"], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "again.npy"), expected.numpy())
