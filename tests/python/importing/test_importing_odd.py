"""Undamaged files to import with nonsensical content: settings, keys and tensors of wrong kinds and sizes."""

import copy
import json
import math
import os
import re
import resource
import shutil
import struct
import tracemalloc

import lowbit
import numpy as np
import pytest
import torch
from gguf_files import file_bytes
from importing_files import METADATA, layers_of_others, tensors
from lowbit.checkpoint.codes import Matrix, Nearness, pack_rows
from lowbit.importing import open_source
from lowbit.importing.gguf_architectures import ARCHITECTURES
from lowbit.importing.gguf_source import open_gguf
from safetensors.torch import save


def changed(**changes) -> dict:
    return METADATA | {name.replace("__", "."): item for name, item in changes.items()}


MODELS = {
    "no architecture": ({k: v for k, v in METADATA.items() if k[:7] != "general"}, "has no general.architecture"),
    "architecture of a number": (changed(general__architecture=3), "has no general.architecture"),
    "other architecture": (changed(general__architecture="mamba"), "has a model of the architecture 'mamba'; lowbit imports"),
    "unknown key": (changed(llama__logit_scale=2.0), "llama.logit_scale, which lowbit does not know"),
    "experts": (changed(llama__expert_count=8, llama__expert_used_count=9), "has 8 experts and uses 9 of them"),
    "no heads": (changed(llama__attention__head_count=0), "has 0 attention heads"),
    "heads of a text": (changed(llama__attention__head_count="2"), "head_count '2'; expected one whole number"),
    "heads by layer": (changed(llama__attention__head_count_kv=[1, 2]), "head_count_kv of 2 values; expected one"),
    "negative width": (changed(llama__embedding_length=-32), "embedding_length -32; expected one whole number"),
    "no number": (changed(llama__attention__layer_norm_rms_epsilon=float("nan")), "expected a finite number"),
    "no layers": (changed(llama__block_count=0), "block_count 0; expected 1 or more"),
    "many layers": (
        changed(llama__block_count=2**30),
        "block_count 1073741824; expected 1 or more, and not more than its 11 tensors",
    ),
    "more layers": (changed(llama__block_count=2), "lacks 9 of the 21 tensors of LlamaForCausalLM"),
    "other width": (changed(llama__feed_forward_length=64), r"has shape [32, 32]; expected [32, 64]"),
    "rope": (changed(llama__rope__scaling__type="su"), "rope.scaling.type 'su'; expected none, linear or yarn"),
    "no base of rope": (changed(llama__rope__freq_base=0.0), "rope.freq_base 0; expected a number above 0"),
    "stretched backwards": (changed(llama__rope__scaling__factor=-2.0), "by the factor -2; expected one above 0"),
    "part of a head": (changed(llama__rope__dimension_count=8), "rope.dimension_count 8; expected 16"),
    "end beyond": (changed(tokenizer__ggml__eos_token_id=4), "eos_token_id 4; expected 0 to 3"),
    "tokens twice": (changed(tokenizer__ggml__tokens=["a", "a", "b", "c"]), "has the token 'a' twice"),
    "too many tokens": (
        changed(tokenizer__ggml__tokens=list("abcde")),
        "has 5 texts as tokenizer.ggml.tokens; expected 1 to 4",
    ),
    "types of other tokens": (changed(tokenizer__ggml__token_type=[1]), "token_type for another number of tokens than 4"),
    "merge of nothing": (changed(tokenizer__ggml__merges=["x y"]), "the tokenizer in"),
    "kind of tokenizer": (changed(tokenizer__ggml__model="magic"), "the tokenizer in"),
    "template of a number": (changed(tokenizer__chat_template=1), "has a int as tokenizer.chat_template"),
    "a part alone": (changed(split__count=2, split__no=0), "says that it is part 0 (from 0) of 2"),
    "parts of a text": (changed(split__count="\x1b[2J"), "has a str as split.count; expected a number"),
    "parts of numbers": (changed(split__no=[0, 1]), "has a ndarray as split.no; expected a number"),
    "tensors of a part": (changed(split__tensors__count=12), "says that its model has 12 tensors; found 11"),
}


