"""The libraries of tests/vendor: broken ones, which are refused, some for a few calls only, and one with a packed format."""

import platform
import shutil
import struct
import subprocess
from pathlib import Path

import lowbit
import pytest
from kernel_libraries import USE, build_project, run_checked


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    return build_project("tests/vendor", tmp_path_factory.mktemp("build"))


# Parts of messages with what was found and expected. tests/vendor/faults.cpp has the libraries.
FAULTS = {
    "no_function": "is not a kernel library: it has no function 'lowbit_kernels'",
    "null_library": "has no kernels for version 7 of lowbit's kernel interface",
    "other_abi": "its kernel interface is version 8; this build of lowbit has version 7",
    "other_size": "its structure lowbit_linear_kernel has 96 bytes; expected 32 to 88, a multiple of 8: build it with the "
    "headers",
    "small_size": "its structure lowbit_linear_args has 232 bytes; expected 240 to 248",
    "odd_size": "its structure lowbit_format has 47 bytes; expected 24 to 48, a multiple of 8",
    "no_vendor": "the vendor has no name",
    "bad_preference": "its preference is 9; expected 0 or 1",
    "no_rows": "it has no kernels and no formats",
    "null_rows": "it has 2 linear kernels at a null address",
    "too_many_rows": "it has 1152921504606846976 embedding kernels; expected at most 1024",
    "null_function": "kernel 'fault_linear' has no function",
    "no_name": "linear kernel 0 has no name",
    "empty_name": "linear kernel 0 has an empty name",
    "long_name": "linear kernel 0 has the name 'a_name_of_64_characters_aaaaaaaa...'; expected at most 63 characters",
    "bad_character": "linear kernel 0 has the byte 0x20 in its name; expected letters, digits,",
    "foreign_format": "kernel 'fault_linear' is of the format 'ELSE' (0x45534c45); expected panel16, or a format of",
    "bad_bits": "kernel 'fault_linear' has 9 bits; expected 1 to 8",
    "bad_m_least": "kernel 'fault_linear' has the tile 0 x 16; expected 1 row or more, and a divisor or multiple of 16",
    "bad_n_step": "kernel 'fault_linear' has the tile 1 x 24; expected",
    "bad_x_types": "kernel 'fault_linear_2' prepares the types 0x08; expected some of 0x07",
    "bad_scratch": "kernel 'fault_linear_2' requests -1 bytes of scratch; expected 0 to 2^40",
    "bad_activation_bytes": "kernel 'fault_linear' requests 9223372036854775807 bytes of activations; expected 1 to 2^40",
    "bad_rows_at_once": "format 'FLT1' has rows_at_once -1; expected 0 or more",
    "null_attention": "kernel 'fault_attention' has no function",
    "null_attention_write": "kernel 'fault_attention' has no function write",
    "null_attention_join": "kernel 'fault_attention' has no function join",
    "half_prepare": "kernel 'fault_linear' has only one of prepare and activation_bytes",
    "prepare_panel16": "kernel 'fault_linear' prepares activations in its own way",
    "unknown_isa": "kernel 'fault_linear' requires the ISA bits 0x{foreign:x}; this build knows 0x{known:x}",
    "built_in_name": "kernel 'linear_a8w4_1x16_portable' has the name of another kernel",
    "twice_named": "kernel 'fault_linear' has the name of another kernel",
    "null_embedding": "kernel 'fault_embedding' has no function",
    "bad_embedding_bits": "kernel 'fault_embedding' has 0 bits; expected 1 to 8",
    "null_quantize": "kernel 'fault_quantize' has no function",
    "bad_format_id": "a format has the id 0x0; expected vendor_format() of one to four letters",
    "null_format_bytes": "format 'FLT1' has no function bytes",
    "null_format_pack": "format 'FLT2' has no function pack",
    "twice_formatted": "format 'FLT1' occurs twice",
    "second_row_bad": "kernel 'fault_linear_2' has 0 bits; expected 1 to 8",
    "bad_tolerance": "format 'FLT2' has the tolerance 1.5; expected 0 to 1",
    "lies_by_a_hundredth": "kernel 'fault_linear' differs from the portable kernel: 21 x 128 weights",
    "lies_at_three_rows": ", 3 rows of activations, float32 outputs: [2, 0] is ",
    "lies_in_the_last_column": ", float32 outputs: [0, 20] is ",
    "lies_in_an_embedding": "kernel 'fault_embedding' differs from the portable kernel: ",
    "lies_in_a_scale": "kernel 'fault_quantize' differs from the portable kernel: ",
    "lies_where_it_is_asked": "kernel 'fault_linear' differs from the portable kernel: 16 x 520 weights",
    "never_asked": "kernel 'fault_linear_2' was never run: it supports no matrix of the trial at load, neither the small ",
    "infinite": "kernel 'fault_linear' differs from the portable kernel: 21 x 128 weights",
    "infinite_embedding": "kernel 'fault_embedding' differs from the portable kernel: 21 x 128 weights",
    "writes_before_the_outputs": "kernel 'fault_linear' writes outside of its outputs: 21 x 128 weights of 4 bits, symmetric, ",
    "writes_in_the_weights": "kernel 'fault_linear' changes its inputs: 21 x 128 weights of 4 bits, symmetric, ",
}

