"""Checkpoints made by the formats' own libraries on a CPU, compared with the libraries' dequantization: `make
test-import-libraries`."""

import importlib
import os

import lowbit
import pytest
import torch
from command_line import FLOAT
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LAYERS = 7


def wanted(name: str):
    """Imports a library. If it is not installed, the test is skipped with the reason, or fails under `make
    test-import-libraries`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} is not installed or does not load ({error}): make test-import-libraries"
        (pytest.fail if os.environ.get("LOWBIT_IMPORT_LIBRARIES") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small llama in float16 with a tokenizer."""
    directory = tmp_path_factory.mktemp("libraries") / "float"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).half().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((FLOAT / name).read_bytes())
    return directory


def imported(directory, target) -> tuple[dict[str, torch.Tensor], lowbit.ImportSummary]:
    """The weights of the layers that `lowbit import` packs, float32 [n, k], by layer name."""
    summary = lowbit.import_checkpoint(directory, target)
    tensors, found = load_file(target / "model.safetensors"), {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf == "packed_weight":
            found[layer] = lowbit.nn.Linear(tensor, input_order=tensors.get(f"{layer}.input_order")).dequantize()
    assert len(found) == LAYERS
    return found, summary


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], summary, most_steps: float = 0) -> None:
    """Equal numbers if the import reports "exact", otherwise within the reported error."""
    kinds = {tensor.name.rpartition(".")[0]: tensor for tensor in summary.tensors if tensor.kind != "float"}
    assert found.keys() == expected.keys() == kinds.keys()
    for name, weight in expected.items():
        if kinds[name].kind == "exact":
            assert torch.equal(found[name], weight), name
        else:
            assert kinds[name].kind == "rounded" and 0 < kinds[name].steps <= most_steps, name
            assert (found[name] - weight).abs().max() <= 2**-9 * weight.abs().max(), name


GPTQ = [
    (bits, symmetric, order, version)
    for bits in (2, 3, 4, 8)
    for symmetric, order, version in ((True, False, "gptq"), (False, True, "gptq_v2"))
]


GPTQ += [(4, False, False, "gptq"), (4, True, True, "gptq")]
GPTQ += [(bits, symmetric, False, "gptq_p") for bits in (3, 5, 6, 7) for symmetric in (True, False)]


@pytest.mark.parametrize(("bits", "symmetric", "order", "version"), GPTQ)
def test_gptqmodel(source, tmp_path, monkeypatch, bits, symmetric, order, version):
    """Quantized and packed by GPTQModel, and dequantized by its layers with float32 scales."""
    monkeypatch.setenv("GPTQMODEL_CPU_WORKERS", "2")  # with one CPU it requests two
    monkeypatch.chdir(tmp_path)  # it writes logs to the current directory
    gptqmodel = wanted("gptqmodel")
    config = gptqmodel.QuantizeConfig(
        bits=bits, group_size=32, sym=symmetric, desc_act=order, act_group_aware=False, format=version,
        offload_to_disk=False,
    )  # fmt: skip
    model = gptqmodel.GPTQModel.load(str(source), config)
    texts = torch.randint(0, SIZES["vocab_size"], (8, 64)).tolist()
    model.quantize([{"input_ids": text, "attention_mask": [1] * 64} for text in texts], batch_size=1)
    model.save(str(tmp_path / "in"))
    theirs = gptqmodel.GPTQModel.load(str(tmp_path / "in"), backend=gptqmodel.BACKEND.TORCH, device="cpu").model
    stored = load_file(tmp_path / "in" / "model.safetensors")
    found, summary = imported(tmp_path / "in", tmp_path / "out")
    expected = {}
    for name in found:
        layer = theirs.get_submodule(name)
        layer.scales = stored[f"{name}.scales"].float()
        expected[name] = layer.dequantize_weight().T.contiguous()
    assert ("input_order" in " ".join(load_file(tmp_path / "out" / "model.safetensors"))) == order
    same(found, expected, summary, 2**bits / 1200)
    assert not symmetric or {tensor.kind for tensor in summary.tensors} == {"exact", "float"}


