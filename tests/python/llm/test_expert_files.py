"""Experts streamed from files: the bits of the model in memory, within the allowed bytes."""

import os
import shutil
import time

import lowbit
import pytest
import torch
from command_line import FLOAT, document, error, invoke
from lowbit import llm
from lowbit.llm import stream_experts
from lowbit.llm.expert_files import StreamedExperts
from lowbit.llm.loading import load_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TEXT = [(7 + 13 * i + i * i) % 390 + 4 for i in range(60)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
        max_position_embeddings=256,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(config).save_pretrained(path / "float")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FLOAT / name, path / "float")
    lowbit.quantize_checkpoint(path / "float", path / "packed", lowbit.LowBitConfig(bits=4))
    return path / "packed"


def of_each_layer(model: torch.nn.Module) -> int:
    """Bytes of one expert of every layer."""
    return sum(layer.packed_weight.shape[1] for layer in model.modules() if isinstance(layer, lowbit.nn.LinearExperts))


@pytest.mark.parametrize("places", [1, 2, 3, 8, 100])
def test_the_bits_of_the_model_in_memory(directory, places):
    whole, model = load_model(directory), load_model(directory)
    assert stream_experts(model, directory, places * of_each_layer(whole)) == min(places, 8)
    streamed = [layer for layer in model.modules() if isinstance(layer, StreamedExperts)]
    assert len(streamed) == 4 and all(layer.packed_weight.shape[0] == min(places, 8) for layer in streamed)
    with torch.inference_mode():
        for tokens in (TEXT, TEXT[:1], TEXT[5:9]):
            found, expected = (each(torch.tensor([tokens])).logits for each in (model, whole))
            assert torch.equal(found, expected)
    expected = llm.generate(llm.Decoder(whole, 128), TEXT, 20, max_length=128).tokens
    assert llm.generate(llm.Decoder(model, 128), TEXT, 20, max_length=128).tokens == expected
    read = sum(layer.read_bytes for layer in streamed)
    if places >= 8:
        assert read <= 8 * of_each_layer(whole)  # each expert once
    else:
        assert read > 8 * of_each_layer(whole)


def test_failed_reads_are_repeated(directory, monkeypatch):
    """After a failed read, the next call reads again and gives the right bits."""
    model, whole = load_model(directory), load_model(directory)
    stream_experts(model, directory, 2 * of_each_layer(whole))
    layer = model.model.layers[0].mlp.experts.gate_up_proj
    real, layer._file = layer._file, open(os.devnull, "rb", buffering=0)
    with pytest.raises(OSError, match="ended in the middle of model.layers.0.mlp.experts.gate_up_proj"):
        model(torch.tensor([TEXT]))
    layer._file = real
    assert torch.equal(model(torch.tensor([TEXT])).logits, whole(torch.tensor([TEXT])).logits)
    # A failing read ahead, and a read that is still running when another fails.
    layer, events = model.model.layers[0].mlp.experts.down_proj, []
    read = StreamedExperts._read

    def slow(self, expert, place):
        events.append("begin")
        time.sleep(0.05 * place)
        events.append("end")
        if place == 0:
            raise OSError("a read error")
        read(self, expert, place)

    for tokens in (TEXT, TEXT[3:40]):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_read", slow.__get__(layer))
            layer._places.clear()
            with pytest.raises(OSError, match="a read error"):
                model(torch.tensor([tokens]))
            assert events.count("begin") == events.count("end")  # none is running
        assert torch.equal(model(torch.tensor([tokens])).logits, whole(torch.tensor([tokens])).logits)


def test_refusals(directory, tmp_path):
    model = load_model(directory)
    with pytest.raises(ValueError, match="memory for experts is 5 bytes; expected at least"):
        stream_experts(model, directory, 5)
    lowbit.quantize_checkpoint(directory.parent / "float", tmp_path / "other", lowbit.LowBitConfig(bits=3))
    with pytest.raises(ValueError, match="as the model"):
        stream_experts(model, tmp_path / "other", 1 << 30)
    stream_experts(model, directory, 1 << 30)
    with pytest.raises(ValueError, match="is not saved"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="the experts are in a file"):
        model.model.layers[0].mlp.experts.down_proj.dequantize()
    with pytest.raises(IndexError, match="there is no expert 8; expected 0 to 7"):
        model.model.layers[0].mlp.experts.down_proj(torch.zeros(1, 32), torch.tensor([[8]]))
    with pytest.raises(Exception, match="cannot be compiled or exported"):
        torch.export.export(llm.Decoder(model, 64), (torch.tensor([[5]]), torch.tensor([0])))
    with pytest.raises(ValueError, match="has no packed experts"):
        stream_experts(torch.nn.Linear(2, 2), directory, 1 << 30)


def test_commands(directory, tmp_path):
    arguments = ["--prompt", "the", "--max-new-tokens", 12]
    expected = document(invoke("generate", directory, *arguments, "--json"))["tokens"]
    found = document(invoke("generate", directory, *arguments, "--expert-memory", "200KB", "--json"))
    assert found["tokens"] == expected
    assert "expected at least" in error(invoke("generate", directory, *arguments, "--expert-memory", "1"))
    assert "--compile" in error(invoke("generate", directory, *arguments, "--expert-memory", "1MB", "--compile"))
