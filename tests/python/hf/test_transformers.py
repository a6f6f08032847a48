"""lowbit in transformers: quantizing and loading by from_pretrained, save_pretrained, generate."""

import json
import pickle
import sys

import lowbit
import pytest
import torch
from checkpoints import EMBED, HEAD, KINDS, TOKENS, UP, assert_same_model, load, make_model, quantized, save_model  # fmt: skip
from lowbit import LowBitConfig, quantize_checkpoint
from lowbit.calibration import calibrate
from lowbit.layers import packable
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompileConfig, LlamaForSequenceClassification, MixtralConfig, Qwen3MoeConfig

CONFIG = LowBitConfig(
    bits=3, group_size=32, embedding_bits=5, overrides={"*.down_proj": {"bits": 8, "mapping": "affine"}, "*.0.*.k_proj": None}
)


@pytest.mark.parametrize("kind", KINDS)
def test_three_ways_to_the_same_model(tmp_path, kind):
    source = save_model(tmp_path / "source", kind, sharded=True)
    expected = quantized(load(source), CONFIG)
    quantize_checkpoint(source, tmp_path / "packed", CONFIG, max_shard_bytes=40_000)
    loaded = load(tmp_path / "packed")
    made = load(source, quantization_config=CONFIG)
    for model in (loaded, made):
        assert_same_model(model, expected)
        assert not model.training and model.is_quantized and model.dtype == torch.bfloat16
    # Saved again, from either.
    for number, model in enumerate((loaded, made)):
        for size in ("1GB", "30KB"):
            target = tmp_path / f"saved-{number}-{size}"
            model.save_pretrained(target, max_shard_size=size)
            again = load(target)
            assert_same_model(again, expected)
            assert vars(again.config.quantization_config) == vars(CONFIG)
    for model in (loaded, made, again):
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert (table.packed_weight is head.packed_weight) == (kind != "untied")
        assert model.model.layers[1].self_attn.q_proj.info.has_bias == (kind == "bias")
        model.tie_weights()  # as users call it
        assert_same_model(model, expected)


def test_a_packed_file_is_mapped(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    model = load(tmp_path / "packed")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = [line.split() for line in maps if line.rstrip().endswith("/packed/model.safetensors")]
    ranges = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in mapped]
    packed = {name: buffer for name, buffer in model.named_buffers() if name.endswith("packed_weight")}
    assert len(packed) == 14  # of 15 layers: one stays float, and the head shares the embedding's weight
    for name, buffer in packed.items():
        assert any(begin <= buffer.data_ptr() and buffer.data_ptr() + buffer.numel() <= end for begin, end in ranges), name
        assert buffer.data_ptr() % 64 == 0, name


WITHOUT_LOWBIT = """
import sys
from transformers import AutoModel, AutoModelForCausalLM

for directory in sys.argv[1:]:
    for kind in (AutoModel, AutoModelForCausalLM):
        for options in ({}, {"dtype": "float32"}):
            try:
                kind.from_pretrained(directory, **options)
            except (RuntimeError, NotImplementedError) as error:
                assert any(part in str(error) for part in ("mismatch", "is invalid for input", "not implemented")), error
            else:
                sys.exit(f"{kind.__name__} loads {directory} with {options}, without its weights")
assert "lowbit.transformers" not in sys.modules
"""


