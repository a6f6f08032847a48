"""`lowbit import` of checkpoints of torchao (made by the library) and HQQ (written in the published layout)."""

import json
import re

import lowbit
import pytest
import torch
from checkpoints import TOKENS, change_tensors, load
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_importing_directory import SIZES, check, checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def torchao(tmp_path_factory):
    """Makes a checkpoint; returns it and its model."""
    from torchao.quantization import IntxWeightOnlyConfig

    directory = tmp_path_factory.mktemp("torchao")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(directory / "float")

    def make(name: str, bits: int, **options):
        config = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), **options))
        model = AutoModelForCausalLM.from_pretrained(directory / "float", quantization_config=config)
        model.save_pretrained(directory / name)
        return directory / name, model

    return make


@pytest.mark.parametrize(
    ("bits", "kind"),
    [(bits, kind) for bits in (1, 3, 4, 8) for kind in ("row", "asymmetric")] + [(bits, "group") for bits in range(1, 9)],
)
def test_torchao(tmp_path, torchao, bits, kind):
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quant_primitives import MappingType

    options = {"granularity": PerAxis(0) if kind == "row" else PerGroup(32)}
    if kind == "asymmetric":
        options["mapping_type"] = MappingType.ASYMMETRIC
    source, model = torchao(f"{bits}{kind}", bits, **options)
    summary = lowbit.import_checkpoint(source, tmp_path / "out")
    kinds = {tensor.name: tensor.kind for tensor in summary.tensors if tensor.source == f"torchao, {bits} bits"}
    # With zero points, some mins have more digits than float16.
    allowed = {"exact"} if kind != "asymmetric" and bits > 1 else {"exact", "rounded"}
    assert len(kinds) == 7 and set(kinds.values()) <= allowed
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, how in kinds.items():
        weight = model.get_submodule(name.removesuffix(".packed_weight")).weight
        rows, k = weight.qdata.shape
        spread = k // weight.scale.shape[1]
        scale, zero = (each.float().repeat_interleave(spread, 1) for each in (weight.scale, weight.zero_point))
        expected = (weight.qdata.float() - zero) * scale
        found = lowbit.embedding(torch.arange(rows), tensors[name], k)
        if how == "exact":
            assert torch.equal(found, expected) and torch.equal(found.bfloat16(), weight.dequantize())
        else:
            assert (found - expected).abs().max() <= 2**-10 * (scale * 2**bits).max()
    logits = load(tmp_path / "out", dtype="auto")(TOKENS).logits
    assert (logits - model(TOKENS).logits).float().norm() / logits.float().norm() < 0.1


