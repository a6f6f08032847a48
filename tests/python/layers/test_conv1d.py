"""transformers' Conv1D, a linear layer with a weight [in, out], is packed wherever a torch.nn.Linear is."""

import copy
import subprocess
import sys
import warnings

import lowbit
import lowbit.transformers
import pytest
import torch
import transformers
from lowbit.calibration import assign_widths, calibrate
from lowbit.layers.linear_forms import of_conv1d
from lowbit.layers.packable import with_linears
from reference import close_to_packed
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

CONFIG = lowbit.LowBitConfig(bits=4)
TEXT = torch.arange(20)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gpt2") / "float"
    config = GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide errors
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@torch.inference_mode()
def logits(model):
    return model(TEXT).logits


@pytest.fixture(scope="module")
def expected(source):
    """The result of a model whose Conv1D were converted to torch.nn.Linear by hand."""
    model = load(source)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Conv1D):
            linear = torch.nn.Linear(*layer.weight.shape)
            linear.weight.data, linear.bias.data = layer.weight.data.T.contiguous(), layer.bias.data
            model.set_submodule(name, linear)
    plain = logits(model)
    assert torch.allclose(plain, logits(load(source)), atol=1e-5)
    lowbit.quantize_(model, CONFIG.select(model))
    return logits(model), plain


def test_every_way_gives_the_same_bits(source, expected, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing stays float
        in_memory = load(source)
        lowbit.quantize_(in_memory, CONFIG.select(in_memory))
        at_load = load(source, quantization_config=CONFIG)
        summary = lowbit.quantize_checkpoint(source, tmp_path / "packed", CONFIG)
    assert not summary.unquantized and not [1 for module in in_memory.modules() if isinstance(module, Conv1D)]
    in_memory.save_pretrained(tmp_path / "memory")
    at_load.save_pretrained(tmp_path / "load")
    models = [in_memory, at_load, *(load(tmp_path / name) for name in ("packed", "memory", "load"))]
    for model in models:
        assert torch.equal(logits(model), expected[0])
    layer = models[-1].transformer.h[0].attn.c_attn
    assert list(layer.weight.shape) == [192, 64] and layer.info.has_bias


def test_layers_that_stay_float_do_not_change(source, tmp_path):
    config = lowbit.LowBitConfig(bits=4, overrides={"*.c_proj": None})
    summary = lowbit.quantize_checkpoint(source, tmp_path / "packed", config)
    assert set(summary.unquantized) == {f"transformer.h.{i}.{part}.c_proj.weight" for i in range(2) for part in ("attn", "mlp")}
    model, at_load = load(tmp_path / "packed"), load(source, quantization_config=config)
    for found in (model, at_load):
        assert type(found.transformer.h[1].mlp.c_proj) is Conv1D
        assert torch.equal(found.transformer.h[1].mlp.c_proj.weight, load(source).transformer.h[1].mlp.c_proj.weight)
    assert torch.equal(logits(model), logits(at_load))


def test_hooks_stay(source):
    model, seen = load(source), []
    handle = model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *arguments: seen.append(arguments[2].shape))
    lowbit.quantize_(model, CONFIG.select(model))
    logits(model)
    assert seen == [(1, 20, 256)]
    handle.remove()
    logits(model)
    assert len(seen) == 1


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 160, (1, 64), generator=generator) for _ in range(8)]


def test_calibration(source, expected):
    config = {"*.h.*": lowbit.LinearConfig(2)}
    rounded = lowbit.quantize_(load(source), config)
    model = load(source)
    calibrate(model, texts(), config, "gptq")
    errors = [float((logits(each) - expected[1]).square().mean()) for each in (model, rounded)]
    assert errors[0] < 0.6 * errors[1], errors


