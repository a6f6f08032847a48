"""Rotary positions of transformers' models computed by lowbit: the same bits, gradients, compiled code, functions that stay."""

import copy
import functools
import inspect
import pickle
from importlib import import_module

import lowbit
import pytest
import torch
from lowbit.hf import rotary
from lowbit.hf.rebinding import with_globals
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from lowbit.llm import Decoder, generate_batch

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
# Model, function, layout, whether bfloat16 is rounded once, whether part of a head may be rotated.
FUNCTIONS = [
    ("llama", "apply_rotary_pos_emb", "halves", False, False),
    ("gpt_neox", "apply_rotary_pos_emb", "halves", False, True),
    ("cohere", "apply_rotary_pos_emb", "adjacent", True, False),
    ("glm", "apply_rotary_pos_emb", "adjacent_half_table", False, True),
    ("ernie4_5", "apply_rotary_pos_emb", "adjacent_half_table", True, False),
    ("modernbert", "apply_rotary_pos_emb", "halves", True, False),
    ("deepseek_v3", "apply_rotary_pos_emb_interleave", "adjacent_to_halves", False, False),
]


class Count(TorchDispatchMode):
    """Counts calls of the operator, without those that it refuses."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls += func is torch.ops.lowbit.rotary.default
        return result


def function_of(kind, name="apply_rotary_pos_emb"):
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)


def same(a, b):
    return all(x.dtype is y.dtype and x.equal(y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "name", "layout", "round_once", "part"), FUNCTIONS)
def test_functions_of_transformers(kind, name, layout, round_once, part):
    function = function_of(kind, name)
    fused = rotary.fused(function)
    form = rotary.ROTARY_LAYOUTS.index(layout)
    assert fused.whole[FLOAT32, FLOAT32] == (form, False) and fused.whole[BFLOAT16, BFLOAT16] == (form, round_once)
    assert ((FLOAT16, FLOAT16) in fused.part) == part
    torch.manual_seed(1)
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        for heads_dim in (1, 2):
            for positions in (1, 7):
                q = torch.randn(2, positions, 4 * 32).to(dtype).unflatten(-1, (4, 32))
                k = torch.randn(2, positions, 2 * 32).to(dtype).unflatten(-1, (2, 32))
                if heads_dim == 1:
                    q, k = q.transpose(1, 2), k.transpose(1, 2)
                cos, sin = torch.randn(2, 2, positions, 16 if part else 32).to(dtype)
                with Count() as count:
                    result = fused(q, k, cos, sin, unsqueeze_dim=heads_dim)
                assert count.calls == 1
                assert same(result, function(q, k, cos, sin, unsqueeze_dim=heads_dim))


def test_tables_of_another_type():
    """OLMo's tables are float32 in any model: float32 products are rounded once."""
    function, llama = function_of("olmo2"), function_of("llama")
    fused, of_llama = rotary.fused(function), rotary.fused(llama)
    q, k, cos, sin = (torch.randn(1, 2, 3, 16, dtype=BFLOAT16) for _ in range(4))
    cos, sin = cos[:, 0].float(), sin[:, 0].float()
    with Count() as count:
        assert same(fused(q, k, cos, sin), function(q, k, cos, sin))
    assert count.calls == 1
    with Count() as count:
        assert same(of_llama(q, k, cos, sin), llama(q, k, cos, sin))  # float32
    assert count.calls == 0


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Turns in the other direction."""
    return function_of("llama")(q, k, cos, -sin, unsqueeze_dim)


def test_functions_that_are_not_replaced():
    for function in (
        apply_rotary_pos_emb,
        function_of("gpt_oss"),
        function_of("gptj"),
        function_of("llama4", "apply_rotary_emb"),
    ):
        assert rotary.fused(function) is function


def test_calls_that_run_the_original_code():
    function = function_of("llama")
    fused = rotary.fused(function)
    q, k, table = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 3, 16), torch.randn(1, 3, 16)
    every_second = torch.randn(2, 4, 3, 32)[..., ::2]
    per_head = torch.randn(2, 4, 3, 16)
    calls = [
        ((q, k, table, table, 1), {}),  # a fifth argument
        ((every_second, k, table, table), {}),
        ((q[0], k[0], table, table), {"unsqueeze_dim": 0}),
        ((q, k, table[:, :1], table[:, :1]), {}),  # one position for all
        ((q, q, per_head, per_head), {"unsqueeze_dim": 0}),
        ((q.double(), k.double(), table.double(), table.double()), {}),
    ]
    for arguments, more in calls:
        with Count() as count:
            assert same(fused(*arguments, **more), function(*arguments, **more))
        assert count.calls == 0
    with pytest.raises(RuntimeError, match="must match"):  # this function turns whole heads only
        fused(q, k, table[..., :8], table[..., :8])
    with Count() as count:
        fused(q.clone().requires_grad_(), k, table, table)[0].sum().backward()
    assert count.calls == 0


SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK = dict(
    q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, first_k_dense_replace=2,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
)  # fmt: skip
MODELS = {
    "llama": {"num_key_value_heads": 2},
    "gpt_neox": {},
    "cohere": {"num_key_value_heads": 2},
    "glm": {"num_key_value_heads": 2, "head_dim": 16},
    "falcon": {"alibi": False},
    "deepseek_v3": DEEPSEEK,
}


def model_of(kind, dtype=FLOAT32):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def logits_of(decoder):
    tokens = torch.tensor([[5, 8, 13, 21, 34, 55]])
    with torch.no_grad():
        parts = [decoder(tokens, torch.tensor([0]))]
        parts += [decoder(torch.tensor([[token]]), torch.tensor([6 + at])) for at, token in enumerate((3, 1, 4))]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("llama", dtype) for dtype in (FLOAT32, BFLOAT16)),
        *((kind, FLOAT32) for kind in ("gpt_neox", "falcon", "deepseek_v3")),
        *((kind, BFLOAT16) for kind in ("cohere", "glm")),
    ],
)
def test_decoders(kind, dtype, monkeypatch):
    model = model_of(kind, dtype)
    lowbit.quantize_(model, {"*": lowbit.LinearConfig(8, 32)})
    decoder = Decoder(model, 32, plan=False)
    with Count() as count:
        found = logits_of(decoder)
    assert count.calls == 2 * 4  # layers, calls
    texts = generate_batch(decoder, [[5, 8, 13], [21, 34]], 5)
    decoder = Decoder(model, 32)
    planned = logits_of(decoder)
    decoder.release()
    assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setattr(rotary, "replace", lambda model: [])
    monkeypatch.setattr(rotary, "fused", lambda function: function)
    plain = Decoder(model, 32, plan=False)
    with Count() as count:
        expected = logits_of(plain)
    assert count.calls == 0
    assert found.equal(expected)
    # Routers have functions of torch, whose bits a plan does not have.
    assert planned.equal(expected) or (kind == "deepseek_v3" and planned.allclose(expected, atol=1e-2))
    assert [each.tokens for each in texts] == [each.tokens for each in generate_batch(plain, [[5, 8, 13], [21, 34]], 5)]


def renamed(function):
    """Renames an argument, as transformers does for older callers."""

    @functools.wraps(function)
    def call(*arguments, **more):
        return function(*arguments, **{{"old": "cache"}.get(name, name): value for name, value in more.items()})

    return call


def held_twice(function):
    other = function

    @functools.wraps(function)
    def call(*arguments, **more):
        return (function or other)(*arguments, **more)

    return call


def held_in_a_list(function):
    functions = [function]

    @functools.wraps(function)
    def call(*arguments, **more):
        return functions[0](*arguments, **more)

    return call


@pytest.mark.parametrize(
    ("wrap", "replaced"),
    [(renamed, True), (lambda forward: renamed(renamed(forward)), True), (held_twice, False), (held_in_a_list, False)],
)
def test_functions_in_wrappers(wrap, replaced, monkeypatch):
    model = model_of("llama")
    expected = logits_of(Decoder(model, 32, plan=False))
    kind = type(model.model.layers[0].self_attn)
    wrapped = wrap(kind.forward)
    wrapped.mark = 1
    monkeypatch.setattr(kind, "forward", wrapped)
    decoder = Decoder(model, 32, plan=False)
    with Count() as count:
        assert logits_of(decoder).equal(expected)
    assert count.calls == (2 * 4 if replaced else 0)
    if replaced:
        own = with_globals(wrapped, {"x": 1})
        assert own.mark == 1 and own.__wrapped__ is not wrapped.__wrapped__ and own.__qualname__ == wrapped.__qualname__
        assert inspect.unwrap(own).__globals__["x"] == 1 and "x" not in own.__globals__
    else:
        with pytest.raises(ValueError, match=f"in {2 if wrap is held_twice else 0} cells of its closure; expected 1"):
            with_globals(wrapped, {})
    with pytest.raises(ValueError, match="is a partial; expected a Python function"):
        with_globals(functools.partial(wrapped), {})


def test_fused_models():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **SIZES, num_key_value_heads=2, head_dim=16)
    model = transformers.AutoModel.from_config(config).eval()
    tokens = torch.randint(3, 97, (2, 9))
    plain = copy.deepcopy(model)
    assert lowbit.fuse_(model).rotary == 2 and lowbit.fuse_(model).rotary == 0
    model.set_attn_implementation("sdpa")
    results = []
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with Count() as count, torch.no_grad():
            results.append(each(input_ids=tokens).last_hidden_state)
        assert count.calls == 2
    assert results[0].equal(results[1]) and results[0].equal(results[2])
    for each in (model, plain):
        each(input_ids=tokens).last_hidden_state.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)(input_ids=tokens).last_hidden_state
    torch.testing.assert_close(compiled, results[0], rtol=1e-5, atol=1e-5)
