"""calibrate: all kinds of transformers models, block by block."""

import copy
import functools

import lowbit
import pytest
import torch
import transformers
from calibration_models import SHARED, bert, buffers, errors, hidden, linears, llama, packed, tokens
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.calibration import calibrate, distilling, widths
from lowbit.calibration import model as implementation
from lowbit.calibration.tables import moments_of_tables
from torch import nn

pytestmark = pytest.mark.more


def test_llama_gets_better():
    for bits in (2, 3):
        found = errors(llama(), LinearConfig(bits, 32))
        assert found[2] < 0.8 * found[0], found
        assert found[1] < found[0], found


# With mins: test_scales_of_experts_are_learned.
@pytest.mark.parametrize("config", [LinearConfig(2, 32), LinearConfig(2, levels="fit")])
def test_tuned_scales_are_better_at_two_bits(config):
    torch.manual_seed(3)
    found = errors(llama(), {"*": config, "lm_head": None}, ("gptq", "tuned"))
    assert found[1] < found[0], found  # only slightly, because GPTQ's descent has already chosen scales


def test_bert_s_biases_are_tuned_too():
    model = bert()
    floats = {name: module.bias.clone() for name, module in model.named_modules() if type(module) is nn.Linear}
    config = {"*": LinearConfig(2), "*pooler*": None}
    result = calibrate(model, tokens(20), config, "tuned")
    assert "tuned" in result.methods.values()
    for name, method in result.methods.items():
        bias = lowbit.unpack(model.get_submodule(name).packed_weight).bias
        assert torch.equal(bias, floats[name]) == (method != "tuned"), name


def test_all_scales_learned_together_are_better():
    for make, config in (
        (llama, {"*": LinearConfig(2, levels="fit"), "model.embed_tokens": EmbeddingConfig(2, levels="fit")}),
        (bert, {"*": LinearConfig(2), "*embeddings": EmbeddingConfig(2), "*pooler*": None}),
    ):
        torch.manual_seed(3)
        model = make()
        test = tokens(seed=1)
        wanted, found = hidden(model, test), []
        for method, options in (("gptq", {}), ("distilled", {"steps": 32, "rate": 0.004})):
            changed = copy.deepcopy(model)
            result = implementation.run(
                changed, tokens(12), config, method, tokenizer=None, window=64, max_tokens=4096, progress=None,
                options=options,
            )  # fmt: skip
            assert set(result.methods.values()) == {method}
            found.append(float((hidden(changed, test) - wanted).square().sum() / wanted.square().sum()))
        assert found[1] < 0.97 * found[0], (make, found)


def test_a_rate_that_is_too_high_is_lowered(monkeypatch):
    """If the first pass over the text makes the held-out error larger; at most twice."""
    model, test, rates, steps = llama(), tokens(seed=1), [], distilling.adam_steps
    config = {"*": LinearConfig(2), "model.embed_tokens": EmbeddingConfig(2)}

    def spied(loss, epoch, parameters, least, rate, schedule):
        rates.append(rate)
        return steps(loss, epoch, parameters, least, rate, schedule)

    monkeypatch.setattr(distilling, "adam_steps", spied)
    wanted, found = hidden(model, test), []
    for rate in (0.004, 1.0, 64.0):
        changed = copy.deepcopy(model)
        result = implementation.run(
            changed, tokens(12), config, "distilled", tokenizer=None, window=64, max_tokens=4096, progress=None,
            options={"steps": 32, "rate": rate},
        )  # fmt: skip
        found.append(float((hidden(changed, test) - wanted).square().sum() / wanted.square().sum()))
        methods = set(result.methods.values())
        assert methods == ({"gptq"} if rate == 64.0 else {"distilled"})
        assert rates == {0.004: [0.004], 1.0: [1.0, 0.25], 64.0: [64.0, 16.0, 4.0]}[rate]
        rates.clear()
    assert found[0] < found[2] and found[1] < found[2], found


def test_a_large_head_alone_is_not_distilled():
    model, steps = llama(tied=False), []
    model.resize_token_embeddings(1200)
    result = calibrate(
        model, tokens(12), {"lm_head": LinearConfig(2)}, "distilled", progress=lambda done, total: steps.append((done, total))
    )
    assert result.methods == {"lm_head": "gptq"} and steps[-1] == (2, 2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [1100, 1200])  # the text has 1152 tokens
