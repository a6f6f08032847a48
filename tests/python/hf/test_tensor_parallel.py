"""Packed models on several processes (tensor_parallel_ranks.py), compared with one process."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lowbit
import pytest
import torch
import torch.distributed as dist
from lowbit.files.safetensors import read_file
from lowbit.tensor_parallel import LinearPart, shard_
from reference import random_packed
from tensor_parallel_ranks import CONFIG
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

pytestmark = pytest.mark.first

RANKS = Path(__file__).parents[1] / "support" / "tensor_parallel_ranks.py"
TINY = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"
SIZES = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 6, "vocab_size": 100,
}  # fmt: skip
NEOX = SIZES | {"num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # Phi 3's defaults are outside a small vocabulary


def _llama(**sizes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes))


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """Results of each of three ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 64}
    # Biases, a tied head, a vocabulary that three ranks cannot split evenly, several query heads per KV head.
    models = {"qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=3, tie_word_embeddings=True))}
    # Queries, keys and values in one matrix, gate and up in another.
    models["phi3"] = Phi3ForCausalLM(Phi3Config(**sizes, num_key_value_heads=3, **ENDS))
    # Every rank needs the only KV head.
    models["one head"] = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1))
    models["mixtral"] = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4))
    # A head that shares its weight with a scaled table.
    models["gemma3"] = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=3, head_dim=16))
    # Matrices of many pages; the embedding table is the largest.
    large = {"hidden_size": 768, "intermediate_size": 1536, "vocab_size": 2400}
    models["large"] = LlamaForCausalLM(LlamaConfig(**sizes | large, num_key_value_heads=3))
    torch.manual_seed(3)
    for kind, model in models.items():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        model.save_pretrained(directory / kind)
        lowbit.quantize_checkpoint(directory / kind, directory / f"{kind} packed", CONFIG)
    lowbit.quantize_checkpoint(TINY, directory / "tiny", CONFIG)
    shutil.copytree(directory / "large packed", directory / "damaged")
    file = directory / "damaged" / "model.safetensors"
    stored = read_file(file)["model.layers.0.self_attn.k_proj.packed_weight"]
    data = bytearray(file.read_bytes())
    data[stored.offset + stored.bytes // 2] ^= 1
    file.write_bytes(data)
    command = [sys.executable, RANKS, directory / "tiny", directory]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(3)]


def of(found: list[dict], case: str) -> list[dict]:
    """The ranks that ran a case: two or all."""
    return [each[case] for each in found if case in each]


@pytest.mark.more
def test_layers_have_the_same_bits(found):
    assert len(of(found, "layers")) == 2
    for case in of(found, "layers"):
        assert case["columns"] and case["exact"] and case["exact bfloat16"] and case["order"]


def test_sums_are_those_of_slices_and_have_the_bias_once(found):
    for case in of(found, "layers"):
        assert case["sums"]
        assert 0 < case["difference"] < case["bias"] / 2


def test_a_shipped_model_on_two_ranks(found):
    assert len(of(found, "tiny")) == 2
    for case in of(found, "tiny"):
        assert case["exact"] and case["tokens"]
        assert 0 < case["sums"] < 0.02  # each rank quantizes its own activations: docs/internals/language_models.md
        assert case["bytes"] < 0.51 * case["whole bytes"]


def test_experts(found):
    assert len(of(found, "experts")) == 2
    for case in of(found, "experts"):
        assert case["exact"] and case["late"] and case["sums"]
        for difference in (case["difference"], case["late difference"]):
            assert 0 < difference < 1  # biases are 10 times a normal variable, so counting one twice would show
        assert case["bytes"] < 0.6 * case["whole bytes"]  # the rest is overhead of small matrices
        assert case["refused"] == {
            "rows": "first has 49 outputs, which 2 ranks cannot share evenly",
            "inputs": "second has 49 inputs, which 2 ranks cannot share evenly",
            "groups": "second has 48 inputs in groups of 32, which 2 ranks cannot share evenly",
            "style": "first is to be cut as 'grouped_gemm'; lowbit cuts packed experts as colwise, packed_colwise, rowwise",
            "float": "experts is float; 2 ranks can share packed experts only: quantize it",
            "twice": "first is a part already",
        }


@pytest.mark.parametrize("name", ["qwen2", "phi3", "one head", "mixtral", "gemma3"])
def test_transformers_cuts_by_its_own_plan(found, name):
    assert len(of(found, name)) == 3
    for case in of(found, name):
        assert case["auto"] and case["at load"] and case["by hand"] and case["plan"]
        assert case["parts"] == [True, True]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux says what a process has of a file")
def test_a_rank_has_one_matrix_of_the_files_in_memory_while_it_loads(found):
    page = 1 << 16  # Linux also maps cached pages around the pages read
    for case in of(found, "memory"):
        assert case["most mapped"] < case["largest"] + 16 * page < case["file"] / 3
        assert case["left mapped"] < 16 * page
        assert case["own"] < 0.34 * (case["file"] - case["largest"])


def test_a_damaged_file_is_named_by_each_rank(found):
    for each in found:
        where = r"model\.layers\.0\.self_attn\.k_proj\.packed_weight in .*model\.safetensors: .*"
        assert re.match(where + r" The file was damaged: copy it, or quantize, again\.", each["damaged"])


