"""LOWBIT_ISA: the cap is obeyed and reported correctly, and does not change results."""

import json
import re
from pathlib import Path

import lowbit
import pytest
import reference
import torch
from reference import assert_same_bits

pytestmark = pytest.mark.first

# Saves what the capped package reports, and results of every width, mapping and dtype.
SCRIPT = """
import json, sys
import torch, lowbit, reference
tensors = {}
for bits in reference.WIDTHS:
    for mapping in reference.MAPPINGS:
        for n, k, group_size in ((33, 100, 48), (64, 256, 32), (5, 17, None), (40, 130, 16)):
            packed = reference.random_packed(n, k, bits, group_size, mapping, bias=True)
            tensors[f"packed {bits} {mapping} {n}"] = packed
            for dtype in reference.DTYPES:
                for m in (1, 4, 9):
                    x = 3 * reference.random_rows(m, k, seed=m)
                    x[0] = x[0].abs()
                    y = lowbit.linear(x.to(dtype), packed, n)
                    tensors[f"linear {bits} {mapping} {n} {m} {dtype}"] = y
                rows = lowbit.embedding(torch.arange(n), packed, k, dtype=dtype)
                tensors[f"embedding {bits} {mapping} {n} {dtype}"] = rows
        for scale in ("absmax", "mse"):
            config = lowbit.LinearConfig(bits, 32, mapping, scale)
            packed = lowbit.quantize_tensor(reference.random_rows(40, 70), config)
            tensors[f"quantized {bits} {mapping} {scale}"] = packed
for heads, width in ((4, 48), (2, 128), (7, 16)):
    for dtype in reference.DTYPES:
        q = 2 * reference.random_rows(1, heads, 290, width).to(dtype)
        k, v = (reference.random_rows(1, heads // 2, 290, width, seed=seed)[:, :1].to(dtype) for seed in (1, 2))
        caches = torch.zeros(2, 1, 1, 304, width, dtype=dtype)
        tensors[f"attention {heads} {dtype}"] = lowbit.attention(q, k, v, *caches, torch.tensor(0))
torch.save(tensors, sys.argv[1])
print(json.dumps([lowbit.isa(), lowbit.kernels()]))
"""
IMPORT = "import lowbit"
# The names of each processor's family, from the list that the build reads.
LISTS = re.findall(
    r"#define LOWBIT_(\w+)_ISAS\(ISA\)((?:.*\\\n)+.*)", (Path(__file__).parents[3] / "kernels/isas.h").read_text("utf-8")
)
FAMILIES = {family: re.findall(r"ISA\(\w+, \w+, (\w+)\)", rows) for family, rows in LISTS}


def test_the_list_has_both_families():
    assert FAMILIES["X86"][0] == "avx2" and FAMILIES["ARM"][0] == "neon" and len(FAMILIES["X86"] + FAMILIES["ARM"]) >= 11


def test_a_wrong_name_is_refused_and_the_right_ones_are_told(fork_python):
    for name in ("nonsense", "Portable", "x" * 200):
        process = fork_python(IMPORT, isa=name)
        assert process.returncode != 0
        last = process.stderr.strip().splitlines()[-1]
        assert re.fullmatch(rf"ImportError: LOWBIT_ISA is '{name[:32]}'; expected one of: portable(, \w+)*", last), last


def names_of_this_processor(fork_python) -> list[str]:
    """All names that LOWBIT_ISA accepts here, weakest first, including instruction sets that this CPU lacks."""
    return fork_python(IMPORT, isa="?").stderr.strip().rsplit("expected one of: ", 1)[1].split(", ")


def test_names_of_another_processor_are_refused(fork_python):
    here = names_of_this_processor(fork_python)
    assert here[0] == "portable" and set(lowbit.isa()["cpu"]) <= set(here)
    family = [name for name, isas in FAMILIES.items() if here[1:] == isas]
    assert len(family) == 1
    others = [name for other in set(FAMILIES) - set(family) for name in FAMILIES[other]]
    for name in others:
        process = fork_python(IMPORT, isa=name)
        assert process.returncode != 0
        assert f"ImportError: LOWBIT_ISA is '{name}'; expected one of: portable, " in process.stderr


def test_the_cap_is_read_once(fork_python):
    script = "import os, lowbit; os.environ['LOWBIT_ISA'] = 'portable'; print(lowbit.isa()['cap'])"
    assert fork_python(script).stdout == "None\n"
    assert fork_python(script.replace("portable", "later"), isa="portable").stdout == "portable\n"


def test_no_cap(fork_python):
    script = "import lowbit; print(lowbit.isa()); print(lowbit.kernels())"
    without, empty = fork_python(script), fork_python(script, isa="")
    assert without.returncode == 0 and without.stdout == empty.stdout
    assert "'cap': None" in without.stdout


