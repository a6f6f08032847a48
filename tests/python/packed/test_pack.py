"""pack, unpack, info and verify."""

import dataclasses
import hashlib

import lowbit
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import HEADER_BYTES, MAPPINGS, WIDTHS, random_packed, random_rows


@st.composite
def matrices(draw):
    """Arguments of pack() with scales that fit in float16."""
    bits, mapping = draw(st.integers(1, 8)), draw(st.sampled_from(MAPPINGS))
    n, k = draw(st.integers(1, 40)), draw(st.integers(1, 200))
    group_size = draw(st.none() | st.integers(1, 9).map(lambda i: 16 * i))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = 1 if group_size is None else -(-k // group_size)
    power = 2.0 ** draw(st.integers(-100, 100))  # of a whole row; float16 holds the rest
    scales = torch.randn(n, groups, generator=generator).half().float() * power
    mins = torch.randn(n, groups, generator=generator).half().float() * power if mapping == "affine" else None
    bias = torch.randn(n, generator=generator) if draw(st.booleans()) else None
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
    return dict(codes=codes, scales=scales, mins=mins, bias=bias, bits=bits, group_size=group_size, mapping=mapping)


@settings(max_examples=max(300, settings.default.max_examples))
@given(matrices())
def test_round_trip(matrix):
    packed = lowbit.pack(**matrix)
    found = lowbit.unpack(packed)
    for name, expected in matrix.items():
        value = getattr(found, name)
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype and torch.equal(value, expected), name
        else:
            assert value == expected, name
    n, k = matrix["codes"].shape
    info = lowbit.verify(packed)
    assert (
        info
        == lowbit.info(packed)
        == lowbit.PackedInfo(
            bits=matrix["bits"],
            mapping=matrix["mapping"],
            group_size=matrix["group_size"],
            out_features=n,
            in_features=k,
            groups=matrix["scales"].shape[1],
            has_bias=matrix["bias"] is not None,
            total_bytes=packed.numel(),
            version=1,
        )
    )
    assert torch.equal(lowbit.pack(**found._asdict()), packed)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_other_scales_keep_eleven_bits(mapping):
    scales = random_rows(30, 7) * 10 ** random_rows(30, 1, seed=1)
    mins = random_rows(30, 7, seed=2) if mapping == "affine" else None
    codes = torch.zeros(30, 100, dtype=torch.uint8)
    packed = lowbit.pack(codes, scales, mins, bits=4, group_size=16, mapping=mapping)
    found = lowbit.unpack(packed)
    # Division, float16 and multiplication by the row scale round; below 2^-29 of the largest, float16 is subnormal.
    largest = scales.abs().amax(1, keepdim=True)
    if mins is not None:
        largest = torch.maximum(largest, mins.abs().amax(1, keepdim=True))
    for value, expected in ((found.scales, scales), (found.mins, mins)):
        if expected is not None:
            assert ((value - expected).abs() <= expected.abs() * 2**-11 * 1.001 + largest * 2.0**-39).all()
            assert not torch.equal(value, expected)
    # A second round trip changes nothing.
    assert torch.equal(lowbit.pack(**found._asdict()), packed)


def test_small_scales_beside_a_large_one():
    """As the docstring of pack says: to multiples of 2**-39 of the largest."""
    scales = torch.tensor([[2.0**20, 1.3 * 2.0**-19, 2.6 * 2.0**-19, 2.0**-21], [2.0**100, 2.0**-100, 0, 1]])
    expected = torch.tensor([[2.0**20, 2.0**-19, 3 * 2.0**-19, 0], [2.0**100, 0, 0, 0]])
    packed = lowbit.pack(torch.ones(2, 64, dtype=torch.uint8), scales, bits=2, group_size=16)
    assert torch.equal(lowbit.unpack(packed).scales, expected)


def test_scales_may_be_zero_negative_denormal_and_large():
    tiny, large = 2.0**-149, 2.0**127
    for pair in ([0.0, 0.0], [-1.0, 1.0], [tiny, tiny], [large, -large], [1.0, 2.0**-29], [0.0, 3e38]):
        scales = torch.tensor([pair])
        packed = lowbit.pack(torch.ones(1, 32, dtype=torch.uint8), scales, bits=2, group_size=16)
        assert torch.equal(lowbit.unpack(packed).scales, scales), scales


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_row_sums(bits, mapping):
    packed = random_packed(40, 130, bits, 48, mapping)
    parts = reference.take_apart(packed)
    exact = parts.weight().sum(1) / parts.row_scale.double()
    assert torch.equal(parts.row_sum, exact.float())


def test_inputs_may_be_strided():
    codes = (torch.arange(40 * 20) % 16).to(torch.uint8).view(40, 20)
    scales, bias = random_rows(3, 20).half().float(), random_rows(40)
    strided = (codes.t(), scales.t(), None, bias[::2])
    contiguous = (None if each is None else each.contiguous() for each in strided)
    expected = lowbit.pack(*contiguous, bits=4, group_size=16)
    assert torch.equal(lowbit.pack(*strided, bits=4, group_size=16), expected)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_same_bytes_for_any_number_of_threads(mapping):
    found = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        found.append(random_packed(3000, 1024, 3, 32, mapping, bias=True))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    unpacked = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        unpacked.append(lowbit.unpack(found[0]))
    for other in unpacked[1:]:
        assert torch.equal(other.codes, unpacked[0].codes) and torch.equal(other.scales, unpacked[0].scales)


# sha256 of the packed bytes of fixed inputs. A difference means that earlier checkpoints would be misread, so the format's
# version must change too.
GOLDEN = {
    "symmetric": [
        "9aaa71e3d14dd6fce173f89de2c11c33f577a3c4bbc8300ce79fb521eb85068f",
        "49cc251f6cc1971f12bf4b2d79edf3c547f14ae19ae7dc33ac404d78fb2661f1",
        "56fa17b53ad394c93ac2e1ceef3bcc309c119dc073b7c561602f6fe5c1114cd7",
        "08f1b4abde808bbcc97e6b6c665533aea3e3b0a59731db28c1832907000d2691",
        "cf1d8a5566610cc6bb73fdfb3521131946386864c59123907d6941ce76083e65",
        "471f8488be321e2c1a7a0093e397a2f9e1adebcfb78d8ccd29bd55747da1b093",
        "c53368160205f795f15c1955d4e55aa96e726ea223f376cd6192ab4a350187ff",
        "7f3a11ca23e4a478816f0632d225c3a23fa07498b063699d0b7314d5efa69e05",
    ],
    "affine": [
        "b49b73bcfdeab9a40f46023b0589a299404066ef753053fa57da116b0f7d3d29",
        "09a3de7818a450405eeeedfec267e2f3ee5f689cf7c2a4fa802f2192b0465d65",
        "b87bfae86a2ba7bb358319a8eeda82b9d93ac4e301d08cf749f56bd192d077e6",
        "6d880abcb16f01120644916ca50405dfaae267cc1d2718dc76a8ab1fc7452bf9",
        "acaefb97c48a2aa17475528d576b64e8634b5835e620da993d93c3e37649035d",
        "c9b58daa437b700b519f58fa24b82ffcae7f95167b8a78ce896c48905dd10a88",
        "88ecb87000fcb0db6f274c7e9f464d3a3e278c6369fe9ccc03492d22156b5010",
        "795333e45d524956140bf39e4ebbcfab5edc6a20bd6a7e1610d19dcafbd14983",
    ],
}


def golden_bytes(bits: int, mapping: str) -> bytes:
    n, k = 19, 100
    at = torch.arange(n * k).view(n, k)
    codes = ((at * 2654435761) >> 7) & (2**bits - 1)
    group = torch.arange(n * 7).view(n, 7)
    scales = (group * 37 % 101 - 50) / 64.0
    mins = (group * 53 % 97 - 48) / 32.0
    bias = (torch.arange(n) * 29 % 31 - 15) / 8.0
    packed = lowbit.pack(
        codes.to(torch.uint8), scales, mins if mapping == "affine" else None, bias, bits=bits, group_size=16, mapping=mapping
    )
    return bytes(packed.tolist())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_golden_bytes(bits, mapping):
    assert hashlib.sha256(golden_bytes(bits, mapping)).hexdigest() == GOLDEN[mapping][bits - 1]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping, floats", [("symmetric", 1), ("affine", 2)])
def test_bits_per_weight_of_a_large_matrix(bits, mapping, floats):
    n, k, group = 1024, 4096, 64
    info = lowbit.info(random_packed(n, k, bits, group, mapping, bias=True))
    per_row = 3 * 32  # row scale, row sum and bias
    formula = bits + 16 * floats / group + per_row / k + 8 * HEADER_BYTES / (n * k)
    padding = 8 * 64 * (n / 16) / (n * k)  # of each panel to a multiple of 64 bytes
    assert formula <= info.bits_per_weight <= formula + padding
    assert info.bits_per_weight == 8 * info.total_bytes / (n * k)
    assert info.bits_per_weight == pytest.approx(bits + 16 * floats / group, abs=0.04)
    assert info.total_bytes % 64 == 0


def test_info_is_a_value():
    packed = random_packed(5, 40, 3, 16, "affine", bias=True)
    info = lowbit.info(packed)
    assert info.groups == 3 and info.has_bias and info.version == 1 and info.group_size == 16
    assert hash(info) == hash(lowbit.info(packed.clone()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.bits = 4
    assert lowbit.info(random_packed(5, 40, 3, None, "symmetric")).group_size is None


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_verify_sees_every_byte(bits, mapping):
    packed = random_packed(17, 33, bits, 16, mapping, bias=True)
    lowbit.verify(packed)
    for at in range(packed.numel()):
        altered = packed.clone()
        altered[at] ^= 1 << (at % 8)
        with pytest.raises(ValueError, match="altered|not a packed weight|version"):
            lowbit.verify(altered)