@pytest.mark.parametrize("what", MODELS)
def test_models_that_are_refused(tmp_path, what):
    metadata, message = MODELS[what]
    (tmp_path / "m.gguf").write_bytes(file_bytes(metadata, tensors()))
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_tensors_that_are_refused(tmp_path):
    block = struct.pack("<e", float("nan")) + bytes(16)
    ones = np.ones(32, "<f4").tobytes()
    extra = {
        "which lowbit does not know": ("blk.0.attn_sinks.weight", (32,), 0, ones),
        "99.attn_q.weight', which lowbit does not know": ("blk." + "9" * 200 + ".attn_q.weight", (32,), 0, ones),
        "'blk.00.attn_q.weight', which": ("blk.00.attn_q.weight", (32, 32), 2, bytes(576)),
        "'blk.\u0661.attn_q.weight', which": ("blk.\u0661.attn_q.weight", (32, 32), 2, bytes(576)),
        "has no such tensor": ("blk.7.attn_q.weight", (32, 32), 2, (block[:2] + block[2:]) * 32),
        "expected a type of weights": ("output.weight", (32, 4), 24, bytes(128)),
        "has shape [5, 32]; expected [4, 32]": ("output.weight", (32, 5), 0, bytes(640)),
        "expected a matrix": ("output.weight", (32, 2, 2), 2, bytes(72)),
    }
    for message, entry in extra.items():
        (tmp_path / "m.gguf").write_bytes(file_bytes(METADATA, [*tensors(), entry]))
        with pytest.raises(ValueError, match=re.escape(message)):
            lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    found = tensors()
    found[1] = (*found[1][:3], block * 32)
    (tmp_path / "m.gguf").write_bytes(file_bytes(METADATA, found))
    with pytest.raises(ValueError, match="q_proj.weight, rows 0 to 31: .*finite"):
        lowbit.import_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    assert os.listdir(tmp_path) == ["m.gguf"]


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "granite", "olmo2"])
def test_frequencies_count_in_every_architecture(tmp_path, architecture):
    """Without them the model would compute something else."""
    own = {key.replace("llama.", f"{architecture}."): item for key, item in METADATA.items()}
    factors = ("rope_freqs.weight", (8,), 0, np.full(8, 3, "<f4").tobytes())
    (tmp_path / "m.gguf").write_bytes(file_bytes(own | {"general.architecture": architecture}, [*tensors(), factors]))
    with pytest.raises(ValueError, match="rope_freqs.weight has factors up to 3 that are not those of Llama 3"):
        open_gguf(tmp_path / "m.gguf")


def test_a_hybrid_without_attention(tmp_path):
    keys = {"attention.head_count_kv": 0, "ssm.inner_size": 32, "ssm.time_step_rank": 2, "ssm.group_count": 1}
    keys |= {"ssm.state_size": 8, "ssm.conv_kernel": 4}
    own = {key.replace("llama.", "granitehybrid."): item for key, item in METADATA.items()}
    own |= {f"granitehybrid.{key}": item for key, item in keys.items()} | {"general.architecture": "granitehybrid"}
    (tmp_path / "m.gguf").write_bytes(file_bytes(own, [entry for entry in tensors() if "attn_k" not in entry[0]]))
    with pytest.raises(ValueError, match="m.gguf has 0 KV heads and no attn_k.weight; expected one in a layer"):
        open_gguf(tmp_path / "m.gguf")


ODD = [None, True, [], {}, "\x1b[2J", 0, -1, 3, 2**31 - 1, 10**400, math.nan, {"a": {}}]


