"""Tables of levels: configs, fitting, rounding, and special surfaces. test_linear.py and others test the kernels."""

from dataclasses import replace

import lowbit
import pytest
import reference
import torch
from lowbit import EmbeddingConfig, LinearConfig
from lowbit.levels import TABLES, fit_levels, round_to_levels, sampled_rows
from reference import assert_same_bits, random_packed, random_rows


def dequantized(packed: torch.Tensor) -> torch.Tensor:
    return reference.take_apart(packed).weight()


def error(weight: torch.Tensor, config: LinearConfig) -> float:
    return float((dequantized(lowbit.quantize_tensor(weight, config)) - weight).square().sum())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_pack_and_back(bits):
    packed = random_packed(21, 80, bits, 32, "levels", bias=True)
    found = lowbit.unpack(packed)
    info = lowbit.verify(packed)
    assert (info.mapping, info.version, info.levels) == ("levels", 2, tuple(found.levels.tolist()))
    assert torch.equal(lowbit.pack(**found._asdict()), packed)
    as_list = found._asdict() | {"levels": found.levels.tolist(), "mapping": None}
    assert torch.equal(lowbit.pack(**as_list), packed)
    assert torch.equal(lowbit.repack(packed, "panel16"), packed)
    describe = lowbit.operators.ops.describe
    assert describe((21, 80), bits, 32, "levels", True, info.levels) == info
    assert info.total_bytes == describe((21, 80), bits, 32, "symmetric", True).total_bytes + 64


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        ({"levels": [1, 2, 3]}, ValueError, "there are 3 levels; expected 16 at 4 bits"),
        ({"levels": 15 * [0] + [-128]}, ValueError, "levels hold -128; expected -127 to 127"),
        ({"levels": 15 * [0] + [0.5]}, TypeError, "levels hold 0.5; expected integers"),
        ({"levels": torch.zeros(16)}, TypeError, "levels have dtype torch.float32; expected torch.int8"),
        ({"levels": None, "mapping": "levels"}, ValueError, "'levels' without levels"),
        ({"mapping": "symmetric"}, ValueError, "'symmetric' with levels"),
        ({"bits": 5, "levels": 32 * [0]}, ValueError, "bits is 5; expected 2, 3 or 4 with a table of levels"),
        ({"bits": 1, "levels": [0, 1]}, ValueError, "bits is 1; expected 2, 3 or 4"),
    ],
)
def test_pack_refuses(changes, kind, message):
    arguments = {"codes": torch.zeros(2, 16, dtype=torch.uint8), "scales": torch.ones(2, 1), "bits": 4,
                 "group_size": 16, "levels": 16 * [0]}  # fmt: skip
    lowbit.pack(**arguments)
    with pytest.raises(kind, match=message):
        lowbit.pack(**arguments | changes)


