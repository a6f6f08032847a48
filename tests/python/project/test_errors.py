"""Bad arguments of every public function raise an exception that names what was found and what was expected."""

import dataclasses
import os
import re

import lowbit
import pytest
import torch
from lowbit import LinearConfig
from lowbit.operators.ops import info_of_experts
from reference import random_packed, random_rows

PACKED = random_packed(20, 40, 4, 16, "symmetric", bias=True)
X = random_rows(3, 40)
INDICES = torch.tensor([0, 19])
CODES = torch.zeros(4, 40, dtype=torch.uint8)
SCALES = torch.ones(4, 3)


def changed(at: int, value: int) -> torch.Tensor:
    packed = PACKED.clone()
    packed[at] = value
    return packed


def refuses(error: type, message: str, function, *arguments, **options) -> None:
    with pytest.raises(error, match=re.escape(message)) as caught:
        function(*arguments, **options)
    assert caught.type is error


@pytest.mark.parametrize(
    "x, message",
    [
        (X.double(), "expected float32, bfloat16 or float16"),
        (X.int(), "x has dtype int32; expected float32, bfloat16 or float16"),
        (X.bool(), "expected float32, bfloat16 or float16"),
        (X.to(torch.complex64), "x has dtype complex64; expected one of torch's usual types, such as float32"),
        (torch.tensor(1.0), "x has no dimensions; expected [..., in_features]"),
        (random_rows(3, 41), "x has shape [3, 41]; expected [..., 40], the inputs of the packed weight"),
        (random_rows(40, 1), "x has shape [40, 1]; expected [..., 40]"),
        (random_rows(3, 0), "x has shape [3, 0]; expected [..., 40]"),
        (torch.empty(0), "x has shape [0]; expected [..., 40]"),
        (random_rows(*[1] * 16, 40), "x has 17 dimensions; expected at most 16"),
    ],
)
def test_linear_x(x, message):
    refuses(ValueError, message, lowbit.linear, x, PACKED, 20)


@pytest.mark.parametrize(
    "out_features, message",
    [
        (21, "out_features is 21; expected 20, the rows of the packed weight"),
        (0, "out_features is 0; expected 1 or more"),
        (-1, "out_features is -1; expected 1 or more"),
        (2**40, "20, the rows of the packed weight"),
    ],
)
def test_linear_out_features(out_features, message):
    # With 2^40 the output cannot be allocated, which may be detected first.
    errors = (ValueError, RuntimeError, MemoryError) if out_features > 2**30 else ValueError
    with pytest.raises(errors) as caught:
        lowbit.linear(X, PACKED, out_features)
    if caught.type is ValueError:
        assert message in str(caught.value)


HEADER_FAULTS = [
    (PACKED[:0], "has 0 bytes; expected a header of 64 bytes and more"),
    (PACKED[:63], "has 63 bytes; expected a header of 64 bytes"),
    (PACKED[:64], "has 64 bytes, its header says 1728; expected 1728 for 20 x 40 weights of 4 bits"),
    (PACKED[:-1], "has 1727 bytes, its header says 1728; expected 1728"),
    (torch.cat([PACKED, PACKED]), "has 3456 bytes, its header says 1728"),
    (changed(0, 0), "not a packed weight: its first eight bytes are 004c4f574249540a; expected 894c4f574249540a"),
    (changed(8, 5), "is of format version 5; this library reads versions 1 to 4"),
    (changed(9, 255), "is of format version 65281; this library reads versions 1 to 4"),
    (changed(11, 5), "has an altered header: its checksum does not match"),
    (changed(16, 21), "altered header"),
    (changed(60, 0), "altered header"),
    (torch.zeros(1728, dtype=torch.uint8), "not a packed weight: its first eight bytes are 0000000000000000"),
]
TENSOR_FAULTS = [
    (PACKED.view(1, -1), "shape [1, 1728]; expected"),
    (PACKED[0], "shape []; expected"),
    (PACKED.view(torch.int8), "expected"),
    (PACKED.float(), "dtype"),
    (PACKED.repeat_interleave(2)[::2], "not contiguous"),
]


