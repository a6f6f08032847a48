"""docs/format.md is the specification: packed matrices can be decoded by its tables and offsets alone."""

import math
import re
import struct
from pathlib import Path

import lowbit
import pytest
import torch
from reference import WEIGHTS

DOCUMENT = Path(__file__).parents[3] / "docs" / "format.md"


def placement_tables() -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """For each width: (unpacked line, code bit) -> (packed line, bit position)."""
    tables = {}
    for bits, body in re.findall(r"^### (\d) bits?\n(.*?)(?=^### |\Z)", DOCUMENT.read_text(), re.S | re.M):
        table = {}
        for packed_line, cells in re.findall(r"^ +line (\d) +\|(.*)\|$", body, re.M):
            for column, cell in enumerate(cells.split("|")):
                line, bit = (int(part) for part in cell.split("."))
                assert (line, bit) not in table
                table[line, bit] = (int(packed_line), 7 - column)
        tables[int(bits)] = table
    return tables


TABLES = placement_tables()


def decode(data: bytes) -> dict:
    """Decodes a packed matrix according to docs/format.md, in plain Python."""
    magic, version, layout, bits, mapping, has_bias, log, activations, n, k, g, _, total = struct.unpack_from(
        "<8sHBBBBBBqqIIq", data
    )
    assert magic == bytes.fromhex("894c4f574249540a") and (layout, total) == (0, len(data))
    assert version == (4 if activations else 3 if log else 2 if mapping == 2 else 1) and activations in (0, 16)
    table = None
    if mapping == 2:
        table = struct.unpack_from(f"<{2**bits}b", data, 64)
        assert not any(data[64 + len(table) : 128])
    blocks = -(-k // 32)
    group = g or blocks * 32
    groups = -(-k // group)
    floats = 32 if mapping == 1 else 16
    codes = [[0] * k for _ in range(n)]
    scales = [[0.0] * groups for _ in range(n)]
    mins = [[0.0] * groups for _ in range(n)]
    biases, row_sums = [0.0] * n, [0.0] * n
    at = 128 if mapping == 2 else 64
    for panel in range(-(-n // 16)):
        start, read, raw = at, 0, []
        for block in range(blocks):
            lines = data[at : at + 64 * bits]
            at += 64 * bits
            for r in range(min(16, n - 16 * panel)):
                for i in range(min(32, k - 32 * block)):
                    code = 0
                    for t in range(bits):
                        line, position = TABLES[bits][i // 4, t]
                        code |= (lines[64 * line + 4 * r + i % 4] >> position & 1) << t
                    codes[16 * panel + r][32 * block + i] = code ^ (128 if bits == 8 else 0)
            while read < groups and (min((read + 1) * group, k) + 31) // 32 <= block + 1:
                raw.append(struct.unpack_from(f"<{floats}e", data, at))
                at += 2 * floats
                read += 1
        head = struct.unpack_from("<48f", data, at)
        at += 192
        padding = -(at - start) % 64
        assert not any(data[at : at + padding])
        at += padding
        for r in range(min(16, n - 16 * panel)):
            row = 16 * panel + r
            for index, values in enumerate(raw):
                scales[row][index] = head[r] * values[r]
                mins[row][index] = head[r] * values[16 + r] if mapping == 1 else 0.0
            row_sums[row], biases[row] = head[r] * head[16 + r], head[32 + r]
    assert at == len(data)
    return {
        "codes": codes,
        "scales": scales,
        "mins": mins,
        "bias": biases,
        "row_sums": row_sums,
        "group": group,
        "affine": mapping == 1,
        "levels": table,
        "has_bias": bool(has_bias),
        "rotated": 2**log if log else 0,
        "activation_bits": activations or 8,
    }


def rotated(x: list[float], block: int) -> list[float]:
    """Rotates inputs according to docs/format.md, in plain Python and float64."""
    words = [int(word, 16) for word in re.search(r"of `([0-9a-f ]+)` \(hexadecimal", DOCUMENT.read_text())[1].split()]
    factor = 2.0 ** -math.ceil(math.log2(block) / 2)
    for first in range(0, len(x), block):
        for i in range(block):
            x[first + i] *= -factor if words[i // 32] >> i % 32 & 1 else factor
        h = 1
        while h < block:
            for i in range(first, first + block):
                if not i - first & h:
                    x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h]
            h *= 2
    return x


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_inputs_are_rotated_as_documented(block):
    torch.manual_seed(block)
    k = 2 * block
    codes, scales = torch.randint(0, 256, (5, k), dtype=torch.uint8), torch.rand(5, k // 32) + 0.5
    packed = lowbit.pack(codes, scales, bits=8, group_size=32, rotated_inputs=block)
    found = decode(bytes(packed.tolist()))
    assert found["rotated"] == block
    x = torch.randn(3, k)
    turned = torch.tensor([rotated(row.tolist(), block) for row in x])
    plain = lowbit.pack(codes, scales, bits=8, group_size=32)
    torch.testing.assert_close(lowbit.linear(x, packed, 5), lowbit.linear(turned, plain, 5), rtol=1e-3, atol=1e-3)
    # The layer's weights, from the weights for rotated inputs.
    weight = lowbit.embedding(torch.arange(5), packed, k)
    back = torch.tensor([rotated(row.tolist(), block) for row in weight]) * (1 if math.log2(block) % 2 == 0 else 2)
    torch.testing.assert_close(back, lowbit.embedding(torch.arange(5), plain, k), rtol=1e-5, atol=1e-4)


def test_the_document_has_a_whole_table_for_every_width():
    assert sorted(TABLES) == list(range(1, 9))
    for bits, table in TABLES.items():
        assert sorted(table) == [(line, bit) for line in range(8) for bit in range(bits)]
        assert len(set(table.values())) == 8 * bits


@pytest.mark.parametrize("bits, mapping", WEIGHTS)
@pytest.mark.parametrize("n, k, group_size", [(16, 32, 32), (17, 70, 32), (3, 100, 16), (2, 130, 48), (5, 49, None)])
def test_packed_bytes_are_as_documented(bits, n, k, group_size, mapping):
    torch.manual_seed(bits)
    groups = 1 if group_size is None else -(-k // group_size)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scales = torch.rand(n, groups).half().float() + 0.5
    mins = torch.randn(n, groups).half().float() if mapping == "affine" else None
    scales, bias = scales.half().float(), torch.randn(n)
    table = torch.randint(-127, 128, (2**bits,), dtype=torch.int8) if mapping == "levels" else None
    packed = lowbit.pack(codes, scales, mins, bias, bits=bits, group_size=group_size, mapping=mapping, levels=table)

    found = decode(bytes(packed.tolist()))
    assert torch.equal(torch.tensor(found["codes"], dtype=torch.uint8), codes)
    assert torch.equal(torch.tensor(found["scales"]), scales)
    assert torch.equal(torch.tensor(found["bias"]), bias)
    if mins is not None:
        assert torch.equal(torch.tensor(found["mins"]), mins)

    weight = lowbit.embedding(torch.arange(n), packed, k)
    column_group = torch.arange(k) // found["group"]
    if mapping == "affine":
        expected = scales[:, column_group].double() * codes + mins[:, column_group]
    elif mapping == "levels":
        expected = scales[:, column_group] * torch.tensor(found["levels"]).double()[codes.long()]
    else:
        levels = 2 * codes.double() - 1 if bits == 1 else codes.double() - 2 ** (bits - 1)
        expected = scales[:, column_group] * levels
    torch.testing.assert_close(weight.double(), expected, rtol=2**-22, atol=2**-24)
    torch.testing.assert_close(torch.tensor(found["row_sums"], dtype=torch.double), expected.sum(1), rtol=2**-22, atol=2**-20)


@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
def test_two_planes_are_computed_as_documented(mapping):
    torch.manual_seed(0)
    k = 96
    codes, scales = torch.randint(0, 256, (5, k), dtype=torch.uint8), torch.rand(5, 3) + 0.5
    mins, bias = torch.randn(5, 3) if mapping == "affine" else None, torch.randn(5)
    packed = lowbit.pack(codes, scales, mins, bias, bits=8, group_size=32, mapping=mapping, activation_bits=16)
    found = decode(bytes(packed.tolist()))
    assert found["activation_bits"] == 16 and decode(bytes(lowbit.with_activation_bits(packed, 8).tolist())) == found | {
        "activation_bits": 8
    }
    x = torch.randn(3, k)
    one = lowbit.with_activation_bits(packed, 8)
    rest = x.clone()
    for begin in range(0, k, 32):  # plane 1: docs/format.md names t and a
        part = x[:, begin : begin + 32]
        t = (part.abs().amax(1, keepdim=True) * torch.tensor(1 / 127)).view(torch.int32) & ~3
        t = t.view(torch.float32)
        rest[:, begin : begin + 32] = (part.double() - t.double() * (part * (1 / t)).round().double()).float()
    first, second = lowbit.linear(x, one, 5), lowbit.linear(rest, one, 5)
    assert torch.equal(lowbit.linear(x, packed, 5), first + (second - bias))