@pytest.mark.more
def test_without_lowbit_a_checkpoint_does_not_load(tmp_path, run_python, monkeypatch):
    source = save_model(tmp_path / "source", "tied")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    quantize_checkpoint(source, tmp_path / "shards", CONFIG, max_shard_bytes=40_000)
    load(tmp_path / "packed").save_pretrained(tmp_path / "saved")
    sizes = {"vocab_size": 403, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    mixtures = {
        "qwen3": Qwen3MoeConfig(**sizes, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        "mixtral": MixtralConfig(**sizes, intermediate_size=32, num_local_experts=4),
    }
    for name, config in mixtures.items():
        experts = AutoModelForCausalLM.from_config(config)
        lowbit.quantize_(experts, {"*.experts.*": lowbit.LinearConfig(4, 32)}).save_pretrained(tmp_path / name)
        # By names in the model, because versions of transformers rename Mixtral's experts differently.
        assert set(experts.state_dict()) <= set(load_file(tmp_path / name / "model.safetensors"))
        assert_same_model(load(tmp_path / name), experts)
    directories = [tmp_path / name for name in ("packed", "shards", "saved", *mixtures)]
    monkeypatch.setenv("LOWBIT_AUTOLOAD", "0")
    result = run_python(WITHOUT_LOWBIT, *directories)
    assert result.returncode == 0, result.stderr


@pytest.mark.more
def test_loading_takes_no_memory_for_weights(tmp_path, run_python):
    source = save_model(tmp_path / "source", "untied", vocab_size=50_000, hidden_size=512, num_hidden_layers=1)
    quantize_checkpoint(source, tmp_path / "packed", LowBitConfig(bits=8, scale="absmax"))
    small = tmp_path / "small"
    quantize_checkpoint(save_model(tmp_path / "source-small"), small, CONFIG)
    script = """
import sys
import lowbit.transformers
from transformers import AutoModelForCausalLM
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
first = AutoModelForCausalLM.from_pretrained(sys.argv[1])
before = anonymous()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
print(anonymous() - before, sum(buffer.numel() for buffer in model.buffers()))
"""
    process = run_python(script, small, tmp_path / "packed")
    assert process.returncode == 0, process.stderr
    grown, size = map(int, process.stdout.split()[-2:])
    assert size > 54e6 and grown < 10e6


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_generate(tmp_path, kind):
    source = save_model(tmp_path / "source", kind)
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    model, expected = load(tmp_path / "packed"), quantized(load(source), CONFIG)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(TOKENS)}
    tokens = model.generate(TOKENS, **options)
    assert tokens.shape == (2, 17)
    assert torch.equal(tokens, expected.generate(TOKENS, **options))
    # In float32, because a static cache sums attention in another order, which matters in bfloat16 on some CPUs.
    model = load(tmp_path / "packed", dtype=torch.float32)
    tokens = model.generate(TOKENS, **options)
    assert torch.equal(tokens, model.generate(TOKENS, cache_implementation="static", **options))


def test_generate_compiled_with_a_static_cache(tmp_path):
    # In float32, because compiled code rounds bfloat16 in other places than eager code.
    source = save_model(tmp_path / "source", "tied", dtype=torch.float32)
    model = load(source, quantization_config=CONFIG)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(TOKENS)}
    expected = model.generate(TOKENS, **options)
    compiled = CompileConfig(mode="default", fullgraph=True)
    compiled._compile_all_devices = True  # by default transformers only compiles on GPUs
    assert not hasattr(model, "_compiled_call")
    found = model.generate(TOKENS, cache_implementation="static", compile_config=compiled, **options)
    assert hasattr(model, "_compiled_call") and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype(tmp_path, dtype):
    source = save_model(tmp_path / "source")
    quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    model = load(tmp_path / "packed", dtype=dtype)
    assert model.dtype == dtype and model.model.embed_tokens(TOKENS).dtype == dtype
    assert model(TOKENS).logits.dtype == dtype
    expected = load(source)
    quantized(expected, CONFIG).model.embed_tokens.to(dtype)
    for parameter in expected.parameters():  # not expected.to(dtype), which would also cast the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    assert_same_model(model, expected)
    if dtype != torch.float16:  # bfloat16 values quantize equally in float32; float16 would round them first
        assert_same_model(load(source, dtype=dtype, quantization_config=CONFIG), expected)


def test_layers_left_float(tmp_path):
    source = save_model(tmp_path / "source", "tied")
    cases = {
        "head": ({HEAD: None}, True, False),
        "table": ({EMBED: None}, False, False),  # a tied head stays with its table
        "table, not the head": ({EMBED: None, HEAD: {"bits": 4}}, False, True),
        "both": ({EMBED: None, HEAD: None}, False, False),
    }
    for name, (overrides, table_packed, head_packed) in cases.items():
        config = LowBitConfig(overrides=overrides)
        expected = quantized(load(source), config)
        quantize_checkpoint(source, tmp_path / name, config)
        for model in (load(tmp_path / name), load(source, quantization_config=config)):
            assert isinstance(model.get_input_embeddings(), lowbit.nn.Embedding) == table_packed, name
            assert isinstance(model.get_output_embeddings(), lowbit.nn.Linear) == head_packed, name
            assert_same_model(model, expected)
            model.save_pretrained(tmp_path / "saved")
            assert_same_model(load(tmp_path / "saved"), expected)