@pytest.mark.parametrize("packed, message", HEADER_FAULTS + TENSOR_FAULTS, ids=str)
def test_packed_weights(packed, message):
    refuses(ValueError, message, lowbit.linear, X, packed, 20)
    refuses(ValueError, message, lowbit.linear, X[:0], packed, 20)
    refuses(ValueError, message, lowbit.embedding, INDICES, packed, 40)
    refuses(ValueError, message, lowbit.embedding, INDICES[:0], packed, 40)
    refuses(ValueError, message, lowbit.info, packed)
    refuses(ValueError, message, lowbit.verify, packed)
    refuses(ValueError, message, lowbit.unpack, packed)
    refuses(ValueError, message, torch.ops.lowbit.unpack, packed)
    refuses(ValueError, message, lowbit.nn.Linear, packed)
    refuses(ValueError, message, lowbit.nn.Embedding, packed)


def test_altered_bytes_after_the_header():
    for at in (64, 500, PACKED.numel() - 1):
        packed = changed(at, int(PACKED[at]) ^ 4)
        lowbit.info(packed)  # reads only the header
        lowbit.linear(X, packed, 20)
        message = "packed weight has altered bytes: their checksum is "
        refuses(ValueError, message, lowbit.verify, packed)
        refuses(ValueError, message, lowbit.unpack, packed)
        refuses(ValueError, message, torch.ops.lowbit.unpack, packed)


def test_experts():
    both, info = torch.stack([PACKED, PACKED]), lowbit.info(PACKED)
    for count in (1, 2):
        for verified in (False, True):
            found = info_of_experts(both[:count], verified=verified)
            assert found == dataclasses.replace(info, experts=count) and found.shape == (count, 20, 40)
    for wrong, shape in ((PACKED, [1728]), (both[None], [1, 2, 1728]), (both[:0], [0, 1728])):
        refuses(ValueError, f"packed has shape {shape}; expected [experts, bytes]", info_of_experts, wrong)
    other = random_packed(20, 40, 4, 32, "symmetric", bias=True)  # with fewer bytes
    padded = torch.cat([other, torch.zeros(PACKED.numel() - other.numel(), dtype=torch.uint8)])
    refuses(ValueError, "expert 1: packed weight has 1728 bytes", info_of_experts, torch.stack([PACKED, padded]))
    same_size = random_packed(20, 40, 4, 16, "symmetric", bias=False)
    refuses(ValueError, "expert 1 is packed as", info_of_experts, torch.stack([PACKED, same_size]))
    both[1, 500] ^= 4
    info_of_experts(both)  # reads only headers
    refuses(ValueError, "expert 1: packed weight has altered bytes", info_of_experts, both, verified=True)


@pytest.mark.parametrize("function", [lowbit.info, lowbit.verify, lowbit.unpack])
def test_not_a_tensor_or_not_on_the_cpu(function):
    refuses(TypeError, "packed is a bytes; expected a uint8 tensor", function, bytes(64))
    refuses(TypeError, "packed is a NoneType", function, None)
    refuses(ValueError, "packed is on meta; expected the CPU", function, PACKED.to("meta"))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "values, message",
    [
        ([0, 20], "index 20 (number 1 of 2) is out of range; expected 0 to 19"),
        ([-1], "index -1 (number 0 of 1) is out of range; expected 0 to 19"),
        (2**31 - 1, "index 2147483647 (number 0 of 1) is out of range; expected 0 to 19"),
        (-(2**31), "index -2147483648 "),
        ([[0, 1, 2], [3, 99, -5]], "index 99 (number 4 of 6) is out of range; expected 0 to 19"),
        ([5] * 5000 + [20], "index 20 (number 5000 of 5001)"),
    ],
)
def test_indices_out_of_range(integers, values, message):
    refuses(IndexError, message, lowbit.embedding, torch.tensor(values, dtype=integers), PACKED, 40)
    refuses(IndexError, message, lowbit.nn.Embedding(PACKED), torch.tensor(values, dtype=integers))


