"""Packed models on several processes: tensor_parallel_ranks.py, run by torchrun, against one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import lowbit
from lowbit.tensor_parallel import shard_

RANKS = Path(__file__).with_name("tensor_parallel_ranks.py")
TINY = Path(__file__).parents[2] / "examples" / "tiny_llama" / "model"
CONFIG = lowbit.LowBitConfig(bits=4, group_size=32)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each of three ranks found."""
    directory = tmp_path_factory.mktemp("ranks")
    # Biases, a tied head, a vocabulary that three ranks cannot share evenly, several heads of queries to one of keys.
    sizes = {"vocab_size": 100, "hidden_size": 96, "intermediate_size": 144, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    torch.manual_seed(3)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, max_position_embeddings=64))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory / "float")
    lowbit.quantize_checkpoint(directory / "float", directory / "packed", CONFIG)
    lowbit.quantize_checkpoint(TINY, directory / "tiny", CONFIG)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(RANKS)]
    ended = subprocess.run(
        [*run, *(str(directory / name) for name in ("tiny", "packed", "float")), str(directory)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(3)]


def of(found: list[dict], case: str) -> list[dict]:
    """The ranks that ran a case: two of them, or all."""
    return [each[case] for each in found if case in each]


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
        assert 0 < case["sums"] < 0.02  # each rank quantises its own activations: docs/design.md
        assert case["bytes"] < 0.51 * case["whole bytes"]


def test_transformers_cuts_by_its_own_plan(found):
    assert len(of(found, "random")) == 3
    for case in of(found, "random"):
        assert case["auto"] and case["at load"] and case["by hand"] and case["plan"]
        assert case["parts"] == [True, True]
    # Whole panels of 16, and what is left.
    assert [case["rows of the head"] for case in of(found, "random")] == [48, 48, 4]


def test_what_cannot_be_cut_is_refused(found):
    for case in of(found, "refusals"):
        assert case == {
            "outputs": "up has 50 outputs, which 3 ranks cannot share evenly",
            "few": "up has 2 outputs, too few for 3 ranks",
            "inputs": "up has 32 inputs, which 3 ranks cannot share evenly",
            "groups": "up has 48 inputs in groups of 32, which 3 ranks cannot share evenly",
            "style": "up is to be cut as 'packed_colwise'; lowbit cuts packed layers as colwise, colwise_rep, "
            "colwise_gather_output, rowwise, rowwise_rep, rowwise_split_input",
            "float": "up is float; 3 ranks can share packed layers only: quantise it",
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
        assert case["order refused"] == "0 has inputs in an order of their own, which 2 ranks cannot share: use exact"


def test_without_processes_it_is_refused():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        shard_(torch.nn.Linear(16, 16), plan={"": "colwise"})
