"""Packed experts that transformers keeps in one tensor: quantize_, checkpoints, decoder, layers that stay float."""

import copy
import json
import os
import warnings

import lowbit
import lowbit.llm
import pytest
import torch
import transformers
from lowbit import LinearConfig, LowBitConfig, nn, quantize_checkpoint
from lowbit.calibration import assign_widths, widths
from lowbit.calibration.expert_inputs import mean_squares
from lowbit.calibration.importance import search
from lowbit.checkpoint import planned_size
from lowbit.layers.packable import layer_at
from lowbit.tools.model_speed import bytes_per_token

TOKENS = torch.arange(20)[None] * 5 % 128
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
# Files with a tensor per matrix and expert, or with one tensor for all, stored directly or transposed with biases.
KINDS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=48),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SMALL, num_local_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, layer_types=["sliding_attention"]),
}
EXPERTS = {"granitemoe": "model.layers.0.block_sparse_moe.experts"}
pytestmark = [pytest.mark.first, pytest.mark.filterwarnings("error:.*stay float")]


def make(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() < 0.1:
                parameter.normal_(0, 0.2)
    return model


def experts_of(kind: str) -> str:
    return EXPERTS.get(kind, "model.layers.0.mlp.experts")


def load(path, **options) -> torch.nn.Module:
    import lowbit.transformers  # noqa: F401 - registers

    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def assert_same_state(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    state, wanted = model.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module", params=KINDS)
def source(request, tmp_path_factory):
    """A kind, and its float checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(directory)
    return request.param, directory


@torch.no_grad()
def test_the_bits_of_a_loop_and_the_noise_of_the_activations(source):
    kind, _ = source
    model, plain = make(kind), make(kind)
    lowbit.quantize_(model, LinearConfig(4, 32))
    holder, own = model.get_submodule(experts_of(kind)), plain.get_submodule(experts_of(kind))
    assert isinstance(holder.gate_up_proj, nn.LinearExperts) and not holder._parameters
    assert holder.gate_up_proj.info.has_bias == (kind == "gpt_oss")

    # transformers' forward with the same matrices, where each product also has int8 rows.
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    index = torch.arange(60).reshape(30, 2) % 3
    weights = torch.rand(30, 2, generator=torch.Generator().manual_seed(2))
    expected = torch.zeros(30, 64)
    for row in range(30):
        outputs = []
        for expert in index[row].tolist():
            inner = lowbit.linear(x[row], holder.gate_up_proj.packed_weight[expert], holder.gate_up_proj.out_features)
            inner = own._apply_gate(inner)
            outputs.append(lowbit.linear(inner, holder.down_proj.packed_weight[expert], 64))
        expected[row] = (torch.stack(outputs) * weights[row, :, None]).sum(0)
    assert torch.equal(holder(x, index, weights), expected)

    for leaf in ("gate_up_proj", "down_proj"):
        weight = getattr(holder, leaf).dequantize()
        getattr(own, leaf).data = weight.transpose(1, 2) if own.is_transposed else weight
    difference = holder(x, index, weights) - own(x, index, weights)
    assert 0 < difference.std() < 0.02 * expected.std()


def test_every_way_gives_the_same_bytes(source, tmp_path):
    kind, directory = source
    config = LowBitConfig(4, 32, overrides={"*.down_proj": {"bits": 8, "mapping": "affine"}})
    summary = quantize_checkpoint(directory, tmp_path / "packed", config)
    assert all("TopKRouter" in why for why in summary.unquantized.values()) and len(summary.unquantized) == 1
    assert planned_size(directory, config).bytes == os.path.getsize(tmp_path / "packed" / "model.safetensors")
    name = experts_of(kind) + ".down_proj.packed_weight"
    entry = next(entry for entry in lowbit.inspect_checkpoint(tmp_path / "packed") if entry.name == name)
    down = 48 if kind == "qwen3_moe" else 96
    assert (entry.kind, entry.shape, entry.bits, entry.mapping) == ("packed", (4, 64, down), 8, "affine")

    first = load(tmp_path / "packed")
    assert_same_state(load(directory, quantization_config=config), first)
    by_hand = make(kind)
    lowbit.quantize_(by_hand, config.choose(by_hand)[0])
    assert_same_state(by_hand, first)
    for model in (first, by_hand):
        model.save_pretrained(tmp_path / "saved")
        again = load(tmp_path / "saved")
        assert_same_state(again, first)
        assert torch.equal(again(TOKENS).logits, first(TOKENS).logits)
    copied = copy.deepcopy(first)
    with torch.no_grad():  # the copy uses its own weights
        copied.get_submodule(experts_of(kind)).down_proj.packed_weight.zero_()
    assert torch.equal(again(TOKENS).logits, first(TOKENS).logits)


def test_experts_are_packed_while_the_files_are_read(source, monkeypatch):
    """At the end, all of them would be in memory as floats. Also if their biases come later in the files."""
    from lowbit.hf import quantizer

    left, replace = [], quantizer.replace_layers
    monkeypatch.setattr(quantizer, "replace_layers", lambda model, layers: (left.extend(layers), replace(model, layers)))
    model = load(source[1], quantization_config=LowBitConfig(4, 32))
    assert isinstance(model.get_submodule(experts_of(source[0])).down_proj, nn.LinearExperts)
    assert not any("experts" in name for name in left)


def test_decoding(source):
    kind, _ = source
    model = make(kind)
    lowbit.quantize_(model, LinearConfig(4, 32))
    with torch.inference_mode():
        own = model(TOKENS).logits
    decoder = lowbit.llm.Decoder(model, max_length=32)
    assert max(decoder.measured.values()) < 0.1
    with torch.inference_mode():
        whole = decoder(TOKENS, torch.tensor([0]))
        for i in range(TOKENS.shape[1]):
            last = decoder(TOKENS[:, i : i + 1], torch.tensor([i]))
    assert torch.equal(last, whole)
    assert (whole - own[:, -1]).std() < 0.05 * own.std()
    decoder.release()
    with torch.inference_mode():
        assert torch.equal(model(TOKENS).logits, own)


def test_the_bytes_of_a_token(source):
    """A token reads two of the four experts, all other layers, and a row of the table."""
    model = make(source[0])
    lowbit.quantize_(model, {"*": LinearConfig(4, 32), "*embed*": lowbit.EmbeddingConfig(4, 32)})
    found = 0
    for module in model.modules():
        if isinstance(module, nn.LinearExperts):
            found += module.packed_weight.numel() // 2
        elif isinstance(module, nn.Linear):
            found += module.packed_weight.numel()
        elif isinstance(module, nn.Embedding):
            found += module.packed_weight.numel() // 128
    assert bytes_per_token(model) == found
    model.config = transformers.LlamaConfig()  # a configuration without experts
    experts = [module for module in model.modules() if isinstance(module, nn.LinearExperts)]
    assert bytes_per_token(model) == found + sum(layer.packed_weight.numel() // 2 for layer in experts)


@pytest.mark.more
@pytest.mark.parametrize("plan", [True, False])
def test_exported_decoder(plan, tmp_path):
    pytest.importorskip("executorch")
    model = make("gpt_oss")
    lowbit.quantize_(model, LinearConfig(4, 32))
    decoder = lowbit.llm.Decoder(model, max_length=32)
    # Without XNNPACK, whose lowering is slowest; test_llm_export.py uses it.
    lowbit.llm.export_decoder(decoder, tmp_path / "m.pte", chunk=8, xnnpack=False, plan=plan)
    program = lowbit.llm.load_decoder(tmp_path / "m.pte")
    with torch.inference_mode():
        for begin, end in ((0, 7), (7, 8), (8, 20)):
            expected = decoder(TOKENS[:, begin:end], torch.tensor([begin]))
            assert torch.allclose(program(TOKENS[:, begin:end], torch.tensor([begin])), expected, rtol=1e-3, atol=1e-4)


def test_streams_one_expert_at_a_time(source, tmp_path, monkeypatch):
    """Every read of the files is smaller than half of the model's tensor of experts."""
    from lowbit.files import io

    kind, directory = source
    sizes, read = [], io.read_bytes

    def counted(stored, begin, end):
        sizes.append(end - begin)
        return read(stored, begin, end)

    monkeypatch.setattr(io, "read_bytes", counted)
    quantize_checkpoint(directory, tmp_path / "packed", LowBitConfig())
    experts = make(kind).get_submodule(experts_of(kind))
    assert experts.gate_up_proj[0].nbytes / 2 <= max(sizes) < experts.gate_up_proj.nbytes / 2


def test_float_experts_are_reported(tmp_path):
    model = make("mixtral")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowbit.quantize_(model, {"*": LinearConfig(4, 32), "*.experts.*": None})
    assert isinstance(layer_at(model, "model.layers.0.mlp.experts.down_proj").weight, torch.nn.Parameter)
    model.save_pretrained(tmp_path / "floats")
    assert_same_state(load(tmp_path / "floats"), model)
    message = "has a config and .*experts.gate_up_proj, of the same experts, has none; give both a config, or None to both"
    with pytest.raises(ValueError, match=message):
        lowbit.quantize_(make("mixtral"), {"*": LinearConfig(4, 32), "*gate_up_proj": None})
    make("mixtral").save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(tmp_path / "source", tmp_path / "packed", LowBitConfig(overrides={"*gate_up_proj": None}))
    config = LowBitConfig(overrides={"*.experts.*": None})
    summary = quantize_checkpoint(tmp_path / "source", tmp_path / "packed", config)
    left = {name: why for name, why in summary.unquantized.items() if ".experts." in name}
    assert len(left) == 12 and set(left.values()) == {"left float by its configuration"}
    assert_same_state(load(tmp_path / "packed"), load(tmp_path / "source", quantization_config=config))


def test_weights_that_cannot_be_packed():
    model = make("gpt_oss")
    with torch.no_grad():
        model.get_submodule(experts_of("gpt_oss")).down_proj[2, 5, 7] = torch.nan
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="expert 2 of .*experts.down_proj: weight has 1 NaN"):
        lowbit.quantize_(model, LinearConfig(4, 32))
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in model.state_dict().items())


