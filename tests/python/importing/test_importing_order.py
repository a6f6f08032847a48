"""Layers with an act-order permutation of inputs, as in GPTQ: the same results on every surface."""

import json
import re
import shutil

import lowbit
import lowbit.llm
import pytest
import torch
from checkpoints import TOKENS, load
from lowbit.exports.gguf import export_gguf
from lowbit.llm.loading import load_model
from safetensors.torch import load_file, save_file
from test_importing_directory import GPTQ, GROUP, Q, Quantized, act_order, checkpoint, gptq

N, K = 48, 96


@pytest.fixture(scope="module")
def layer() -> tuple[lowbit.nn.Linear, torch.Tensor]:
    """A layer with a permutation, and its weight in the model's order."""
    made = Quantized(N, K, 4, GROUP, "middle", torch.Generator().manual_seed(0))
    order = act_order(made).long().argsort(stable=True)
    packed = lowbit.pack(made.codes[:, order].to(torch.uint8), made.scales.float(), bits=4, group_size=GROUP)
    return lowbit.nn.Linear(packed, input_order=order.int()), made.weight


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A directory with GPTQ's layout in "in" and its import in "out"; and the float model."""
    directory, generator = tmp_path_factory.mktemp("order"), torch.Generator().manual_seed(1)

    def make(n: int, k: int):
        made = Quantized(n, k, 4, GROUP, "middle", generator)
        groups = act_order(made)
        return made.weight, gptq(made, 4, GROUP, 1) | {"g_idx": groups}

    model = checkpoint(directory / "in", GPTQ | {"desc_act": True}, make)
    lowbit.import_checkpoint(directory / "in", directory / "out")
    return directory / "out", model


def test_a_layer(layer):
    linear, weight = layer
    assert torch.equal(linear.dequantize(), weight) and torch.equal(linear.weight + 0, weight)
    assert "act-order permutation" in repr(linear)
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(2))
    expected = lowbit.linear(x[..., linear.input_order.long()], linear.packed_weight, N)
    assert torch.equal(linear(x), expected)
    assert (linear(x) - x @ weight.T).std() < 0.01 * expected.std()  # int8 activations
    x.requires_grad_()
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(x.shape))


def test_a_state_dict_contains_its_permutation(layer):
    linear, weight = layer
    plain = lowbit.nn.Linear(lowbit.quantize_tensor(torch.randn(N, K), lowbit.LinearConfig(4, GROUP)))
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    plain.load_state_dict(linear.state_dict())
    assert torch.equal(plain.dequantize(), weight)
    plain.load_state_dict(before)  # which removes the permutation
    assert plain.input_order is None and plain.state_dict().keys() == {"packed_weight"}
    for order, message in (
        (torch.zeros(K, dtype=torch.int32), "has other numbers than 0 to 95, each once"),
        (linear.input_order + 1, "has other numbers than 0 to 95"),
        (linear.input_order.long(), "expected torch.int32 [96]"),
        (linear.input_order[1:], "expected torch.int32 [96]"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            plain.load_state_dict(linear.state_dict() | {"input_order": order})
        with pytest.raises(ValueError, match=re.escape(message)):
            lowbit.nn.Linear(linear.packed_weight, input_order=order)


def test_a_state_dict_that_is_refused_changes_nothing(layer):
    ordered, _ = layer
    plain = lowbit.nn.Linear(lowbit.quantize_tensor(torch.randn(N, K), lowbit.LinearConfig(4, GROUP)))
    state = ordered.state_dict()
    damaged, other = state["packed_weight"].clone(), {"input_order": state["input_order"].flip(0)}
    damaged[200] ^= 1
    x = torch.randn(2, K)
    for one in (ordered, plain):
        before = one(x)
        for refused in ({"packed_weight": damaged}, {"packed_weight": damaged} | other, other):
            with pytest.raises(RuntimeError, match="checksum|there is no packed_weight beside it"):
                one.load_state_dict(refused, strict=False)
            assert torch.equal(one(x), before)
    assert plain.input_order is None
    ordered.load_state_dict({}, strict=False)
    assert ordered.input_order is not None


def test_a_loaded_layer_can_be_saved(imported, tmp_path):
    first = load(imported[0], dtype="auto")
    first.save_pretrained(tmp_path)
    again = load(tmp_path, dtype="auto")
    assert again.get_submodule(Q).input_order is not None
    assert torch.equal(again(TOKENS).logits, first(TOKENS).logits)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["format_version"] == 2


def test_a_decoder(imported):
    model = load_model(imported[0])
    tokens = TOKENS[:1]
    with torch.inference_mode():
        expected = model(tokens).logits[:, -1]
        logits = lowbit.llm.Decoder(model, 32)(tokens, torch.zeros(1, dtype=torch.int64))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.more
def test_programs(executorch, layer, tmp_path):
    linear, x = layer[0].eval(), torch.randn(3, K, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = linear(x)
    lowbit.export_pte(linear, (x,), tmp_path / "layer.pte")
    assert torch.equal(executorch.load_program(tmp_path / "layer.pte").load_method("forward").execute((x,))[0], expected)
    lowbit.export_pt2(linear, (x,), tmp_path / "layer.pt2")
    assert torch.equal(torch._inductor.aoti_load_package(tmp_path / "layer.pt2")(x), expected)


def changed(source, target, change) -> None:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def twice(tensors: dict) -> None:
    tensors[f"{Q}.input_order"][0] = tensors[f"{Q}.input_order"][1]


def outside(tensors: dict) -> None:
    tensors[f"{Q}.input_order"][0] = 1 << 30


def short(tensors: dict) -> None:
    tensors[f"{Q}.input_order"] = tensors[f"{Q}.input_order"][1:].clone()


def alone(tensors: dict) -> None:
    del tensors[f"{Q}.packed_weight"], tensors[f"{Q}.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (twice, f"{Q}.packed_weight in .*: input_order has other numbers than 0 to 63, each once"),
        (outside, f"{Q}.packed_weight in .*: input_order has other numbers than 0 to 63, each once"),
        (short, rf"{Q}.input_order in .* is I32 \[63\]; expected I32 \[64\]"),
        (alone, f"lacks 1 of the 12 tensors of LlamaForCausalLM: {Q}.weight"),
    ],
)
def test_damaged_orders_are_refused(imported, tmp_path, change, message):
    changed(imported[0], tmp_path / "m", change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m")


def test_an_order_of_inputs_is_refused_by_gguf(imported, tmp_path):
    with pytest.raises(ValueError, match="has an act-order permutation .*, which GGUF does not support"):
        export_gguf(imported[0], tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()
