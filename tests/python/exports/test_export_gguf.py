"""`lowbit export --to gguf`: files read by the package gguf, llama.cpp and lowbit's importer."""

import filecmp
import json
import os
import shutil
import warnings
from pathlib import Path

import gguf
import lowbit
import numpy as np
import pytest
import torch
from checkpoints import edit_json, make_model, quantized, save_model
from command_line import FLOAT, document, documented_keys, invoke, keys_in
from gguf_files import file_bytes, write_model
from lowbit.checkpoint.codes import dequantize
from lowbit.exports.gguf import encode, export_gguf
from lowbit.exports.gguf_settings import architecture_metadata, is_of_lowbit
from lowbit.files.config_json import read_config
from lowbit.importing.gguf_blocks import NL4
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.operators import ops
from safetensors.torch import load_file, save_file

SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2048}


def to_gguf(source, path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the tokenizer in .* cuts words")
        return export_gguf(source, path)


def with_tokenizer(path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((FLOAT / name).read_bytes())
    return path


@pytest.fixture(scope="module")
def symmetric(tmp_path_factory) -> Path:
    """examples/tiny_llama in forms that GGUF has: 4 bits, groups of 32, without mins, the table with 6 bits."""
    target = tmp_path_factory.mktemp("symmetric") / "model"
    config = lowbit.LowBitConfig(embedding_bits=6, scale="absmax", overrides={"*.1.*gate_proj": {"mapping": "affine"}})
    lowbit.quantize_checkpoint(FLOAT, target, config)
    edit_json(target / "config.json", dtype="float32")  # activations, as in llama.cpp
    return target


@pytest.mark.parametrize(
    "bits, mapping, kind",
    [(1, "symmetric", "Q4_0"), (2, "symmetric", "Q4_0"), (3, "symmetric", "Q4_0"), (4, "symmetric", "Q4_0"),
     (5, "symmetric", "Q5_0"), (6, "symmetric", "Q8_0"), (7, "symmetric", "Q8_0"), (8, "symmetric", "Q8_0"),
     (2, "affine", "Q4_1"), (4, "affine", "Q4_1"), (5, "affine", "Q5_1"), (3, "levels", "Q8_0"), (4, "NL4", "IQ4_NL")],
)  # fmt: skip
@pytest.mark.parametrize("group", [32, 64, None])
def test_blocks_are_the_weights(bits, mapping, kind, group):
    """Every code, dequantized by the package gguf."""
    k, n = 160, 18
    groups = 1 if group is None else -(-k // group)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    codes[:, : 2**bits] = torch.arange(min(2**bits, k), dtype=torch.int32).to(torch.uint8)
    scales = (torch.randn(n, groups) / 7).half().float()
    mins = torch.randn(n, groups).half().float() if mapping == "affine" else None
    levels = NL4 if mapping == "NL4" else [-127, -50, -9, 0, 3, 20, 77, 127] if mapping == "levels" else None
    packed = ops.pack(codes, scales, mins, bits=bits, group_size=group, mapping="levels" if levels else mapping, levels=levels)
    unpacked = ops.unpack(packed)
    blocks = encode(kind, ops.info(packed), *unpacked[:3])
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    expected = dequantize(unpacked).numpy()
    if mins is None:
        assert np.array_equal(found, expected)
    else:  # numpy rounds the product; ggml's kernels and ours do not
        assert np.abs(found - expected).max() <= 2**-22 * np.abs(expected).max()


@pytest.mark.parametrize(
    "model, kind", [*(("untied", kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16")), ("bias", "Q4_0")]
)
def test_import_export_and_import_give_the_same_bytes(tmp_path, model, kind):
    made = make_model(model, dtype=torch.float32, **SIZES)
    tokens = ["<s>", "</s>", *[chr(0x100 + number) for number in range(2046)]]
    tokens[2:6] = ["t", "h", "e", "th"]
    tokens[6] = "the"
    write_model(tmp_path / "m.gguf", made, kind, tokens)
    lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "one")
    report = to_gguf(tmp_path / "one", tmp_path / "again.gguf")
    assert {each.kind for each in report} == ({"exact", "float"} if kind.startswith("Q") else {"float"})
    lowbit.import_checkpoint(tmp_path / "again.gguf", tmp_path / "two")
    names = sorted(os.listdir(tmp_path / "one"))
    assert names == sorted(os.listdir(tmp_path / "two")) and "model.safetensors" in names
    same = {name for name in names if filecmp.cmp(tmp_path / "one" / name, tmp_path / "two" / name, shallow=False)}
    different = {"lowbit_import.json"}  # contains the file's name and time
    if model == "bias":  # transformers splits words like Qwen2 for every model of that type, ignoring the file
        different.add("tokenizer.json")
    assert same == set(names) - different
    if kind.startswith("Q"):  # GGUF has no activation bits: an export drops them
        lowbit.convert_checkpoint(tmp_path / "one", tmp_path / "planes", 16)
        assert to_gguf(tmp_path / "planes", tmp_path / "planes.gguf") == report
        assert filecmp.cmp(tmp_path / "planes.gguf", tmp_path / "again.gguf", shallow=False)


@pytest.mark.parametrize("config", [None, {"bits": 1, "scale": "absmax"}, {"bits": 4}, {"bits": 8}])
def test_a_head_that_differs_from_the_table_stays(tmp_path, config):
    """Although the config ties the two; transformers does not tie weights that differ in the files."""
    save_model(tmp_path / "in", "tied", **SIZES)
    file = tmp_path / "in" / "model.safetensors"
    table = load_file(file)["model.embed_tokens.weight"]
    trained = table + 0.5 * table.std() * torch.randn(table.shape, dtype=table.dtype)
    for number, (head, kept) in enumerate(((table.clone(), False), (table.flip(0), True), (trained, True))):
        save_file(load_file(file) | {"lm_head.weight": head}, file, metadata={"format": "pt"})
        source = tmp_path / f"packed {number}" if config else tmp_path / "in"
        if config:
            lowbit.quantize_checkpoint(tmp_path / "in", source, lowbit.LowBitConfig(**config, overrides={"lm_head": None}))
        names = [tensor.name for tensor in export_gguf(source, tmp_path / "m.gguf", tokenizer=False)]
        assert ("output.weight" in names) == kept
    rows = len(table)
    save_file(
        load_file(source / file.name) | {"lm_head.weight": table[:-16].clone()}, source / file.name, metadata={"format": "pt"}
    )
    with pytest.raises(
        ValueError, match=rf"a head of \[{rows - 16}, 64\] and a token table of \[{rows}, 64\]; expected one shape"
    ):
        export_gguf(source, tmp_path / "m.gguf", tokenizer=False)


def test_lowbit_checkpoints_are_exported(symmetric, tmp_path):
    """examples/tiny_llama, read by the package gguf; values of one tensor are compared."""
    assert "Q8_0" in invoke("export", symmetric, "--to", "gguf", "--output", tmp_path / "m.gguf").stdout
    fields = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in fields.tensors}
    model = load_model(symmetric)
    found = gguf.dequantize(tensors["blk.1.ffn_down.weight"].data, gguf.GGMLQuantizationType.Q4_0)
    weight = ops.unpack(model.model.layers[1].mlp.down_proj.packed_weight)
    step = weight.scales.repeat_interleave(32, 1).numpy()
    assert 0 < (np.abs(found - dequantize(weight).numpy()) / np.abs(step)).max() < 0.004
    said = document(invoke("export", symmetric, "--to", "gguf", "--output", tmp_path / "m.gguf", "--json"))
    assert set(said) | keys_in(said["tensors"]) == documented_keys("export")
    kinds = {tensor["name"]: (tensor["type"], tensor["kind"]) for tensor in said["tensors"]}
    assert kinds["token_embd.weight"] == ("Q8_0", "rounded") and kinds["output_norm.weight"] == ("F32", "float")
    assert max(tensor["steps"] for tensor in said["tensors"]) < 0.02
    text = load_tokenizer(symmetric)
    listed = [bytes(fields.fields["tokenizer.ggml.tokens"].parts[at]).decode() for at in
              fields.fields["tokenizer.ggml.tokens"].data]  # fmt: skip
    assert listed == text.convert_ids_to_tokens(range(2048))


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("name, rule", [("llama-bpe", WORDS), ("qwen2", WORDS.replace("{1,3}", "")), ("gpt-2", None)])
def test_tokenizers_round_trip(tmp_path, name, rule):
    """With llama.cpp's ways of splitting words: the same tokens, stop tokens and template after an import."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = load_tokenizer(FLOAT)
    cut = [] if rule is None else [pre_tokenizers.Split(Regex(rule), "isolated")]
    cut.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule is None))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut) if rule else cut[0]
    tokenizer.chat_template = "{{ messages }}"
    make_model(dtype=torch.float32, **SIZES).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_gguf(tmp_path / "model", tmp_path / "m.gguf")
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "back")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == name
    found, text = load_tokenizer(tmp_path / "back"), "It's the first.\n\n  Return 12345 items; naïve 世界 </s>"
    assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert found.chat_template == tokenizer.chat_template
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["eos_token_id"] == [1, 2]


def test_models_that_gguf_cannot_hold_are_refused_by_name(tmp_path):
    model = make_model(dtype=torch.float32, **SIZES)
    for config, words in (
        ({"group_size": 16}, "lowbit quantize --group-size 32"),
        ({"bits": 6, "mapping": "affine"}, "--mapping symmetric"),
    ):
        name = words[-4:].strip("- ")
        packed = quantized(make_model(dtype=torch.float32, **SIZES), lowbit.LowBitConfig(**config))
        packed.save_pretrained(tmp_path / name)
        with_tokenizer(tmp_path / name)
        with pytest.raises(ValueError, match=rf"(packed_weight) has .*{words}"):
            to_gguf(tmp_path / name, tmp_path / "m.gguf")
    model.save_pretrained(tmp_path / "odd")
    with_tokenizer(tmp_path / "odd")
    edit_json(tmp_path / "odd" / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0})
    with pytest.raises(ValueError, match="has the rope_type 'yarn'"):
        to_gguf(tmp_path / "odd", tmp_path / "m.gguf")
    edit_json(tmp_path / "odd" / "config.json", model_type="gpt_neox")
    with pytest.raises(ValueError, match="'gpt_neox'; lowbit writes llama, mistral, qwen2, qwen3, phi3, gemma"):
        to_gguf(tmp_path / "odd", tmp_path / "m.gguf")
    save_model(tmp_path / "rows", vocab_size=2048)  # the last matrix of a layer has 168 inputs
    quantized_rows = tmp_path / "packed rows"
    lowbit.quantize_checkpoint(tmp_path / "rows", quantized_rows, lowbit.LowBitConfig())
    with_tokenizer(quantized_rows)
    with pytest.raises(ValueError, match="down_proj.* has 168 inputs"):
        to_gguf(quantized_rows, tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
    for option in (("--bits", 4), ("--cache", "int8")):
        result = invoke("export", FLOAT, "--to", "gguf", *option, "--output", tmp_path / "m.gguf")
        assert result.exit_code == 2 and f"{option[0]} with --to gguf" in " ".join(result.output.split())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_type": "linear"}, "transformers refuses its settings: .*factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "transformers refuses its settings: .*low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
          "original_max_position_embeddings": 64}, "has the rotation .* the low factor below the high one"),
        ({"rope_theta": "10000"}, "has rope_theta '10000'"),
        ([1], r"has rope_parameters \[1\]"),
        ({"model_type": ["llama"]}, r"has model_type \['llama'\]; expected a text"),
        ({"num_attention_heads": 16, "head_dim": 32}, "has 256 rows in model.layers.0.self_attn.q_proj.*expected 512"),
    ],
)  # fmt: skip
def test_settings_that_no_file_can_have(symmetric, tmp_path, changes, message):
    shutil.copytree(symmetric, tmp_path / "m")
    rope = isinstance(changes, list) or any(key.startswith("rope") for key in changes)
    edit_json(tmp_path / "m" / "config.json", **({"rope_parameters": changes} if rope else changes))
    with pytest.raises(ValueError, match=message):
        to_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_eight_bits_of_lowbit_are_exported(tmp_path):
    """Their scales are float32; float16 moves a weight of 128 steps by a sixteenth of a step."""
    from lowbit.exports.gguf import _steps

    for config in (lowbit.LinearConfig(8, 32), lowbit.LinearConfig(8, None), lowbit.LinearConfig(3, 32, "levels")):
        packed = lowbit.nn.Linear.from_float(torch.nn.Linear(256, 512), config).packed_weight
        weight = ops.unpack(packed)
        assert 0 < _steps("w", ops.info(packed), weight.scales, weight.mins) < 2**-4


def test_scales_that_float16_does_not_hold(tmp_path):
    codes, scales = torch.full((16, 64), 15, dtype=torch.uint8), torch.full((16, 2), 1e-7)
    from lowbit.exports.gguf import _steps

    info = ops.info(ops.pack(codes, scales, bits=4, group_size=32))
    with pytest.raises(ValueError, match="w has scales from 1e-07 to 1e-07; GGUF's float16"):
        _steps("w", info, scales, None)
    with pytest.raises(ValueError, match="float16"):
        _steps("w", info, scales * 1e12, None)
    assert _steps("w", info, torch.full((16, 2), 0.5), None) == 0


def test_which_files_are_of_lowbit(symmetric, tmp_path):
    """Files of lowbit are recognized by keys that it has always written, which other programs write in another order."""
    ours = architecture_metadata(symmetric, read_config(symmetric))
    file = tmp_path / "m.gguf"

    def is_ours(metadata):
        file.write_bytes(file_bytes(metadata, []))
        return is_of_lowbit(file)

    assert is_ours(ours) and is_ours(ours | {"lowbit.version": "0.1"})
    assert invoke("export", symmetric, "--to", "gguf", "--output", file).exit_code == 0 and is_of_lowbit(file)
    assert not is_ours(dict([*ours.items()][::-1]))
    assert not is_ours(ours | {"general.name": "lowbit.version"})
    assert not is_ours({"general.architecture": "llama"}) and not is_ours({"lowbit.version": "0.1"})


def test_damaged_weights_are_refused(symmetric, tmp_path):
    shutil.copytree(symmetric, tmp_path / "m")
    data = bytearray((tmp_path / "m" / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "m" / "model.safetensors").write_bytes(data)
    (tmp_path / "m.gguf").write_bytes(b"what was there")
    with pytest.raises(ValueError, match="is damaged: its checksum is wrong"):
        to_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"what was there"


KILLED = """
import filecmp, os, shutil, sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
import lowbit
import lowbit.importing.gguf_source, lowbit.transformers  # before processes are forked
from checkpoints import killed_at
from lowbit.exports.gguf import export_gguf

warnings.simplefilter("ignore")
source, base = map(Path, sys.argv[1:])
export_gguf(source, base / "whole.gguf")
lowbit.import_checkpoint(base / "whole.gguf", base / "whole")
names = sorted(os.listdir(base / "whole"))
actions = {
    "m.gguf": lambda target, progress: export_gguf(source, target, progress=progress),
    "imported": lambda target, progress: lowbit.import_checkpoint(base / "whole.gguf", target, progress=progress),
}
for name, action in actions.items():
    moment, killed, kills = 0, True, 0
    while killed:
        moment += 1
        place = base / f"{name}-{moment}"
        place.mkdir()
        target, ticks = place / name, []
        killed = killed_at(moment, lambda: action(target, lambda *_: [tick() for tick in ticks]), ticks.append)
        kills += killed
        if target.is_dir():
            assert sorted(os.listdir(target)) == names
            assert filecmp.cmpfiles(base / "whole", target, names, shallow=False)[0] == names
        elif target.exists():
            assert filecmp.cmp(base / "whole.gguf", target, shallow=False)
        else:
            assert killed
        if not killed:
            assert len(list(place.iterdir())) == 1
        shutil.rmtree(place)
    assert kills > 1, (name, kills)
    print(name, kills)
"""


@pytest.mark.more
def test_killed_after_every_band(tmp_path, run_python):
    """After SIGKILL in an export or import, the target is complete or missing. test_crashes.py tests other moments."""
    source = with_tokenizer(save_model(tmp_path / "source", dtype=torch.float32, **SIZES))
    process = run_python(KILLED, source, tmp_path)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.split()) == 2 * 2