def test_every_cap_takes_effect_and_gives_the_same_bits(fork_python, tmp_path):
    names = names_of_this_processor(fork_python)
    described, results = {}, {}
    for name in (None, *names):
        process = fork_python(SCRIPT, tmp_path / "results.pt", isa=name)
        assert process.returncode == 0, process.stderr
        described[name] = json.loads(process.stdout)
        results[name] = torch.load(tmp_path / "results.pt", weights_only=True)

    cpu = described[None][0]["cpu"]
    assert described[None][0] == {"cpu": cpu, "cap": None, "active": cpu}
    for name in names:
        isa, kernels = described[name]
        allowed = names[: names.index(name) + 1]
        assert isa == {"cpu": cpu, "cap": name, "active": [each for each in allowed if each in cpu]}
        for kernel in kernels:
            assert kernel["supported"] == (kernel["isa"] in cpu)
            assert kernel["enabled"] == (kernel["isa"] in isa["active"])
            assert kernel["enabled"] or not kernel["active"]
            assert kernel["name"].endswith(kernel["isa"])
        active = [kernel for kernel in kernels if kernel["active"]]
        assert {kernel["family"] for kernel in active} == {
            "linear",
            "embedding",
            "quantize",
            "attention",
            "recurrence",
            "elementwise",
        }
        for family in ("linear", "embedding"):
            assert {kernel["bits"] for kernel in active if kernel["family"] == family} == set(range(1, 9))
        if name == "portable":
            assert {kernel["isa"] for kernel in active} == {"portable"}
    # Without a cap, the best instruction set with kernels is used.
    best = described[None][1][0]["isa"]
    if best in cpu:
        assert any(kernel["active"] for kernel in described[None][1] if kernel["isa"] == best)

    for name in names:
        assert list(results[name]) == list(results[None])
        for key, expected in results[None].items():
            if expected.dtype == torch.uint8:
                assert torch.equal(results[name][key], expected), (name, key)
            else:
                assert_same_bits(results[name][key], expected)


def test_the_table_of_kernels():
    kernels = lowbit.kernels()
    assert len({kernel["name"] for kernel in kernels}) == len(kernels)
    for kernel in kernels:
        keys = {"name", "family", "isa", "supported", "enabled", "active", "vendor", "library"}
        keys |= {"linear": {"format", "bits", "tile"}, "embedding": {"format", "bits"}}.get(kernel["family"], set())
        assert set(kernel) == keys
        assert kernel["vendor"] is None and kernel["library"] is None
        assert kernel.get("format", "panel16") == "panel16"
        if kernel["family"] == "linear":
            m, n = kernel["tile"]
            assert kernel["name"] == f"linear_a8w{kernel['bits']}_{m}x{n}_{kernel['isa']}"
        elif kernel["family"] == "embedding":
            assert kernel["name"] == f"embedding_w{kernel['bits']}_{kernel['isa']}"
        else:
            assert kernel["family"] in ("quantize", "attention", "recurrence", "elementwise")
            assert kernel["name"] == f"{kernel['family']}_{kernel['isa']}"
    for family, widths in (("linear", range(1, 9)), ("embedding", range(1, 9))):
        portable = {kernel["bits"] for kernel in kernels if kernel["family"] == family and kernel["isa"] == "portable"}
        assert portable == set(widths)


def test_streams_are_pinned_and_change_no_bit(fork_python, monkeypatch):
    before = lowbit.streams()
    assert before in ("one", "ahead", "several")
    packed = reference.random_packed(150, 256, 4, 32, "affine", bias=True)
    x = reference.random_rows(1, 256)
    try:
        found = {}
        for pin in ("several", "ahead", "one"):
            assert lowbit.streams(pin) == pin == lowbit.streams()
            found[pin] = lowbit.linear(x, packed, 150)
            running = {row["name"] for row in lowbit.kernels() if row["active"]}
            interleaved = "avx512vnni" in lowbit.isa()["active"] and pin == "several"
            assert ("linear_a8w4_1x64_avx512vnni" in running) == interleaved
        assert_same_bits(found["one"], found["several"])
        assert_same_bits(found["one"], found["ahead"])
        with pytest.raises(ValueError, match="pin is 'two'; expected one, ahead or several"):
            lowbit.streams("two")
    finally:
        lowbit.streams(before)

    monkeypatch.setenv("LOWBIT_STREAMS", "several" if before == "one" else "one")
    assert fork_python("import lowbit; print(lowbit.streams())").stdout.strip() not in ("", before)
    monkeypatch.setenv("LOWBIT_STREAMS", "two")
    process = fork_python(IMPORT)
    assert process.returncode != 0
    assert process.stderr.strip().endswith("ImportError: LOWBIT_STREAMS is 'two'; expected one, ahead or several")