def test_a_new_head_on_a_packed_model(tmp_path):
    quantize_checkpoint(save_model(tmp_path / "source"), tmp_path / "packed", CONFIG)
    model = LlamaForSequenceClassification.from_pretrained(tmp_path / "packed", num_labels=3)
    assert isinstance(model.score, torch.nn.Linear) and bool(torch.isfinite(model.score.weight).all())
    expected = load(tmp_path / "packed").model
    assert torch.equal(model.model(TOKENS).last_hidden_state, expected(TOKENS).last_hidden_state)


@pytest.mark.parametrize("name", ["Mixtral", "Gemma3", "T5", "Bert", "ModernBert", "OPT", "SeamlessM4T", "Bart"])
def test_other_architectures(tmp_path, name):
    """Experts fused by transformers, scaled embeddings, three ways of tying, a tied head that the model initializes by name,
    scaled encoder and decoder tables with a shared weight, layers that stay in float32."""
    import transformers

    small = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model_class, config = {
        "Mixtral": (
            "MixtralForCausalLM",
            lambda: transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4),
        ),
        "Gemma3": ("Gemma3ForCausalLM", lambda: transformers.Gemma3TextConfig(**small, head_dim=16)),
        "T5": (
            "T5ForConditionalGeneration",
            lambda: transformers.T5Config(vocab_size=160, d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16),
        ),
        "Bert": ("BertForMaskedLM", lambda: transformers.BertConfig(**small)),
        "ModernBert": (
            "ModernBertForMaskedLM",
            lambda: transformers.ModernBertConfig(
                **small, pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
            ),
        ),
        "OPT": (
            "OPTForCausalLM",
            lambda: transformers.OPTConfig(
                vocab_size=160, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
            ),
        ),
        "SeamlessM4T": (
            "SeamlessM4TForTextToText",
            lambda: transformers.SeamlessM4TConfig(
                vocab_size=160,
                hidden_size=64,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=96,
                decoder_ffn_dim=96,
            ),
        ),
        "Bart": (
            "BartForConditionalGeneration",
            lambda: transformers.BartConfig(
                vocab_size=160,
                d_model=64,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=96,
                decoder_ffn_dim=96,
                scale_embedding=True,
            ),
        ),
    }[name]
    model_class = getattr(transformers, model_class)
    model_class(config()).save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed", CONFIG)
    expected = quantized(model_class.from_pretrained(tmp_path / "source"), CONFIG)
    first = model_class.from_pretrained(tmp_path / "packed")
    first.save_pretrained(tmp_path / "saved")
    inputs = {"input_ids": TOKENS % 160} | (
        {"decoder_input_ids": TOKENS % 160} if name in ("T5", "SeamlessM4T", "Bart") else {}
    )
    for model in (
        first,
        model_class.from_pretrained(tmp_path / "source", quantization_config=CONFIG),
        model_class.from_pretrained(tmp_path / "saved"),
    ):
        state = model.state_dict()
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.state_dict().items())
        assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    assert sum(key.endswith("packed_weight") for key in state) > 8


