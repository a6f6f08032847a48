"""quantize_checkpoint and inspect_checkpoint: the bytes, the memory, and what is left when something goes wrong."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, JetMoeConfig, JetMoeForCausalLM

import lowbit
from checkpoints import EMBED, HEAD, KINDS, NORM, UP, change_tensors, edit_json, load, save_model
from lowbit import LowBitConfig, checkpoint, inspect_checkpoint, quantize_checkpoint

OVERRIDES = {"*.down_proj": {"bits": 3, "mapping": "affine", "scale": "absmax"}, "*.1.self_attn.o_proj": None}
CONFIG = LowBitConfig(bits=4, group_size=32, embedding_bits=6, overrides=OVERRIDES)


def tensors_of(path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_bytes_are_those_of_whole_tensors(tmp_path, monkeypatch, kind, sharded):
    monkeypatch.setattr(checkpoint, "_BAND_WEIGHTS", 5000)  # several bands in most tensors
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


def test_files_beside_the_weights(tmp_path):
    source = save_model(tmp_path / "source", sharded=True)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_text("other weights")
    edit_json(source / "config.json", note="kept as it is")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json",
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
        "overrides": [list(pair) for pair in OVERRIDES.items()],
    }
    assert config == json.loads((source / "config.json").read_text())
    assert (tmp_path / "packed").stat().st_mode == source.stat().st_mode


def test_packed_tensors_lie_at_multiples_of_64(tmp_path):
    source = save_model(tmp_path / "source")
    change_tensors(
        source / "model.safetensors", lambda tensors: tensors.update({"a.rotary_emb.inv_freq": torch.ones(3)})
    )
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    file = tmp_path / "packed" / "model.safetensors"
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert begin % 64 == 0
    header = json.loads(file.read_bytes()[8:begin])
    packed = [entry["data_offsets"][0] for name, entry in header.items() if name.endswith("packed_weight")]
    assert packed and all(offset % 64 == 0 for offset in packed)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_tensor("a.rotary_emb.inv_freq"), torch.ones(3))  # the model lacks it: copied


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
    assert summary.left == {left: "left float by its configuration"}
    assert summary.left_bytes == 2 * 64 * 64
    entries = {entry.name: entry for entry in after}
    size = lowbit.quantize_tensor(torch.ones(64, 168), lowbit.LinearConfig(bits=3, mapping="affine")).numel()
    name = "model.layers.1.mlp.down_proj.packed_weight"
    expected = lowbit.CheckpointEntry(name, "packed", (64, 168), 3, 32, "affine", size, entries[name].file)
    assert entries[name] == expected
    assert entries[NORM].kind == "bfloat16" and entries[NORM].shape == (64,)


def test_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_BAND_WEIGHTS", 5000)
    source = save_model(tmp_path / "source")
    calls = []
    summary = quantize_checkpoint(source, tmp_path / "packed", CONFIG, progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert (
        list(done) == sorted(set(done)) and done[-1] == summary.source_bytes and set(totals) == {summary.source_bytes}
    )
    assert set(names) == {entry.name for entry in summary.entries}
    assert len(calls) > len(summary.entries)


def test_a_tied_weight_that_the_file_has_twice(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({f"{HEAD}.weight": tensors[f"{EMBED}.weight"].clone()}))
    quantize_checkpoint(source, tmp_path / "same", CONFIG)
    assert f"{HEAD}.packed_weight" not in tensors_of(tmp_path / "same")
    # transformers unties what differs, and so do we.
    change_tensors(file, lambda tensors: tensors[f"{HEAD}.weight"].mul_(2))
    quantize_checkpoint(source, tmp_path / "different", CONFIG)
    found = tensors_of(tmp_path / "different")
    doubled = lowbit.unpack(found[f"{HEAD}.packed_weight"])
    single = lowbit.unpack(found[f"{EMBED}.packed_weight"])
    assert torch.equal(doubled.codes, single.codes) and torch.equal(doubled.scales, 2 * single.scales)


def test_memory(tmp_path, run_python):
    # One tensor of 100 MB that packs to 28 MB; neither is ever in memory as a whole.
    source = save_model(tmp_path / "source", vocab_size=100_000, hidden_size=512, num_hidden_layers=1)
    small = save_model(tmp_path / "small")
    entries = {entry.name: entry for entry in inspect_checkpoint(source)}
    largest = entries[f"{EMBED}.weight"].bytes
    assert largest == 2 * 100_000 * 512
    script = """
