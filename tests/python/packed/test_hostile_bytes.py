"""For any bytes, the operators raise an error or return a result, and never access memory out of bounds.

The header has a checksum, so simple bit flips are refused early. Most of these tests put a matching checksum on the wrong
header, like an attacker.
"""

import random
import struct

import lowbit
import pytest
import torch
from reference import HEADER_BYTES, MAPPINGS, WEIGHTS, random_packed, random_rows

# offset, struct format
FIELDS = {
    "version": (8, "H"),
    "format": (10, "B"),
    "bits": (11, "B"),
    "mapping": (12, "B"),
    "has_bias": (13, "B"),
    "rotation": (14, "B"),
    "activation_bits": (15, "B"),
    "n": (16, "q"),
    "k": (24, "q"),
    "group_size": (32, "I"),
    "reserved1": (36, "I"),
    "total_bytes": (40, "q"),
    "payload_checksum": (48, "Q"),
}
# Version 2 has these after the others.
LEVELS = {"level 0": (64, "b"), "level 15": (79, "b"), "reserved2": (80, "B"), "reserved3": (127, "B")}
MASK = 2**64 - 1


def step(value: int, word: int) -> int:
    return ((value ^ word) * 0x100000001B3) & MASK


def sealed(packed: torch.Tensor) -> torch.Tensor:
    """The bytes with a matching header checksum (docs/format.md)."""
    data = bytes(packed[:56].tolist())
    if data[8] == 2:
        data += bytes(packed[64:128].tolist())
    lanes = [0xCBF29CE484222325 + i for i in range(8)]
    for i, word in enumerate(struct.unpack(f"<{len(data) // 8}Q", data)):
        lanes[i % 8] = step(lanes[i % 8], word)
    total = 0xCBF29CE484222325
    for lane in lanes:
        total = step(total, lane ^ (lane >> 32))
    packed = packed.clone()
    packed[56:64] = torch.tensor(list(struct.pack("<Q", total)), dtype=torch.uint8)
    return packed


def with_field(packed: torch.Tensor, name: str, value: int) -> torch.Tensor:
    offset, kind = (FIELDS | LEVELS)[name]
    data = struct.pack("<" + kind, value)
    packed = packed.clone()
    packed[offset : offset + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    return sealed(packed)


def try_everything(packed: torch.Tensor) -> int:
    """Calls every reader; each raises an expected error or returns a result. Returns the number of results."""
    results = 0
    for call in (
        lambda: lowbit.linear(random_rows(3, 40), packed, 20),
        lambda: lowbit.linear(random_rows(1, 40).half(), packed, 20),
        lambda: lowbit.embedding(torch.tensor([0, 7, 19]), packed, 40),
        lambda: lowbit.info(packed),
        lambda: lowbit.verify(packed),
        lambda: lowbit.unpack(packed),
    ):
        try:
            call()
            results += 1
        except (ValueError, IndexError):
            pass
    return results


def test_the_test_computes_the_checksum_as_the_library_does():
    for bits in range(1, 9):
        packed = random_packed(20, 40, bits, 16, "affine", bias=True)
        assert torch.equal(sealed(packed), packed)
    for bits in (2, 3, 4):
        packed = random_packed(20, 40, bits, 16, "levels", bias=True)
        assert torch.equal(sealed(packed), packed)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("version", 0, "format version 0; this library reads versions 1 to 4"),
        ("version", 65535, "format version 65535"),
        ("format", 1, "has format 1, mapping 0, bias flag 1; expected each to be 0 or 1"),
        ("bits", 0, "bits is 0; expected 1 to 8"),
        ("bits", 9, "bits is 9; expected 1 to 8"),
        ("bits", 255, "bits is 255; expected 1 to 8"),
        ("mapping", 2, "mapping 2"),
        ("has_bias", 2, "bias flag 2"),
        ("rotation", 1, "blocks of 2\\^1 rotated inputs"),
        ("activation_bits", 16, "version 1 has activations of 16 bits; expected 16 in version 4"),
        ("reserved1", 1, "expected"),
        ("n", 0, "the number of output rows is 0; expected 1 to 2147483648"),
        ("n", -1, "the number of output rows is -1"),
        ("n", -(2**63), "the number of output rows is -9223372036854775808"),
        ("n", 2**63 - 1, "the number of output rows is 9223372036854775807"),
        ("n", 2**31, "expected .* for 2147483648 x 40 weights of 4 bits"),
        ("n", 33, "has 1728 bytes, its header says 1728; expected 2560 for 33 x 40"),
        ("k", 0, "the number of inputs is 0; expected 1 to 2147483648"),
        ("k", -(2**63), "the number of inputs is"),
        ("k", 2**31, "expected .* for 20 x 2147483648 weights"),
        ("group_size", 8, "group size is 8; expected a multiple of 16"),
        ("group_size", 2**32 - 16, "group size is 4294967280; expected a multiple of 16 up to 2147483648"),
        ("total_bytes", 0, "has 1728 bytes, its header says 0; expected 1728"),
        ("total_bytes", -(2**63), "its header says -9223372036854775808"),
        ("total_bytes", 2**63 - 1, "its header says 9223372036854775807"),
    ],
)
def test_each_field(name, value, message):
    packed = with_field(random_packed(20, 40, 4, 16, "symmetric", bias=True), name, value)
    for reader in (lowbit.info, lowbit.verify, lowbit.unpack, torch.ops.lowbit.unpack, lowbit.nn.Linear):
        with pytest.raises(ValueError, match=message):
            reader(packed)
    with pytest.raises(ValueError, match=message):
        lowbit.linear(random_rows(1, 40), packed, 20)
    with pytest.raises(ValueError, match=message):
        lowbit.embedding(torch.tensor([0]), packed, 40)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("version", 1, "mapping 2"),
        ("bits", 5, "a table of levels has codes of 5 bits; expected 2, 3 or 4"),
        ("bits", 1, "codes of 1 bits"),
        ("bits", 8, "codes of 8 bits"),
        ("mapping", 0, "of version 2 has mapping 0; expected 2, a table of levels"),
        ("mapping", 1, "of version 2 has mapping 1"),
        ("mapping", 255, "of version 2 has mapping 255"),
        ("level 0", -128, "level .0. is -128; expected -127 to 127"),
        ("level 15", 1, "bytes after its 8 levels; expected zeros"),
        ("reserved2", 1, "bytes after its 8 levels"),
        ("reserved3", 255, "bytes after its 8 levels"),
        ("total_bytes", 64, "its header says 64"),
    ],
)
def test_each_field_of_a_table(name, value, message):
    packed = with_field(random_packed(20, 40, 3, 16, "levels", bias=True), name, value)
    for reader in (lowbit.info, lowbit.verify, lowbit.unpack, torch.ops.lowbit.unpack, lowbit.nn.Linear):
        with pytest.raises(ValueError, match=message):
            reader(packed)
    with pytest.raises(ValueError, match=message):
        lowbit.linear(random_rows(1, 40), packed, 20)
    with pytest.raises(ValueError, match=message):
        lowbit.embedding(torch.tensor([0]), packed, 40)