# Loads broken libraries one by one, prints each error, and checks that nothing remains of them.
REFUSED = (
    USE
    + """
before = lowbit.kernels()
for path in sys.argv[1:]:
    try:
        lowbit.load_kernels(path)
        print("loaded")
    except (ValueError, OSError) as error:
        print(type(error).__name__, error)
    assert lowbit.kernels() == before
    try:
        lowbit.repack(lowbit.quantize_tensor(torch.ones(1, 1), lowbit.LinearConfig()), "FLT1")
    except ValueError as error:
        assert str(error).startswith("there is no format 'FLT1'"), error
"""
)


@pytest.mark.more
def test_broken_libraries_are_refused(fork_python, libraries):
    arm = platform.machine() in ("aarch64", "arm64")
    known, foreign = (0x3F, 0x100) if arm else (0x1F00, 0x1)
    lines = run_checked(fork_python, REFUSED, *(libraries / f"fault_{fault}.so" for fault in FAULTS)).splitlines()
    assert len(lines) == len(FAULTS)
    for (fault, message), line in zip(FAULTS.items(), lines):
        message = message.format(known=known, foreign=foreign)
        assert line.startswith("ValueError ") and f"fault_{fault}.so'" in line and message in line, (fault, line)


def test_from_an_application_in_cpp(libraries):
    paths = [libraries / "fault_null_function.so", libraries / "acme_kernels.so", libraries / "missing.so"]
    done = subprocess.run([libraries / "load_kernels", *paths], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("fault_null_function.so' cannot be used: kernel 'fault_linear' has no function")
    assert lines[1].startswith("refused: kernel library does not load: ") and "missing.so" in lines[1]
    assert lines[2] == "acme_linear_a8w4 of acme"


def test_files_that_are_not_libraries_are_refused(fork_python, libraries, tmp_path):
    text = tmp_path / "text.so"
    text.write_text("not a library")
    missing = tmp_path / "missing.so"
    long = tmp_path / ("x" * 200) / ("y" * 200) / "z.so"
    lines = run_checked(fork_python, REFUSED, missing, text, tmp_path, "", long).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("OSError kernel library does not load: ") and "missing.so" in lines[0]
    assert lines[1].startswith("OSError kernel library does not load: ") and "text.so" in lines[1]
    assert lines[2].startswith("OSError kernel library does not load: ")
    assert lines[3] == "ValueError the path of the kernel library is empty"
    assert lines[4].startswith("OSError kernel library does not load: ") and "z.so" in lines[4]
    with pytest.raises(TypeError):
        lowbit.load_kernels(1)


def test_a_library_that_is_cut_is_refused(fork_python, libraries, tmp_path):
    data = (libraries / "fault_none.so").read_bytes()
    (table,), (count,) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<H", data, 56)
    ends = []
    for i in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", data, table + 56 * i)
        ends += [offset + size] if kind == 1 else []  # loaded segments
    end = max(ends)
    cuts = [0, 1, 63, 64, 65, table + 56 * count - 1, *range(500, end, 500), end - 1]
    for cut in cuts:
        (tmp_path / f"{cut}.so").write_bytes(data[:cut])
    lines = run_checked(fork_python, REFUSED, *(tmp_path / f"{cut}.so" for cut in cuts)).splitlines()
    assert len(lines) == len(cuts)
    for cut, line in zip(cuts, lines, strict=True):
        assert line.startswith("OSError kernel library does not load: ") and f"{cut}.so" in line, line
        if cut >= 64:
            assert f"is truncated: it has {cut} bytes; its header says " in line, line


def test_a_second_library_with_the_same_names(fork_python, libraries, tmp_path):
    shutil.copy(libraries / "fault_none.so", tmp_path / "copy.so")
    script = (
        USE
        + """
lowbit.load_kernels(sys.argv[1])
assert [row["name"] for row in rows()] == ["fault_linear", "fault_linear_2", "fault_embedding", "fault_quantize"]
# They ask to be used after the built-in rows, which can do all of it.
assert not any(row["active"] for row in rows()) and all(row["enabled"] for row in rows())
try:
    lowbit.load_kernels(sys.argv[2])
except ValueError as error:
    print(error)
assert len(rows()) == 4
"""
    )
    line = run_checked(fork_python, script, libraries / "fault_none.so", tmp_path / "copy.so")
    assert "copy.so' cannot be used: format 'FLT1' occurs twice" in line


def test_rows_for_one_mapping_are_active(fork_python, libraries):
    script = (
        USE
        + """
lowbit.load_kernels(sys.argv[1])
assert [(row["name"], row["active"]) for row in rows()] == [
    ("fault_linear", True), ("fault_linear_2", True), ("fault_embedding", True)]
"""
    )
    run_checked(fork_python, script, libraries / "fault_one_mapping.so")


def test_a_row_for_some_sizes_is_active_if_a_published_model_has_them(fork_python, libraries):
    """lowbit.kernels() considers 14336 x 4096 with 3 rows, but not 17 outputs."""
    script = (
        USE
        + """
active = lambda: [row["name"] for row in lowbit.kernels() if row["active"]]
before = active()
lowbit.load_kernels(sys.argv[1])
assert [(row["name"], row["active"]) for row in rows()] == [("fault_linear", True), ("fault_linear_2", False)]
assert sorted(active()) == sorted([*before, "fault_linear"])
"""
    )
    run_checked(fork_python, script, libraries / "fault_some_sizes.so")


@pytest.mark.parametrize("isa", [None, "portable"])
def test_a_row_for_another_cpu_is_listed_and_not_used(fork_python, libraries, isa):
    script = (
        USE
        + """
lowbit.load_kernels(sys.argv[1])
(row,) = rows()
active = set(lowbit.isa()["active"])
assert row["enabled"] == (set(row["isa"].split("+")) <= active) == row["active"], row
if len(sys.argv) > 2:
    assert not row["enabled"]
    layer = lowbit.nn.Linear(lowbit.quantize_tensor(torch.eye(64), lowbit.LinearConfig(8)))
    assert torch.allclose(layer(torch.ones(1, 64)), torch.ones(64), atol=0.02)
"""
    )
    run_checked(fork_python, script, libraries / "fault_missing_isa.so", *(["capped"] if isa else []), isa=isa)


OWN_FORMAT = (
    USE
    + """
torch.manual_seed(0)
weight, bias = torch.randn(50, 100), torch.randn(50)
packed = {bits: lowbit.quantize_tensor(weight, lowbit.LinearConfig(bits, 32, mapping), bias)
          for bits, mapping in ((4, "affine"), (8, "symmetric"), (3, "symmetric"))}
try:
    lowbit.repack(packed[4], "ROWS")
except ValueError as error:
    assert "there is no format 'ROWS'" in str(error)
lowbit.load_kernels(sys.argv[1])
own = {bits: lowbit.repack(value, "ROWS") for bits, value in packed.items()}
for bits in packed:
    info, described = lowbit.info(packed[bits]), lowbit.verify(own[bits])
    assert described.format == "ROWS" and info.format == "panel16"
    assert (described.bits, described.mapping, described.group_size, described.out_features, described.in_features) == (
        info.bits, info.mapping, info.group_size, info.out_features, info.in_features)
    assert own[bits].numel() == described.total_bytes and described.total_bytes % 64 == 0
    # Back, to the byte: this format keeps all values.
    assert torch.equal(lowbit.repack(own[bits], "panel16"), packed[bits])
    assert torch.equal(lowbit.repack(own[bits], "ROWS"), own[bits])
    assert torch.equal(lowbit.unpack(own[bits]).codes, lowbit.unpack(packed[bits]).codes)

# The operators go by the header. 300 rows are several claims, and more than the last panel of 16 columns is odd.
torch.set_num_threads(2)
dense = {bits: lowbit.embedding(torch.arange(50), packed[bits], 100) for bits in packed}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for bits in (4, 8):
        for x in (torch.randn(1, 100), torch.randn(3, 100), torch.randn(300, 100), torch.randn(100, 7).T,
                  torch.randn(0, 100)):
            x = x.to(dtype)
            expected = (x.double() @ dense[bits].double().T + bias.double()).float()
            found = lowbit.linear(x, own[bits], 50)
            assert found.dtype == dtype and found.shape == expected.shape
            if dtype == torch.float32:
                # It computes in float64; only its weights are rounded, one ulp each.
                assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
            else:
                eps = torch.finfo(dtype).eps
                assert torch.allclose(found.float(), expected, rtol=eps, atol=eps * 0.1)
assert torch.allclose(lowbit.embedding(torch.tensor([49, 0]), own[4], 100), dense[4][[49, 0]], rtol=1e-6, atol=1e-6)

def refused(call, *says):
    try:
        call()
    except ValueError as error:
        assert all(text in str(error) for text in says), error
    else:
        raise AssertionError(f"accepted, and not: {says}")

refused(lambda: lowbit.linear(x, own[3], 50) if x.numel() else lowbit.linear(torch.ones(1, 100), own[3], 50),
        "no linear kernel for weights of 3 bits in format 'ROWS'")
refused(lambda: lowbit.embedding(torch.tensor([0]), own[8], 100),
        "no embedding kernel for weights of 8 bits in format 'ROWS'")
refused(lambda: lowbit.repack(packed[4], "ELSE"), "there is no format 'ELSE'", "panel16")
refused(lambda: lowbit.repack(packed[4], "TOOLONG"), "there is no format 'TOOLONG'")
refused(lambda: lowbit.repack(packed[4], ""), "there is no format ''")
big = lowbit.quantize_tensor(torch.zeros(1, 5000), lowbit.LinearConfig())
refused(lambda: lowbit.repack(big, "ROWS"),
        "format 'ROWS' does not hold 1 x 5000 weights of 4 bits, symmetric, group size 32")
refused(lambda: lowbit.repack(lowbit.with_activation_bits(packed[4], 16), "ROWS"),
        "format 'ROWS' has activations of 8 bits; this weight has activations of 16 bits: set them to 8 first")
refused(lambda: lowbit.with_activation_bits(own[4], 16),
        "format 'ROWS' has activations of 8 bits; expected panel16 for activations of 16 bits")
assert torch.equal(lowbit.with_activation_bits(own[4], 8), own[4])
picky = lowbit.pack(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 42.0), bits=4, group_size=16)
refused(lambda: lowbit.repack(picky, "ROWS"), "format 'ROWS' does not support this weight: its first scale is 42")

# Hostile bytes: a changed payload, a wrong length, a header that says otherwise.
altered = own[4].clone()
altered[100] ^= 1
refused(lambda: lowbit.verify(altered), "altered bytes")
refused(lambda: lowbit.repack(altered, "panel16"), "altered bytes")
refused(lambda: lowbit.info(own[4][:-64]), "expected")
for byte in range(64):
    for value in (own[4][byte] ^ 1, own[4][byte] ^ 128):
        header = own[4].clone()
        header[byte] = value
        refused(lambda: lowbit.verify(header))

# A module, its state dict, and a trip through a file.
layer = lowbit.nn.Linear(packed[4])
assert layer.to_format("ROWS") is layer and "format=ROWS" in repr(layer)
assert torch.equal(layer.packed_weight, own[4])
other = lowbit.nn.Linear(packed[4])
other.load_state_dict(layer.state_dict())
x = torch.randn(2, 100)
assert torch.equal(other(x), lowbit.linear(x, own[4], 50)) and other.info.format == "ROWS"
torch.save(own[4], sys.argv[2])
print("all of it")
"""
)


def test_a_format_of_its_own(fork_python, libraries, tmp_path):
    saved = tmp_path / "weight.pt"
    assert run_checked(fork_python, OWN_FORMAT, libraries / "own_format.so", saved) == "all of it\n"
    # Without the library, the weight names its vendor.
    script = USE + "print(lowbit.info(torch.load(sys.argv[1])))"
    done = fork_python(script, saved)
    assert "ValueError: packed weight has the format 'ROWS', which no loaded library has" in done.stderr


def test_loading_while_others_compute(fork_python, libraries):
    script = (
        USE
        + """
import threading
layer = lowbit.nn.Linear(lowbit.quantize_tensor(torch.randn(64, 128), lowbit.LinearConfig(4)))
x = torch.randn(5, 128)
expected, stop, wrong, calls = layer(x), threading.Event(), [], [0]

def compute():
    while not stop.is_set():
        calls[0] += 1
        if not torch.equal(layer(x), expected):
            wrong.append(1)

threads = [threading.Thread(target=compute) for _ in range(3)]
for thread in threads: thread.start()
while calls[0] < 100: pass
for path in sys.argv[1:]:
    at = calls[0]
    lowbit.load_kernels(path)
    while calls[0] < at + 100: pass
stop.set()
for thread in threads: thread.join()
assert not wrong and len(rows()) == 1 + 4 + 3
"""
    )
    names = ("acme_kernels.so", "fault_none.so", "own_format.so")
    run_checked(fork_python, script, *(libraries / name for name in names))
