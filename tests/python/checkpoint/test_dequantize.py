"""Dequantizing: `model.dequantize()`, `lowbit dequantize`, and requantizing a packed checkpoint."""

import copy

import lowbit
import pytest
import torch
import transformers
from checkpoints import load, make_model
from command_line import FLOAT, PROMPT, document, documented_keys, error, invoke
from lowbit import LowBitConfig
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, T5Config, T5ForConditionalGeneration

SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96, "num_key_value_heads": 1}


def make(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":  # Conv1D, a tied head
        config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
        model = GPT2LMHeadModel(config)
    elif kind == "gpt-oss":  # experts [experts, in, out], with a bias
        sizes = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 32}
        model = GptOssForCausalLM(GptOssConfig(**sizes, layer_types=["full_attention"]))
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, intermediate_size=64, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "t5":  # one table for encoder, decoder and head
        config = T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
        model = T5ForConditionalGeneration(config)
    else:
        return make_model(kind).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.bfloat16().eval()


KINDS = ["untied", "tied", "gpt2", "gpt-oss", "mixtral", "t5"]


def expected_state(model, packed) -> dict[str, torch.Tensor]:
    """The state of the float model with the weights of packed layers, assembled by hand."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, layer in packed.named_modules(remove_duplicate=False):
        if not isinstance(layer, lowbit.nn.Packed):
            continue
        weight = layer.dequantize(torch.bfloat16)
        target = name if name in state else f"{name}.weight"
        state[target] = weight if weight.shape == state[target].shape and not turned(model, name) else weight.mT
    return state


def turned(model, name: str) -> bool:
    holder = model.get_submodule(name.rpartition(".")[0])
    layer = getattr(holder, name.rpartition(".")[2])
    return type(layer).__name__ == "Conv1D" or type(holder).__name__ == "GptOssExperts"


def assert_float(model, state) -> None:
    assert not any(isinstance(layer, lowbit.nn.Packed) for layer in model.modules())
    assert not hasattr(model.config, "quantization_config") and not getattr(model, "is_quantized", False)
    found = model.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(found[name].float(), value.float()), name  # T5 loads some in float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gets_its_dequantized_weights(kind, tmp_path):
    model = make(kind)
    packed = lowbit.quantize_(copy.deepcopy(model), LowBitConfig(bits=3, group_size=16).select(model))
    state = expected_state(model, packed)
    reference = copy.deepcopy(model)
    reference.load_state_dict(state)
    back = packed.dequantize()
    assert back is packed
    assert_float(back, state)
    assert back.all_tied_weights_keys == model.all_tied_weights_keys
    for target, source in model.all_tied_weights_keys.items():
        assert back.get_parameter(target) is back.get_parameter(source)
    tokens = {"input_ids": torch.arange(12)[None]} | ({"decoder_input_ids": torch.arange(6)[None]} if kind == "t5" else {})
    with torch.inference_mode():
        assert torch.equal(back(**tokens).logits, reference(**tokens).logits)
    back.save_pretrained(tmp_path / "float")
    assert_float(type(model).from_pretrained(tmp_path / "float", dtype=torch.bfloat16), state)
    lowbit.quantize_(back, LowBitConfig(bits=4).select(back))  # requantized


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_becomes_float(kind, tmp_path):
    model = make(kind)
    model.save_pretrained(tmp_path / "source")
    lowbit.quantize_checkpoint(tmp_path / "source", tmp_path / "packed", LowBitConfig(bits=3, group_size=16))
    packed = type(model).from_pretrained(tmp_path / "packed", dtype="auto")
    (tmp_path / "packed" / "README.md").write_text("kept")
    (tmp_path / "packed" / "lowbit_import.json").write_text("{}")
    entries = lowbit.dequantize_checkpoint(tmp_path / "packed", tmp_path / "float")
    assert {entry.kind for entry in entries} <= {"bfloat16", "float32" if kind == "t5" else "bfloat16"}
    assert {entry.name for entry in entries} == {entry.name for entry in lowbit.inspect_checkpoint(tmp_path / "source")}
    assert (tmp_path / "float" / "README.md").read_text() == "kept"
    assert not (tmp_path / "float" / "lowbit_import.json").exists()
    assert_float(type(model).from_pretrained(tmp_path / "float", dtype="auto"), expected_state(model, packed))


def test_a_head_that_was_packed_apart_from_its_table(tmp_path):
    model = make("tied")
    lowbit.quantize_(model, LowBitConfig(bits=3).select(model))
    packed = lowbit.quantize_tensor(torch.randn(403, 64), lowbit.LinearConfig(bits=8))
    model.lm_head = lowbit.nn.Linear(packed, torch.bfloat16)
    head, table = model.lm_head.dequantize(torch.bfloat16), model.model.embed_tokens.dequantize(torch.bfloat16)
    model.dequantize().save_pretrained(tmp_path / "float")
    found = load(tmp_path / "float", dtype="auto")
    assert not found.config.tie_word_embeddings
    assert torch.equal(found.model.embed_tokens.weight, table) and torch.equal(found.lm_head.weight, head)


def with_packed_table(**config):
    """A tied model of which only the table is packed."""
    model = make("tied")
    with pytest.warns(UserWarning, match="share one weight, of which only model.embed_tokens is packed"):
        return lowbit.quantize_(model, {"*embed_tokens": lowbit.EmbeddingConfig(**config)})


@pytest.mark.parametrize("bits, noise", [(1, None), (8, None), (1, 0.5), (2, 0.5), (4, 0.5), (8, 0.5)])
def test_a_head_that_is_another_matrix_than_its_packed_table(bits, noise):
    """transformers does not tie weights that differ in the files, whatever the config says. Some are trained from the table."""
    model = with_packed_table(bits=bits)
    before = model.lm_head.weight.detach()
    other = torch.randn_like(before) * before.std()
    head = other if noise is None else before + noise * other
    model.lm_head.weight = torch.nn.Parameter(head.clone())
    table = model.model.embed_tokens.dequantize(torch.bfloat16)
    model.dequantize()
    assert torch.equal(model.lm_head.weight, head) and torch.equal(model.model.embed_tokens.weight, table)
    assert not model.config.tie_word_embeddings


@pytest.mark.parametrize(
    "config",
    [
        {"bits": 1, "scale": "absmax"}, {"bits": 1, "scale": "absmax", "group_size": None}, {"bits": 1, "mapping": "affine"},
        {"bits": 2, "rotate": True}, {"bits": 3, "levels": "fit"}, {"bits": 4, "levels": "mxfp4"}, {"bits": 8},
    ],
)  # fmt: skip
def test_a_table_that_was_packed_and_its_head_was_not(config):
    """The head keeps its exact weight, which becomes that of both, however large the errors of the table are."""
    model = with_packed_table(**config)
    head = model.lm_head.weight
    model.dequantize()
    assert model.model.embed_tokens.weight is model.lm_head.weight is head and model.config.tie_word_embeddings


def test_a_head_that_was_packed_and_its_table_was_not():
    """The table keeps its exact weight, which becomes that of both."""
    model = make("tied")
    table = model.model.embed_tokens.weight.clone()
    with pytest.warns(UserWarning, match="share one weight, of which only lm_head is packed"):
        lowbit.quantize_(model, {"lm_head": lowbit.LinearConfig(bits=3)})
    model.dequantize()
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, table)
    assert model.config.tie_word_embeddings


def test_another_dtype_and_an_altered_weight():
    model = make("untied")
    lowbit.quantize_(model, LowBitConfig().select(model))
    altered = copy.deepcopy(model)
    altered.lm_head.packed_weight[100] ^= 1
    with pytest.raises(ValueError, match="altered"):
        altered.dequantize()
    assert isinstance(altered.model.embed_tokens, lowbit.nn.Packed)
    assert model.dequantize(torch.float32).lm_head.weight.dtype == torch.float32


def test_the_command(packed, tmp_path):
    said = document(invoke("dequantize", packed[0], tmp_path / "float", "--json"))
    assert said.keys() == documented_keys("dequantize")
    assert said["packed_layers"] == packed[1]["packed_layers"] and said["bytes_after"] > 3 * said["bytes_before"]
    result = invoke("generate", tmp_path / "float", "--prompt", PROMPT, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.stderr
    other = invoke("dequantize", packed[0], tmp_path / "half", "--dtype", "float16")
    assert "floats" in other.stdout and load(tmp_path / "half", dtype="auto").lm_head.weight.dtype == torch.float16
    assert error(invoke("dequantize", FLOAT, tmp_path / "x")) == (
        f"{FLOAT} is float; expected a checkpoint with packed weights of lowbit"
    )


def test_a_packed_checkpoint_is_quantized_again(packed, tmp_path):
    """Like its float form, with a warning; no files are left besides the target."""
    document(invoke("dequantize", packed[0], tmp_path / "float", "--json"))
    expected = invoke("quantize", tmp_path / "float", tmp_path / "expected", "--bits", 3)
    result = invoke("quantize", packed[0], tmp_path / "target", "--bits", 3)
    assert expected.exit_code == result.exit_code == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if line.startswith("lowbit: warning: ")]
    bits = packed[1]["bits_per_weight"]
    assert len(warnings) == 1 and f"is packed already, with {bits:.2f} bits per weight: that loss stays" in warnings[0]
    names = ["model.safetensors", "config.json", "tokenizer.json"]
    assert all((tmp_path / "target" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes() for name in names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "float", "target"]
    with pytest.raises(ValueError, match="lowbit.dequantize_checkpoint writes them"):
        lowbit.quantize_checkpoint(packed[0], tmp_path / "again", LowBitConfig())


def test_a_missing_source_is_refused_first(tmp_path):
    result = invoke("quantize", tmp_path / "nope", tmp_path / "target")
    assert result.exit_code == 1 and "does not exist" in result.stderr and len(result.stderr.splitlines()) == 1
