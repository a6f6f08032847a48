"""quantize_checkpoint and inspect_checkpoint: bytes, other files of the checkpoint, and memory."""

import json
import re

import lowbit
import pytest
import torch
from checkpoints import (
    CONFIG,
    EMBED,
    HEAD,
    KINDS,
    NORM,
    OVERRIDES,
    UP,
    change_tensors,
    edit_json,
    load,
    make_model,
    refuse,
    save_model,
)
from lowbit import LowBitConfig, dequantize_checkpoint, inspect_checkpoint, quantize_checkpoint
from lowbit.checkpoint import outputs, write_note
from lowbit.files.config_json import read_config
from lowbit.llm.loading import load_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import JetMoeConfig, JetMoeForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration


def tensors_of(path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def source(tmp_path):
    return save_model(tmp_path / "source")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_bytes_are_those_of_whole_tensors(tmp_path, monkeypatch, kind, sharded):
    monkeypatch.setattr(outputs, "_BAND_WEIGHTS", 5000)  # several bands in most tensors
    source = save_model(tmp_path / "source", kind, sharded)
    assert sharded == (len(list(source.glob("*.safetensors"))) > 1)
    quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=40_000 if sharded else 10**9)
    floats, packed = tensors_of(source), tensors_of(tmp_path / "packed")
    assert sharded == (tmp_path / "packed" / "model.safetensors.index.json").exists()
    expected = {}
    for name, weight in floats.items():
        layer, _, leaf = name.rpartition(".")
        if layer == "model.layers.1.self_attn.o_proj" or weight.dim() == 1:
            if leaf != "bias":
                expected[name] = weight
            continue
        config = lowbit.LinearConfig(bits=4, group_size=32)
        if layer == EMBED:
            config = lowbit.EmbeddingConfig(bits=6, group_size=32)
        elif layer.endswith("down_proj"):
            config = lowbit.LinearConfig(bits=3, group_size=32, mapping="affine", scale="absmax")
        expected[f"{layer}.packed_weight"] = lowbit.quantize_tensor(weight, config, floats.get(f"{layer}.bias"))
    assert (f"{HEAD}.packed_weight" in expected) == (kind == "untied")
    guards = {name.removesuffix("packed_weight") + "weight" for name in expected if name.endswith(".packed_weight")}
    assert all(packed.pop(name).numel() == 0 for name in guards)
    assert packed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert packed[name].dtype == tensor.dtype and torch.equal(packed[name], tensor), name
        if name.endswith("packed_weight"):
            lowbit.verify(packed[name])


def test_two_files_have_an_index_and_every_tensor_may_have_its_own(source, tmp_path):
    whole = quantize_checkpoint(source, tmp_path / "whole", CONFIG)
    size = sum(entry.bytes for entry in whole.entries)
    for name, limit, count in (("two", size * 2 // 3, 2), ("each", 1, len(whole.entries))):
        quantize_checkpoint(source, tmp_path / name, CONFIG, max_shard_bytes=limit)
        files = {f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)}
        assert {file.name for file in (tmp_path / name).glob("*.safetensors")} == files
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == size and set(index["weight_map"].values()) == files
        found, expected = tensors_of(tmp_path / name), tensors_of(tmp_path / "whole")
        assert found.keys() == expected.keys()
        assert index["weight_map"].keys() == {each for each, tensor in expected.items() if tensor.numel()}  # no guards
        assert all(torch.equal(found[each], expected[each]) for each in expected)
        load(tmp_path / name)


@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
def test_a_scale_for_each_row(source, tmp_path, mapping):
    quantize_checkpoint(source, tmp_path / "packed", LowBitConfig(bits=4, group_size=None, mapping=mapping))
    config = lowbit.LinearConfig(bits=4, group_size=None, mapping=mapping)
    found, floats = tensors_of(tmp_path / "packed"), tensors_of(source)
    assert torch.equal(found[f"{UP}.packed_weight"], lowbit.quantize_tensor(floats[f"{UP}.weight"], config))


@pytest.mark.parametrize("name, found", [("file", "is a file"), ("nothing", "does not exist")])
def test_a_source_that_is_no_directory(tmp_path, name, found):
    (tmp_path / "file").write_text("")
    message = f"{tmp_path / name} {found}; expected a directory with config.json"
    with pytest.raises(NotADirectoryError, match=re.escape(message)):
        read_config(tmp_path / name)


def test_files_beside_the_weights(tmp_path):
    source = save_model(tmp_path / "source", sharded=True)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("other weights")
    edit_json(source / "config.json", note="kept as it is")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer_config.json",
    ]  # fmt: skip
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "packed" / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "lowbit",
        "format_version": 1,
        "bits": 4,
        "group_size": 32,
        "mapping": "symmetric",
        "scale": "mse",
        "levels": None,
        "embedding_bits": 6,
        "conv_bits": None,
        "overrides": [list(pair) for pair in OVERRIDES.items()],
    }
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "packed").stat().st_mode == source.stat().st_mode