def test_indices_far_out_of_range():
    for index in (2**63 - 1, -(2**63), 2**32, 2**60):
        refuses(IndexError, f"index {index} (number 0 of 1)", lowbit.embedding, torch.tensor([index]), PACKED, 40)
    # Padding rows exist in the bytes, but not in the table.
    for index in (20, 31):
        refuses(IndexError, f"index {index} ", lowbit.embedding, torch.tensor([index]), PACKED, 40)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((INDICES.float(), PACKED, 40), {}, "indices have dtype float32; expected int32 or int64"),
        ((INDICES.to(torch.uint8), PACKED, 40), {}, "indices have dtype uint8; expected int32 or int64"),
        ((INDICES.short(), PACKED, 40), {}, "expected int32 or int64"),
        ((INDICES.bool(), PACKED, 40), {}, "expected int32 or int64"),
        ((INDICES, PACKED, 41), {}, "embedding_dim is 41; expected 40, the inputs of the packed weight"),
        ((INDICES, PACKED, 0), {}, "embedding_dim is 0; expected 1 or more"),
        ((INDICES, PACKED, -3), {}, "embedding_dim is -3; expected 1 or more"),
        ((INDICES, PACKED, 40), {"dtype": torch.float64}, "expected float32, bfloat16 or float16"),
        ((INDICES, PACKED, 40), {"dtype": torch.int32}, "the output dtype is int32; expected float32, "),
        ((INDICES.view(*[1] * 15, 2), PACKED, 40), {}, "indices have 16 dimensions; expected at most 15"),
    ],
)
def test_embedding(arguments, options, message):
    refuses(ValueError, message, lowbit.embedding, *arguments, **options)


AFFINE = {"mins": SCALES, "mapping": "affine"}


def scales_with(value: float) -> torch.Tensor:
    scales = torch.ones(4, 3)
    scales[2, 1] = value
    return scales


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"bits": 0}, ValueError, "bits is 0; expected 1 to 8"),
        ({"bits": 9}, ValueError, "bits is 9; expected 1 to 8"),
        ({"bits": -(2**70)}, ValueError, "expected 1 to 8"),
        ({"bits": 260}, ValueError, "bits is 260; expected 1 to 8"),
        ({"bits": 4.0}, TypeError, "bits is 4.0; expected an int"),
        ({"bits": True}, TypeError, "bits is True; expected an int"),
        ({"group_size": 0}, ValueError, "group_size is 0; expected a positive multiple of 16, or None"),
        ({"group_size": -16}, ValueError, "group_size is -16"),
        ({"group_size": 24}, ValueError, "group_size is 24; expected a positive multiple of 16, or None for one group per row"),
        ({"group_size": 2**31 + 16}, ValueError, "group size is 2147483664; expected a multiple of 16 up to 2147483648"),
        ({"group_size": "16"}, TypeError, "group_size is '16'; expected an int or None"),
        ({"mapping": "linear"}, ValueError, "mapping is 'linear'; expected 'symmetric', 'affine' or 'levels'"),
        ({"mapping": "affine"}, ValueError, "mapping is 'affine' without mins; affine weights have mins"),
        ({"mins": SCALES}, ValueError, "mapping is 'symmetric' with mins; affine weights have mins"),
        ({"codes": CODES[0]}, ValueError, "codes have shape [40]; expected two dimensions [n, k]"),
        ({"codes": CODES[None]}, ValueError, "codes have shape [1, 4, 40]; expected two dimensions"),
        ({"codes": CODES[:0]}, ValueError, "the number of output rows is 0; expected 1 to"),
        ({"codes": CODES[:, :0]}, ValueError, "the number of inputs is 0; expected 1 to"),
        ({"codes": CODES + 16}, ValueError, "code [0, 0] is 16; expected less than 16 at 4 bits"),
        ({"codes": CODES.to(torch.int8)}, TypeError, "codes has dtype torch.int8; expected torch.uint8"),
        ({"codes": CODES.tolist()}, TypeError, "codes is a list; expected a tensor"),
        ({"codes": CODES.to("meta")}, ValueError, "codes is on meta; expected the CPU"),
        ({"scales": SCALES[:, :2]}, ValueError, "scales has shape [4, 2]; expected [4, 3]"),
        ({"scales": SCALES[:3]}, ValueError, "scales has shape [3, 3]; expected [4, 3]"),
        ({"scales": SCALES.flatten()}, ValueError, "scales has shape [12]; expected [4, 3]"),
        ({"scales": SCALES, "group_size": None}, ValueError, "scales has shape [4, 3]; expected [4, 1]"),
        ({"scales": SCALES.half()}, TypeError, "scales has dtype torch.float16; expected torch.float32"),
        ({"scales": None}, TypeError, "scales is a NoneType; expected a tensor"),
        ({"scales": scales_with(torch.nan)}, ValueError, "scale [2, 1] is nan; expected a finite value"),
        ({"scales": scales_with(-torch.inf)}, ValueError, "scale [2, 1] is -inf; expected a finite value"),
        (AFFINE | {"mins": SCALES[:, :2]}, ValueError, "mins has shape [4, 2]; expected [4, 3]"),
        (AFFINE | {"mins": SCALES.double()}, TypeError, "mins has dtype torch.float64; expected torch.float32"),
        (AFFINE | {"mins": scales_with(torch.inf)}, ValueError, "min [2, 1] is inf; expected a finite value"),
        ({"bias": torch.ones(3)}, ValueError, "bias has shape [3]; expected [4]"),
        ({"bias": torch.ones(4, 1)}, ValueError, "bias has shape [4, 1]; expected [4]"),
        ({"bias": torch.ones(4).half()}, TypeError, "bias has dtype torch.float16; expected torch.float32"),
        ({"bias": [1.0] * 4}, TypeError, "bias is a list; expected a tensor"),
        ({"bias": torch.tensor([0, 0, torch.nan, 0])}, ValueError, "bias [2] is nan; expected a finite value"),
        ({"bias": torch.ones(4, device="meta")}, ValueError, "bias is on meta; expected the CPU"),
    ],
)
def test_pack(options, error, message):
    sound = {"codes": CODES, "scales": SCALES, "bits": 4, "group_size": 16}
    lowbit.pack(**sound)
    refuses(error, message, lowbit.pack, **(sound | options))


