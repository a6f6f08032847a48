"""`lowbit import` of 8- and 4-bit float and int8 weights, and of experts with separate tensors."""

import json
import math

import lowbit
import pytest
import torch
from checkpoints import TOKENS, load
from lowbit.importing.small_floats import read_layers
from lowbit.importing.stock import Stock
from safetensors.torch import load_file, save_file
from test_importing_directory import check, checkpoint
from test_importing_libraries import wanted
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CT = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
Q = "model.layers.0.self_attn.q_proj"


def spread(scales: torch.Tensor, rows: int, columns: int, shape: tuple[int, int]) -> torch.Tensor:
    return scales.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


class Maker:
    """Random layers of a format: weights, and tensors in the files."""

    def __init__(self, kind: str):
        self.kind, self.generator = kind, torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) * 0.01 + 0.001

    def fp8(self, n: int, k: int) -> torch.Tensor:
        return (torch.randn((n, k), generator=self.generator) * 30).clamp(-440, 440).to(torch.float8_e4m3fn)

    def __call__(self, n: int, k: int):
        return getattr(self, self.kind)(n, k)

    def block(self, n, k):
        codes, scales = self.fp8(n, k), self.random(-(-n // 32), -(-k // 16))
        return codes.float() * spread(scales, 32, 16, (n, k)), {"weight": codes, "weight_scale_inv": scales}

    def row(self, n, k):
        codes, scales = self.fp8(n, k), self.random(n, 1)
        return codes.float() * scales, {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}

    def tensor(self, n, k):
        codes, scale = self.fp8(n, k), self.random(1)[0]
        return codes.float() * scale, {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}

    def mxfp8(self, n, k):
        codes, powers = self.fp8(n, k), torch.randint(115, 120, (n, k // 32), generator=self.generator)
        weight = codes.float() * spread(2.0 ** (powers - 127), 1, 32, (n, k))
        return weight, {"weight": codes, "weight_scale": powers.to(torch.uint8)}

    def four(self, n, k):
        codes = torch.randint(0, 16, (n, k), generator=self.generator)
        return E2M1[codes], (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)

    def nvfp4(self, n, k, leaf="weight_packed", factor="weight_global_scale"):
        values, packed = self.four(n, k)
        scales, whole = (self.random(n, k // 16) * 20000).to(torch.float8_e4m3fn), torch.tensor([3000.0])
        weight = values * spread(scales.float() / whole, 1, 16, (n, k))
        stored = whole if factor == "weight_global_scale" else 1 / whole[0]
        return weight, {leaf: packed, "weight_scale": scales, factor: stored, "input_scale": torch.tensor(1.0)}

    def modelopt(self, n, k):
        return self.nvfp4(n, k, "weight", "weight_scale_2")

    def mxfp4(self, n, k):
        values, packed = self.four(n, k)
        powers = torch.randint(117, 124, (n, k // 32), generator=self.generator)
        weight = values * spread(2.0 ** (powers - 127), 1, 32, (n, k))
        return weight, {"weight_packed": packed, "weight_scale": powers.to(torch.uint8)}

    def int8(self, n, k, zeros=False):
        codes = torch.randint(-128, 128, (n, k), generator=self.generator).to(torch.int8)
        scales = self.random(n, 1).half().float() / 8
        if not zeros:
            return codes.float() * scales, {"weight": codes, "weight_scale": scales}
        zero = torch.randint(-9, 9, (n, 1), generator=self.generator).to(torch.int8)
        return (codes.float() - zero) * scales, {"weight": codes, "weight_scale": scales, "weight_zero_point": zero}

    def int8_zeros(self, n, k):
        return self.int8(n, k, True)


FORMATS = {
    "block": (FP8, "requantized"),
    "row": (CT | {"format": "float-quantized"}, "requantized"),
    "tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "requantized"),
    "mxfp8": (CT | {"format": "mxfp8-quantized"}, "requantized"),
    "nvfp4": (CT | {"format": "nvfp4-pack-quantized"}, "rounded"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "rounded"),
    "mxfp4": (CT | {"format": "mxfp4-pack-quantized"}, "exact"),
    "int8": (CT | {"format": "int-quantized"}, "exact"),
    "int8_zeros": (CT | {"format": "int-quantized"}, "rounded"),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.filterwarnings("ignore:7 matrices")
def test_formats(tmp_path, kind, recwarn):
    settings, nearness = FORMATS[kind]
    model = checkpoint(tmp_path / "in", settings, Maker(kind))
    summary = check(tmp_path, model, nearness)
    if nearness == "rounded":
        assert max(tensor.steps for tensor in summary.tensors) < 0.2
    dropped = [warning for warning in recwarn if "scales of activations" in str(warning.message)]
    assert len(dropped) == (kind in ("row", "tensor", "nvfp4", "modelopt"))


@pytest.mark.parametrize("kind", ["block", "mxfp4", "int8"])
def test_experts_one_by_one(tmp_path, kind):
    """The files have a matrix per expert, the model one tensor, which is packed."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=403, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        )
    ).eval()  # fmt: skip
    model.save_pretrained(tmp_path / "in")
    tensors, make = load_file(tmp_path / "in" / "model.safetensors"), Maker(kind)
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == 12
    for name in experts:
        weight, packed = make(*tensors.pop(name).shape)
        layer = name.removesuffix(".weight")
        number, leaf = layer.split(".")[-2:]
        holder = model.model.layers[0].mlp.experts
        rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64), "down_proj": slice(0, 64)}[leaf]
        (holder.down_proj if leaf == "down_proj" else holder.gate_up_proj).data[int(number), rows] = weight
        tensors |= {f"{layer}.{leaf}": tensor for leaf, tensor in packed.items()}
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS[kind][0]}))
    summary = lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    packed = {tensor.name for tensor in summary.tensors if tensor.kind == FORMATS[kind][1]}
    assert packed == {f"model.layers.0.mlp.experts.{leaf}.packed_weight" for leaf in ("gate_up_proj", "down_proj")}
    loaded = load(tmp_path / "out", dtype="auto")
    for leaf in ("gate_up_proj", "down_proj"):
        layer, expected = getattr(loaded.model.layers[0].mlp.experts, leaf), getattr(model.model.layers[0].mlp.experts, leaf)
        found = torch.stack([lowbit.nn.Linear(one).dequantize() for one in layer.packed_weight])
        if kind == "block":
            assert (found - expected).norm() / expected.norm() < 0.01
        else:
            assert torch.equal(found, expected)
    found, expected = loaded(TOKENS).logits, model(TOKENS).logits
    assert (found - expected).norm() / expected.norm() < 0.05


def changed(kind: str, **changes):
    def change(tensors: dict) -> None:
        for leaf, to in changes.items():
            tensors[f"{Q}.{leaf}"] = to(tensors[f"{Q}.{leaf}"])

    return FORMATS[kind][0], kind, change


REFUSED = {
    "blocks": (
        *changed("block", weight_scale_inv=lambda one: one[:, :-1].contiguous()),
        "expected one scale, one for each row",
    ),
    "format": ({**CT, "format": "sparse"}, "mxfp4", None, "lowbit imports 'pack-quantized'"),
    "fmt": (FP8 | {"fmt": "e5m2"}, "block", None, "fmt 'e5m2'; lowbit imports 'e4m3'"),
    "block size": (FP8 | {"weight_block_size": [0, 1]}, "block", None, "weight_block_size [0, 1]; expected rows and columns"),
    "algorithm": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt", None, "quant_algo 'W4A8_AWQ'; lowbit"),
    "groups": (*changed("mxfp4", weight_scale=lambda one: one[:, :-1].contiguous()), "expected U8 or F8_E8M0 [64, 2]"),
    "factor": (*changed("nvfp4", weight_global_scale=lambda one: one * 0), "expected a positive number"),
    "factors": (*changed("nvfp4", weight_global_scale=lambda one: one.repeat(2)), "expected one number"),
    "powers": (*changed("mxfp8", weight_scale=lambda one: one[:, :-1].contiguous()), "expected [64, 2], as MXFP8 has groups"),
    "zeros": (*changed("int8_zeros", weight_zero_point=lambda one: one[:-1].contiguous()), "other zero points"),
    "no number": (*changed("mxfp4", weight_scale=lambda one: one.fill_(255)), "finite"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore:7 matrices", "ignore:.*scales of activations")
def test_refusals(tmp_path, what):
    settings, kind, change, message = REFUSED[what]
    checkpoint(tmp_path / "in", settings, Maker(kind), change=change)
    with pytest.raises(ValueError) as raised:
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert message in str(raised.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["FP8", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16", "W8A8"])
def test_as_compressed_tensors_reads_it(tmp_path, preset):
    """A random matrix compressed by the library, and decompressed by it."""
    wanted("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    scheme, weight = preset_name_to_scheme(preset, ["Linear"]), torch.randn(256, 256)
    arguments = scheme.weights
    if preset == "FP8_BLOCK":
        blocks = weight.view(2, 128, 2, 128).transpose(1, 2).flatten(2)
    else:
        blocks = weight.view(256, -1, arguments.group_size or 256)
    if preset == "FP8":
        blocks = weight.view(1, 1, -1)
    state, factor = {"weight": weight}, None
    if preset.startswith("NVFP4"):
        factor = state["weight_global_scale"] = torch.tensor([6 * 448 / float(weight.abs().max())])
    state["weight_scale"], _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=factor)
    formats = {"FP8": "float", "FP8_BLOCK": "float", "NVFP4A16": "nvfp4-pack", "MXFP4A16": "mxfp4-pack", "MXFP8A16": "mxfp8"}
    compressor = BaseCompressor.get_value_from_registry(f"{formats.get(preset, 'int')}-quantized")
    packed = compressor.compress(state, scheme)
    again = compressor.decompress(dict(packed), scheme)["weight"].float()
    save_file({f"a.{name}": value.contiguous() for name, value in packed.items()}, tmp_path / "m.safetensors")
    from lowbit.checkpoint.codes import values_of
    from lowbit.files.safetensors import read_file

    [tensor] = read_layers(Stock(tmp_path, read_file(tmp_path / "m.safetensors"), {}))
    found = values_of(tensor)(0, 256)
    torch.testing.assert_close(found, again, rtol=2**-7 if "NV" in preset else 1e-6, atol=1e-6)
    assert math.isclose(float(found.std()), 1.0, rel_tol=0.1)
