"""transformers' embedding tables that scale or normalize rows, or take other inputs, are packed on every surface."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
from pathlib import Path

import lowbit
import lowbit.llm
import pytest
import torch
import transformers
from lowbit.layers.embedding_layers import table_of

sys.path.append(str(Path(__file__).parents[2] / "models"))
import tiny_models

SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def classes() -> dict[str, type]:
    """All embedding classes in transformers' models."""
    found = {}
    for directory in pkgutil.iter_modules(transformers.models.__path__):
        path = Path(transformers.models.__path__[0]) / directory.name / f"modeling_{directory.name}.py"
        if not path.exists() or "(nn.Embedding):" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"transformers.models.{directory.name}.modeling_{directory.name}")
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, torch.nn.Embedding) and value.__module__ == module.__name__:
                found[name] = value
    return found


CLASSES = classes()
SCALED = sorted(name for name in CLASSES if name.endswith("ScaledWordEmbedding") and not name.startswith("T5"))
NORMED = sorted(name for name in CLASSES if name.endswith("NormedEmbedding"))


def make(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Embedding:
    """A table of 64 rows; bfloat16 cannot represent 7.3."""
    torch.manual_seed(0)
    more = {"norm_eps": 1e-5} if name in NORMED else {"embed_scale": 7.3}
    table = CLASSES[name](64, 96, 0, **more)
    norm = getattr(getattr(table, "embed_norm", None), "weight", None)
    if norm is not None:
        torch.nn.init.normal_(norm)
    return table.to(dtype)


def test_the_classes_are_those_of_this_version_of_transformers():
    assert len(SCALED) > 20
    assert {name for name in CLASSES if name.endswith(("ScaledWordEmbedding", "NormedEmbedding"))} - {*SCALED, *NORMED} <= {
        "T5Gemma2TextScaledWordEmbedding"
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*SCALED, *NORMED])
def test_a_table_computes_what_its_class_does_with_the_weight_it_stores(name, dtype):
    table, ids = make(name, dtype), torch.arange(63).reshape(3, 21)
    packed = lowbit.nn.Embedding.from_float(table, lowbit.EmbeddingConfig(4, 32))
    assert type(packed) is lowbit.nn.Embedding
    with torch.no_grad():
        table.weight.copy_(packed.dequantize(dtype))
        assert torch.equal(packed(ids), table(ids))
        for other in DTYPES:
            moved, floats = copy.deepcopy(packed).to(other), copy.deepcopy(table).float().to(other)
            floats.weight.copy_(packed.dequantize(other))
            if dtype == torch.float32 or name in NORMED:  # otherwise its scale was rounded earlier
                assert torch.equal(moved(ids), floats(ids))
        assert not torch.equal(packed(ids), torch.nn.functional.embedding(ids, table.weight))


def test_other_classes_stay_float_and_are_refused():
    class Mine(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) + 1

    table = Mine(64, 96)
    assert table_of(table) is None
    with pytest.raises(TypeError, match=r"a Mine may use its weight in its own way; expected a torch\.nn\.Embedding"):
        lowbit.nn.Embedding.from_float(table, lowbit.EmbeddingConfig(4))
    model = torch.nn.Sequential(table, torch.nn.Linear(96, 32))
    with pytest.warns(UserWarning, match=r"67 % of the bytes of this Sequential's matrices stay float, in [\w.<>]*\.Mine;"):
        lowbit.quantize_(model, {"*": lowbit.LinearConfig(4)})
    assert type(model[0]) is Mine


def gemma3():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, sliding_window=8))


def gemma3n():
    config = transformers.Gemma3nTextConfig(
        **SMALL | {"num_key_value_heads": 2}, vocab_size_per_layer_input=128, hidden_size_per_layer_input=32, laurel_rank=8,
        num_kv_shared_layers=0, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 2, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    return transformers.Gemma3nForCausalLM(config)


def bart():
    sizes = {f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in SIZES.items()}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=128, d_model=64, scale_embedding=True, max_position_embeddings=64, **sizes)
    )


def m2m100():
    sizes = {f"{part}_{what}": value for part in ("encoder", "decoder") for what, value in SIZES.items()}
    return transformers.M2M100ForConditionalGeneration(
        transformers.M2M100Config(vocab_size=128, d_model=64, scale_embedding=True, max_position_embeddings=64, **sizes)
    )


def xglm():
    return transformers.XGLMForCausalLM(
        transformers.XGLMConfig(
            vocab_size=128, d_model=64, ffn_dim=64, num_layers=2, attention_heads=2, max_position_embeddings=64
        )
    )


def minicpm3():
    return transformers.MiniCPM3ForCausalLM(
        transformers.MiniCPM3Config(
            **SMALL | {"num_key_value_heads": 2}, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
            v_head_dim=32, scale_emb=12,
        )
    )  # fmt: skip


def inkling():
    return tiny_models.make("inkling_text")


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
MODELS = {made.__name__: made for made in (gemma3, gemma3n, bart, m2m100, xglm, minicpm3, inkling)}
TIED = {"gemma3", "gemma3n", "bart", "m2m100", "xglm"}


# BART's and M2M100's positions, and Inkling's convolutions.
pytestmark = pytest.mark.filterwarnings("ignore:.* of the bytes of this .* matrices stay float")


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    made = MODELS[request.param]().eval()
    made.kind = request.param
    return made


def call(model):
    ids = (torch.arange(12)[None] * 7 + 3) % 128
    more = {"decoder_input_ids": ids[:, :6]} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        return model(input_ids=ids, **more).logits