def damage(directory, name, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t[:3].clone(), r"has weights \[3, 64, 96\]; expected \[4, 64, 96\], as config.json says"),
        (lambda t: t.index_fill(1, torch.tensor([t.shape[1] - 9]), 7), "expert 0: .* The file was damaged"),
        (lambda t: t[0].clone(), "MixtralForCausalLM has experts in one tensor there; expected Linear or Embedding"),
        (lambda t: t[:, None].clone(), r"expected U8 and \[bytes\] or \[experts, bytes\]"),
    ],
)
def test_damaged_files(tmp_path, change, message):
    make("mixtral").save_pretrained(tmp_path / "source")
    quantize_checkpoint(tmp_path / "source", tmp_path / "packed", LowBitConfig())
    damage(tmp_path / "packed", "model.layers.0.mlp.experts.down_proj.packed_weight", change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "packed")


def test_source_files_that_do_not_fit(tmp_path):
    make("mixtral").save_pretrained(tmp_path)
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    damage(tmp_path, name, lambda t: t[:-1].clone())
    with pytest.raises(ValueError, match=r"experts.2.w2.weight .*has shape \[63, 96\]; expected a part of \[64, 96\]"):
        quantize_checkpoint(tmp_path, tmp_path / "packed", LowBitConfig())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 5}))
    damage(tmp_path, name, lambda t: torch.zeros(64, 96))
    damage(tmp_path, "model.layers.0.block_sparse_moe.gate.weight", lambda t: torch.zeros(5, 64))
    with pytest.raises(ValueError, match="the files have 4 experts of .*; expected 5, as config.json says"):
        quantize_checkpoint(tmp_path, tmp_path / "packed", LowBitConfig())