@pytest.mark.filterwarnings("ignore:.*share one weight, of which only")
@pytest.mark.parametrize("kind", KINDS)
def test_models_quantized_by_quantize_are_saved_and_loaded(tmp_path, kind):
    """After quantize_ and save_pretrained, from_pretrained gives the same model, whichever layers are packed."""
    source = save_model(tmp_path / "source", kind)
    mixed = {"*": lowbit.LinearConfig(4), "*embed*": lowbit.EmbeddingConfig(6, 16), "*.0.mlp.up_proj": None}
    mixed |= {"*down*": lowbit.LinearConfig(8, None, "affine"), HEAD: lowbit.LinearConfig(6, 16)}
    for number, config in enumerate((mixed, lowbit.LinearConfig(3), {"*embed*": lowbit.EmbeddingConfig()})):
        model, target = load(source), tmp_path / f"saved-{number}"
        lowbit.quantize_(model, config)
        model.save_pretrained(target)
        again = load(target)
        assert_same_model(again, model)
        settings = again.config.quantization_config
        assert settings.quant_method == "lowbit" and settings.select(load(source)).keys() == {
            name for name, layer in model.named_modules() if isinstance(layer, lowbit.nn.Linear | lowbit.nn.Embedding)
        }
        for each in (model, again, pickle.loads(pickle.dumps(model))):
            assert each.resize_token_embeddings(403) is each.get_input_embeddings()
            with pytest.raises(ValueError, match="is packed, with 403 rows, and cannot get 512: .* before quantizing"):
                each.resize_token_embeddings(500, pad_to_multiple_of=64)
        assert_same_model(again, model)
    whole = torch.nn.ModuleDict({"language": load(source)})
    lowbit.quantize_(whole, lowbit.LinearConfig())
    whole["language"].save_pretrained(tmp_path / "part")
    assert_same_model(load(tmp_path / "part"), whole["language"])


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("calibrated", [False, True])
def test_an_interrupted_model_is_saved_as_it_is(tmp_path, kind, calibrated, monkeypatch):
    """Some layers are packed and the others float."""
    model = load(save_model(tmp_path / "source", kind))
    config = {"*": lowbit.LinearConfig(4), "*embed*": lowbit.EmbeddingConfig(4)}
    calls, put = [], packable.put_packed

    def count(*_):
        calls.append(None)
        if len(calls) == 8:
            raise KeyboardInterrupt

    def interrupted(*arguments):
        count()
        return put(*arguments)

    with pytest.raises(KeyboardInterrupt):
        if calibrated:
            text = [torch.randint(403, (4, 64), generator=torch.Generator().manual_seed(0))]
            calibrate(model, text, config, method="importance", progress=count)
        else:
            monkeypatch.setattr(packable, "put_packed", interrupted)
            lowbit.quantize_(model, config)
    packed = sum(isinstance(layer, lowbit.nn.Packed) for layer in model.modules())
    assert 1 < packed < 15
    model.save_pretrained(tmp_path / "saved")
    assert_same_model(load(tmp_path / "saved"), model)


def test_an_unsupported_transformers_saves_no_partial_model(tmp_path, monkeypatch):
    model = make_model()
    monkeypatch.setitem(sys.modules, "lowbit.hf.quantizer", None)
    lowbit.quantize_(model, lowbit.LinearConfig())
    with pytest.raises(RuntimeError, match="lowbit cannot save this quantized model: "):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_the_last_override_counts(tmp_path):
    # Not in alphabetical order, in which transformers writes the keys of config.json.
    overrides = {"model.*": {"bits": 2}, "*.mlp.*": {"group_size": None}, "*.up_proj": None}
    config = LowBitConfig(overrides=overrides)
    selected = config.select(make_model())
    assert UP not in selected
    assert selected["model.layers.0.self_attn.q_proj"] == lowbit.LinearConfig(bits=2)
    assert selected["model.layers.0.mlp.down_proj"] == lowbit.LinearConfig(bits=4, group_size=None)
    assert selected[EMBED] == lowbit.EmbeddingConfig(bits=2)
    assert selected[HEAD] == lowbit.LinearConfig(bits=4)

    pairs = [list(pair) for pair in overrides.items()]
    model = load(save_model(tmp_path / "source"), quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed", config)
    for path in ("saved", "packed"):
        saved = json.loads((tmp_path / path / "config.json").read_text())["quantization_config"]
        assert saved["overrides"] == pairs
        assert load(tmp_path / path).config.quantization_config.select(make_model()) == selected
    for same in (
        LowBitConfig(overrides=pairs),
        LowBitConfig(**config.to_dict()),
        LowBitConfig.from_dict(json.loads(config.to_json_string())),
        LowBitConfig.from_dict({"quant_method": "lowbit", "overrides": overrides}),  # an older form
    ):
        assert vars(same) == vars(config)


@pytest.mark.parametrize("fields", [
    {}, {"bits": 2}, {"group_size": 64}, {"group_size": None}, {"mapping": "affine"}, {"scale": "absmax"},
    {"embedding_bits": 8},
    {"levels": "nf4"}, {"conv_bits": 4}, {"rotate": True}, {"activation_bits": 16}, {"format_version": 2},
    {"overrides": {"*": {"rotate": True}}},
    {"rotate": True, "overrides": {"lm_head": {"rotate": False, "bits": 8, "levels": None}, "*embed*": None}},
], ids=str)  # fmt: skip
def test_every_field_survives(fields):
    """`rotate` and `activation_bits` are omitted at their defaults, so that an older lowbit can read the config."""
    config = LowBitConfig(**fields)
    assert set(config.to_dict()) | {"rotate", "activation_bits"} == set(vars(config))
    assert ("rotate" in config.to_dict()) == config.rotate
    assert ("activation_bits" in config.to_dict()) == (config.activation_bits == 16)
    for same in (LowBitConfig(**config.to_dict()), LowBitConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))):
        assert vars(same) == vars(config) and same.to_dict() == config.to_dict()