def tables_of(model) -> dict[str, lowbit.nn.Embedding]:
    return {name: each for name, each in model.named_modules() if isinstance(each, lowbit.nn.Embedding)}


def same_state(model, other) -> None:
    state = other.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(call(model), call(other), rtol=1e-5, atol=1e-6)  # float layers may be at other addresses


CONFIG = {"bits": 4, "group_size": 16}


def test_a_model_packed_in_memory_saved_and_dequantized(model, tmp_path):
    floats = copy.deepcopy(model)
    model.save_pretrained(tmp_path / "source")
    config = lowbit.LowBitConfig(**CONFIG)
    lowbit.quantize_(model, config.select(model))
    tables = tables_of(model)
    assert any(each._table.scale is not None or each._table.normed for each in tables.values())
    if floats.kind in TIED:
        assert model.get_output_embeddings().packed_weight is model.get_input_embeddings().packed_weight
    # Equal bits to the lookup in a float model with the stored weights.
    for name, table in tables.items():
        like, ids = floats.get_submodule(name), torch.arange(100)
        like.weight.data = table.dequantize()
        with torch.no_grad():
            assert torch.equal(table(ids), like(ids))
    # Files: saved, quantized from files, and quantized while loading.
    model.save_pretrained(tmp_path / "saved")
    lowbit.quantize_checkpoint(tmp_path / "source", tmp_path / "packed", config)
    kind = type(floats)
    same_state(kind.from_pretrained(tmp_path / "saved").eval(), model)
    same_state(kind.from_pretrained(tmp_path / "packed").eval(), model)
    same_state(kind.from_pretrained(tmp_path / "source", quantization_config=config).eval(), model)
    # Dequantized again, in memory and in files.
    lowbit.dequantize_checkpoint(tmp_path / "packed", tmp_path / "back")
    reference = kind.from_pretrained(tmp_path / "back").eval()
    packed = call(model)
    model.dequantize()
    same_state(model, reference)
    assert not tables_of(model)
    # The same model except for activations, which packed layers round.
    assert (call(model) - packed).norm() < 0.1 * packed.norm()


def gradients_reach(model) -> bool:
    return all(bool(each.weight.grad.any()) for each in model.modules() if isinstance(each, lowbit.qat.Embedding))


@pytest.mark.parametrize("kind", ["gemma3", "bart", "inkling"])
def test_training_computes_what_packed_tables_will(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    names = {name for name, each in model.named_modules() if type(each) is not torch.nn.Embedding and table_of(each)}
    assert names
    config = {"*": lowbit.LinearConfig(3, 16)} | dict.fromkeys(names, lowbit.EmbeddingConfig(3, 16))
    chosen = lambda layer, name: "experts" not in name  # noqa: E731 - experts are not trained
    expected = lowbit.quantize_(copy.deepcopy(model), config, chosen)
    lowbit.qat.prepare_(model, config, chosen)
    ids = torch.arange(100)
    for name in names:
        assert type(model.get_submodule(name)) is lowbit.qat.Embedding
        rows = model.get_submodule(name)(ids)
        assert torch.equal(copy.deepcopy(model.get_submodule(name))(ids), rows)
        rows.square().sum().backward()
        assert torch.equal(rows, expected.get_submodule(name)(ids))
    assert gradients_reach(model)
    lowbit.qat.convert_(model)
    for name in names:
        assert torch.equal(model.get_submodule(name)(ids), expected.get_submodule(name)(ids))


@pytest.mark.more
@pytest.mark.parametrize("method", ["importance", "tuned", "distilled"])
def test_calibration_shares_the_table_with_its_head(method):
    torch.manual_seed(0)
    model = gemma3().eval()
    text = [torch.randint(0, 128, (2, 32)) for _ in range(3)]
    lowbit.calibrate(model, text, lowbit.LowBitConfig(3, 16), method)
    table, head = model.model.embed_tokens, model.lm_head
    assert table.packed_weight is head.packed_weight
    ids = torch.arange(100)
    assert torch.equal(table(ids), table.dequantize()[ids] * table._table.scale.value)
    assert bool(call(model).isfinite().all())


@pytest.mark.more
def test_decoding_and_export(tmp_path):
    torch.manual_seed(0)
    model = gemma3().eval()
    unpacked = call(model)[:, -1]
    lowbit.quantize_(model, lowbit.LowBitConfig(4, 16).select(model))
    expected = call(model)
    decoder = lowbit.llm.Decoder(model, 32)
    ids, start = (torch.arange(12)[None] * 7 + 3) % 128, torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        assert (decoder(ids, start) - expected[:, -1]).norm() < 1e-2 * expected[:, -1].norm()
        decoder(ids[:, :-1], start)
        whole = decoder(ids[:, -1:], start + 11)
    for name, plan in (("plan.pte", True), ("m.pte", False), ("m.pt2", False)):
        lowbit.llm.export_decoder(decoder, tmp_path / name, chunk=4, plan=plan)
        step = lowbit.llm.load_decoder(tmp_path / name)
        step(ids[:, :-1], start)
        # Compiled float code may round activations to other integers, but packing loses more.
        assert (step(ids[:, -1:], start + 11) - whole).norm() < 0.5 * (whole - unpacked).norm()
        # 128 rows of 64 weights at 4 bits, stored once.
        packed = model.lm_head.packed_weight.numpy().tobytes()
        assert (tmp_path / name).read_bytes().count(packed[64:1024]) <= 1