def texts():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 128, (2, 32), generator=generator) for _ in range(4)]


@pytest.mark.more
@torch.no_grad()
def test_mixed_widths_include_experts(source):
    kind, directory = source
    model, holder = make(kind), experts_of(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = assign_widths(model, texts(), LowBitConfig(overrides={"lm_head": {"bits": 8}}), target_bits=4.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    overrides = dict(config.overrides)
    assert {f"{holder}.gate_up_proj", f"{holder}.down_proj"} <= overrides.keys()
    chosen = config.select(model)
    assert chosen["lm_head"].bits == 8
    size = planned_size(directory, config)
    assert 4.4 < 8 * size.packed_bytes / size.packed_weights <= 4.5

    if kind != "mixtral":
        return
    # If the experts' second matrices do not matter, they get the fewest bits.
    parameter = model.get_submodule(holder).down_proj
    parameter.mul_(1e-3)
    config = assign_widths(model, texts(), LowBitConfig(), target_bits=4.5)
    chosen = config.select(model)
    assert chosen[f"{holder}.down_proj"].bits == 1 < chosen["model.layers.0.self_attn.o_proj"].bits


@torch.no_grad()
def test_reported_loss_of_experts_is_that_of_the_model_with_rounded_experts(source):
    kind, _ = source
    model, name = make(kind), f"{experts_of(kind)}.down_proj"
    batches = [{"input_ids": ids} for ids in texts()]
    seen = []
    holder = model.get_submodule(experts_of(kind))
    hook = holder.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[:2]), with_kwargs=True
    )
    wanted = [model(**batch).logits.log_softmax(-1) for batch in batches]
    hook.remove()
    own = layer_at(model, name)
    first = layer_at(model, f"{experts_of(kind)}.gate_up_proj")
    squares, count = torch.zeros(own.in_features), 0
    for hidden, index in seen:
        for row, experts in zip(hidden.reshape(-1, 64), index.reshape(-1, 2), strict=True):
            for expert in experts.tolist():
                inner = first.weight[expert] @ row + (0 if first.bias is None else first.bias[expert])
                squares += holder._apply_gate(inner).square()
                count += 1
    found = mean_squares(model, {name: LinearConfig(2, 32)}, batches)
    assert found.keys() == {name}
    torch.testing.assert_close(found[name], squares / count, rtol=1e-4, atol=0)

    item = next(item for item in widths.options_of(model, LowBitConfig(2, 32)) if item.layers == [name])
    item.options = [option for option in item.options if option.config in (LinearConfig(2, 32), LinearConfig(8, 32))]
    widths.measure_losses(model, batches, [item], 2)
    counts = found[name] + 1e-4 * found[name].mean()
    rounded = torch.stack([search(weight, counts, LinearConfig(2, 32)).dequantize() for weight in own.weight])
    own.holder._parameters[own.leaf].copy_(own.oriented(rounded))
    lost = [
        (expected.exp() * (expected - model(**batch).logits.log_softmax(-1))).sum(-1)
        for batch, expected in zip(batches, wanted, strict=True)
    ]
    two, eight = sorted(item.options, key=lambda option: option.bytes)
    # Layers count half beside tables, whose errors calibration reduces less.
    assert two.loss == pytest.approx(float(torch.cat(lost).mean()) / 2, rel=1e-4)
    assert 0 < eight.loss < 0.01 * two.loss