def test_the_operator_refuses():
    codes, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1)
    levels = torch.zeros(16, dtype=torch.int8)
    for table, mins, bits, message in (
        (levels[:4], None, 4, r"levels has shape \[4\]; expected \[16\]"),
        (levels.int(), None, 4, "levels has dtype int32; expected int8"),
        (levels, scales, 4, "levels and mins are both given"),
        (levels, None, 6, "a table of levels has codes of 6 bits; expected 2, 3 or 4"),
        (levels - 128, None, 4, r"level \[0\] is -128"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.lowbit.pack(codes, scales, mins, None, bits, 16, table)


@pytest.mark.parametrize("name", TABLES)
def test_named_tables(name):
    weight = random_rows(40, 100)
    config = LinearConfig(4, 32, levels=name)
    packed = lowbit.quantize_tensor(weight, config)
    assert lowbit.info(packed).levels == TABLES[name]
    found = dequantized(packed)
    # Every weight has its nearest level, up to the rounding of the scales to 11 bits.
    scales = lowbit.unpack(packed).scales.repeat_interleave(32, 1)[:, :100].double()
    nearest = (weight[..., None] - scales[..., None] * torch.tensor(TABLES[name])).abs().amin(2)
    assert ((found - weight).abs() <= nearest + 0.002 * weight.abs().max()).all()
    x = random_rows(3, 100, seed=1)
    assert_same_bits(lowbit.linear(x, packed, 40), reference.linear(x, packed))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_fitted_levels_are_better_than_plain_ones(bits):
    weight = random_rows(64, 512)
    plain = error(weight, LinearConfig(bits, 32))
    fitted = error(weight, LinearConfig(bits, 32, levels="fit"))
    assert fitted < 0.97 * plain
    levels = fit_levels(weight, bits, 32)
    assert levels == fit_levels(weight, bits, 32) == tuple(sorted(levels))
    assert len(levels) == 2**bits and max(map(abs, levels)) == 127
    assert lowbit.info(lowbit.quantize_tensor(weight, LinearConfig(bits, 32, mapping="levels"))).levels == levels


def test_exact_levels_are_found():
    # Weights that are four levels times a scale have no error.
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 4, (32, 64), generator=generator)
    codes[:, :4] = torch.arange(4)
    weight = torch.tensor([-127.0, -40.0, 10.0, 80.0])[codes] * 2.0 ** torch.randint(-3, 3, (32, 1), generator=generator)
    assert error(weight, LinearConfig(2, None, levels=(-127, -40, 10, 80))) == 0


def test_importance():
    weight = random_rows(32, 128)
    importance = torch.ones(128)
    importance[::4] = 100

    def weighted(levels, counts):
        codes, scales = round_to_levels(weight, levels, 32, counts)
        found = torch.tensor(levels).float()[codes.long()] * scales.repeat_interleave(32, 1)
        return float(((found - weight).square() * importance).sum())

    plain, fitted = fit_levels(weight, 3, 32), fit_levels(weight, 3, 32, importance)
    assert weighted(fitted, importance) < 0.9 * weighted(plain, None)
    with pytest.raises(ValueError, match=r"importance has shape \[5, 128\]; expected \[128\] or \[32, 128\]"):
        fit_levels(weight, 3, 32, torch.ones(5, 128))


def test_zeros_and_short_groups():
    for weight in (torch.zeros(5, 40), torch.zeros(1, 1), random_rows(3, 17), torch.full((2, 33), -3.0)):
        for bits in (2, 3, 4):
            packed = lowbit.quantize_tensor(weight, LinearConfig(bits, 32, levels="fit"))
            found = dequantized(packed).float()
            assert torch.isfinite(found).all()
            if not weight.any():
                assert not found.any()
            elif weight.max() == weight.min():
                torch.testing.assert_close(found, weight, rtol=1e-3, atol=0)


def test_the_sample_of_a_sample_is_all_of_it():
    for n, k in ((1, 1), (7, 100), (4096, 4096), (32000, 64), (3, 150_000), (5, 300_000), (100_000, 11)):
        rows = sampled_rows(n, k)
        assert list(sampled_rows(len(rows), k)) == list(range(len(rows)))


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (dict(levels="nf5"), ValueError, "levels is 'nf5'; expected 'fit', 'nf4', 'iq4_nl', 'mxfp4', 'nvfp4'"),
        (dict(bits=3, levels="nf4"), ValueError, "bits is 3; expected 4 with the levels 'nf4'"),
        (dict(bits=5, levels="fit"), ValueError, "bits is 5; expected 2, 3 or 4"),
        (dict(mapping="affine", levels="fit"), ValueError, "mapping is 'affine' with levels"),
        (dict(levels=(1, 2)), ValueError, "there are 2 levels; expected 16"),
        (dict(levels=[7] * 16), ValueError, "levels are all 7; expected at least two different ones"),
        (dict(levels=4), TypeError, "levels is a int"),
    ],
)
def test_configs_refuse(arguments, kind, message):
    with pytest.raises(kind, match=message):
        LinearConfig(**arguments)


def test_configs():
    assert LinearConfig(mapping="levels") == LinearConfig(levels="fit") == LinearConfig(mapping="levels", levels="fit")
    assert LinearConfig(2, levels=[1, 2, 3, 4]).levels == (1, 2, 3, 4)
    assert EmbeddingConfig(levels="nf4").mapping == "levels"
    assert LinearConfig().levels is None
    assert LinearConfig().mapping == replace(LinearConfig(), bits=3).mapping == "symmetric"
    # An explicit mapping applies.
    for mapping in ("symmetric", "affine"):
        with pytest.raises(ValueError, match=f"mapping is '{mapping}' with levels; expected 'levels', or levels=None"):
            replace(LinearConfig(levels="nf4"), mapping=mapping)
        assert replace(LinearConfig(levels="nf4"), mapping=mapping, levels=None) == LinearConfig(mapping=mapping)


def test_models():
    model = torch.nn.Sequential(torch.nn.Embedding(40, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 21))
    lowbit.quantize_(model, {"*": LinearConfig(3, levels="fit"), "0": EmbeddingConfig(4, levels="nf4")})
    assert [layer.info.levels is None for layer in model] == [False] * 3
    assert "mapping=levels" in repr(model[1])
    state, indices = model.state_dict(), torch.arange(40)
    other = torch.nn.Sequential(torch.nn.Embedding(40, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 21))
    lowbit.quantize_(other, {"*": LinearConfig(2), "0": EmbeddingConfig(2)})
    other.load_state_dict(state)
    assert_same_bits(other(indices), model(indices))
    torch.testing.assert_close(model[0].weight.float(), dequantized(model[0].packed_weight).float())


