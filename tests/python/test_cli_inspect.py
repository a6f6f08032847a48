"""`lowbit inspect`, beside the library."""

import dataclasses
import json

import pytest

import lowbit
from command_line import FLOAT, document, documented_keys, invoke, keys_in, run


def test_inspect(packed):
    result = run("inspect", packed[0])
    assert (result.returncode, result.stderr) == (0, "")
    entries = lowbit.inspect_checkpoint(packed[0])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tensor", "kind", "shape", "bits", "group", "mapping", "bytes"]
    for line, entry in zip(lines[1:-1], entries, strict=True):
        shown = [entry.name, entry.kind, *" x ".join(map(str, entry.shape)).split(), str(entry.bits)]
        if entry.kind == "packed":
            shown += [str(entry.group_size or "row"), entry.mapping]
        assert line.split() == [*shown, str(entry.bytes)]
    assert lines[-1].startswith(f"{len(entries)} tensors, ")


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