def test_pack_names_the_first_bad_code():
    codes = torch.zeros(200, 3000, dtype=torch.uint8)
    codes[150, 7], codes[77, 2999], codes[77, 5] = 9, 8, 12
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        refuses(
            ValueError,
            "code [77, 5] is 12; expected less than 8 at 3 bits",
            lowbit.pack,
            codes,
            torch.ones(200, 1),
            bits=3,
            group_size=None,
        )


@pytest.mark.parametrize(
    "weight, bias, error, message",
    [
        ([[1.0]], None, TypeError, "weight is a list; expected a tensor"),
        (torch.ones(3), None, ValueError, "weight has shape [3]; expected [n, k] with n and k at least 1"),
        (torch.ones(0, 3), None, ValueError, "weight has shape [0, 3]; expected [n, k]"),
        (torch.ones(3, 0), None, ValueError, "weight has shape [3, 0]; expected [n, k]"),
        (torch.ones(3, 3, dtype=torch.int32), None, TypeError, "weight has dtype torch.int32; expected float32, bfloat16"),
        (torch.ones(3, 3, device="meta"), None, ValueError, "weight is on meta; expected the CPU"),
        (torch.full((3, 3), torch.nan), None, ValueError, "weight has 9 NaN or infinite values; expected finite"),
        (torch.full((3, 3), 3e38), None, ValueError, "weight reaches from 3e+38 to 3e+38; expected magn"),
        (torch.ones(3, 3), [0.0] * 3, TypeError, "bias is a list; expected a tensor"),
        (torch.ones(3, 3), torch.ones(2), ValueError, "bias has shape [2]; expected [3]"),
        (torch.ones(3, 3), torch.ones(3, dtype=torch.int64), TypeError, "bias has dtype torch.int64"),
        (torch.ones(3, 3), torch.tensor([0, torch.inf, 0]), ValueError, "bias has 1 NaN or infinite values"),
    ],
)
def test_quantize_tensor(weight, bias, error, message):
    refuses(error, message, lowbit.quantize_tensor, weight, LinearConfig(), bias)


