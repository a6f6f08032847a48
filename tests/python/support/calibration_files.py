"""Shared by the tests of calibrate_checkpoint: small models with a tokenizer, texts, and measures of the result."""

from pathlib import Path

import lowbit
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

WORDS = 120
SIZES = {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIG = lowbit.LowBitConfig(bits=3)


def words(count: int, seed: int = 0, per_line: int = 12) -> str:
    """A text with predictable next words."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 6, (count,), generator=generator).cumsum(0) * 7 % WORDS
    listed = [f"w{step}" for step in steps.tolist()]
    return "\n".join(" ".join(listed[at : at + per_line]) for at in range(0, count, per_line))


def save(model, path: Path) -> Path:
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "Bert" in type(model).__name__:
        tokenizer.post_processor = TemplateProcessing(single="w1 $A w2", special_tokens=[("w1", 1), ("w2", 2)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


def make(kind: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(1)
    if kind == "bert":
        config = transformers.BertConfig(**SIZES, intermediate_size=96, max_position_embeddings=64, initializer_range=0.1)
        model = transformers.BertModel(config)
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64)
        )
    elif kind == "mixtral":
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=32, num_local_experts=4)
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SIZES,
                num_key_value_heads=2,
                intermediate_size=96,
                max_position_embeddings=64,
                tie_word_embeddings=kind == "tied",
                initializer_range=0.1,
            )  # fmt: skip
        )
    return model.to(dtype).eval()


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return save(make("tied"), tmp_path_factory.mktemp("calibrate") / "source")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "text.txt"
    path.write_text(words(1200))
    return path


def packed_of(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: value for name, value in load_file(path / "model.safetensors").items() if name.endswith(".packed_weight")}


def hidden(model, seed: int = 7) -> torch.Tensor:
    ids = torch.tensor([[int(word[1:]) for word in line.split()] for line in words(600, seed).splitlines()])
    with torch.no_grad():
        output = model(input_ids=ids)
    return (output.logits if hasattr(output, "logits") else output.last_hidden_state).float()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().sum() / wanted.square().sum())