@pytest.mark.more
def test_widths_leave_the_model_as_it_was(source):
    model = load(source)
    before = {name: type(layer) for name, layer in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = assign_widths(model, texts(), lowbit.LowBitConfig(), target_bits=4.5)
    assert {name: type(layer) for name, layer in model.named_modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {"transformer.h.0.mlp.c_fc"} <= config.select(model).keys()


def test_a_failed_calibration_does_not_replace_layers(source):
    model = load(source)
    model.transformer.h[1].mlp.c_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(OSError("stop")))
    with pytest.raises(OSError, match="stop"):
        calibrate(model, texts(), {"*.h.1.*": lowbit.LinearConfig(2)}, "importance")
    assert type(model.transformer.h[1].mlp.c_proj) is Conv1D


def train_a_little(model):
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.0)
    for batch in texts()[:3]:
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
def test_it_is_trained_packed(source, mapping, tmp_path):
    """In training a Conv1D keeps its class and its weight's layout, and computes the same as when packed."""
    config = {"*": lowbit.LinearConfig(2, 32, mapping), "*c_proj": lowbit.LinearConfig(3, 48, mapping), "lm_head": None}
    expected = lowbit.quantize_(load(source), config)
    model, twin = load(source), load(source)
    weights = {name: layer.weight for name, layer in model.named_modules() if isinstance(layer, Conv1D)}
    lowbit.qat.prepare_(model, config)
    assert len(weights) == 8
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.weight is weight and isinstance(layer, Conv1D) and isinstance(layer, lowbit.layers.prepared.LinearLayer)
    untrained = lowbit.qat.convert_(copy.deepcopy(model))
    for name in weights:
        assert torch.equal(untrained.get_submodule(name).packed_weight, expected.get_submodule(name).packed_weight)

    # Learns the same bits as a torch.nn.Linear with the same weight.
    for name in weights:
        twin.set_submodule(name, of_conv1d(twin.get_submodule(name)))
    lowbit.qat.prepare_(twin, config)
    train_a_little(model)
    train_a_little(twin)
    inputs = {}
    for name in weights:
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach()}))
    before = logits(model)
    model.save_pretrained(tmp_path / "training")
    assert torch.equal(load(tmp_path / "training").transformer.h[1].attn.c_proj.weight, weights["transformer.h.1.attn.c_proj"])
    state = copy.deepcopy(model.state_dict())
    floats = {name: model.get_submodule(name) for name in weights}
    lowbit.qat.convert_(model)
    lowbit.qat.convert_(twin)
    with torch.no_grad():
        for name, layer in floats.items():
            packed, x = model.get_submodule(name), inputs[name][0]
            assert type(packed) is lowbit.nn.Linear and packed.info.has_bias
            assert torch.equal(packed.packed_weight, twin.get_submodule(name).packed_weight), name
            assert not torch.equal(packed.packed_weight, expected.get_submodule(name).packed_weight), name
            assert torch.equal(layer.fake_quantized(), packed.dequantize())
            close_to_packed(layer(x), packed, x)
    # A different rounding moves an activation by a step in later layers.
    assert (logits(model) - before).abs().max() <= 0.02 * before.abs().max()
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(tmp_path / "packed")), logits(model))

    again = lowbit.qat.prepare_(load(source), config)  # training resumes from a checkpoint
    again.load_state_dict(state)
    assert torch.equal(logits(lowbit.qat.convert_(again)), logits(model))


def test_a_layer_that_occurs_twice_is_trained_once(source):
    model = load(source)
    first, second = model.transformer.h[0].mlp.c_fc, model.transformer.h[1].mlp.c_fc
    second.weight = first.weight
    lowbit.qat.prepare_(model, {"*c_fc": lowbit.LinearConfig(2)})
    assert sum(name.endswith("weight_scale") for name, _ in model.named_parameters()) == 1
    first.bias.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"^transformer\.h\.0\.mlp\.c_fc\.bias has .*NaN or infinite values"):
        lowbit.qat.convert_(model)
    first.bias.data[3] = 0
    lowbit.qat.convert_(model)
    found = [lowbit.unpack(block.mlp.c_fc.packed_weight) for block in model.transformer.h]
    assert torch.equal(found[0].codes, found[1].codes) and torch.equal(found[0].scales, found[1].scales)
    assert torch.equal(found[0].bias, first.bias) and torch.equal(found[1].bias, second.bias)