def test_a_table_that_is_cut_off():
    packed = random_packed(20, 40, 3, 16, "levels")
    for size in (64, 65, 127):
        with pytest.raises(ValueError, match=f"has {size} bytes; expected a header of 128 bytes and more"):
            lowbit.info(packed[:size].clone())


def test_the_largest_matrix_does_not_overflow():
    packed = random_packed(20, 40, 8, 16, "affine", bias=True)
    packed = with_field(with_field(packed, "n", 2**31), "k", 2**31)
    with pytest.raises(ValueError, match="2147483648 x 2147483648 weights"):
        lowbit.info(packed)


def test_rows_that_are_only_padding():
    # 20 rows fill two panels; a header that claims 21 to 32 has the same size.
    packed = random_packed(20, 40, 4, 16, "symmetric")
    for n in range(17, 33):
        claims = with_field(packed, "n", n)
        assert lowbit.linear(random_rows(2, 40), claims, n).shape == (2, n)
        assert lowbit.unpack(claims).codes.shape == (n, 40)
        with pytest.raises(IndexError, match=f"index {n} "):
            lowbit.embedding(torch.tensor([n]), claims, 40)


@pytest.mark.parametrize("mapping", [*MAPPINGS, "levels"])
@pytest.mark.parametrize("seed", range(4))
def test_random_headers(mapping, seed):
    choose = random.Random(seed)
    bits = 2 + seed % 3 if mapping == "levels" else 1 + seed * 2
    source = random_packed(20, 40, bits, 16, mapping, bias=seed % 2 == 0)
    fields = FIELDS | (LEVELS if mapping == "levels" else {})
    interesting = [0, 1, 2, 8, 15, 16, 17, 20, 32, 33, 40, 48, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]
    accepted = 0
    for _ in range(250):
        packed = source.clone()
        for _ in range(choose.randint(1, 3)):
            name = choose.choice(list(fields))
            size = struct.calcsize(fields[name][1])
            signed = fields[name][1] in "qb"
            value = choose.choice(interesting + [choose.getrandbits(8 * size - signed)]) % 2 ** (8 * size - signed)
            packed = with_field(packed, name, -value if signed and choose.random() < 0.2 else value)
        if choose.random() < 0.2:
            packed = packed[: choose.randrange(packed.numel())].clone()
        accepted += try_everything(packed) > 0
    assert accepted > 0  # some changes are accepted, so the kernels ran too


@pytest.mark.parametrize("seed", range(3))
def test_random_bit_flips(seed):
    choose = random.Random(seed)
    source = random_packed(20, 40, 3 + seed, 16, MAPPINGS[seed % 2], bias=True)
    for _ in range(300):
        packed = source.clone()
        for _ in range(choose.randint(1, 8)):
            packed[choose.randrange(HEADER_BYTES)] ^= 1 << choose.randrange(8)
        if not torch.equal(packed, source):
            assert try_everything(packed) == 0


@pytest.mark.parametrize("bits, mapping", WEIGHTS)
def test_random_bytes_after_a_valid_header(bits, mapping):
    """NaN and infinite scales and any codes give a result of the right shape, the same in every call."""
    source = random_packed(20, 40, bits, 16, mapping, bias=True)
    generator = torch.Generator().manual_seed(bits)
    begin = 128 if mapping == "levels" else HEADER_BYTES
    for _ in range(10):
        packed = source.clone()
        packed[begin:] = torch.randint(0, 256, (packed.numel() - begin,), dtype=torch.uint8, generator=generator)
        first, second = (lowbit.linear(random_rows(5, 40), packed, 20) for _ in range(2))
        assert first.shape == (5, 20)
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
        assert lowbit.embedding(torch.arange(20), packed, 40).shape == (20, 40)
        with pytest.raises(ValueError, match="altered bytes"):
            lowbit.unpack(packed)