@pytest.mark.parametrize(
    "card", [None, b"", b"# A model\n", b"---\r\nlicense: mit\r\n---\r\n# Caf\xe9\r\n", b"---\nlicense: mit\n---\n"]
)
def test_the_model_card_says_what_to_install(tmp_path, card):
    source = save_model(tmp_path / "source")
    if card is not None:
        (source / "README.md").write_bytes(card)
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    packed = (tmp_path / "packed" / "README.md").read_bytes()
    matter, note, rest = re.fullmatch(
        rb"(---.*?---\r?\n)?(<!-- lowbit: begin.*lowbit: end -->\n)\n?(.*)", packed, re.S
    ).groups()
    assert b"pip install '.[llm]'` in a clone" in note and b"Do not pass `ignore_mismatched_sizes=True`" in note
    assert (matter or b"") + rest == (card or b"")
    write_note(tmp_path / "packed")  # once is enough
    assert (tmp_path / "packed" / "README.md").read_bytes() == packed
    dequantize_checkpoint(tmp_path / "packed", tmp_path / "float")
    left = tmp_path / "float" / "README.md"
    assert left.read_bytes() == card if card else not left.exists()


def test_packed_tensors_lie_at_multiples_of_64(tmp_path):
    source = save_model(tmp_path / "source")
    change_tensors(source / "model.safetensors", lambda tensors: tensors.update({"a.rotary_emb.inv_freq": torch.ones(3)}))
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    file = tmp_path / "packed" / "model.safetensors"
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert begin % 64 == 0
    header = json.loads(file.read_bytes()[8:begin])
    packed = [entry["data_offsets"][0] for name, entry in header.items() if name.endswith("packed_weight")]
    assert packed and all(offset % 64 == 0 for offset in packed)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_tensor("a.rotary_emb.inv_freq"), torch.ones(3))  # copied, because the model lacks it


def test_inspect(tmp_path):
    source = save_model(tmp_path / "source", "bias", sharded=True)
    before = {entry.name: entry for entry in inspect_checkpoint(source)}
    assert before[f"{UP}.weight"] == lowbit.CheckpointEntry(
        f"{UP}.weight", "bfloat16", (168, 64), 16, None, None, 2 * 168 * 64, before[f"{UP}.weight"].file
    )
    summary = quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=50_000)
    after = inspect_checkpoint(tmp_path / "packed")
    assert after == summary.entries
    assert summary.target_bytes == sum(entry.bytes for entry in after)
    assert summary.source_bytes == sum(e.bytes for e in before.values() if not e.name.endswith("bias"))
    left = "model.layers.1.self_attn.o_proj.weight"
    assert summary.unquantized == {left: "left float by its configuration"}
    assert summary.unquantized_bytes == 2 * 64 * 64
    entries = {entry.name: entry for entry in after}
    size = lowbit.quantize_tensor(torch.ones(64, 168), lowbit.LinearConfig(bits=3, mapping="affine")).numel()
    name = "model.layers.1.mlp.down_proj.packed_weight"
    expected = lowbit.CheckpointEntry(name, "packed", (64, 168), 3, 32, "affine", size, entries[name].file, 0, 8)
    assert entries[name] == expected
    assert entries[NORM].kind == "bfloat16" and entries[NORM].shape == (64,)