def test_another_shape_is_refused(source, tmp_path):
    packed = tmp_path / "packed"
    lowbit.quantize_checkpoint(source, packed, CONFIG)
    config = transformers.AutoConfig.from_pretrained(packed)
    config.n_inner = 128
    config.save_pretrained(packed)
    with pytest.raises(ValueError, match=r"c_fc.packed_weight .*\[256, 64\]; expected \[128, 64\], as config.json says"):
        load(packed)


def test_a_shared_weight_is_packed_once():
    """Also by calibration, which replaces Conv1D by linear layers. If only one of the pair is packed, there is a warning."""
    model = torch.nn.Sequential(Conv1D(64, 64), Conv1D(64, 64), torch.nn.Linear(64, 64), Conv1D(64, 64))
    model[1].weight = model[0].weight
    model[2].weight = model[0].weight  # which computes a different function with it
    half = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="1 and 0 share one weight, of which only 0 is packed"):
        lowbit.quantize_(half, {"*": lowbit.LinearConfig(), "1": None})
    with with_linears(model, "013"):
        assert model[0].weight is model[1].weight and model[0].weight is not model[3].weight
    for layer in model:
        torch.nn.init.zeros_(layer.bias)  # one buffer holds one bias
        layer.bias = model[0].bias
    lowbit.quantize_(model, lowbit.LinearConfig())
    assert model[0].packed_weight is model[1].packed_weight
    assert model[0].packed_weight is not model[2].packed_weight and model[0].packed_weight is not model[3].packed_weight
    assert torch.equal(model[0].dequantize(), model[1].dequantize())


def test_a_weight_with_new_memory_is_not_taken_for_the_old_one():
    layer = Conv1D(32, 48)
    assert of_conv1d(layer).weight is of_conv1d(layer).weight
    for change in (lambda: layer.bfloat16(), lambda: layer.weight.requires_grad_(False), lambda: layer.to("meta")):
        change()
        made = of_conv1d(layer).weight
        assert made.dtype == layer.weight.dtype and made.device == layer.weight.device
        assert made.requires_grad == layer.weight.requires_grad


_FRESH = """
import sys, torch, lowbit, transformers
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D
from lowbit.layers.packable import named_layers
class Holder(torch.nn.Module):
    is_transposed = has_bias = False
    def __init__(self):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.ones(2, 8, 16))
        self.down_proj = torch.nn.Parameter(torch.ones(2, 16, 4))
model = torch.nn.ModuleList([Conv1D(32, 16), FalconLinear(16, 32), Holder()])
print(sorted((name, type(layer).__name__) for name, layer in named_layers(model) if name), "lowbit.hf" in sys.modules)
"""


@pytest.mark.more
def test_a_fresh_process_finds_the_same_layers():
    """named_layers() does not depend on earlier imports."""
    run = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=True, timeout=600)
    layers = [("0", "Linear"), ("1", "Linear"), ("2", "Holder"), ("2.down_proj", "Experts"), ("2.gate_up_proj", "Experts")]
    assert run.stdout.strip() == f"{layers} False"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_that_a_hook_computes_is_refused():
    for name in ("weight", "bias"):
        model = torch.nn.Sequential(Conv1D(16, 32))
        prune.l1_unstructured(model[0], name, 0.5)
        with pytest.raises(ValueError, match=f"0.{name} is not a parameter: a hook computes it before each call"):
            lowbit.quantize_(model, lowbit.LinearConfig(4))
    model = torch.nn.Sequential(torch.nn.utils.weight_norm(Conv1D(16, 32)))
    with pytest.raises(ValueError, match="0.weight is not a parameter: a hook computes it before each call"):
        lowbit.quantize_(model, lowbit.LinearConfig(4))


def test_calibration_refuses_weights_that_it_could_not_replace(source):
    model = load(source)
    layer = model.transformer.h[0].mlp.c_fc
    prune.l1_unstructured(layer, "weight", 0.5)
    with pytest.raises(ValueError, match="h.0.mlp.c_fc.weight is not a parameter: a hook computes it"):
        calibrate(model, TEXT, CONFIG)
    prune.remove(layer, "weight")
    model.transformer.ln_f.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="ln_f.bias has NaN values; expected numbers"):
        calibrate(model, TEXT, CONFIG)
