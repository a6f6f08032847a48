"""lowbit.llm.replay: replaying the operators of a first call, and cases in which that is not allowed."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lowbit.llm import Decoder, generate
from lowbit.llm.replay import Replay
from test_llm import PROMPT, SIZES, make, run

GEMMA = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16}


def make_gemma() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**SIZES | GEMMA)).eval()


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "float qwen3", "gemma"])
def test_a_decoder_that_replays_has_the_same_bits(kind, cache, monkeypatch):
    model = make_gemma() if kind == "gemma" else make(kind.split()[-1], quantized="float" not in kind)
    tokens = [*PROMPT, *((11 * i + 5) % 97 for i in range(40))]
    sizes = [len(PROMPT), *[1] * 40]
    expected = run(Decoder(model, 64, cache), tokens, sizes)
    decoder = Decoder(model, 64, cache, replay=True)
    calls, compute = [], decoder.run
    monkeypatch.setattr(decoder, "run", lambda *args, **more: calls.append(0) or compute(*args, **more))
    assert torch.equal(run(decoder, tokens, sizes), expected)
    assert decoder._replay.refusal is None and len(calls) == 3  # the prompt, the recorded token and the verified token
    # A new text over the same caches.
    assert torch.equal(run(decoder, tokens[::-1], sizes), run(Decoder(model, 64, cache), tokens[::-1], sizes))


def test_the_text_is_the_same():
    model = make("llama")
    expected = generate(Decoder(model, 64), PROMPT, 40, max_length=64).tokens
    decoder = Decoder(model, 64, replay=True)
    assert generate(decoder, PROMPT, 40, max_length=64).tokens == expected
    assert generate(decoder, PROMPT, 40, max_length=64, guesses=3).tokens == expected
    decoder.release()
    with pytest.raises(RuntimeError, match="released"):
        decoder(torch.tensor([[1]]), torch.tensor([0]))


def test_gradients_are_computed():
    decoder = Decoder(make("llama", quantized=False), 32, replay=True)
    for start in range(4):
        assert decoder(torch.tensor([[5]]), torch.tensor([start])).requires_grad
    assert decoder._replay._run is None


def test_operators_with_all_kinds_of_results_and_arguments():
    weight = torch.randn(3)

    def function(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        first, second = x.split([2, 4])
        total = torch.zeros(2)
        total += first * 2.5
        total.mul_(float("inf") if start.shape[0] > 1 else 0.5)
        return torch.cat([total, second.view(2, 2)[:, None].sum((0, 1)).to(torch.bfloat16).float(), weight + start])

    replay = Replay(function)
    for start in range(5):
        x, at = torch.randn(6), torch.tensor([start])
        assert torch.equal(replay(x, at), function(x, at))
    assert replay._proven and replay.refusal is None
    weight += 1  # constants are the tensors themselves, not copies
    assert torch.equal(replay(x, at), function(x, at))


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x: x * int(x.sum()), "_local_scalar_dense"),
        (lambda x: x + len((x * 1).tolist()), "tolist"),
        (lambda x: x + torch.from_numpy((x * 1).numpy()), "numpy"),
        (lambda x: x[x > 2].sum() + x, "index"),
        (lambda x: x + (x > 2).nonzero().shape[0], "nonzero"),
    ],
    ids=["number", "list", "numpy", "mask", "size"],
)
def test_a_function_that_reads_values_is_not_replayed(function, reason):
    replay = Replay(function)
    for number in range(4):
        x = torch.arange(5) + number
        assert torch.equal(replay(x), function(x))
    assert reason in replay.refusal


def test_a_function_that_changes_is_not_replayed():
    calls = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + len(calls)

    replay = Replay(function)
    assert [replay(torch.tensor(10)).item() for _ in range(4)] == [11, 12, 13, 14]
    assert replay.refusal == "its operators depend on the text"


def test_recurrent_models_run_as_they_are():
    torch.manual_seed(0)
    config = transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"])
    decoder = Decoder(transformers.AutoModelForCausalLM.from_config(config).eval(), 32, replay=True)
    assert decoder.recurrent and decoder._replay is None