@pytest.mark.parametrize(
    ("bits", "symmetric", "layout"),
    [*((bits, symmetric, "auto_round") for bits in (2, 3, 4) for symmetric in (True, False)),
     (8, True, "auto_round"), (4, True, "auto_round:auto_awq"), (4, False, "auto_round:auto_awq")],
)  # fmt: skip
def test_auto_round(source, tmp_path, monkeypatch, bits, symmetric, layout):
    """Rounded to nearest and packed by AutoRound; the weights are its layers' outputs for the identity."""
    auto_round = wanted("auto_round")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    scheme = {"bits": bits, "group_size": 32, "sym": symmetric}
    rounding = auto_round.AutoRound(
        model, AutoTokenizer.from_pretrained(source), **scheme, iters=0, device_map="cpu", disable_opt_rtn=True
    )
    rounding.quantize_and_save(str(tmp_path / "in"), format=layout)
    (saved,) = (file.parent for file in (tmp_path / "in").rglob("config.json"))
    found, summary = imported(saved, tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, device_map="cpu")
    expected = {}
    for name, weight in found.items():
        layer = theirs.get_submodule(name)
        assert type(layer) is not torch.nn.Linear
        expected[name] = layer(torch.eye(weight.shape[1])).T.contiguous()
    halves = lambda weights: {name: weight.half().float() for name, weight in weights.items()}  # noqa: E731
    same(halves(found), halves(expected), summary, 2**bits / 1200)  # most of its layers multiply in float16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_compressed_tensors(source, tmp_path, bits, symmetric):
    """Packed and unpacked by the library."""
    wanted("compressed_tensors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    compressors = importlib.import_module("compressed_tensors.compressors")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    weights = quantization.QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=symmetric)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    config = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized", quantization_status="frozen"
    )
    quantization.apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            parts = layer.weight.detach().float().view(layer.weight.shape[0], -1, 32)
            scale, zero = quantization.utils.calculate_qparams(parts.amin(-1), parts.amax(-1), weights)
            layer.weight_scale.data = scale.half()
            if not symmetric:
                layer.weight_zero_point.data = zero.to(torch.int8)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "in")
    compressor.update_config(str(tmp_path / "in"))
    unpack = importlib.import_module("compressed_tensors.compressors.pack_quantized.helpers").unpack_from_int32
    stored = load_file(tmp_path / "in" / "model.safetensors")
    found, summary = imported(tmp_path / "in", tmp_path / "out")
    expected = {}
    for name in found:
        shape = stored[f"{name}.weight_shape"].tolist()
        codes = unpack(stored[f"{name}.weight_packed"], bits, torch.Size(shape)).float()
        scales = stored[f"{name}.weight_scale"].float()
        if not symmetric:
            groups = torch.Size(scales.shape)
            zeros = unpack(stored[f"{name}.weight_zero_point"], bits, groups, packed_dim=0)
            codes -= zeros.float().repeat_interleave(32, 1)
        expected[name] = codes * scales.repeat_interleave(32, 1)
    same(found, expected, summary, 2**bits / 1200)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(source, tmp_path, kind, nested):
    """Quantized and saved through transformers, and dequantized by the library."""
    wanted("bitsandbytes")
    functional = importlib.import_module("bitsandbytes.functional")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    options = {"quantization_config": config, "device_map": "cpu", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(source, **options)
    model.save_pretrained(tmp_path / "in")
    found, summary = imported(tmp_path / "in", tmp_path / "out")
    assert {tensor.kind for tensor in summary.tensors} == {"rounded", "float"}
    for name, weight in found.items():
        layer = model.get_submodule(name)
        expected = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        # Its table is rounded to 255 levels, relative to the largest weight of a block.
        assert (weight - expected).abs().max() <= 0.005 * expected.abs().max()


@pytest.mark.parametrize(
    ("bits", "group"), [(1, 32), (1.58, 32), (2, 16), (3, 32), (4, 64), (5, 32), (6, 16), (8, 32), (8, None)]
)
def test_hqq(source, tmp_path, bits, group):
    """Quantized by HQQ's layer, saved as its state, and dequantized by it."""
    wanted("hqq")
    quantize = importlib.import_module("hqq.core.quantize")
    from safetensors.torch import save_file

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    tensors, expected = dict(load_file(source / "model.safetensors")), {}
    settings = quantize.BaseQuantizeConfig(nbits=bits, group_size=group, axis=1)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            made = quantize.HQQLinear(layer, settings, compute_dtype=torch.float16, device="cpu", del_orig=False)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in made.state_dict().items()}
            # In float32, because the library multiplies in float16.
            made.meta["scale"], made.meta["zero"] = made.meta["scale"].float(), made.meta["zero"].float()
            made.meta["compute_dtype"] = torch.float32
            expected[name] = made.dequantize().float()
    model.config.quantization_config = {"quant_method": "hqq", "quant_config": settings}
    model.config.save_pretrained(tmp_path / "in")
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    found, summary = imported(tmp_path / "in", tmp_path / "out")
    same(found, expected, summary, 2**bits / 1200)


@pytest.mark.parametrize(("mode", "bits"), [*(("affine", bits) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 4), ("nvfp4", 4)])
def test_mlx(source, tmp_path, mode, bits):
    """Quantized and written by mlx-lm, and dequantized by MLX."""
    mx, mlx_lm = wanted("mlx.core"), wanted("mlx_lm")
    group = {"nvfp4": 16}.get(mode, 32)
    of_layers = {"group_size": group, "bits": bits, "mode": mode}
    mlx_lm.convert(
        str(source), str(tmp_path / "in"), quantize=True, q_bits=bits, q_group_size=group, q_mode=mode,
        quant_predicate=lambda name, module: of_layers if ".layers." in name and hasattr(module, "to_quantized") else False,
    )  # fmt: skip
    stored = mx.load(str(tmp_path / "in" / "model.safetensors"))
    found, summary = imported(tmp_path / "in", tmp_path / "out")
    expected = {}
    for name in found:
        parts = [stored[f"{name}.{leaf}"] for leaf in ("weight", "scales", "biases") if f"{name}.{leaf}" in stored]
        parts = [parts[0], *(part.astype(mx.float32) if mode == "affine" else part for part in parts[1:])]
        weight = mx.dequantize(*parts, group_size=group, bits=bits, mode=mode).astype(mx.float32)
        expected[name] = torch.tensor(weight.tolist())
    same(found, expected, summary)