def test_overrides_and_embeddings():
    config = lowbit.LowBitConfig(bits=2, mapping="levels", embedding_bits=8, overrides={"*1": {"bits": 6, "levels": None,
                                 "mapping": "symmetric"}})  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Embedding(40, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 21))
    chosen = config.select(model)
    assert chosen["0"] == EmbeddingConfig(8) and chosen["1"] == LinearConfig(6) and chosen["2"] == LinearConfig(2, levels="fit")
    with pytest.raises(ValueError, match="bits is 6; expected 2, 3 or 4 with a table of levels"):
        lowbit.LowBitConfig(bits=2, levels="fit", overrides={"*1": {"bits": 6}})


@pytest.mark.parametrize(
    "base, change, expected",
    [
        ({"levels": "nf4"}, {"mapping": "symmetric"}, LinearConfig()),
        ({"levels": "nf4"}, {"mapping": "affine"}, LinearConfig(mapping="affine")),
        ({"levels": "nf4"}, {"mapping": "levels"}, LinearConfig(levels="nf4")),
        ({"levels": "nf4"}, {"levels": None}, LinearConfig()),
        ({"levels": "nf4", "mapping": "symmetric"}, {"bits": 4}, LinearConfig(levels="nf4")),  # the form of config.json
        ({"mapping": "affine"}, {"levels": "nf4"}, LinearConfig(levels="nf4")),
        ({"mapping": "affine"}, {"levels": None}, LinearConfig(mapping="affine")),
    ],
)
def test_overrides_of_mapping_and_levels(base, change, expected):
    config = lowbit.LowBitConfig(**base, overrides={"0": change})
    assert config.select(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 21)))["0"] == expected
    assert lowbit.LowBitConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_command_line(tmp_path):
    from checkpoints import save_model
    from command_line import invoke

    source = save_model(tmp_path / "source", "untied", False)
    result = invoke("quantize", source, tmp_path / "packed", "--bits", 3, "--mapping", "levels", "--embedding-bits", 6)
    assert result.exit_code == 0, result.output
    kinds = {(entry.bits, entry.mapping) for entry in lowbit.inspect_checkpoint(tmp_path / "packed") if entry.kind == "packed"}
    assert kinds == {(3, "levels"), (6, "symmetric")}
    result = invoke("quantize", source, tmp_path / "other", "--bits", 5, "--mapping", "levels")
    assert result.exit_code == 1 and "bits is 5; expected 2, 3 or 4 with a table of levels" in result.output + result.stderr


def test_checkpoints(tmp_path, monkeypatch):
    from checkpoints import save_model
    from lowbit import LowBitConfig, quantize_checkpoint
    from lowbit.checkpoint import outputs
    from safetensors.torch import load_file

    monkeypatch.setattr(outputs, "_BAND_WEIGHTS", 5000)  # several bands in most tensors
    source = save_model(tmp_path / "source", "untied", False)
    config = LowBitConfig(bits=3, levels="fit", embedding_bits=6)
    assert LowBitConfig(**config.to_dict()).to_dict() == config.to_dict()
    quantize_checkpoint(source, tmp_path / "packed", config)
    floats, packed = (load_file(next(path.glob("*.safetensors"))) for path in (source, tmp_path / "packed"))
    fitted = 0
    for name, tensor in packed.items():
        layer = name.removesuffix(".packed_weight")
        if layer == name or lowbit.info(tensor).mapping != "levels":
            continue
        weight, bias = floats[f"{layer}.weight"], floats.get(f"{layer}.bias")
        assert torch.equal(tensor, lowbit.quantize_tensor(weight, LinearConfig(3, levels="fit"), bias)), name
        fitted += 1
    assert fitted > 5

    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    ids = torch.arange(20)[None]
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "again")
    assert_same_bits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, expected)
    assert model.config.quantization_config.levels == "fit"


def test_levels_in_a_tensor_are_saved(tmp_path):
    from checkpoints import load, save_model

    levels = torch.tensor([-127, -30, 20, 90], dtype=torch.int8)
    overrides = {"*q_proj": {"levels": -levels}, "*k_proj": {"bits": 3, "levels": "fit"}}
    config = lowbit.LowBitConfig(bits=2, levels=levels, overrides=overrides)
    assert config.levels == levels.tolist() and config.overrides[0][1]["levels"] == (-levels).tolist()
    source = save_model(tmp_path / "source", "untied", False)
    lowbit.quantize_checkpoint(source, tmp_path / "packed", config)
    layers = load(tmp_path / "packed").model.layers[0].self_attn
    assert layers.q_proj.info.levels == tuple((-levels).tolist()) and layers.v_proj.info.levels == tuple(levels.tolist())