def test_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(outputs, "_BAND_WEIGHTS", 5000)
    source = save_model(tmp_path / "source")
    calls = []
    summary = quantize_checkpoint(source, tmp_path / "packed", CONFIG, progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert list(done) == sorted(set(done)) and done[-1] == summary.source_bytes and set(totals) == {summary.source_bytes}
    assert set(names) == {entry.name for entry in summary.entries}
    assert len(calls) > len(summary.entries)


def test_a_tied_weight_that_the_file_has_twice(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({f"{HEAD}.weight": tensors[f"{EMBED}.weight"].clone()}))
    quantize_checkpoint(source, tmp_path / "same", CONFIG)
    assert f"{HEAD}.packed_weight" not in tensors_of(tmp_path / "same")
    # transformers unties tensors that differ, and so does lowbit.
    change_tensors(file, lambda tensors: tensors[f"{HEAD}.weight"].mul_(2))
    quantize_checkpoint(source, tmp_path / "different", CONFIG)
    found = tensors_of(tmp_path / "different")
    doubled = lowbit.unpack(found[f"{HEAD}.packed_weight"])
    single = lowbit.unpack(found[f"{EMBED}.packed_weight"])
    assert torch.equal(doubled.codes, single.codes) and torch.equal(doubled.scales, 2 * single.scales)


@pytest.mark.more
def test_memory(tmp_path, run_python):
    # One tensor of 100 MB that packs to 28 MB; neither is ever completely in memory.
    source = save_model(tmp_path / "source", vocab_size=100_000, hidden_size=512, num_hidden_layers=1)
    small = save_model(tmp_path / "small")
    entries = {entry.name: entry for entry in inspect_checkpoint(source)}
    largest = entries[f"{EMBED}.weight"].bytes
    assert largest == 2 * 100_000 * 512
    script = """
import sys, torch, lowbit, lowbit.transformers
torch.set_num_threads(1)
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
config = lowbit.LowBitConfig(scale="absmax")
lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2] + "-small", config)
before = peak()
lowbit.quantize_checkpoint(sys.argv[3], sys.argv[2], config)
print(before, peak())
"""
    process = run_python(script, small, tmp_path / "packed", source)
    assert process.returncode == 0, process.stderr
    before, after = map(int, process.stdout.split()[-2:])
    # A band of 2^21 weights in bfloat16, its codes, scales and packed bytes are 8 MB.
    assert after - before < 32e6 < largest / 3


def test_layers_that_stay_float(tmp_path):
    """If experts of an unsupported form, most of the bytes, stay float, every run warns."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 16}
    sizes["pad_token_id"] = 0  # transformers 5.0 needs one
    JetMoeForCausalLM(JetMoeConfig(**sizes, intermediate_size=96, num_local_experts=4)).save_pretrained(tmp_path / "experts")
    with pytest.warns(UserWarning, match="only .* % are packed: .* stay float, in JetMoeParallelExperts"):
        summary = quantize_checkpoint(tmp_path / "experts", tmp_path / "packed", LowBitConfig())
    kind = "in a layer of the kind JetMoeParallelExperts, which lowbit does not pack"
    assert list(summary.unquantized.values()).count(kind) == 4  # in the feed-forward layer and in attention
    entries = {entry.name: entry for entry in summary.entries}
    assert summary.unquantized.keys() == {
        name for name in entries if entries[name].kind != "packed" and len(entries[name].shape) > 1
    }
    assert summary.unquantized_bytes == sum(entries[name].bytes for name in summary.unquantized)

    with pytest.warns(UserWarning, match="stay float, in JetMoeParallelExperts") as warned:
        model = load(tmp_path / "experts", quantization_config=LowBitConfig())
    message = next(str(warning.message) for warning in warned if "ParallelExperts" in str(warning.message))
    left = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
    whole = load(tmp_path / "experts")
    share = 100 * left / sum(parameter.nbytes for parameter in whole.parameters() if parameter.dim() > 1)
    assert f" {share:.0f} % of the bytes of this JetMoeForCausalLM's matrices stay float" in message


def test_weights_that_the_architecture_keeps_in_float32(tmp_path):
    """T5's "wo" could be packed, so the warning gives the reason instead of a kind of layer, and its advice works."""
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    why = "the architecture keeps it in float32; an explicit override would pack it"
    with pytest.warns(UserWarning, match=rf"stay float, as encoder\.block\S*\.wo does: {why}$"):
        summary = quantize_checkpoint(tmp_path / "t5", tmp_path / "packed", LowBitConfig())
    assert set(summary.unquantized.values()) == {why} and all(name.endswith(".wo.weight") for name in summary.unquantized)
    with pytest.warns(UserWarning, match=f"does: {why}$"):
        T5ForConditionalGeneration.from_pretrained(tmp_path / "t5", quantization_config=LowBitConfig())
    overridden = quantize_checkpoint(tmp_path / "t5", tmp_path / "all", LowBitConfig(overrides={"*.wo": {"bits": 8}}))
    assert not overridden.unquantized


def test_names_of_several_parts_stay_in_float32(tmp_path, monkeypatch):
    """For example "indexer.weights_proj" of DeepSeek V3.2: transformers matches whole parts of a name."""
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["mlp.up_proj", "proj", "self_attn.q_proj.weight"])
    left = LowBitConfig().choose(make_model())[1]
    assert sorted(left) == [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("mlp.up_proj", "self_attn.q_proj")]