def test_the_scales_of_a_large_head_are_not_learned(tied, rows):
    """Nor those of its table; a table of its own is learned."""
    model = llama(tied)
    model.resize_token_embeddings(rows)
    names = {"*": LinearConfig(2), "model.embed_tokens": EmbeddingConfig(2)}
    found = []
    for method in ("gptq", "distilled"):
        changed = copy.deepcopy(model)
        result = implementation.run(
            changed, tokens(12), names, method, tokenizer=None, window=64, max_tokens=4096, progress=None,
            options={"steps": 11, "rate": 0.004} if method == "distilled" else {},
        )  # fmt: skip
        found.append(buffers(changed))
    same = {name for name in found[0] if torch.equal(found[0][name], found[1][name])}
    large = {f"{name}.packed_weight" for name in (["lm_head", "model.embed_tokens"] if tied else ["lm_head"])}
    assert same == (large if rows == 1200 else set())
    assert [name for name, used in result.methods.items() if used == "gptq"] == (["lm_head"] if rows == 1200 else [])


def test_layers_that_no_text_reaches_stay_float(monkeypatch):
    """Rows of an embedding table that do not occur in the text keep their values, and so do levels from the config."""
    model = llama(tied=False)
    table = (-127, -40, 40, 127)
    names = {"*": LinearConfig(2, levels=table), "model.embed_tokens": EmbeddingConfig(2)}
    plain = lowbit.quantize_(copy.deepcopy(model), names)
    unseen = 11
    data = [torch.where(batch == unseen, 12, batch) for batch in tokens(8)]
    result = implementation.run(
        model, data, names, "distilled", tokenizer=None, window=64, max_tokens=4096, progress=None,
        options={"steps": 24, "rate": 0.004},
    )  # fmt: skip
    assert set(result.methods.values()) == {"distilled"}
    before, after = (lowbit.unpack(each.model.embed_tokens.packed_weight) for each in (plain, model))
    assert torch.equal(before.codes, after.codes)
    changed = (before.scales != after.scales).any(1)
    assert not changed[unseen] and changed[data[0].unique()].any()
    assert lowbit.operators.ops.info(model.lm_head.packed_weight).levels == table


def test_llama_in_bfloat16():
    model = llama().bfloat16()
    names = linears(model)
    result = calibrate(model, tokens(8), LinearConfig(4), "tuned")
    assert packed(model) == names == set(result.methods)
    assert hidden(model, tokens(1)).isfinite().all()


def test_bert_gets_better():
    found = errors(bert(), {"*": LinearConfig(2, 32), "*pooler*": None})
    assert found[2] < 0.7 * found[0], found