def test_a_pattern_twice():
    pairs = [("*", {"bits": 4}), (HEAD, {"bits": 8}), ("*", {"bits": 2})]
    selected = LowBitConfig(overrides=pairs).select(make_model())
    assert {config.bits for config in selected.values()} == {2}


@pytest.mark.more
def test_imports(run_python, fork_python):
    """`import lowbit` imports neither transformers nor safetensors; when they are needed, an error names the missing
    package."""
    process = run_python("import sys, torch, lowbit; print([m for m in ('transformers', 'safetensors') if m in sys.modules])")
    assert process.stdout.splitlines()[-1] == "[]", process.stderr
    process = fork_python("import sys; sys.modules['transformers'] = None; from lowbit import LowBitConfig")
    assert process.stderr.splitlines()[-1].startswith("ImportError: transformers is not installed, or not a version for ")
    assert "pip install 'transformers>=5,<6'" in process.stderr
    for version in ("4.57.6", "6.0.0"):
        process = fork_python(f"import transformers; transformers.__version__ = '{version}'; import lowbit.transformers")
        assert f": found transformers {version}; expected 5.0.0 or later, below 6. Install it" in process.stderr
    with pytest.raises(AttributeError, match="module 'lowbit' has no attribute 'LowBitConfg'"):
        lowbit.LowBitConfg  # noqa: B018


KILLED = """
import sys, shutil
from pathlib import Path
import torch
torch.set_num_threads(1)
import transformers.modeling_utils
from checkpoints import assert_same_model, killed_at, load, make_model, save_model
from lowbit import LowBitConfig

base = Path(sys.argv[1])
config = LowBitConfig(scale="absmax")
models = [load(save_model(base / f"source-{seed}", seed=seed), quantization_config=config) for seed in (0, 1)]
save_file = transformers.modeling_utils.safe_save_file

def install(tick):
    def save(*arguments, **options):
        tick()
        save_file(*arguments, **options)
        tick()
    transformers.modeling_utils.safe_save_file = save

outcomes = set()
for older in (False, True):
    moment, killed = 0, True
    while killed:
        moment += 1
        target = base / "saved"
        if older:  # over another model, whose shards have the same names
            models[0].save_pretrained(target, max_shard_size="30KB")
        killed = killed_at(moment, lambda: models[1].save_pretrained(target, max_shard_size="30KB"), install)
        try:
            found = load(target)
        except (OSError, ValueError):
            outcomes.add((older, killed, "refused"))
        else:
            same = [all(torch.equal(found.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
                    for model in models]
            assert any(same), "a mixture of two models"
            outcomes.add((older, killed, f"model {same.index(True)}"))
        shutil.rmtree(target)
print(sorted(outcomes))
"""


@pytest.mark.more
def test_killed_while_saving(tmp_path, run_python):
    """After SIGKILL before or after any shard of save_pretrained there is no model, or a complete one."""
    process = run_python(KILLED, tmp_path)
    assert process.returncode == 0, process.stderr
    outcomes = process.stdout.splitlines()[-1]
    assert outcomes == str(
        [(False, False, "model 1"), (False, True, "refused"),
         (True, False, "model 1"), (True, True, "model 0"), (True, True, "model 1"), (True, True, "refused")]
    )  # fmt: skip
