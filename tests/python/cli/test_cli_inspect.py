"""`lowbit inspect`, compared with the library."""

import dataclasses
import json

import lowbit
import pytest
import typer.testing
from command_line import FLOAT, document, documented_keys, error, invoke, keys_in, run
from gguf_files import file_bytes
from lowbit.cli.app import make_app
from lowbit.machine.sizes import size


def test_inspect(packed):
    result = run("inspect", packed[0])
    assert (result.returncode, result.stderr) == (0, "")
    entries = lowbit.inspect_checkpoint(packed[0])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tensor", "kind", "shape", "bits", "group", "mapping", "activations", "bytes"]
    for line, entry in zip(lines[1:-1], entries, strict=True):
        shown = [entry.name, entry.kind, *" x ".join(map(str, entry.shape)).split(), str(entry.bits)]
        if entry.kind == "packed":
            shown += [str(entry.group_size or "row"), entry.mapping, str(entry.activation_bits)]
        assert line.split() == [*shown, str(entry.bytes)]
    assert lines[-1].startswith(f"{len(entries)} tensors, ")


@pytest.mark.parametrize("columns, terminal", [(40, True), (40, False), (120, False)])
def test_inspect_shows_whole_names(tmp_path, columns, terminal):
    """In a narrow terminal a tensor takes two lines; in a file, lines are as long as needed."""
    names = ["decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "x" * 150, "short"]
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path = tmp_path / "names.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * len(names)))
    environment = {"COLUMNS": str(columns), "FORCE_COLOR": "1" if terminal else None, "NO_COLOR": "1", "TERM": "dumb"}
    shown = typer.testing.CliRunner(env=environment).invoke(make_app(), ["inspect", str(path)])
    assert shown.exit_code == 0, shown.exception
    words = [line.split() for line in shown.stdout.splitlines()]
    if terminal:
        assert [words[2 * i] for i in range(1, 4)] == [[name] for name in names]
        assert all(words[2 * i + 1][:3] == ["float32", "1", "32"] for i in range(1, 4))
    else:
        assert [line[:4] for line in words[1:4]] == [[name, "float32", "1", "32"] for name in names]


@pytest.mark.parametrize("of_file", [False, True])
def test_inspect_json(packed, of_file):
    path = packed[0] / "model.safetensors" if of_file else packed[0]
    said = document(invoke("inspect", path, "--json"))
    entries = [dataclasses.asdict(entry) for entry in lowbit.inspect_checkpoint(packed[0])]
    assert said["tensors"] == json.loads(json.dumps(entries))
    assert said["bytes"] == sum(entry["bytes"] for entry in entries)
    assert said["bits_per_weight"] == packed[1]["bits_per_weight"]
    assert set(said) | keys_in(said["tensors"]) == documented_keys("inspect")


def test_inspect_a_float_checkpoint():
    said = document(invoke("inspect", FLOAT, "--json"))
    assert (said["packed_bytes"], said["packed_weights"], said["bits_per_weight"]) == (0, 0, None)


def test_inspect_shows_the_bits_of_every_dtype(tmp_path):
    # The types of safetensors 0.8, which refuses all others.
    bits = {
        "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
        "U64": 64,
    }  # fmt: skip
    header, at = {}, 0
    for dtype, width in bits.items():
        header[dtype] = {"dtype": dtype, "shape": [3, 8], "data_offsets": [at, at + 3 * width]}
        at += 3 * width
    text = json.dumps(header).encode()
    file = tmp_path / "all.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    found = {entry["name"]: entry for entry in document(invoke("inspect", file, "--json"))["tensors"]}
    assert {name: entry["bits"] for name, entry in found.items()} == bits
    assert all(entry["bytes"] == 3 * entry["bits"] for entry in found.values())
    names = [found[dtype]["kind"] for dtype in ("BF16", "U32", "C64", "F8_E4M3", "F8_E8M0", "F4")]
    assert names == ["bfloat16", "uint32", "complex64", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"]
    header["F4"]["dtype"] = "F5"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    assert "F5" in error(invoke("inspect", file))


def test_inspect_a_gguf_file(tmp_path):
    blocks = 3 * 18  # of Q4_0
    tensors = [("a", (32, 3), 2, bytes(blocks)), ("b", (8,), 0, bytes(32)), ("c", (256, 2), 12, bytes(2 * 144))]
    file = tmp_path / "model.gguf"
    file.write_bytes(file_bytes({"general.architecture": "llama"}, tensors))
    said = document(invoke("inspect", file, "--json"))
    rows = [(entry["name"], entry["kind"], entry["shape"], entry["bits"], entry["bytes"]) for entry in said["tensors"]]
    assert rows == [
        ("a", "Q4_0", [3, 32], 4.5, blocks), ("b", "float32", [8], 32, 32), ("c", "Q4_K", [2, 256], 4.5, 2 * 144),
    ]  # fmt: skip
    assert said["bytes"] == blocks + 32 + 2 * 144 and {entry["file"] for entry in said["tensors"]} == {"model.gguf"}
    assert ["a", "Q4_0", "3", "x", "32", "4.5", str(blocks)] in [
        line.split() for line in invoke("inspect", file).stdout.splitlines()
    ]
    file.write_bytes(file.read_bytes()[:-1])
    assert str(file) in error(invoke("inspect", file))


def test_inspect_shows_names_unchanged(tmp_path):
    # Neither rich's markup, nor emoji codes, nor terminal control sequences.
    names = ["a[bold]b", "[/x]", ":smile:", "\x1b[31mred"]
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path = tmp_path / "names.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(len(names)))
    shown = invoke("inspect", path)
    assert shown.exit_code == 0, shown.exception
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:-1]] == [*names[:3], "\\x1b[31mred"]
    assert [entry["name"] for entry in document(invoke("inspect", path, "--json"))["tensors"]] == names


def test_sizes_have_the_unit_that_fits():
    shown = {0: "0 B", 999: "999 B", 999.6: "1.00 kB", 1000: "1.00 kB", 9996: "10.0 kB", 54_321: "54.3 kB", 999_600: "1.00 MB"}
    shown |= {123_456_789: "123 MB", 1_340_000_000: "1.34 GB", 16_060_000_000: "16.1 GB", 2_500_000_000_000: "2500 GB"}
    assert {count: size(count) for count in shown} == shown
