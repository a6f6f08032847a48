"""gpt-oss in the Hub's layout: MXFP4 experts are imported exactly, compared with transformers' values."""

import json

import lowbit
import pytest
import torch
import transformers
from lowbit import nn
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS, HIDDEN, INNER = 3, 64, 96
NAMES = ("gate_up_proj", "down_proj")
HOLDER = "model.layers.{}.mlp.experts"


def random_blocks(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (EXPERTS, n, k // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(113, 125, (EXPERTS, n, k // 32), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint in the Hub's layout, and transformers' model of it."""
    path = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=128,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() < 0.1:
                parameter.normal_(0, 0.2)
    tensors = {}
    for layer in range(2):
        holder = model.get_submodule(HOLDER.format(layer))
        for leaf in NAMES:
            _, k, n = getattr(holder, leaf).shape
            blocks, scales = random_blocks(n, k, layer + n)
            name = f"{HOLDER.format(layer)}.{leaf}"
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            getattr(holder, leaf).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    floats = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(NAMES)}
    save_file(tensors | floats, path / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["GptOssForCausalLM"]
    quantized = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (path / "config.json").write_text(json.dumps(config.to_dict() | quantized, default=str))
    return path, model


@torch.no_grad()
def test_the_values_of_transformers(source, tmp_path):
    import lowbit.transformers

    path, model = source
    summary = lowbit.import_checkpoint(path, tmp_path / "packed")
    experts = [tensor for tensor in summary.tensors if tensor.source == "MXFP4"]
    assert len(experts) == 4 and {tensor.kind for tensor in experts} == {"exact"}
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    for layer in range(2):
        for leaf in NAMES:
            own = getattr(packed.get_submodule(HOLDER.format(layer)), leaf)
            expected = getattr(model.get_submodule(HOLDER.format(layer)), leaf)
            assert isinstance(own, nn.LinearExperts) and own.info.has_bias and own.info.mapping == "levels"
            assert torch.equal(own.dequantize(), expected.transpose(1, 2))
    tokens = torch.arange(20)[None] * 5
    logits, wanted = packed(tokens).logits, model(tokens).logits
    assert 0 < (logits - wanted).std() < 0.05 * wanted.std()


def changed(source, target, **changes) -> None:
    tensors = load_file(source / "model.safetensors")
    for name, value in changes.items():
        name = f"{HOLDER.format(0)}.{name}"
        tensors[name] = value(tensors[name])
        if tensors[name] is None:
            del tensors[name]
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"down_proj_scales": lambda t: None}, "has no .*down_proj_scales; expected U8"),
        ({"down_proj_scales": lambda t: t[:2].clone()}, r"is U8 \[2, 64, 3\]; expected U8 \[3, 64, 3\]"),
        ({"down_proj_blocks": lambda t: t.to(torch.int16)}, "is I16 .*; expected U8"),
        ({"down_proj_scales": lambda t: t.index_fill(1, torch.tensor([5]), 255)}, "down_proj, expert 0, rows 0 to 63: "),
        ({"down_proj_bias": lambda t: None}, "has no .*down_proj_bias; expected the bias of"),
        (
            {"down_proj_blocks": lambda t: t[:2].clone(), "down_proj_scales": lambda t: t[:2].clone()},
            r"has shape \[2, 64, 96\]; expected \[3, 64, 96\], as its configuration says",
        ),
    ],
)
def test_refusals(source, tmp_path, changes, message):
    changed(source[0], tmp_path / "source", **changes)
    with pytest.raises(ValueError, match=message):
        lowbit.import_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