import sys
import torch, lowbit, lowbit.transformers
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


def refuse(source, target, error, *parts, config=CONFIG):
    """Quantising raises the error, whose message has all the parts, and leaves nothing behind."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(error) as caught:
        quantize_checkpoint(source, target, config)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert sorted(source.parent.rglob("*")) == before


@pytest.fixture
def source(tmp_path):
    return save_model(tmp_path / "source")


@pytest.fixture
def sharded(tmp_path):
    return save_model(tmp_path / "source", sharded=True)


def test_no_such_source(tmp_path):
    refuse(tmp_path / "none", tmp_path / "packed", OSError, str(tmp_path / "none"), "is not a directory")


def test_no_weights(source, tmp_path):
    (source / "model.safetensors").rename(source / "weights.safetensors")
    refuse(source, tmp_path / "packed", OSError, "has neither model.safetensors nor", "found config.json")


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_a_truncated_file(source, tmp_path, size):
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:size])
    refuse(source, tmp_path / "packed", ValueError, str(file), "not a whole safetensors file", "copy it again")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        inspect_checkpoint(source)


def test_a_header_that_lies(source, tmp_path):
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"[64,168]", b"[64,169]"))
    refuse(source, tmp_path / "packed", ValueError, str(file), "not a whole safetensors file")


def test_a_missing_shard(sharded, tmp_path):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refuse(sharded, tmp_path / "packed", OSError, f"{shard} is missing", "tensors; copy it too")


def test_a_shard_that_the_index_lacks(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map={name: file for name, file in weights.items() if "00002-of" not in file})
    refuse(sharded, tmp_path / "packed", ValueError, "lacks", "tensors of LlamaForCausalLM: ", "A shard, or its entry")


def test_an_index_that_disagrees_with_the_files(sharded, tmp_path):
    index = sharded / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weights | {NORM: weights[f"{EMBED}.weight"]})
    refuse(sharded, tmp_path / "packed", ValueError, f"{NORM} is in", "found it in")
    edit_json(index, weight_map=weights | {"no.such": weights[NORM]})
    refuse(sharded, tmp_path / "packed", ValueError, "no.such is in", "found it nowhere")
    edit_json(index, weight_map=weights | {NORM: "../elsewhere.safetensors"})
    refuse(sharded, tmp_path / "packed", ValueError, "../elsewhere.safetensors", "of the same directory")
    index.write_text("[1, 2]")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} holds a list; expected an object")
    index.write_text("{")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} is not JSON")
    index.write_text("{}")
    refuse(sharded, tmp_path / "packed", ValueError, f"{index} is not an index")


def test_a_tensor_in_two_shards(sharded, tmp_path):
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    change_tensors(second, lambda tensors: tensors.update({name: tensor}))
    refuse(sharded, tmp_path / "packed", ValueError, f"{name} is in both", "expected each name once")


def test_a_missing_tensor(source, tmp_path):
    change_tensors(source / "model.safetensors", lambda tensors: tensors.pop(NORM))
    refuse(source, tmp_path / "packed", ValueError, f"lacks 1 of the 21 tensors of LlamaForCausalLM: {NORM}")


@pytest.mark.parametrize("name, shape", [(f"{UP}.weight", (168, 65)), (NORM, (63,)), (f"{EMBED}.weight", (403, 64, 1))])
def test_a_wrong_shape(source, tmp_path, name, shape):
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    refuse(
        source, tmp_path / "packed", ValueError, f"{name} in {file} has shape {list(shape)}; expected ", "config.json"
    )


def test_a_wrong_dtype(source, tmp_path):
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors.update({f"{UP}.weight": tensors[f"{UP}.weight"].to(torch.int8)}))
    refuse(source, tmp_path / "packed", ValueError, f"{UP}.weight in {file} has dtype I8; expected F64, F32, BF16, F16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite(source, tmp_path, monkeypatch, value):
    monkeypatch.setattr(checkpoint, "_BAND_WEIGHTS", 64 * 64)
    file = source / "model.safetensors"
    change_tensors(file, lambda tensors: tensors[f"{UP}.weight"].__setitem__((70, 3), value))
    message = f"{UP}.weight in {file}, rows 64 to 127: weight has 1 NaN or infinite values"
    refuse(source, tmp_path / "packed", ValueError, message)


def test_an_unknown_architecture(source, tmp_path):
    edit_json(source / "config.json", model_type="llama77", architectures=["Llama77ForCausalLM"])
    refuse(source, tmp_path / "packed", ValueError, "'llama77'", "['Llama77ForCausalLM']", "newer transformers")


def test_a_broken_config(source, tmp_path):
    (source / "config.json").write_text('{"model_type": ')
    refuse(source, tmp_path / "packed", ValueError, str(source / "config.json"), "is not JSON")
    (source / "config.json").unlink()
    refuse(source, tmp_path / "packed", OSError, "has no config.json")


def test_what_is_quantised_already(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    refuse(tmp_path / "packed", tmp_path / "again", ValueError, "is quantised already, by the method 'lowbit'")
    edit_json(source / "config.json", quantization_config={"quant_method": "gptq"})
    refuse(source, tmp_path / "again", ValueError, "is quantised already, by the method 'gptq'")


def test_a_target_that_is_there(source, tmp_path):
    target = tmp_path / "packed"
    target.mkdir()
    (target / "mine").write_text("precious")
    refuse(source, target, OSError, f"{target} has 1 files", "empty or not there yet")
    assert (target / "mine").read_text() == "precious"
    refuse(source, source, OSError, "expected a directory that is empty")
    refuse(source, target / "mine", OSError, "is a file")
    refuse(source, tmp_path / "no" / "packed", OSError, f"{tmp_path / 'no'} is not a directory; make it first")
    (target / "mine").unlink()
    quantize_checkpoint(source, target, CONFIG)  # an empty one will do
    load(target)


def test_a_target_behind_a_symbolic_link(source, tmp_path):
    place, link, dangling = tmp_path / "place", tmp_path / "link", tmp_path / "dangling"
    place.mkdir(mode=0o750)
    link.symlink_to("place")
    dangling.symlink_to("place-to-be")
    for name, real in ((link, place), (dangling, tmp_path / "place-to-be")):
        summary = quantize_checkpoint(source, name, CONFIG)
        assert summary.target == name and name.is_symlink() and not real.is_symlink()
        assert (real / "config.json").exists() and inspect_checkpoint(name) == summary.entries
    assert place.stat().st_mode & 0o777 == 0o750
    assert len(list(tmp_path.iterdir())) == 5
    (tmp_path / "around").symlink_to("around")
    refuse(source, tmp_path / "around", OSError, "is a symbolic link to itself")
    (tmp_path / "lost").symlink_to("no/such")
    refuse(source, tmp_path / "lost", OSError, f"{tmp_path / 'no'} is not a directory; make it first")


def no_weights_are_read(monkeypatch):
    def read(*arguments):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(checkpoint, "read_rows", read)
    monkeypatch.setattr(checkpoint, "chunks", read)


def test_a_target_that_cannot_be_replaced(source, tmp_path, monkeypatch):
    no_weights_are_read(monkeypatch)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    with monkeypatch.context() as context:
        context.setattr("os.path.ismount", lambda path: str(path) == str(mounted))
        refuse(source, mounted, OSError, f"{mounted} is a mount point", f"a directory in it, such as {mounted}/packed")
    # A bind mount of the same file system is none for ismount: the rename says so.
    rename = os.rename

    def busy(old, new):
        if str(new) == str(mounted):
            raise OSError(errno.EBUSY, "Device or resource busy", str(old))
        rename(old, new)

    with monkeypatch.context() as context:
        context.setattr("os.rename", busy)
        refuse(source, mounted, OSError, f"{mounted} cannot be replaced by a new directory: Device or resource busy")
    refuse(source, Path("/sys/packed"), OSError, "/sys cannot be written: ")  # not even by root


def test_a_last_step_that_fails_keeps_the_work(source, tmp_path, monkeypatch):
    target, rename = tmp_path / "packed", os.rename

    def fail(old, new):
        # After the rehearsal somebody else has put something there.
        if str(new) == str(target) and (Path(old) / "config.json").exists():
            target.mkdir()
            (target / "theirs").touch()
        rename(old, new)

    monkeypatch.setattr("os.rename", fail)
    with pytest.raises(OSError, match="could not be replaced: .* All was written, and is in ") as caught:
        quantize_checkpoint(source, target, CONFIG)
    kept = Path(str(caught.value).rpartition(" ")[2].rstrip("'"))
    assert sorted(tmp_path.iterdir()) == sorted([source, target, kept]) and not kept.name.startswith(".")
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "again", CONFIG)
    assert tensors_of(kept).keys() == tensors_of(tmp_path / "again").keys()
    assert inspect_checkpoint(kept) == inspect_checkpoint(tmp_path / "again")


def test_what_dead_runs_left_is_swept(source, tmp_path):
    """The directory of a run that was killed goes with the next run to the same target; that of a living one stays."""
    target = tmp_path / "packed"
    other = tmp_path / ".packed-of-another-machine-1234.partial"
    other.mkdir()
    script = """
