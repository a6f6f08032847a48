"""GGUF files that are damaged, or made to do damage: one sentence that names what is wrong, and nothing is written."""

import copy
import json
import math
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tracemalloc

import lowbit
import numpy as np
import pytest
import torch
from gguf_files import ARRAY, STRING, file_bytes, tensor, text, value
from lowbit.files import gguf as reader
from lowbit.files.gguf import read_gguf
from lowbit.importing import open_source
from lowbit.importing.codes import Matrix, Nearness, pack_rows
from lowbit.importing.gguf import open_gguf
from lowbit.importing.gguf_models import ARCHITECTURES
from safetensors.torch import save
from test_importing_directory import NF4, Quantised, act_order, awq, compressed, gptq, gptq_p
from test_importing_others import hqq

HUGE = [2**64 - 1, 2**63, 2**63 - 1, 2**61, 2**60 + 1, 2**40]
METADATA = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32, "llama.block_count": 1,
    "llama.feed_forward_length": 32, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"], "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.add_bos_token": False,
}  # fmt: skip
MATRICES = {
    "token_embd": (32, 4), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (32, 16), "blk.0.attn_v": (32, 16),
    "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
}  # fmt: skip


def tensors() -> list:
    """All of a small llama: Q4_0 with scales of 1, and norms."""
    block = struct.pack("<e", 1.0) + bytes(range(16))
    found = [(f"{name}.weight", shape, 2, block * shape[1]) for name, shape in MATRICES.items()]
    ones = np.ones(32, "<f4").tobytes()
    return found + [(f"{name}.weight", (32,), 0, ones) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]


def expert_file() -> bytes:
    """All of a small Mixtral, likewise."""
    block = struct.pack("<e", 1.0) + bytes(range(16))
    found = [each for each in tensors() if "ffn_" not in each[0] or "norm" in each[0]]
    found += [(f"blk.0.ffn_{part}_exps.weight", (32, 32, 2), 2, block * 64) for part in ("gate", "up", "down")]
    found.append(("blk.0.ffn_gate_inp.weight", (32, 2), 0, np.ones(64, "<f4").tobytes()))
    return file_bytes(METADATA | {"llama.expert_count": 2, "llama.expert_used_count": 1}, found)