class Mixing(nn.Module):
    """The smallest model with a table and outputs: a row times a matrix."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.table = nn.Embedding(120, len(matrix))
        self.matrix = matrix

    def forward(self, input_ids, **_):
        return (self.table(input_ids) @ self.matrix,)


def test_moments_of_tables_are_those_of_derivatives():
    """The moments are those of the derivatives, here of a known matrix."""
    torch.manual_seed(0)
    matrix = torch.randn(16, 16) * torch.linspace(-1.5, 1.5, 16).exp()
    found = moments_of_tables(Mixing(matrix), list(map(as_batch, tokens(20))), ["table"])["table"]
    assert found.tokens == 20 * 2 * 48
    similar = torch.nn.functional.cosine_similarity(found.square.flatten(), (matrix @ matrix.T).flatten(), 0)
    assert similar > 0.98
    # Masked tokens do not count.
    batch = as_batch(tokens(1)[0])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 20:] = 0
    assert moments_of_tables(Mixing(matrix), [batch], ["table"])["table"].tokens == 2 * 20
    assert moments_of_tables(llama(tied=False), [batch], ["model.embed_tokens"]) == {}


def as_batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids}


@pytest.mark.parametrize("levels", [None, "fit"])
def test_tables_of_an_encoder_make_up_for_their_errors(levels):
    """Also for words that are not in the text; at 1 bit those are as without calibration."""
    torch.manual_seed(3)
    model = bert()
    # Correlated features, as in trained models.
    mixed = torch.randn(64, 64) * torch.linspace(-2, 1, 64).exp()
    for name in ("query", "key", "value"):
        layer = model.encoder.layer[0].attention.self.get_submodule(name)
        layer.weight.data = layer.weight.data @ mixed
    model.embeddings.LayerNorm.weight.data.mul_(torch.linspace(-1.5, 1.5, 64).exp())
    table = "embeddings.word_embeddings"
    data = [torch.where(batch < 60, batch, batch - 60) for batch in tokens(20)]
    test = [torch.where(batch < 60, batch + 60, batch) for batch in tokens(seed=1)]
    wanted, found = hidden(model, test), []
    for bits, method in ((3, "importance"), (3, "gptq"), (1, "importance"), (1, "gptq")):
        changed = copy.deepcopy(model)
        embedding = EmbeddingConfig(bits, levels=bits > 1 and levels or None)
        config = {"*": None, "*.2.output.dense": LinearConfig(8), table: embedding}
        result = calibrate(changed, data, config, method)
        assert set(result.methods) == {"encoder.layer.2.output.dense"}
        found.append((float((hidden(changed, test) - wanted).square().sum()), changed.get_submodule(table).packed_weight))
    assert found[1][0] < 0.9 * found[0][0], found
    assert torch.equal(found[2][1], found[3][1])


def test_padding_does_not_count():
    """Masked tokens may have any value."""
    ids = tokens(8)
    mask = torch.ones_like(ids[0])
    mask[1, 30:] = 0
    results = []
    for padding in (0, 77):
        model = copy.deepcopy(_BERT)
        padded = [torch.where(mask == 1, batch, padding) for batch in ids]
        data = [{"input_ids": batch, "attention_mask": mask} for batch in padded]
        result = calibrate(model, data, LinearConfig(3), "gptq")
        assert result.tokens == 8 * (48 + 30)
        results.append(buffers(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


torch.manual_seed(5)
_BERT = bert()


def test_the_conv1d_of_gpt2():
    """It is calibrated like a linear layer; if it stays float it does not change."""
    config = transformers.GPT2Config(vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    wte = {"*": LinearConfig(4), "transformer.wte": EmbeddingConfig(4)}
    wte["*.c_fc"] = None
    float_layer = model.transformer.h[0].mlp.c_fc
    result = calibrate(model, tokens(), wte)
    names = [f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj")]
    assert result.methods == {"lm_head": "gptq"} | dict.fromkeys(names, "gptq") and not result.unquantized
    assert model.transformer.h[0].mlp.c_fc is float_layer
    assert all(isinstance(model.get_submodule(name), lowbit.nn.Linear) for name in names)
    assert model.lm_head.packed_weight is model.transformer.wte.packed_weight


def test_t5_has_two_lists_of_blocks():
    config = transformers.T5Config(vocab_size=120, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    data = [{"input_ids": a, "decoder_input_ids": b} for a, b in zip(tokens(8), tokens(8, 32, seed=3))]
    names = {name for name in linears(model) if not name.endswith("wo")}  # with a dtype that the architecture requires
    result = calibrate(model, data, {"*": LinearConfig(3), "*.wo": None, "lm_head": None}, "gptq")
    assert packed(model) == names - {"lm_head"} == set(result.methods)
    with torch.no_grad():
        assert model(**data[0]).logits.isfinite().all()


class Detour(nn.Module):
    """Blocks with other code between them, which do not form a chain."""

    def __init__(self):
        super().__init__()
        self.config = transformers.LlamaConfig(**SHARED)
        self.table = nn.Embedding(120, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x) + x)
        return x


class DetourBlocks(Detour):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))


@pytest.mark.parametrize("kind", [Detour, DetourBlocks])
def test_blocks_that_do_not_form_a_chain(kind):
    model = kind()
    names, test = linears(model), tokens(seed=1)
    wanted, plain = model(test[0]).detach(), lowbit.quantize_(copy.deepcopy(model), LinearConfig(2))
    result = calibrate(model, tokens(20), LinearConfig(2), "gptq")
    assert packed(model) == names and set(result.methods.values()) == {"gptq"}
    with torch.no_grad():
        found = [float((each(test[0]) - wanted).square().mean()) for each in (model, plain)]
    assert found[0] < 0.8 * found[1]


class Ordered(DetourBlocks):
    """Calls its blocks in any order."""

    order = (0, 1, 2)

    def forward(self, input_ids):
        x = self.table(input_ids)
        for number in self.order:
            x = self.blocks[number](x)
        return transformers.modeling_outputs.BaseModelOutput(x)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 0, 1, 2)])
def test_runs_skip_only_blocks_that_no_change_reaches(order):
    model = Ordered().eval()
    model.order = order
    batches = [{"input_ids": ids} for ids in tokens(2)]
    with torch.inference_mode():
        runs = widths._Runs(model, batches, linears(model))
        assert list(runs.lists) == (["blocks"] if order == (0, 1, 2) else [])
        for name in linears(model):
            weight = model.get_submodule(name).weight
            kept = weight.clone()
            weight.mul_(0.5)
            assert torch.equal(runs.outputs([name]), torch.cat([widths._output(model, batch)[0] for batch in batches]))
            weight.copy_(kept)


def test_runs_keep_a_block_s_own_forward():
    model = Ordered().eval()
    block = model.blocks[0]
    block.forward = own = functools.partial(type(block).forward, block)
    with torch.inference_mode():
        widths._Runs(model, [{"input_ids": ids} for ids in tokens(2)], linears(model))
    assert block.forward is own and "forward" not in vars(model.blocks[1])


@pytest.mark.parametrize("norm", ["weight_norm", "orthogonal"])
def test_mixed_widths_of_a_parametrized_layer(norm):
    model, plain = Ordered().eval(), Ordered().eval()
    plain.load_state_dict(model.state_dict())
    layer = getattr(nn.utils.parametrizations, norm)(model.blocks[1][0])
    plain.blocks[1][0].weight.data = layer.weight.detach().clone()
    for each in (model, plain):
        calibrate(each, tokens(4), lowbit.LowBitConfig(bits=4, embedding_bits=None), "importance", target_bits=4.5)
    found = [[module.packed_weight for module in each.modules() if hasattr(module, "packed_weight")] for each in (model, plain)]
    assert len(found[0]) == 4 and all(map(torch.equal, *found))


class FusedConfig(transformers.PretrainedConfig):
    vocab_size = 120


class Fused(nn.Module):
    """torch's encoder layers, which in evaluation pass the weights of linear layers to one fused operator."""

    def __init__(self):
        super().__init__()
        self.config = FusedConfig()
        self.table = nn.Embedding(120, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids):
        return self.encoder(self.table(input_ids))