import signal, sys, time
from lowbit.files.replace import PartialDirectory
from pathlib import Path
partial = PartialDirectory(Path(sys.argv[1]))
(partial.path / "half").touch()
print(partial.path, flush=True)
time.sleep(300)
"""
    command = [sys.executable, "-c", script, str(target)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, living = (Path(run.stdout.readline().strip()) for run in runs)
        runs[0].send_signal(signal.SIGHUP)
        assert runs[0].wait(60) == -signal.SIGHUP and dead.exists()
        quantize_checkpoint(source, target, CONFIG)
        assert sorted(tmp_path.iterdir()) == sorted([source, target, living, other])
        assert (living / "half").exists()
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdout.close()


def test_what_stays_float(tmp_path):
    """Experts of an architecture's own form and GPT-2's Conv1D are most of the bytes: no run passes over that in silence."""
    sizes = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 16}
    sizes["pad_token_id"] = 0  # transformers 5.0 wants one
    JetMoeForCausalLM(JetMoeConfig(**sizes, intermediate_size=96, num_local_experts=4)).save_pretrained(tmp_path / "experts")
    with pytest.warns(UserWarning, match="only .* % are packed: .* stay float, in JetMoeParallelExperts"):
        summary = quantize_checkpoint(tmp_path / "experts", tmp_path / "packed", LowBitConfig())
    kind = "in a layer of the kind JetMoeParallelExperts, which lowbit does not pack"
    assert list(summary.left.values()).count(kind) == 4  # of the feed-forward layer and of attention
    entries = {entry.name: entry for entry in summary.entries}
    assert summary.left.keys() == {name for name in entries if entries[name].kind != "packed" and len(entries[name].shape) > 1}
    assert summary.left_bytes == sum(entries[name].bytes for name in summary.left)

    GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4)).save_pretrained(tmp_path / "gpt2")
    with pytest.warns(UserWarning, match="stay float, in Conv1D") as warned:
        model = load(tmp_path / "gpt2", quantization_config=LowBitConfig())
    message = next(str(warning.message) for warning in warned if "Conv1D" in str(warning.message))
    left = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
    whole = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2")
    share = 100 * left / sum(parameter.nbytes for parameter in whole.parameters() if parameter.dim() > 1)
    assert f" {share:.0f} % of the bytes of this GPT2LMHeadModel's matrices stay float" in message


def test_a_matrix_that_the_model_lacks(source, tmp_path):
    name = "model.layers.7.mlp.up_proj.weight"
    change_tensors(source / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(168, 64)}))
    with pytest.warns(UserWarning, match=f"1 matrices of the files .* are not in LlamaForCausalLM, {name} for example"):
        summary = quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    assert summary.left[name] == "not in LlamaForCausalLM"


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
        *kept, "modules.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json",
    }  # fmt: skip
    (source / "adapter_config.json").write_text("{}")
    refuse(source, tmp_path / "again", ValueError, "has adapter_config.json", "merge them into it first")


def test_wrong_arguments(source, tmp_path):
    refuse(source, tmp_path / "packed", TypeError, "is a LinearConfig", "LowBitConfig", config=lowbit.LinearConfig())
    nothing = LowBitConfig(overrides={"*": None})
    refuse(source, tmp_path / "packed", ValueError, "config selects no layer of LlamaForCausalLM", config=nothing)
    too_long = LowBitConfig(group_size=65552)
    refuse(source, tmp_path / "packed", ValueError, "group size is 65552", config=too_long)
    for value in (0, 1.5, True, None):
        with pytest.raises(ValueError, match="max_shard_bytes is"):
            quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=value)


def test_different_configs_for_one_weight(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    config = LowBitConfig(overrides={HEAD: {"bits": 8}})
    refuse(source, tmp_path / "packed", ValueError, "share one weight but have different configs", config=config)


def test_no_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    refuse(source, tmp_path / "packed", OSError, "0.00 GB free; the packed checkpoint takes")


@pytest.mark.parametrize("limit", [0, 1000, 60_000])
def test_the_disk_fills_up(source, tmp_path, run_python, limit):
    # A limit on the size of files fails a write in the middle, as a full disk does.
    script = """