def test_rows_of_each_rank(found):
    def rows(name: str, layer: str) -> list[int]:
        return [case["rows"][layer] for case in of(found, name)]

    # Whole panels of 16, and the rest.
    assert rows("qwen2", "lm_head") == [48, 48, 4]
    assert rows("phi3", "model.layers.1.self_attn.qkv_proj") == [64, 64, 64]
    assert rows("one head", "model.layers.1.self_attn.q_proj") == [32, 32, 32]
    assert rows("one head", "model.layers.1.self_attn.k_proj") == [16, 16, 16]
    # Half of these rows belong to gate, the other half to up.
    assert rows("mixtral", "model.layers.1.mlp.experts.gate_up_proj") == [128, 128, 128]
    assert rows("mixtral", "model.layers.1.mlp.experts.down_proj") == [32, 32, 32]


@pytest.mark.parametrize("name", ["phi3 on two", "one head on two", "mixtral on two"])
def test_two_ranks_give_the_results_of_one(found, name):
    assert len(of(found, name)) == 2
    for case in of(found, name):
        assert case["logits"] and case["tokens"]
        assert 0 < case["sums"] < (0.15 if name.startswith("mixtral") else 0.05)  # some tokens choose another expert


@pytest.mark.parametrize("ranks, expected", [(2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0, 0, 0, 0, 1, 1, 1, 1])])
def test_heads_of_keys_for_more_ranks(monkeypatch, ranks, expected):
    """Which KV head a rank has; nothing is computed, so one process simulates all."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}
    for rank, head in enumerate(expected):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        model = lowbit.quantize_(_llama(**sizes), lowbit.LinearConfig(bits=4, group_size=32))
        attention = model.model.layers[0].self_attn
        wholes = [layer.packed_weight for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        shard_(model)
        each = 256 // ranks
        slices = [(rank * each, (rank + 1) * each), (head * 32, (head + 1) * 32), (head * 32, (head + 1) * 32)]
        own = [layer.packed_weight for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
        for found, whole, cut in zip(own, wholes, slices, strict=True):
            assert torch.equal(found, lowbit.slice_rows(whole, *cut))
        assert attention.num_key_value_groups == 8 // ranks


@pytest.mark.parametrize(
    "ranks, build, wrong",
    [
        (3, lambda: _llama(num_key_value_heads=2, head_dim=24), "k_proj has 2 heads of 24 outputs"),
        (4, lambda: _llama(num_key_value_heads=1), "q_proj has 6 heads of 16 outputs"),
        # Queries, keys and values are interleaved by head.
        (3, lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)), "query_key_value has 4 heads of 72 outputs"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused(monkeypatch, ranks, build, wrong):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: ranks)
    model = lowbit.quantize_(build(), lowbit.LinearConfig(bits=4, group_size=32))
    with pytest.raises(ValueError, match=f"{wrong}, which {ranks} ranks cannot share evenly"):
        shard_(model)


def test_what_cannot_be_cut_is_refused(found):
    for case in of(found, "refusals"):
        assert case == {
            "outputs": "up has 50 outputs, which 3 ranks cannot share evenly",
            "few": "up has 2 outputs, too few for 3 ranks",
            "inputs": "up has 32 inputs, which 3 ranks cannot share evenly",
            "groups": "up has 48 inputs in groups of 32, which 3 ranks cannot share evenly",
            "style": "up is to be cut as 'packed_colwise'; lowbit cuts packed layers as colwise, colwise_rep, "
            "colwise_gather_output, rowwise, rowwise_rep, rowwise_split_input",
            "float": "up is float; 3 ranks can share packed layers only: quantize it",
            "no plan": "ModuleDict has no plan for tensor parallelism; pass one",
            "no layer": "ModuleDict has no packed layer that its plan names",
        }
    for case in of(found, "tiny"):
        first = "model.layers.0.self_attn.q_proj"
        assert case["heads"] == f"{first} has 256 outputs, which 3 ranks cannot share evenly"
        assert case["unchanged"] == []
        assert case["twice"] == f"{first} is a part already"
        assert case["save"] == f"{first} is a part of a layer: a model that is spread over ranks cannot be saved"
    for case in of(found, "layers"):
        assert case["order refused"] == "0 has an act-order permutation, which 2 ranks cannot share; use exact=True"


def test_without_processes_it_is_refused():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        shard_(torch.nn.Linear(16, 16), plan={"": "colwise"})


@pytest.mark.parametrize("how", [{"whole": 40}, {"sums": True}, {"gathers_inputs": True}, {"inputs": slice(0, 64)}])
def test_a_rank_reads_the_bias_of_its_part_alone(how):
    """Without a process group, so that a collective operation would fail."""
    packed = random_packed(20, 64, 4, 32, "symmetric", bias=True)
    part, order = LinearPart(packed, torch.float32, group=None, **how), torch.arange(63, -1, -1, dtype=torch.int32)
    assert torch.equal(part.bias.clone(), lowbit.unpack(packed).bias)
    assert torch.equal(LinearPart(packed, torch.float32, order, group=None, **how).bias.clone(), lowbit.unpack(packed).bias)
