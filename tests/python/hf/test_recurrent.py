"""Operators with states of a fixed size, and decoders for models with such layers."""

import copy
import sys
from pathlib import Path

import lowbit
import pytest
import torch
import torch.nn.functional as F
from lowbit import llm
from lowbit.operators.recurrence import state_shape

sys.path.append(str(Path(__file__).parents[2] / "models"))
import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def in_float64(q, k, v, decay, beta, scale, epsilon):
    """Linear attention by its definition; returns the outputs and the state [batch, heads, width, value_width]."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    if epsilon:
        q, k = (x * (x.square().sum(-1, keepdim=True) + epsilon).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        d = decay[:, t].double().exp()
        state = state * (d[..., None, None] if d.dim() == 2 else d[..., None])
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None].double() * (u - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


CASES = [  # positions, key heads, heads, width, value width, a decay per row, delta rule
    (7, 2, 4, 16, 16, False, True),
    (40, 1, 3, 24, 40, True, True),
    (33, 2, 2, 128, 128, False, True),
    (20, 2, 4, 7, 5, True, False),
    (9, 2, 2, 64, 64, False, False),
]


def inputs_of(case, dtype=torch.float32):
    positions, key_heads, heads, width, value_width, per_row, delta = case
    torch.manual_seed(sum(case))
    q, k = (torch.randn(2, positions, key_heads, width).to(dtype) for _ in range(2))
    v = torch.randn(2, positions, heads, value_width).to(dtype)
    decay = -torch.rand(2, positions, heads, *([width] if per_row else []))
    return q, k, v, decay, torch.rand(2, positions, heads) if delta else None


def state_of(case):
    return torch.full(state_shape(2, case[2], case[3], case[4]), 7.0)


@pytest.mark.parametrize("case", CASES)
def test_linear_attention_compared_with_its_definition(case):
    q, k, v, decay, beta = inputs_of(case)
    state, epsilon = state_of(case), 1e-6 if case[6] else 0.0
    out = lowbit.linear_attention(q, k, v, decay, state, torch.tensor(0), beta=beta, norm_epsilon=epsilon)
    expected, expected_state = in_float64(q, k, v, decay, beta, case[3] ** -0.5, epsilon)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)
    columns = state.permute(0, 1, 3, 2, 4).flatten(3)[..., : case[4]]
    torch.testing.assert_close(columns.double(), expected_state, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_any_cut_of_a_text_and_any_number_of_threads_give_the_same_bits(case, dtype):
    q, k, v, decay, beta = inputs_of(case, dtype)
    whole, threads = state_of(case), torch.get_num_threads()
    expected = lowbit.linear_attention(q, k, v, decay, whole, torch.tensor(0), beta=beta)
    pieces, outputs = state_of(case) * 3, []
    for begin, end in ((0, 1), (1, 4), (4, case[0])):
        part = slice(begin, end)
        cut = None if beta is None else beta[:, part].contiguous()
        outputs.append(
            lowbit.linear_attention(
                q[:, part], k[:, part], v[:, part], decay[:, part].contiguous(), pieces, torch.tensor(begin), beta=cut
            )
        )
    assert torch.cat(outputs, 1).equal(expected)
    try:
        torch.set_num_threads(3)
        again = state_of(case)
        assert lowbit.linear_attention(q, k, v, decay, again, torch.tensor(0), beta=beta).equal(expected)
    finally:
        torch.set_num_threads(threads)
    for state in (pieces, again):
        columns = [tensor.permute(0, 1, 3, 2, 4).flatten(3)[..., : case[4]] for tensor in (state, whole)]
        assert columns[0].equal(columns[1])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_conv_compared_with_conv1d_and_in_pieces(dtype, silu):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 30, 70), (4, 70), (70,)))
    state = torch.ones(2, 3, 70, dtype=dtype)
    out = lowbit.short_conv(x, weight, state, torch.tensor(0), bias=bias, silu=silu)
    expected = F.conv1d(x.float().transpose(1, 2), weight.float().t()[:, None], bias.float(), padding=3, groups=70)
    expected = expected[..., :30].transpose(1, 2)
    expected = (F.silu(expected) if silu else expected).to(dtype)
    torch.testing.assert_close(out, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert state.equal(x[:, -3:])
    pieces = torch.ones(2, 3, 70, dtype=dtype)
    outputs = [
        lowbit.short_conv(x[:, begin:end], weight, pieces, torch.tensor(begin), bias=bias, silu=silu)
        for begin, end in ((0, 1), (1, 3), (3, 30))
    ]
    assert torch.cat(outputs, 1).equal(out)
    assert pieces.equal(state)


def test_a_decay_above_zero_counts_as_zero_and_nan_stays_in_its_head():
    q, k, v, decay, _ = inputs_of((5, 2, 2, 16, 16, False, False))
    zero, above = (torch.full_like(decay, value) for value in (0.0, 3.0))
    results = [
        lowbit.linear_attention(q, k, v, d, state_of(CASES[0])[:, :2].contiguous(), torch.tensor(0)) for d in (zero, above)
    ]
    assert results[0].equal(results[1])
    v = v.clone()
    v[0, 2, 1] = torch.nan
    out = lowbit.linear_attention(q, k, v, decay, state_of(CASES[0])[:, :2].contiguous(), torch.tensor(0))
    assert out[0, 2:, 1].isnan().all() and not out[0, :2].isnan().any() and not out[:, :, 0].isnan().any()


def test_refusals():
    q, k, v, decay, beta = inputs_of(CASES[0])
    state, start = state_of(CASES[0]), torch.tensor(0)

    def call(**changed):
        given = dict(q=q, k=k, v=v, decay=decay, state=state, start=start, beta=beta) | changed
        return lowbit.linear_attention(**given)

    before = state.clone()
    for changed, sentence in (
        ({"q": q.double()}, "q has dtype float64; expected float32, bfloat16 or float16"),
        ({"q": q[0]}, r"q has shape \[7, 2, 16\]; expected \[batch, positions, heads, width\]"),
        ({"k": k[:, :3]}, r"k has shape \[2, 3, 2, 16\]; expected \[2, 7, 2, 16\]"),
        ({"k": k.transpose(2, 3).contiguous().transpose(2, 3)}, "k has stride 2 in its last dimension; expected 1"),
        ({"v": v[:, :, :3]}, "v has 3 heads; expected 1 or more times 2, the heads of q and k"),
        ({"decay": decay[..., None]}, r"decay has shape \[2, 7, 4, 1\]; expected \[2, 7, 4, 16\]"),
        ({"beta": beta[:, :2]}, r"beta"),
        ({"state": state[..., :8]}, "state"),
        ({"state": state.half()}, "state has dtype float16; expected float32"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"norm_epsilon": -1.0}, "norm_epsilon -1"),
        ({"state": q.new_zeros(1).expand(state.shape)}, "state"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(**changed)
    with pytest.raises(IndexError, match="start is -1; expected 0 or more"):
        call(start=torch.tensor(-1))
    with pytest.raises(RuntimeError, match="lowbit.linear_attention has no gradients"):
        call(q=q.clone().requires_grad_())
    assert state.equal(before)
    with pytest.raises(ValueError, match=r"weight has shape \[17, 4\]; expected \[taps, channels\] with 1 to 16 taps"):
        lowbit.short_conv(torch.zeros(1, 2, 4), torch.zeros(17, 4), torch.zeros(1, 16, 4), start)
    with pytest.raises(ValueError, match=r"state has shape \[1, 2, 4\]; expected \[1, 3, 4\]"):
        lowbit.short_conv(torch.zeros(1, 2, 4), torch.zeros(4, 4), torch.zeros(1, 2, 4), start)


PROMPT = [5, 9, 3, 22, 17, 5, 9, 3, 22, 17, 5, 9]
# Gated delta rule with attention layers; short convolutions; both kinds in a layer; Mamba-2 with MLP-only layers; a decay per
# row; no attention.
HYBRIDS = ["qwen3_5_text", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear", "mamba2"]


def model_of(kind):
    torch.manual_seed(0)
    model = tiny_models.make(kind).eval()
    assert tiny_models.quantize(model)
    return model


@pytest.fixture(scope="module", params=HYBRIDS)
def decoder(request):
    return llm.Decoder(model_of(request.param), 96)


@pytest.mark.more
def test_a_hybrid_writes_the_same_text_alone_in_a_batch_and_after_a_prefix(decoder):
    assert decoder.recurrent
    expected = llm.generate(decoder, PROMPT, 16).tokens
    assert llm.generate(decoder, PROMPT, 16).tokens == expected
    prompts = [PROMPT, PROMPT[:5], [*PROMPT, 4, 4]]
    alone = [llm.generate(decoder, prompt, 16).tokens for prompt in prompts]
    assert [result.tokens for result in llm.generate_batch(decoder, prompts, 16, rows=7)] == alone
    prefix = decoder.read([*PROMPT, *range(20)])
    longer = [*PROMPT, *range(20), 3, 4]
    expected_longer = llm.generate(decoder, longer, 8).tokens
    batch = llm.generate_batch(decoder, [longer, PROMPT], 8, prefixes=[prefix])
    assert [result.cached_tokens for result in batch] == [32, 0]  # a state cannot be cut back to fewer tokens
    assert [result.tokens for result in batch] == [expected_longer, expected[:8]]
    cached = decoder.begin(prefix, longer)
    assert cached == 32 and llm.generate(decoder, longer, 8, cached=cached).tokens == expected_longer
    assert decoder.begin(prefix, PROMPT) == 0
    both = llm.generate_batch(decoder, [longer, [*longer[:-2], 9, 9]], 8)  # the first one's call ends where the second begins
    assert [result.cached_tokens for result in both] == [0, 32]
    assert both[0].tokens == expected_longer
    assert both[1].tokens == llm.generate(decoder, [*longer[:-2], 9, 9], 8).tokens


@pytest.mark.parametrize("wrong", [0, 3])
def test_speculative_decoding_of_a_hybrid_writes_the_same_text(decoder, wrong, monkeypatch):
    """All guesses are right except every `wrong`-th."""
    expected = llm.generate(decoder, PROMPT, 30).tokens
    text = [*PROMPT, *expected]

    class Oracle:
        def guess(self, known, count):
            guesses = text[len(known) : len(known) + count]
            places = range(len(known), len(known) + len(guesses))
            return [token ^ (bool(wrong) and place % wrong == 0) for token, place in zip(guesses, places)]

    monkeypatch.setattr("lowbit.llm.guessing.Lookup", Oracle)
    result = llm.generate(decoder, PROMPT, 30, guesses=4)
    assert result.tokens == expected
    assert result.guessed > result.accepted > 0 if wrong else result.guessed == result.accepted > 0
    assert result.decode_calls < 29


def test_states_can_only_be_cut_back_to_a_copy():
    decoder = llm.Decoder(model_of("lfm2"), 96)
    expected = [decoder(torch.tensor([PROMPT[: end + 1]]), torch.tensor([0])) for end in range(len(PROMPT))]
    decoder(torch.tensor([PROMPT[:6]]), torch.tensor([0]))
    for place in (6, 7, 8):
        decoder(torch.tensor([[PROMPT[place]]]), torch.tensor([place]))
    assert [decoder.kept(count) for count in (12, 9, 8, 6, 5)] == [9, 9, 6, 6, 0]
    with pytest.raises(ValueError, match=r"start is 8; expected 0, or 6, where the states"):
        decoder(torch.tensor([[1]]), torch.tensor([8]))
    assert decoder(torch.tensor([PROMPT[6:8]]), torch.tensor([6])).equal(expected[7])
    assert decoder(torch.tensor([PROMPT[8:]]), torch.tensor([8])).equal(expected[-1])
    longer = llm.Decoder(model_of("lfm2"), 96).read(PROMPT)
    assert longer.usable(3) == 0 and longer.usable(len(PROMPT)) == len(PROMPT)


def test_a_released_hybrid_is_unchanged():
    model = model_of("falcon_h1")
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(tokens).logits
        keys = {name: dict(vars(module)) for name, module in model.named_modules()}
        decoder = llm.Decoder(model, 96)
        decoder(tokens, torch.tensor([0]))
        decoder.release()
        assert model(tokens).logits.equal(before)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == {name: set(own) for name, own in keys.items()}
    copy.deepcopy(model)


@pytest.mark.more
@pytest.mark.parametrize("suffix, plan", [("pte", True), ("pte", False), ("pt2", False)])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1"])
def test_an_exported_hybrid_writes_the_same_text(kind, suffix, plan, tmp_path):
    decoder = llm.Decoder(model_of(kind), 64)
    expected = llm.generate(decoder, PROMPT, 12).tokens
    llm.export_decoder(decoder, tmp_path / f"model.{suffix}", chunk=8, plan=plan)
    step = llm.load_decoder(tmp_path / f"model.{suffix}")
    assert step.recurrent
    for _ in range(2):
        assert llm.generate(step, PROMPT, 12).tokens == expected
    assert step.kept(len(PROMPT) + 11) == len(PROMPT) + 11 and step.kept(len(PROMPT)) == 0
    with pytest.raises(ValueError, match="start is 3; expected 0 or 23"):
        step(torch.tensor([[1]]), torch.tensor([3]))


@pytest.mark.more
def test_a_compiled_hybrid_writes_the_same_text():
    decoder = llm.Decoder(model_of("qwen3_5_text"), 64)
    expected = llm.generate(decoder, PROMPT, 12).tokens
    step = llm.compile_decoder(decoder)
    assert llm.generate(step, PROMPT, 12).tokens == expected
    assert step.recurrent and step.kept(30) == len(PROMPT) + 11
