"""Strided windows compared with a plain computation, token by token."""

import copy
import math

import lowbit
import pytest
import torch
import transformers
from lowbit.llm.perplexity import Perplexity, perplexity
from lowbit.llm.proof import TOKENS, sample_text


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def context_of(token: int, window: int, stride: int) -> int:
    """Start of the window that predicts a token: the first window that contains it."""
    begin = 0
    while begin + window <= token:
        begin += stride
    return begin


@pytest.mark.parametrize(
    "length, window, stride", [(40, 16, 8), (40, 16, 5), (41, 16, 15), (40, 2, 1), (10, 16, 8), (16, 16, 8), (2, 4, 2)]
)
@torch.inference_mode()
def test_every_token_is_predicted_once_from_its_window(model, length, window, stride):
    tokens = torch.randint(50, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    nats = 0.0
    for token in range(1, length):
        begin = context_of(token, window, stride)
        assert token - begin >= min(token, window - stride)  # as in the docstring
        logits = model(torch.tensor([tokens[begin:token]])).logits[0, -1]
        nats -= float(logits.double().log_softmax(0)[tokens[token]])
    seen = []
    result = perplexity(model, tokens, window=window, stride=stride, progress=lambda *counts: seen.append(counts))
    assert result.tokens == length - 1
    assert math.isclose(result.nats, nats, rel_tol=1e-5)
    assert math.isclose(result.perplexity, math.exp(nats / (length - 1)), rel_tol=1e-5)
    assert seen == sorted(seen) and seen[-1] == (length - 1, length - 1)


def test_a_quantized_model(model):
    tokens = torch.randint(50, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    packed = lowbit.quantize_(
        transformers.LlamaForCausalLM(model.config).eval(),
        {"*": lowbit.LinearConfig(bits=2), "*embed*": lowbit.EmbeddingConfig(bits=2)},
    )
    result = perplexity(packed, tokens, window=32, stride=16)
    with torch.inference_mode():
        logits = packed(torch.tensor([tokens[:-1]])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
    assert math.isclose(result.nats, float(expected), rel_tol=1e-5)


def test_not_a_number(model):
    """Also if only this text produces it, and the tokens of the model's trial do not."""
    broken = copy.deepcopy(model)
    token = next(i for i in range(4, 50) if i not in sample_text(model.config, TOKENS))
    with torch.no_grad():
        broken.model.embed_tokens.weight[token] = torch.nan
    assert math.isfinite(perplexity(broken, [1, 2, 3], window=16, stride=8).nats)
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        perplexity(broken, [1, token, 3, 4], window=16, stride=8)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="LlamaForCausalLM .model_type llama. predicts no text: its logits are NaN"):
        perplexity(broken, [1, 2], window=16, stride=8)


def test_figures():
    result = Perplexity(tokens=4, nats=8 * math.log(2))
    assert math.isclose(result.perplexity, 4)
    assert math.isclose(result.bits_per_byte(16), 0.5)
    assert Perplexity(tokens=1, nats=1e4).perplexity == math.inf


@pytest.mark.parametrize(
    "tokens, window, stride, message",
    [
        ([1], 16, 8, "the text has 1 tokens; expected 2 or more"),
        ([], 16, 8, "the text has 0 tokens; expected 2 or more"),
        ([1, 50], 16, 8, "the text has token ids from 1 to 50; expected 0 to 49: the tokenizer is another model's"),
        ([1, 2], 1, 1, "window is 1; expected 2 to 64, the model's positions"),
        ([1, 2], 65, 1, "window is 65; expected 2 to 64, the model's positions"),
        ([1, 2], 16, 16, "stride is 16; expected 1 to 15: the first token of a window is not predicted in it"),
        ([1, 2], 16, 0, "stride is 0; expected 1 to 15: the first token of a window is not predicted in it"),
    ],
)
def test_bad_input(model, tokens, window, stride, message):
    with pytest.raises(ValueError) as caught:
        perplexity(model, tokens, window=window, stride=stride)
    assert str(caught.value) == message


@pytest.mark.parametrize("window", [62, 50, 16, 5])
@torch.inference_mode()
def test_a_cache_takes_every_window_that_the_model_has_positions_for(window):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=62, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(50, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    found = perplexity(model, tokens, window=window, cache="float32")  # half the window is the default stride
    expected = perplexity(model, tokens, window=window, stride=window // 2)
    assert found.tokens == 99 and found.nats == pytest.approx(expected.nats, rel=1e-4)
    with pytest.raises(ValueError, match="window is 63; expected 2 to 62"):
        perplexity(model, tokens, window=63, cache="float32")
