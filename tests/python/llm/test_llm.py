"""lowbit.llm: decoders, compiled and not, generation."""

import copy
import functools
import math

import lowbit
import pytest
import torch

pytestmark = pytest.mark.first

transformers = pytest.importorskip("transformers")

from lowbit.llm import Decoder, compile_decoder, generate

PROMPT = [5, 91, 3, 44, 17, 60, 2, 8, 33, 71, 26]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CLASSES = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def make(kind: str, quantized: bool = True, **more) -> torch.nn.Module:
    """A small random model, the same each time."""
    torch.manual_seed(0)
    if kind == "llama":
        more = {"rope_parameters": ROPE, "tie_word_embeddings": True} | more
    model = transformers.AutoModelForCausalLM.from_config(CLASSES[kind](**SIZES | more)).eval()
    if quantized:
        lowbit.quantize_(model, lowbit.LinearConfig(4, 16), lambda module, name: isinstance(module, torch.nn.Linear))
    return model


def run(step, tokens: list[int], sizes: list[int] | None = None) -> torch.Tensor:
    """The logits after the last token of a text in pieces of these sizes."""
    start = 0
    with torch.inference_mode():
        for size in sizes or [len(tokens)]:
            logits = step(torch.tensor([tokens[start : start + size]]), torch.tensor([start]))
            start += size
    assert start == len(tokens)
    return logits


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "float"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_decoder_continues_as_transformers_does(kind, quantized):
    model = make(kind, quantized)
    theirs = model.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)[0, len(PROMPT) :].tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[:, -1]
    decoder = Decoder(model, 64)
    # Attention sums in another order, which sometimes rounds an activation to the next of 255 values.
    torch.testing.assert_close(run(decoder, PROMPT), logits, rtol=0, atol=0.05 if quantized else 1e-4)
    assert generate(decoder, PROMPT, 40, max_length=64).tokens == theirs
    assert len(set(theirs)) > 3
    # A new text starts at 0; the content of the caches does not matter.
    assert generate(decoder, PROMPT, 40, max_length=64).tokens == theirs