def places(value, at: tuple = ()):
    """Paths to all values in a JSON document."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield *at, key
        yield from places(inner, (*at, key))


def with_value(document, at: tuple, value):
    document = copy.deepcopy(document)
    holder = document
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return document


def settings_of_others():
    """For each format, every setting and every number of its states, replaced by values of other kinds and sizes."""
    more = {
        "gptq": ["dynamic", "checkpoint_format"], "awq": ["version", "w_bit", "q_group_size"], "hqq": [],
        "bitnet": ["linear_class"], "compressed-tensors": ["kv_cache_scheme"], "bitsandbytes": ["load_in_8bit"],
        "torchao": ["quant_type"],
    }  # fmt: skip
    for name, (settings, tensors, metadata) in layers_of_others().items():
        config = {"quantization_config": settings}
        others = [("quantization_config", key) for key in more[settings["quant_method"]]]
        for at in [*places(config), *others]:
            for odd in ODD:
                yield (name, at, odd), with_value(config, at, odd), tensors, metadata
        for odd in ODD:
            auto_round = settings | {"quant_method": "auto-round", "packing_format": odd}
            yield (name, "packing_format", odd), {"quantization_config": auto_round}, tensors, metadata
        for key in metadata.keys() - {"format"}:
            for at in places(json.loads(metadata[key])):
                for odd in ODD:
                    text = json.dumps(with_value(json.loads(metadata[key]), at, odd))
                    yield (name, at, odd), config, tensors, metadata | {key: text}
        leaf = "weight.quant_state.bitsandbytes__nf4"
        if leaf in tensors:
            state = json.loads(bytes(tensors[leaf].tolist()))
            nested = {
                "weight.nested_absmax": torch.ones(1), "weight.nested_quant_map": torch.ones(256),
                "weight.absmax": torch.zeros(32, dtype=torch.uint8),
            }  # fmt: skip
            for key in [*state, "nested_blocksize", "nested_offset"]:
                for odd in ODD:
                    text = torch.tensor(list(json.dumps(state | {key: odd}).encode()), dtype=torch.uint8)
                    yield (name, key, odd), config, tensors | {leaf: text}, metadata
                    yield (name, key, odd, "nested"), config, tensors | nested | {leaf: text}, metadata
            for values in ([0.5] * 16, [1e-45] + [0.0] * 15, [1e-40] * 8 + [2e-40] * 8):
                yield (name, values), config, tensors | {"weight.quant_map": torch.tensor(values)}, metadata


def test_settings_of_other_kinds_and_sizes(tmp_path):
    """Under a memory limit: a small setting must not cause allocations."""
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    accepted = refused = 0
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), before[1]))
    try:
        for what, config, tensors, metadata in settings_of_others():
            made = {f"model.a.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
            (tmp_path / "model.safetensors").write_bytes(save(made, metadata))
            (tmp_path / "config.json").write_text(json.dumps(config))
            try:
                for matrix in open_source(tmp_path).tensors:
                    rows = matrix.read(0, min(16, matrix.shape[0]))
                    if isinstance(matrix, Matrix):
                        pack_rows(matrix, rows, None, Nearness())
                accepted += 1
            except (ValueError, OSError) as error:
                assert str(error).isprintable() and len(str(error)) < 1000, (what, error)
                refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert refused > accepted > 0


def test_a_file_of_a_million_experts(tmp_path):
    """Each expert takes 17 bytes of the file, and costs no more until the model confirms the number."""
    count = 1 << 20
    made = {
        f"model.layers.0.mlp.experts.{leaf}_{part}": torch.zeros(count, 1, 1, *size, dtype=torch.uint8)
        for leaf in ("gate_up_proj", "down_proj")
        for part, size in (("blocks", (16,)), ("scales", ()))
    }
    (tmp_path / "model.safetensors").write_bytes(save(made))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    tracemalloc.start()
    try:
        stacked = open_source(tmp_path).tensors
        assert tracemalloc.get_traced_memory()[1] < 128 << 20  # 64 MiB of them for reading config.json
    finally:
        tracemalloc.stop()
    assert [each.shape for each in stacked] == [(count, 1, 32)] * 2 and stacked[0].bytes == 17 * count


ODD_KEYS = [True, "", "\x1b[2J", 0, -1, 1, 33, 2**31 - 1, 1.5, math.nan, ["a"], ["a"] * 4, [0] * 4, [1e38] * 4]


def test_keys_of_other_kinds_and_sizes(tmp_path):
    """Every key of a small llama's file, and of other architectures' files with missing tensors."""
    keys = [
        *METADATA, "llama.rope.freq_base", "llama.rope.scaling.type", "llama.expert_count", "llama.attention.key_length",
        "split.count", "split.no", "split.tensors.count", "tokenizer.ggml.pre", "tokenizer.ggml.scores",
        "tokenizer.chat_template",
    ]  # fmt: skip
    cases = [METADATA | {key: odd} for key in keys for odd in ODD_KEYS]
    for architecture in ARCHITECTURES:
        own = {key.replace("llama.", f"{architecture}."): item for key, item in METADATA.items()}
        own["general.architecture"] = architecture
        cases += [own | {key: odd} for key in own if key.startswith(f"{architecture}.") for odd in (0, 1, 33, 2**31 - 1, "x")]
    accepted = 0
    for metadata in cases:
        file = tmp_path / "m.gguf"
        file.write_bytes(file_bytes(metadata, tensors()))
        try:
            source = open_gguf(file)
            if any(metadata.get(key) != METADATA.get(key) for key in metadata if key.startswith("tokenizer.")):
                shutil.rmtree(tmp_path / "files", ignore_errors=True)
                (tmp_path / "files").mkdir()
                source.write_files(tmp_path / "files")
            accepted += 1
        except (ValueError, OSError) as error:
            assert str(error).isprintable() and str(file) in str(error), (metadata, error)
    assert 0 < accepted < len(cases)