def i2s_file() -> bytes:
    """All of a small llama in bitnet.cpp's type: digits 0, 1, 2, 1 and a scale of 1."""
    wider = {"llama.embedding_length": 128, "llama.feed_forward_length": 128}
    found = []
    for name, (k, n) in MATRICES.items():
        k, n = 4 * k, n if name == "token_embd" else 4 * n
        found.append((f"{name}.weight", (k, n), 36, b"\x19" * (k * n // 4) + struct.pack("<f", 1.0) + bytes(28)))
    ones = np.ones(128, "<f4").tobytes()
    found += [(f"{name}.weight", (128,), 0, ones) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")]
    return file_bytes(METADATA | wider, found)


def header(tensor_count: int = 0, key_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count)


def listing(
    *entries: bytes, data: bytes = bytes(4096), alignment: int = 32, metadata: bytes = b"", keys: int = 0
) -> bytes:
    head = header(len(entries), keys) + metadata + b"".join(entries)
    return head + bytes(-len(head) % alignment) + data


def key(name: str, item) -> bytes:
    return text(name) + value(item)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text("k") + struct.pack("<IIQ", ARRAY, kind, count) + content


DAMAGED = {
    "no magic": (b"GGML" + bytes(64), "begins with b'GGML'; expected b'GGUF'"),
    "empty": (b"", "begins with b''"),
    "version 1": (header(version=1), "is GGUF of version 1; expected 2 or 3"),
    "version 4": (header(version=4), "is GGUF of version 4; expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "of a big-endian machine"),
    "only magic": (b"GGUF", "its version would take 4 bytes at byte 4"),
    "no counts": (header()[:12], "its number of tensors would take 8 bytes"),
    "key twice": (header(0, 2) + key("a", 1) * 2, "has the key 'a' twice"),
    "key too long": (header(0, 1) + text("k" * 257) + value(1), "has 257 bytes; expected at most 256"),
    "key not text": (header(0, 1) + text(b"\xff\xfe") + value(1), "is not UTF-8 at its byte 0"),
    "type of value": (header(0, 1) + text("k") + struct.pack("<I", 13) + bytes(8), "has the type 13; expected 0 to 12"),
    "truth 2": (header(0, 1) + text("k") + struct.pack("<IB", 7, 2) + bytes(8), "holds the byte 2 for a truth value"),
    "nested arrays": (header(0, 1) + array(ARRAY, 1, bytes(12)), "is an array of arrays"),
    "type in array": (header(0, 1) + array(77, 1, bytes(12)), "is an array of type 77"),
    "text not text": (header(0, 1) + text("k") + struct.pack("<I", STRING) + text(b"\xc0"), "'k' is not UTF-8"),
    "dimensions 0": (listing(text("t") + struct.pack("<IIQ", 0, 0, 0)), "has 0 dimensions; expected 1 to 4"),
    "dimensions 5": (listing(tensor("t", (1,) * 5, 0, 0)), "has 5 dimensions; expected 1 to 4"),
    "dimension of 0": (listing(tensor("t", (0, 4), 0, 0)), "has a dimension of 0"),
    "unknown type": (listing(tensor("t", (32,), 43, 0)), "has the type 43, which this lowbit does not know"),
    "bitnet.cpp": (listing(tensor("t", (128,), 38, 0)), "has the type TL1 of bitnet.cpp; expected I2_S, or"),
    "removed type": (listing(tensor("t", (32,), 4, 0)), "has the type 4, which"),
    "partial block": (listing(tensor("t", (33,), 2, 0)), "has rows of 33 values; expected a multiple of 32"),
    "blocks across rows": (listing(tensor("t", (16, 2), 2, 0)), "has rows of 16 values; expected a multiple of 32"),
    "offset not aligned": (listing(tensor("t", (8,), 0, 8)), "begins at 8; expected a multiple of 32"),
    "name twice": (listing(tensor("t", (8,), 0, 0), tensor("t", (8,), 0, 32)), "has the tensor 't' twice"),
    "name too long": (listing(tensor("t" * 300, (8,), 0, 0)), "has 300 bytes; expected at most 256"),
    "overlap": (listing(tensor("a", (16,), 0, 0), tensor("b", (16,), 0, 32)), "the tensor 'b' overlaps the tensor 'a'"),
    "same place": (listing(tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)), "the tensor 'b' overlaps the tensor 'a'"),
    "beyond the end": (listing(tensor("t", (2048,), 0, 0)), "would end at byte"),
    "just beyond": (listing(tensor("t", (8,), 0, 0), data=bytes(31)), "would end at byte"),
    "control letters": (listing(tensor("\x1b[2J", (8,), 9, 0)), r"'\x1b[2J'"),
}
DAMAGED |= {f"{n} tensors": (header(n) + bytes(64), "tensors") for n in HUGE}
DAMAGED["tensors without entries"] = header(2**20) + bytes(64), "its 1048576 tensors and 0 keys would take 33554432 bytes at"
DAMAGED |= {f"{n} keys": (header(0, n) + bytes(64), "keys would take") for n in HUGE}
DAMAGED |= {f"a key of {n}": (header(0, 1) + struct.pack("<Q", n) + bytes(64), "expected at most 256") for n in HUGE}
DAMAGED |= {
    f"a text of {n}": (header(0, 1) + text("k") + struct.pack("<IQ", STRING, n) + bytes(64), f"would take {n} bytes")
    for n in HUGE
}
DAMAGED |= {
    f"{n} of type {kind} in an array": (header(0, 1) + array(kind, n, bytes(64)), "would take")
    for n in HUGE
    for kind in (0, 7, 8, 12)
}
DAMAGED |= {f"offset {n}": (listing(tensor("t", (8,), 0, n // 32 * 32)), "would end at byte") for n in HUGE}
DAMAGED |= {f"dimension {n}": (listing(tensor("t", (n,), 24, 0)), "would end at byte") for n in HUGE}
DAMAGED |= {  # whose product, or sum with the offset, is small in 64 bits
    f"product of {shape}": (listing(tensor("t", shape, 24, 0)), "would end at byte")
    for shape in [(2**32, 2**32), (2**33, 2**31), (2**63, 2), (2**16,) * 4, (2**62, 4, 1, 1), (2**61 + 1, 8)]
}
DAMAGED |= {
    f"alignment {n}": (listing(metadata=key("general.alignment", n), keys=1), "general.alignment is")
    for n in (0, 3, 33, 2**21, 2**31, -32, 32.0, True, "32", [32])
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_headers(tmp_path, what):
    content, message = DAMAGED[what]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_gguf(file)
    said = str(raised.value)
    assert message in said and str(file) in said and "\n" not in said and said.isprintable()


def test_the_least_alignment(tmp_path):
    """A tensor that begins where the header ends."""
    (tmp_path / "m.gguf").write_bytes(listing(tensor("t", (3,), 24, 5), metadata=key("general.alignment", 1), keys=1, alignment=1))
    assert read_gguf(tmp_path / "m.gguf").tensors["t"].bytes == 3


def test_every_truncation(tmp_path):
    whole = file_bytes(METADATA, tensors())
    file = tmp_path / "m.gguf"
    file.write_bytes(whole)
    assert len(read_gguf(file).tensors) == 11
    for size in range(0, len(whole), 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError):
            read_gguf(file)


def test_a_count_costs_no_memory(tmp_path):
    """Under a limit of memory, in a process of its own: counts are refused before anything is allocated for them."""
    file = tmp_path / "m.gguf"
    file.write_bytes(header(0, 1) + array(12, 2**37, bytes(1 << 16)))
    program = (
        "import resource, sys\nfrom lowbit.files.gguf import read_gguf\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)\n"
        "try:\n    read_gguf(sys.argv[1])\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True, timeout=300)
    assert "would take 1099511627776 bytes" in done.stdout, done.stderr
    assert resource.RLIMIT_AS  # the limit exists here


def test_a_long_header_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MOST_METADATA", 1000)
    file = tmp_path / "m.gguf"
    file.write_bytes(header(0, 1) + key("k", "x" * 2000))
    with pytest.raises(ValueError, match="would take 2000 bytes at byte .*; a header may end"):
        read_gguf(file)


def changed(**changes) -> dict:
    return METADATA | {name.replace("__", "."): item for name, item in changes.items()}


MODELS = {
    "no architecture": ({k: v for k, v in METADATA.items() if k[:7] != "general"}, "has no general.architecture"),
    "architecture of a number": (changed(general__architecture=3), "has no general.architecture"),
    "other architecture": (
        changed(general__architecture="mamba"),
        "has a model of the architecture 'mamba'; lowbit imports",
    ),
    "unknown key": (changed(llama__logit_scale=2.0), "llama.logit_scale, which lowbit does not know"),
    "experts": (changed(llama__expert_count=8, llama__expert_used_count=9), "has 8 experts and uses 9 of them"),
    "no heads": (changed(llama__attention__head_count=0), "has 0 attention heads"),
    "heads of a text": (changed(llama__attention__head_count="2"), "head_count '2'; expected one whole number"),
    "heads by layer": (changed(llama__attention__head_count_kv=[1, 1]), "head_count_kv of 2 values; expected one"),
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
    "part of a head": (changed(llama__rope__dimension_count=8), "rope.dimension_count 8; expected 16"),
    "end beyond": (changed(tokenizer__ggml__eos_token_id=4), "eos_token_id 4; expected 0 to 3"),
    "tokens twice": (changed(tokenizer__ggml__tokens=["a", "a", "b", "c"]), "has the token 'a' twice"),
    "too many tokens": (
        changed(tokenizer__ggml__tokens=list("abcde")),
        "has 5 texts as tokenizer.ggml.tokens; expected 1 to 4",
    ),
    "types of other tokens": (
        changed(tokenizer__ggml__token_type=[1]),
        "token_type for another number of tokens than 4",
    ),
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
        "expected one of a weight": ("output.weight", (32, 4), 24, bytes(128)),
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


def test_parts_of_different_models(tmp_path):
    listed = tensors()

    def write(number: int, found: list, place: int | None = None, total: int = 11) -> None:
        split = {"split.no": number if place is None else place, "split.count": 2, "split.tensors.count": total}
        content = file_bytes((METADATA if number == 0 else {"general.architecture": "llama"}) | split, found)
        (tmp_path / f"m-{number + 1:05}-of-00002.gguf").write_bytes(content)

    write(0, listed[:6])
    write(1, listed[6:])
    assert len(read_gguf(tmp_path / "m-00002-of-00002.gguf").tensors) == 11
    for options, message in (
        ({"found": listed[5:]}, f"'{listed[5][0]}' is in both"),
        ({"found": listed[7:]}, "says that its model has 11 tensors; found 10 in all parts"),
        ({"found": listed[6:], "total": 12}, "m-00002-of-00002.gguf says that its model has 12 tensors; found 11"),
        ({"found": listed[6:], "place": 0}, "says that it is part 0 (from 0) of 2; expected part 1"),
    ):
        write(1, **options)
        with pytest.raises(ValueError, match=re.escape(message)):
            lowbit.import_checkpoint(tmp_path / "m-00001-of-00002.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def mutated(whole: bytes, generator: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        at = generator.randrange(len(data))
        what = generator.randrange(6)
        if what == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif what == 1:
            data[at : at + 8] = struct.pack("<Q", generator.choice((*HUGE, 0, 1, 31, 2**32, len(data))))
        elif what == 2:
            data[at : at + 4] = struct.pack("<I", generator.choice((0, 1, 7, 8, 9, 12, 13, 30, 2**31, 2**32 - 1)))
        elif what == 3:
            del data[at : at + generator.randrange(1, 40)]
        elif what == 4:
            data[at:at] = generator.randbytes(generator.randrange(1, 40))
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def fuzz(directory, seed: int, count: int, step) -> int:
    """Runs `step` on mutants of three files; whatever it raises must be one sentence. Returns how many it accepted."""
    wholes, generator = (file_bytes(METADATA, tensors()), expert_file(), i2s_file()), random.Random(seed)
    accepted = 0
    file = directory / "m.gguf"
    for number in range(count):
        file.write_bytes(mutated(wholes[number % 3], generator))
        try:
            step(file, number)
            accepted += 1
        except (ValueError, OSError) as error:
            assert str(error).isprintable(), (seed, number, error)
    return accepted


def test_mutants_of_a_file(tmp_path):
    count = int(os.environ.get("LOWBIT_FUZZ", 4000))
    seed = int(os.environ.get("LOWBIT_FUZZ_SEED", 1))
    accepted = fuzz(tmp_path, seed, count, lambda file, number: open_gguf(file, "x86"))
    assert 0 < accepted < count  # both ways were taken


def layers_of_others() -> dict[str, tuple[dict, dict, dict]]:
    """By format a layer of 32 x 32 weights: settings, tensors, metadata of the file."""
    generator = torch.Generator().manual_seed(0)
    layer = Quantised(32, 32, 4, 32, "free", generator)
    halves = Quantised(32, 32, 4, 16, "free", generator)
    five = Quantised(32, 32, 5, 32, "free", generator)
    order = gptq(halves, 4, 16, 1) | {"g_idx": act_order(halves)}
    matrix = {
        "_type": "IntxUnpackedToInt8Tensor",
        "_data": {"target_dtype": {"_data": "int4"}, "block_size": [1, 32], "activation_quantization": None},
    }
    integers = {
        "_weight_qdata": (layer.codes - 8).to(torch.int8), "_weight_scale": layer.scales,
        "_weight_zero_point": (layer.zeros - 8).to(torch.int8),
    }  # fmt: skip
    state = json.dumps({"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [32, 32]})
    nf4 = {
        "weight": torch.randint(0, 256, (512, 1), generator=generator, dtype=torch.uint8),
        "weight.absmax": torch.rand(32, generator=generator), "weight.quant_map": torch.tensor(NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }  # fmt: skip
    ternary = {"weight": torch.full((8, 32), 0b01100100, dtype=torch.uint8), "weight_scale": torch.ones(1)}
    plain: dict = {"format": "pt"}
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False}}}
    return {
        "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(layer, 4, 32, 2), plain),
        "gptq in planes": (
            {"quant_method": "gptq", "group_size": 32, "checkpoint_format": "gptq_p"}, gptq_p(five, 5, 32), plain,
        ),
        "gptq with act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, order, plain),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq(layer), plain),
        "compressed-tensors": (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
            compressed(layer, 4), plain,
        ),
        "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4, plain),
        "bitnet": ({"quant_method": "bitnet"}, ternary, plain),
        "hqq": ({"quant_method": "hqq"}, hqq(4, 32)(32, 32)[1], plain),
        "torchao": ({"quant_method": "torchao"}, integers, plain | {"model.a.weight": json.dumps(matrix)}),
    }  # fmt: skip


def test_mutants_of_directories(tmp_path):
    """Of a format's own file, or of config.json; what is accepted is read."""
    count = int(os.environ.get("LOWBIT_FUZZ", 4000)) // 4
    generator = random.Random(int(os.environ.get("LOWBIT_FUZZ_SEED", 1)))
    wholes = {}
    for name, (settings, tensors, metadata) in layers_of_others().items():
        made = {("model.a" + ("." + leaf)): tensor.contiguous() for leaf, tensor in tensors.items()}
        config = json.dumps({"model_type": "llama", "quantization_config": settings}).encode()
        wholes[name] = {"model.safetensors": save(made, metadata), "config.json": config}
    accepted = dict.fromkeys(wholes, 0)
    for number in range(count + len(wholes)):
        name = list(wholes)[number % len(wholes)]
        files = dict(wholes[name])
        if number >= len(wholes):  # the first of each is whole
            which = generator.choice(("model.safetensors", "model.safetensors", "config.json"))
            files[which] = mutated(files[which], generator)
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        try:
            for matrix in open_source(tmp_path).tensors:
                matrix.read(0, min(2, matrix.shape[0]))
            accepted[name] += 1
        except (ValueError, OSError) as error:
            assert number >= len(wholes), (name, error)
            assert str(error).isprintable(), (number, error)
    assert min(accepted.values()) > 1 and sum(accepted.values()) < count


ODD = [None, True, [], {}, "\x1b[2J", 0, -1, 3, 2**31 - 1, 10**400, math.nan, {"a": {}}]


def places(value, at: tuple = ()):
    """The ways to everything in a document of JSON."""
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
    """Of each format every setting and every number of its states, as values of other kinds and sizes."""
    more = {
        "gptq": ["dynamic", "checkpoint_format"], "awq": ["version", "w_bit", "q_group_size"], "hqq": [], "bitnet": ["linear_class"],
        "compressed-tensors": ["kv_cache_scheme"], "bitsandbytes": ["load_in_8bit"], "torchao": ["quant_type"],
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
    """Under a limit of memory: a setting of a few bytes asks for none."""
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
    """Each takes 17 bytes of the file: none costs more before the model says that there are so many."""
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
        assert tracemalloc.get_traced_memory()[1] < 128 << 20  # 64 of them to read config.json
    finally:
        tracemalloc.stop()
    assert [each.shape for each in stacked] == [(count, 1, 32)] * 2 and stacked[0].bytes == 17 * count


ODD_KEYS = [True, "", "\x1b[2J", 0, -1, 1, 33, 2**31 - 1, 1.5, math.nan, ["a"], ["a"] * 4, [0] * 4, [1e38] * 4]


def test_keys_of_other_kinds_and_sizes(tmp_path):
    """Every key of a small llama's file; and those of other architectures, of which not all tensors are there."""
    keys = [
        *METADATA, "llama.rope.freq_base", "llama.rope.scaling.type", "llama.expert_count", "llama.attention.key_length", "split.count",
        "split.no", "split.tensors.count", "tokenizer.ggml.pre", "tokenizer.ggml.scores", "tokenizer.chat_template",
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


def test_mutants_are_imported_or_leave_nothing(tmp_path):
    (tmp_path / "out").mkdir()

    def step(file, number: int) -> None:
        try:
            lowbit.import_checkpoint(file, tmp_path / "out" / str(number), i2s_order="x86")
        except (ValueError, OSError):
            assert not (tmp_path / "out" / str(number)).exists()
            raise

    assert 0 < fuzz(tmp_path, 2, 100, step) == len(os.listdir(tmp_path / "out"))
