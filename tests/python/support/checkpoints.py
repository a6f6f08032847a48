"""Small random transformers models, saved as checkpoints."""

import json
import os
import signal
from pathlib import Path

import lowbit
import lowbit.transformers
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

# Odd sizes: the vocabulary is not a multiple of a panel's 16 rows, the intermediate size not of a group.
SIZES = {
    "vocab_size": 403, "hidden_size": 64, "intermediate_size": 168, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
KINDS = ("untied", "tied", "bias")
TOKENS = torch.tensor([[1, 17, 402, 3, 3], [9, 8, 7, 6, 5]])

EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm.weight"
UP = "model.layers.1.mlp.up_proj"

OVERRIDES = {"*.down_proj": {"bits": 3, "mapping": "affine", "scale": "absmax"}, "*.1.self_attn.o_proj": None}
CONFIG = lowbit.LowBitConfig(bits=4, group_size=32, embedding_bits=6, overrides=OVERRIDES)


def make_model(kind: str = "untied", dtype: torch.dtype = torch.bfloat16, seed: int = 0, **sizes):
    torch.manual_seed(seed)
    if kind == "bias":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes, tie_word_embeddings=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes, tie_word_embeddings=kind == "tied"))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases, because zeros and ones would hide a mix-up
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return model.to(dtype).eval()


def save_model(path: Path, kind: str = "untied", sharded: bool = False, **options) -> Path:
    make_model(kind, **options).save_pretrained(path, max_shard_size="60KB" if sharded else "1GB")
    (path / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    return path


def load(path: Path, **options):
    return AutoModelForCausalLM.from_pretrained(path, **options)


def assert_same_model(found, expected) -> None:
    """The same tensors, bit for bit, and the same logits."""
    found_state, expected_state = found.state_dict(), expected.state_dict()
    assert found_state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert found_state[name].dtype == tensor.dtype and torch.equal(found_state[name], tensor), name
    logits = found(TOKENS).logits
    assert logits.dtype == expected(TOKENS).logits.dtype and torch.equal(logits, expected(TOKENS).logits)


def edit_json(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def change_tensors(path: Path, change) -> None:
    """Rewrites a safetensors file with `change(tensors)` applied to the dict of its tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def killed_at(moment: int, action, install) -> bool:
    """Runs `action()` in a fork that gets SIGKILL at the `moment`-th call of the function that `install(tick)` receives;
    returns whether that call happened. Only for single-threaded processes."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            calls = 0

            def tick() -> None:
                nonlocal calls
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            install(tick)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed by itself"
    return False


def quantized(model, config: lowbit.LowBitConfig):
    return lowbit.quantize_(model, config.select(model))


def refuse(source, target, error, *parts, config=CONFIG):
    """Quantizing raises the error, whose message has all the parts, and leaves no files."""
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(error) as caught:
        lowbit.quantize_checkpoint(source, target, config)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    assert sorted(source.parent.rglob("*")) == before


def change_a_bit(file: Path, ending: str) -> None:
    """Changes a bit of the first tensor of a safetensors file whose name ends so; the header stays as it is."""
    content = bytearray(file.read_bytes())
    start = int.from_bytes(content[:8], "little") + 8
    header = json.loads(content[8:start])
    name = next(name for name in header if name.endswith(ending))
    content[start + header[name]["data_offsets"][0]] ^= 1
    file.write_bytes(content)