def test_layers_that_a_fused_operator_would_pass_by():
    torch.manual_seed(0)
    model, data = Fused().eval(), tokens(20)
    wanted = model(data[0]).detach()
    plain = lowbit.quantize_(copy.deepcopy(model), LinearConfig(2))
    names = {name for name in linears(model) if "out_proj" not in name}
    fast = torch.backends.mha.get_fastpath_enabled()
    result = calibrate(model, data, LinearConfig(2), "gptq")
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert packed(model) == names == set(result.methods) and set(result.methods.values()) == {"gptq"}
    with torch.no_grad():
        found = [float((each(data[0]) - wanted).square().mean()) for each in (model, plain)]
    assert found[0] < 0.8 * found[1]


def test_the_text_model_inside_an_image_model():
    """Its settings are in a nested config. With a cache enabled there, each run of a block would see the previous run's
    keys."""
    texts = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "sliding_window": 64,
    }  # fmt: skip
    images = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=texts, vision_config=images, mm_tokens_per_image=4)
    both = transformers.Gemma3ForConditionalGeneration(config).eval()
    alone = transformers.Gemma3ForCausalLM(config.text_config).eval()
    alone.model.load_state_dict(both.model.language_model.state_dict())
    ids = [torch.randint(0, 97, (4, 64)) for _ in range(3)]
    for model, where in ((both, "model.language_model"), (alone, "model")):
        calibrate(model, ids, {f"{where}.layers.*_proj": LinearConfig(3, 32)})
    assert "use_cache" not in config.to_dict() and config.text_config.use_cache is True  # as they were
    theirs = buffers(alone.model)
    assert len(theirs) == 14
    found = buffers(both.model.language_model)
    assert found.keys() == theirs.keys() and all(torch.equal(found[name], theirs[name]) for name in theirs)