def test_a_matrix_that_the_model_lacks(source, tmp_path):
    name = "model.layers.7.mlp.up_proj.weight"
    change_tensors(source / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(168, 64)}))
    with pytest.warns(UserWarning, match=f"1 matrix of the files .*, {name} for example, is not in LlamaForCausalLM"):
        summary = quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    assert summary.unquantized[name] == "not in LlamaForCausalLM"
    with pytest.warns(UserWarning, match=f"LlamaForCausalLM has no place for, as .*: {name}; they are left out"):
        load_model(source)  # for generate, eval and export


def test_integers_do_not_count_as_float_matrices(source, tmp_path, recwarn):
    """Old BERT files contain token positions, which the model computes."""
    ids = torch.arange(128)[None]
    change_tensors(source / "model.safetensors", lambda tensors: tensors.update({"model.position_ids": ids}))
    summary = quantize_checkpoint(source, tmp_path / "packed", LowBitConfig())
    assert (summary.unquantized, summary.unquantized_bytes, list(recwarn)) == ({}, 0, [])
    assert torch.equal(tensors_of(tmp_path / "packed")["model.position_ids"], ids)


def test_subdirectories_and_weights_of_others(source, tmp_path):
    kept = ["additional_chat_templates/tool.jinja", "1_Pooling/config.json", "2_Dense/model.safetensors"]
    left = [
        "onnx/model.onnx", "onnx/tokenizer.json", "original/consolidated.00.pth", "original/params.json", ".git/HEAD",
        "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx_data", "consolidated.00.pth", "model-q4.gguf",
        "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "consolidated.safetensors",
    ]  # fmt: skip
    for name in kept + left:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    found = {str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob("*") if path.is_file()}
    assert found == {
        *kept, "README.md", "modules.json", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer_config.json",
    }  # fmt: skip
    (source / "adapter_config.json").write_text("{}")
    refuse(source, tmp_path / "again", ValueError, "has adapter_config.json", "merge them into it first")


def test_layers_that_the_config_leaves_float_cause_no_warning(tmp_path, recwarn):
    source = save_model(tmp_path / "source")
    summary = quantize_checkpoint(source, tmp_path / "packed", LowBitConfig(overrides={"*.mlp.*": None}))
    assert len(summary.unquantized) == 6
    assert not [warning for warning in recwarn if "stay float" in str(warning.message)]


def test_a_float_head_that_shares_a_packed_table(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    config = LowBitConfig(bits=4, embedding_bits=6, overrides={HEAD: None})
    quantize_checkpoint(source, tmp_path / "packed", config)
    tensors, table = tensors_of(tmp_path / "packed"), tensors_of(source)[f"{EMBED}.weight"]
    assert f"{EMBED}.packed_weight" in tensors and torch.equal(tensors[f"{HEAD}.weight"], table)
    model = load(tmp_path / "packed")
    assert torch.equal(model.lm_head.weight, table) and type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("code, name, bits", [
    ("F64", "float64", 64), ("F32", "float32", 32), ("BF16", "bfloat16", 16), ("F16", "float16", 16),
    ("I64", "int64", 64), ("I32", "int32", 32), ("I16", "int16", 16), ("I8", "int8", 8), ("U8", "uint8", 8),
    ("BOOL", "bool", 8), ("U16", "uint16", 16), ("U32", "uint32", 32), ("U64", "uint64", 64), ("C64", "complex64", 64),
    ("F8_E4M3", "float8_e4m3fn", 8), ("F8_E5M2", "float8_e5m2", 8), ("F8_E8M0", "float8_e8m0fnu", 8),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8), ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8),
    ("F6_E2M3", "float6_e2m3fn", 6), ("F6_E3M2", "float6_e3m2fn", 6), ("F4", "float4_e2m1fn", 4),
])  # fmt: skip
def test_an_entry_has_its_dtype(tmp_path, code, name, bits):
    header = json.dumps({"x": {"dtype": code, "shape": [2, 4], "data_offsets": [0, bits]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(bits))
    [entry] = inspect_checkpoint(path)
    assert (entry.kind, entry.bits, entry.bytes) == (name, bits, bits)
    if bits >= 8:
        assert getattr(torch, name).itemsize * 8 == bits


def test_a_file_of_another_kind_is_not_inspected(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"x\.bin is a file; expected \.safetensors or \.gguf at the end of its name"):
        inspect_checkpoint(path)