def test_quantize_tensor_config():
    for config in (4, None, {"bits": 4}):
        refuses(TypeError, "expected a LinearConfig or an EmbeddingConfig", lowbit.quantize_tensor, X, config)


def test_arguments_of_the_wrong_kind_reach_no_kernel():
    for arguments in (([1.0], PACKED, 20), (X, [1], 20), (X, PACKED, 20.0), (X, PACKED, None)):
        with pytest.raises(RuntimeError, match="lowbit::linear.* Expected a value of type"):
            lowbit.linear(*arguments)
    for arguments in (([1], PACKED, 40), (INDICES, "packed", 40), (INDICES, PACKED, "40")):
        with pytest.raises(RuntimeError, match="lowbit::embedding.* Expected a value of type"):
            lowbit.embedding(*arguments)


def test_none_and_tensors_that_are_not_dense():
    """torch accepts None as an undefined tensor, and its error for a sparse tensor fills a page."""
    nested = torch.nested.nested_tensor([X, X])
    experts, chosen = PACKED[None], torch.zeros(len(X), 1, dtype=torch.int64)
    calls = {
        "x": [
            lambda x: lowbit.linear(x, PACKED, 20), lambda x: lowbit.linears(x, [PACKED], [20]),
            lambda x: lowbit.linear_experts(x, experts, chosen, 20),
        ],
        "packed_weight": [lambda packed: lowbit.linear(X, packed, 20), lambda packed: lowbit.embedding(INDICES, packed, 40)],
        "packed_weights[1]": [lambda packed: lowbit.linears(X, [PACKED, packed], [20, 20])],
        "packed_weights": [lambda packed: lowbit.linear_experts(X, packed, chosen, 20)],
        "experts": [lambda chosen: lowbit.linear_experts(X, experts, chosen, 20)],
        "indices": [lambda indices: lowbit.embedding(indices, PACKED, 40)],
    }  # fmt: skip
    for name, functions in calls.items():
        for function in functions:
            refuses(TypeError, f"{name} is None; expected a tensor", function, None)
            refuses(TypeError, f"{name} has the layout torch.sparse_coo; expected a dense", function, X.to_sparse())
            refuses(TypeError, f"{name} has the layout torch._mkldnn; expected a dense", function, X.to_mkldnn())
            refuses(TypeError, f"{name} is a nested tensor; expected a dense", function, nested)
    refuses(TypeError, "x has the layout torch.sparse_coo", lowbit.linear, X.to_sparse().requires_grad_(), PACKED, 20)


def limited(script: str, fork_python, room: int) -> str:
    """Output of a script whose process may use only this many bytes of address space in addition to those after its imports."""
    head = "import os, resource, sys, torch, lowbit\ntorch.set_num_threads(1)\n"
    limit = (
        f"size = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGE_SIZE') + {room}\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))\n"
    )
    process = fork_python(head + script.replace("LIMIT\n", limit))
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_no_memory_is_a_memory_error(fork_python):
    # The output with 2 bytes per index fits; the operator's copy with 8 bytes per index does not.
    script = """
codes = torch.zeros(16, 1, dtype=torch.uint8)
packed = lowbit.pack(codes, torch.ones(16, 1), bits=4, group_size=None)
indices = torch.zeros(1, dtype=torch.int64).expand(1 << 28)
LIMIT
try:
    lowbit.embedding(indices, packed, 1, dtype=torch.float16)
except MemoryError as error:
    print(error)
"""
    assert limited(script, fork_python, 1 << 30) == f"no memory for {1 << 28} indices\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_threads_that_cannot_start_are_an_error(fork_python):
    script = """
memory = torch.zeros(64 << 20, dtype=torch.uint8)
LIMIT
try:
    lowbit._C.read_bandwidth(memory.data_ptr(), memory.numel(), 64)
except OSError as error:
    print(error)
"""
    assert limited(script, fork_python, 64 << 20).startswith("64 threads cannot be started: ")