def test_torchao_of_other_kinds_is_refused(tmp_path, torchao):
    from torchao.quantization.granularity import PerGroup

    source, _ = torchao("other", 4, granularity=PerGroup(32))
    file = source / "model.safetensors"
    with safe_open(file, "pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for change, message in (
        ({f"{LAYER}.weight": metadata[f"{LAYER}.weight"].replace("IntxUnpacked", "Other")}, "is a OtherToInt8Tensor"),
        ({f"{LAYER}.weight": "[" * 100000}, "do not say what"),
        ({f"{LAYER}.weight": "{}"}, "do not say what"),
        ({f"{LAYER}.weight": metadata[f"{LAYER}.weight"].replace("[1, 32]", "[32, 1]")}, "blocks [32, 1] for 64"),
        ({f"{LAYER}.weight": metadata[f"{LAYER}.weight"].replace('"int4"', '"int2"')}, "codes that exceed 2 bits"),
        ({f"{LAYER}.weight": metadata[f"{LAYER}.weight"].replace('"int4"', '"float8"')}, "has codes of 'float8'"),
    ):
        save_file(tensors, file, metadata=metadata | change)
        with pytest.raises(ValueError, match=re.escape(message)):
            lowbit.import_checkpoint(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


PACKINGS = {
    1: ("1bit_u8", 8), 2: ("2bit_u8", 4), 3: ("3bit_32", 10), 4: ("4bit_u8", 2), 5: ("8bit_u8", 1), 6: ("8bit_u8", 1),
    8: ("8bit_u8", 1),
}  # fmt: skip


def letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def hqq(bits: int, group: int | None, dtype: torch.dtype = torch.float16, axis: int = 1, whole: bool = False):
    """Layers in the form of HQQLinear.state_dict(), with settings as tensors."""
    generator = torch.Generator().manual_seed(bits)
    packing, count = PACKINGS[bits]

    def make(n: int, k: int):
        size = group or k
        rows = n * k // size
        codes = torch.randint(0, 2**bits, (rows, size), generator=generator)
        scale = (torch.rand((rows, 1), generator=generator) + 0.1).div(5 * 2**bits).to(dtype)
        zero = torch.rand((rows, 1), generator=generator).mul(2**bits - 1).to(dtype)
        zero = torch.full_like(zero, 2 ** (bits - 1)) if whole else zero
        padded = torch.zeros(-(-rows // count) * count, size, dtype=torch.int64)
        padded[:rows] = codes
        parts = padded.view(count, -1, size)
        packed = sum(part << bits * (count - 1 - place) for place, part in enumerate(parts))
        number = lambda value: torch.tensor(value, dtype=torch.int32)  # noqa: E731
        settings = {
            "W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale, "zero": zero,
            "nbits": number(bits), "shape": torch.tensor([n, k]), "axis": number(axis), "packing": letters(packing),
            "view_as_float": torch.tensor(0, dtype=torch.uint8), "quant_scale": torch.tensor(0, dtype=torch.uint8),
            "compute_dtype": letters("torch.float16"), "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
        }  # fmt: skip
        if group is not None:
            settings["group_size"] = number(group)
        return ((codes - zero.float()) * scale.float()).view(n, k), settings

    return make


HQQ = {"quant_method": "hqq", "quant_config": {}}


@pytest.mark.parametrize("group", [32, 16, None])
@pytest.mark.parametrize("bits", PACKINGS)
def test_hqq(tmp_path, bits, group):
    model = checkpoint(tmp_path / "in", HQQ, hqq(bits, group))
    # If a row has one min, below its scale, it is a float16 times the row's factor.
    summary = check(tmp_path, model, "exact" if (bits, group) == (1, None) else "rounded")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {f"HQQ, {bits} bits"}
    assert max(tensor.steps for tensor in summary.tensors) < 2**bits / 1200


def test_hqq_of_three_values(tmp_path):
    """HQQ's 1.58 bits are packed as 2 bits."""
    make = hqq(2, 32, whole=True)

    def ternary(n: int, k: int):
        weight, settings = make(n, k)
        return weight, settings | {"nbits": torch.tensor(1.58)}

    summary = check(tmp_path, checkpoint(tmp_path / "in", HQQ, ternary), "exact")
    assert {tensor.source for tensor in summary.tensors if tensor.kind != "float"} == {"HQQ, 2 bits"}


def test_hqq_with_whole_zeros_in_the_middle_is_exact(tmp_path):
    check(tmp_path, checkpoint(tmp_path / "in", HQQ, hqq(4, 32, torch.bfloat16, whole=True)), "exact")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"axis": torch.tensor(0, dtype=torch.int32)}, "has axis 0; lowbit imports 1"),
        ({"quant_scale": torch.tensor(1, dtype=torch.uint8)}, "has quant_scale 1; lowbit imports 0"),
        ({"packing": letters("5bit")}, "is packed as '5bit'"),
        ({"packing": letters("\x1b[2J")}, "is packed as '\\x1b[2J'"),
        ({"nbits": torch.tensor(9, dtype=torch.int32)}, "has nbits 9; expected 1 to 4"),
        ({"nbits": torch.tensor(2.5)}, "nbits in"),
        ({"nbits": torch.tensor(torch.nan)}, "has nbits 0; expected 1 to 4"),
        ({"nbits": torch.tensor([4, 4], dtype=torch.int32)}, "has 2 values; expected one"),
        ({"group_size": torch.tensor(0, dtype=torch.int32)}, "in groups of 0; expected whole groups"),
        ({"group_size": torch.tensor(-32, dtype=torch.int32)}, "in groups of -32; expected whole groups"),
        ({"shape": torch.tensor([2**62, 2**62])}, "is U8 [96, 32]; expected U8"),
        ({"shape": torch.tensor([-96, -64])}, "expected whole groups"),
        ({"W_q": torch.zeros(95, 32, dtype=torch.uint8)}, "is U8 [95, 32]; expected U8 [96, 32]"),
        ({"zero": torch.full((192, 1), torch.nan)}, "finite"),
    ],
)
def test_damaged_and_other_hqq_files_are_refused(tmp_path, change, message):
    checkpoint(tmp_path / "in", HQQ, hqq(4, 32))
    new = {f"{LAYER}.{name}": tensor for name, tensor in change.items()}
    change_tensors(tmp_path / "in" / "model.safetensors", lambda tensors: tensors.update(new))
    with pytest.raises(ValueError, match=re.escape(message)):
        lowbit.import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert json.loads((tmp_path / "in" / "config.json").read_text())["quantization_config"] == HQQ