@pytest.mark.parametrize("kind", CLASSES)
def test_pieces_of_a_text(kind):
    tokens = [(7 * i + 3) % 97 for i in range(37)]
    decoder = Decoder(make(kind), 48)
    whole = run(decoder, tokens)
    for sizes in ([1] * 37, [5, 16, 16], [36, 1], [1, 36]):
        assert torch.equal(run(decoder, tokens, sizes), whole), sizes
    floats = Decoder(make(kind, quantized=False), 48)  # here torch multiplies, and its order of sums depends on the shape
    torch.testing.assert_close(run(floats, tokens, [5, 16, 16]), run(floats, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_decoder_of_inference_mode_runs_outside_of_it(kind, mode):
    tokens, model = torch.tensor([[5, 6, 7]]), make(kind)
    with torch.inference_mode():
        decoder = Decoder(model, 64)
        first = decoder(tokens, torch.tensor([0]))
        caches = decoder.new_caches(16)
    with mode():
        assert torch.equal(decoder(tokens, torch.tensor([0])), first)
        assert decoder.run_texts([(caches, [5, 6, 7])])[0].shape == first[0].shape


def test_a_long_prompt_comes_in_pieces(monkeypatch):
    decoder = Decoder(make("llama"), 64)
    tokens = [(7 * i + 3) % 97 for i in range(58)]
    whole = run(decoder, tokens)
    rows: list[int] = []
    hook = decoder.model.model.register_forward_pre_hook(
        lambda module, arguments, named: rows.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(lowbit.llm.texts_call, "PIECE", 8)
    for size, expected in ((1, [1]), (8, [8]), (9, [5, 4]), (57, [8, 7, 7, 7, 7, 7, 7, 7])):
        rows.clear()
        run(decoder, tokens[:size])
        assert rows == expected
    assert torch.equal(run(decoder, tokens), whole)
    assert torch.equal(run(decoder, tokens, [3, 40, 15]), whole)
    rows.clear()
    decoder.read(tokens[:20])
    assert rows == [8, 8, 4]
    hook.remove()


def test_attention_reads_all_earlier_positions_and_no_later_ones():
    decoder = Decoder(make("llama"), 48)
    whole = run(decoder, PROMPT)
    for i in range(len(PROMPT)):
        other = list(PROMPT)
        other[i] = (other[i] + 1) % 97
        assert not torch.equal(run(decoder, other), whole)
    run(decoder, [1] * 40)  # the content of the caches after a text does not matter
    assert torch.equal(run(decoder, PROMPT), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_decoder_in_another_dtype(dtype):
    decoder = Decoder(make("llama").to(dtype), 64)
    logits = run(decoder, PROMPT)
    assert logits.dtype == dtype and decoder.k_cache_0.dtype == dtype
    expected = run(Decoder(make("llama"), 64), PROMPT)
    assert torch.nn.functional.cosine_similarity(logits.float(), expected).item() > 0.98


# Bytes per value, and per position.
KINDS_OF_CACHE = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "int8": (1, 4), "int4": (0.5, 4)}


@pytest.mark.parametrize("kind", [*KINDS_OF_CACHE, "int8,int4"])
def test_caches_in_a_smaller_type(kind):
    tokens = [(7 * i + 3) % 97 for i in range(48)]
    width = 32 if "int4" in kind else 16
    usual = Decoder(make("llama", head_dim=width), 48)
    expected, found = run(usual, tokens), usual.measured
    decoder = Decoder(make("llama", head_dim=width), 48, kind)
    whole = run(decoder, tokens)
    assert whole.dtype == torch.float32
    for sizes in ([1] * 48, [5, 16, 27], [47, 1]):  # to the last position
        assert torch.equal(run(decoder, tokens, sizes), whole), sizes
    with pytest.raises(IndexError, match="start is 48 and there are 1 tokens"):
        decoder(torch.tensor([[1]]), torch.tensor([48]))
    # This model's random weights are large, so results depend strongly on the text and on small changes.
    least, most = (0.85, 0.5) if "int4" in kind else (0.99, 0.1)
    assert torch.nn.functional.cosine_similarity(whole, expected).item() > least
    stored = [KINDS_OF_CACHE[name] for name in kind.split(",")]
    for keys, values in decoder.caches():
        sizes = [2 * 48 * (width * item + scale) for item, scale in stored]
        assert [keys.nbytes, values.nbytes] == [sizes[0], sizes[-1]]
    # The model is tested without the smaller caches, and the error that these add is reported.
    assert {name: decoder.measured[name] for name in found} == found
    if kind == "float32":
        assert torch.equal(whole, expected) and "cache" not in decoder.measured
    else:
        assert not torch.equal(whole, expected) and found["whole"] < decoder.measured["cache"] < most


@pytest.mark.parametrize("kind", ["int4", "int8,int4"])
def test_4_bit_caches_are_for_widths_of_32(kind):
    with pytest.raises(ValueError, match="keys or values have a width of 16; expected a multiple of 32 for a 4-bit cache"):
        Decoder(make("llama"), 48, kind)


@pytest.mark.parametrize("kind, width", [("int8,int4", 96), ("int4", 32)])
def test_guesses_over_caches_of_codes_change_nothing(kind, width):
    decoder, draft = (Decoder(make("llama", quantized, head_dim=width), 64, kind) for quantized in (True, False))
    plain = generate(decoder, PROMPT, 40, max_length=64).tokens
    # The text with 4-bit caches does not repeat itself, so there are no guesses.
    for more in ({"guesses": 4}, {"guesses": 3, "draft": draft})[kind == "int4" :]:
        guessed = generate(decoder, PROMPT, 40, max_length=64, **more)
        assert guessed.tokens == plain and guessed.guessed > guessed.accepted  # the caches were cut back


def test_caches_that_do_not_hold_the_numbers_are_refused():
    model = make("llama", quantized=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight *= 2**20
            layer.self_attn.o_proj.weight *= 2**-20
    with torch.inference_mode():
        before = model(torch.tensor([PROMPT])).logits
    with pytest.raises(ValueError, match="its keys or values do not fit into a cache of float16: the logits are not numb"):
        Decoder(model, 48, "float16")
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([PROMPT])).logits, before)  # restored
    for kind in ("bfloat16", "int8"):
        assert run(Decoder(model, 48, kind), PROMPT).isfinite().all()
    known = "expected one of 'float32', 'bfloat16', 'float16', 'int8', 'int8,int4', 'int4', or None"
    with pytest.raises(ValueError, match=f"cache is 'int2'; {known}$"):
        Decoder(model, 48, "int2")
    with pytest.raises(
        ValueError, match=f"cache is 'int4,int8'; {known}; rounding keys to 4 bits loses more than rounding values"
    ):
        Decoder(model, 48, "int4,int8")


def check_step(step, decoder, close: float):
    """A compiled step equals the decoder: logits, tokens, and state across calls."""
    assert step.max_length == decoder.max_length
    torch.testing.assert_close(run(step, PROMPT), run(decoder, PROMPT), rtol=0, atol=close)
    torch.testing.assert_close(run(step, PROMPT, [4, 1, 1, 5]), run(decoder, PROMPT), rtol=0, atol=close)
    theirs = generate(decoder, PROMPT, 40, max_length=64).tokens
    assert generate(step, PROMPT, 40, max_length=64).tokens == theirs
    check_refused_calls(step)


def check_refused_calls(step):
    """Machine code would accept invalid arguments, or end the process, so steps check them first."""
    one, zero = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for tokens, start, error, message in (
        (one.expand(2, 3), zero, ValueError, r"tokens is torch.int64 \[2, 3\]; expected torch.int64 \[1, s\]"),
        (one[:, :0], zero, ValueError, r"tokens is torch.int64 \[1, 0\]; expected at least one token"),
        (one.float(), zero, ValueError, r"tokens is torch.float32 \[1, 1\]"),
        (one, zero.expand(2), ValueError, r"start is torch.int64 \[2\]; expected torch.int64 \[1\]"),
        (one * 97, zero, ValueError, "there is no token 97; expected 0 to 96"),
        (torch.tensor([[5, -2, 99]]), zero, ValueError, "there is no token -2; expected 0 to 96"),
        (one.expand(1, 2), zero + 63, IndexError, "start is 63 and there are 2 tokens; .* max_length of 64 tokens"),
        (one, zero + 64, IndexError, "start is 64"),
        (one, zero - 1, IndexError, "start is -1"),
    ):
        with pytest.raises(error, match=message):
            step(tokens, start)


def check_shared_caches(step, decoder):
    run(decoder, PROMPT[:6])
    with torch.inference_mode():
        continued = step(torch.tensor([PROMPT[6:]]), torch.tensor([6]))
    torch.testing.assert_close(continued, run(decoder, PROMPT), rtol=0, atol=0.05)
    run(step, PROMPT[:-1])
    with torch.inference_mode():
        continued = decoder(torch.tensor([PROMPT[-1:]]), torch.tensor([len(PROMPT) - 1]))
    torch.testing.assert_close(continued, run(decoder, PROMPT), rtol=0, atol=0.05)


@pytest.mark.parametrize("machine_code", [False, pytest.param(True, marks=pytest.mark.more)])
def test_torch_compile(machine_code, monkeypatch):
    """Whole graphs that are compiled once; without machine code, torch runs the graphs."""
    torch._dynamo.reset()
    if not machine_code:
        traced = functools.partial(torch.compile, backend="eager")
        monkeypatch.setattr(torch, "compile", lambda step, options, **more: traced(step, **more))
    decoder = Decoder(make("llama"), 64)
    step = compile_decoder(decoder, "inductor")
    check_step(step, decoder, 0.05)
    check_shared_caches(step, decoder)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for size in range(1, 60):
            step(torch.ones(1, size, dtype=torch.int64), torch.tensor([0]))


@pytest.mark.more
def test_ahead_of_time(monkeypatch):
    decoder = Decoder(make("llama"), 64)
    step = compile_decoder(decoder)
    check_step(step, decoder, 0.05)
    check_shared_caches(step, decoder)
    assert torch.equal(run(step, PROMPT, [1] * len(PROMPT)), run(step, PROMPT, [1] * len(PROMPT)))
    in_pieces = run(step, PROMPT, [4, 4, 3])
    monkeypatch.setattr(lowbit.llm.texts_call, "PIECE", 4)
    assert torch.equal(run(step, PROMPT), in_pieces)
    with pytest.raises(ValueError, match="backend is 'gcc'; expected 'aot' or 'inductor'"):
        compile_decoder(decoder, "gcc")


@pytest.mark.parametrize("length", [0, -16, 20])
def test_invalid_lengths(length):
    with pytest.raises(ValueError, match=f"max_length is {length}; expected a positive multiple of 16"):
        Decoder(make("llama"), length)


def test_lengths_that_do_not_fit():
    model = make("llama")
    with pytest.raises(ValueError, match="max_length is 144; expected at most the model's 128 positions"):
        Decoder(model, 144)
    decoder = Decoder(model, 32)
    with pytest.raises(IndexError, match="max_length of 32"):
        run(decoder, [1] * 33)
    longer = Decoder(model, 128)  # the same model, in a decoder for longer texts
    tokens = [(5 * i + 1) % 97 for i in range(100)]
    assert torch.equal(run(longer, tokens), run(Decoder(make("llama"), 128), tokens))


def test_calls_that_do_not_fit():
    check_refused_calls(Decoder(make("llama"), 64))


def test_attention_of_other_kinds():
    def mistral():
        torch.manual_seed(0)
        config = transformers.MistralConfig(**SIZES | {"sliding_window": 32})
        return transformers.AutoModelForCausalLM.from_config(config).eval()

    theirs = mistral().generate(torch.tensor([PROMPT]), max_new_tokens=60, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(PROMPT) + 60 > 2 * 32  # beyond the window
    assert generate(Decoder(mistral(), 80), PROMPT, 60, max_length=80).tokens == theirs


def test_a_cap_on_scores():
    def gemma(**more):
        torch.manual_seed(0)
        config = transformers.Gemma2Config(**SIZES | {"sliding_window": 16} | more)
        # In the first versions of transformers 5, only this attention supports a cap.
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")

    with pytest.raises(ValueError, match=r"the model is in training mode; call its eval\(\) first"):
        Decoder(gemma(), 32)
    capped, free = (gemma(attn_logit_softcapping=cap).eval() for cap in (0.01, None))
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        assert not torch.allclose(capped(tokens).logits, free(tokens).logits, atol=1e-4)
    theirs = capped.generate(tokens, max_new_tokens=40, do_sample=False)[0, len(PROMPT) :].tolist()
    assert generate(Decoder(capped, 64), PROMPT, 40, max_length=64).tokens == theirs


def test_layers_whose_window_differs_from_the_configuration_are_refused():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES | {"sliding_window": 32})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    config.layer_types = ["full_attention", "sliding_attention"]  # the first layer has a window of 32 nevertheless
    message = "layer 0 has a sliding window of None in its configuration, but passes 32 to its attention; expected a max_length"
    with pytest.raises(ValueError, match=message):
        Decoder(model, 48)
    Decoder(model, 32)


def test_generation():
    decoder = Decoder(make("llama"), 64)
    seen = []
    whole = generate(decoder, PROMPT, 20, max_length=64, on_token=seen.append)
    assert seen == whole.tokens and len(seen) == 20 and whole.prompt_tokens == len(PROMPT)
    assert whole.prefill_rate > 0 and whole.decode_rate > 0
    assert whole.decode_steps == 19
    assert math.isnan(generate(decoder, PROMPT, 1, max_length=64).decode_rate)
    stop = whole.tokens[7]
    stopped = generate(decoder, PROMPT, 20, max_length=64, stop=[stop])
    assert stopped.tokens == whole.tokens[: whole.tokens.index(stop)] and stopped.stopped == "stop"
    assert stopped.decode_steps == len(stopped.tokens)  # including that of the stop token, whose time counts
    assert stopped.decode_rate == stopped.decode_steps / stopped.decode_seconds
    nothing = generate(decoder, PROMPT, 20, max_length=64, stop=whole.tokens[:1])
    assert nothing.tokens == [] and nothing.prefill_seconds > 0 and math.isnan(nothing.decode_rate)
    # The last token needs no position in the caches.
    assert len(generate(decoder, PROMPT, 99, max_length=64).tokens) == 64 - len(PROMPT)
    warm = [generate(decoder, PROMPT, 20, max_length=64, temperature=3.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [1] * 64}, "has 64 tokens; expected fewer than the decoder's max_length of 64"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; expected 1 or more"),
        ({"temperature": -1.0}, "temperature is -1.0; expected 0 or more"),
        ({"temperature": math.nan}, "temperature is nan; expected 0 or more"),
        ({"temperature": math.inf}, "temperature is inf; expected 0 or more"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0; expected 1 or more"),
        ({"top_p": 1.5}, "top_p is 1.5; expected 0 to 1"),
        ({"top_p": -0.5}, "top_p is -0.5; expected 0 to 1"),
        ({"top_p": math.nan}, "top_p is nan; expected 0 to 1"),
        ({"prompt": [5, 97]}, "there is no token 97; expected 0 to 96"),
        ({"prompt": [-1, 5]}, "there is no token -1; expected 0 to 96"),
    ],
)
def test_generation_refuses(arguments, message):
    arguments = {"prompt": PROMPT, "max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=message):
        generate(Decoder(make("llama"), 64), arguments.pop("prompt"), max_length=64, **arguments)


def test_copies_of_a_decoder_have_caches_of_their_own():
    decoder = Decoder(make("llama"), 64)
    run(decoder, PROMPT[:6])
    other = copy.deepcopy(decoder)
    run(other, PROMPT[::-1])
    with torch.inference_mode():
        continued = decoder(torch.tensor([PROMPT[6:]]), torch.tensor([6]))
    assert torch.equal(continued, run(decoder, PROMPT))