import resource, sys, lowbit
from lowbit import transformers
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    lowbit.quantize_checkpoint(sys.argv[1], sys.argv[2], lowbit.LowBitConfig())
except OSError as error:
    print(error.errno, error)
"""
    process = run_python(script, source, tmp_path / "packed", limit)
    assert process.returncode == 0, process.stderr
    line = process.stdout.splitlines()[-1]
    assert line.startswith(f"{errno.EFBIG} ") and f"while {tmp_path / 'packed'} was written" in line
    assert "nothing of it was kept" in line
    assert list(tmp_path.iterdir()) == [source]


def test_an_error_in_the_middle(source, tmp_path):
    def fail(done, total, name):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "packed", CONFIG, progress=fail)
    assert list(tmp_path.iterdir()) == [source]


KILLED = """
import os, sys, shutil
from pathlib import Path
import torch
torch.set_num_threads(1)
import lowbit
from checkpoints import assert_same_model, killed_at, load
from lowbit import LowBitConfig, checkpoint, quantize_checkpoint

source, base = map(Path, sys.argv[1:])
config = LowBitConfig(scale="absmax")
quantize_checkpoint(source, base / "whole", config)
whole = load(base / "whole")
outcomes = []
for what in ("progress", "fsync"):
    moment, killed = 0, True
    while killed:
        moment += 1
        place = base / f"{what}-{moment}"
        place.mkdir()
        ticks = []

        def install(tick):
            if what == "fsync":
                real = os.fsync
                os.fsync = lambda descriptor: (real(descriptor), tick())
            else:
                ticks.append(tick)

        def action():
            quantize_checkpoint(source, place / "packed", config, max_shard_bytes=40_000,
                                progress=lambda *_: [tick() for tick in ticks])

        killed = killed_at(moment, action, install)
        for found in place.iterdir():
            try:
                model = load(found)
            except (OSError, ValueError):
                outcomes.append((what, found.name == "packed", "refused"))
                continue
            assert_same_model(model, whole)
            outcomes.append((what, found.name == "packed", "whole"))
        if not killed:
            assert (place / "packed").exists() and len(list(place.iterdir())) == 1
        shutil.rmtree(place)
print(len(outcomes), sorted(set(outcomes)))
"""


def test_killed_at_any_moment(tmp_path, run_python):
    """SIGKILL after every band and after every fsync: what is left is no model, or a whole one."""
    source = save_model(tmp_path / "source")
    process = run_python(KILLED, source, tmp_path)
    assert process.returncode == 0, process.stderr
    count, outcomes = process.stdout.splitlines()[-1].split(" ", 1)
    assert int(count) > 30
    # The target is there only when it is whole. The rest beside it is whole for a moment, before it gets its name.
    assert outcomes == str(
        [("fsync", False, "refused"), ("fsync", False, "whole"), ("fsync", True, "whole"),
         ("progress", False, "refused"), ("progress", True, "whole")]
    )  # fmt: skip
