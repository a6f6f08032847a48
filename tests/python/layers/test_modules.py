"""lowbit.nn: properties and construction of modules."""

import copy
import pickle
import types

import lowbit
import pytest
import torch
import torch.nn.utils.prune
from lowbit import EmbeddingConfig, LinearConfig
from reference import MAPPINGS, WIDTHS, random_packed, random_rows
from torch import nn


def test_repr_of_linear():
    layer = lowbit.nn.Linear(random_packed(512, 1024, 4, 32, "symmetric", bias=True))
    assert repr(layer) == (
        "Linear(in_features=1024, out_features=512, bias=True, bits=4, group_size=32, mapping=symmetric, 4.59 bits per weight)"
    )
    layer = lowbit.nn.Linear(random_packed(512, 1024, 3, None, "affine"))
    assert repr(layer) == (
        "Linear(in_features=1024, out_features=512, bias=False, bits=3, group_size=per channel, mapping=affine, "
        "3.13 bits per weight)"
    )


def test_repr_of_embedding():
    table = random_packed(512, 1024, 8, 128, "affine")
    assert repr(lowbit.nn.Embedding(table)) == (
        "Embedding(512, 1024, bits=8, group_size=128, mapping=affine, 8.34 bits per weight)"
    )
    padded = lowbit.nn.Embedding(table, torch.bfloat16, 7)
    assert repr(padded).startswith("Embedding(512, 1024, padding_idx=7, bits=8, ")


def test_layers_in_float64():
    """Like float layers, they accept and return it; they compute in float32."""
    torch.manual_seed(0)
    linear, conv = torch.nn.Linear(64, 48), torch.nn.Conv1d(4, 8, 4, stride=4)
    layers = torch.nn.ModuleList([
        lowbit.nn.Linear.from_float(linear, LinearConfig(4, 32)),
        lowbit.nn.Conv.from_float(conv, lowbit.ConvConfig(4)),
        lowbit.nn.Embedding.from_float(torch.nn.Embedding(20, 64), lowbit.EmbeddingConfig(4)),
    ])  # fmt: skip
    layers.append(lowbit.nn.LinearExperts(torch.stack([layers[0].packed_weight] * 2)))
    inputs = [
        (torch.randn(3, 64),),
        (torch.randn(1, 4, 32),),
        (torch.arange(5),),
        (torch.randn(3, 64), torch.ones(3, 1).long()),
    ]
    expected = [layer(*each) for layer, each in zip(layers, inputs, strict=True)]
    weights = [layer.weight.clone() for layer in layers]
    assert layers.double() is layers
    for layer, each, result, weight in zip(layers, inputs, expected, weights, strict=True):
        found = layer(*(x.double() if x.is_floating_point() else x for x in each))
        assert found.dtype == torch.float64 and torch.equal(found, result.double())
        assert layer.weight.dtype == torch.float64 and torch.equal(layer.weight, weight.double())
    x = inputs[0][0].double().requires_grad_()
    layers[0](x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float64 and layers[0].bias.dtype == torch.float64
    layers.float()
    assert torch.equal(layers[0](inputs[0][0]), expected[0]) and layers[2](inputs[2][0]).dtype == torch.float32
    with pytest.raises(ValueError, match="x has dtype float64; expected float32"):
        layers[0](x)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_from_float(bits, mapping):
    for group_size in (16, 48, None):
        linear = nn.Linear(100, 9, bias=group_size != 48).eval()
        config = LinearConfig(bits, group_size, mapping)
        layer = lowbit.nn.Linear.from_float(linear, config)
        assert torch.equal(layer.packed_weight, lowbit.quantize_tensor(linear.weight, config, linear.bias))
        assert (layer.in_features, layer.out_features, layer.training) == (100, 9, False)
        assert (layer.info.bits, layer.info.group_size, layer.info.mapping) == (bits, group_size, mapping)
        assert layer.info == lowbit.info(layer.packed_weight)
        assert layer.info.has_bias == (linear.bias is not None)
        assert layer(random_rows(2, 100)).shape == (2, 9)

        table = nn.Embedding(20, 100, padding_idx=3).bfloat16()
        config = EmbeddingConfig(bits, group_size, mapping)
        found = lowbit.nn.Embedding.from_float(table, config)
        assert torch.equal(found.packed_weight, lowbit.quantize_tensor(table.weight, config))
        assert (found.num_embeddings, found.embedding_dim, found.padding_idx, found.training) == (20, 100, 3, True)
        assert found(torch.tensor([3])).dtype == torch.bfloat16


def test_from_float_refuses_other_things():
    with pytest.raises(TypeError, match="expected a torch.nn.Linear; found Embedding"):
        lowbit.nn.Linear.from_float(nn.Embedding(3, 16), LinearConfig())
    with pytest.raises(TypeError, match="expected a LinearConfig; found EmbeddingConfig"):
        lowbit.nn.Linear.from_float(nn.Linear(16, 3), EmbeddingConfig())
    with pytest.raises(TypeError, match="expected a torch.nn.Embedding; found Linear"):
        lowbit.nn.Embedding.from_float(nn.Linear(16, 3), EmbeddingConfig())
    with pytest.raises(TypeError, match="expected an EmbeddingConfig; found dict"):
        lowbit.nn.Embedding.from_float(nn.Embedding(3, 16), {})


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_from_float_refuses_layers_that_compute_something_else():
    """Subclasses would lose what they add, and prepared layers their learned scales."""
    with pytest.raises(TypeError, match="^a Doubled may use its weight in its own way; expected a torch.nn.Linear$"):
        lowbit.nn.Linear.from_float(Doubled(32, 16), LinearConfig())
    configs = {"0": EmbeddingConfig(2), "1": LinearConfig(2)}
    prepared = lowbit.qat.prepare_(nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16)), configs)
    for form, layer, config in zip((lowbit.nn.Embedding, lowbit.nn.Linear), prepared, configs.values(), strict=True):
        with pytest.raises(TypeError, match="is prepared for training; lowbit.qat.convert_ packs it"):
            form.from_float(layer, config)


def test_from_float_takes_subclasses_that_compute_the_same():
    plain = nn.Linear(32, 16)
    output = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 16)
    output.load_state_dict(plain.state_dict())
    normed = nn.utils.parametrizations.weight_norm(copy.deepcopy(plain))
    for layer in (output, normed):
        expected = lowbit.quantize_tensor(layer.weight, LinearConfig(8), layer.bias)
        assert torch.equal(lowbit.nn.Linear.from_float(layer, LinearConfig(8)).packed_weight, expected)


def test_modules_of_something_else():
    for module in (lowbit.nn.Linear, lowbit.nn.Embedding):
        with pytest.raises(ValueError, match="packed has dtype torch.float32 .* expected torch.uint8"):
            module(torch.zeros(100))
        with pytest.raises(ValueError, match="not a packed weight"):
            module(torch.zeros(100, dtype=torch.uint8))
        with pytest.raises(ValueError, match="packed is on meta; expected the CPU"):
            module(random_packed(3, 16, 4, 16, "symmetric").to("meta"))
        with pytest.raises(TypeError):
            module([1, 2, 3])


def test_dequantize_refuses_altered_bytes():
    layer = lowbit.nn.Linear(random_packed(20, 40, 4, 16, "symmetric"))
    layer.packed_weight[100] ^= 1
    with pytest.raises(ValueError, match="altered bytes"):
        layer.dequantize()


def test_configs_check_themselves():
    for config in (LinearConfig, EmbeddingConfig):
        assert config() == config(bits=4, group_size=32, mapping="symmetric", scale="mse")
        for arguments, error, message in (
            (dict(bits=0), ValueError, "bits is 0; expected 1 to 8"),
            (dict(bits=9), ValueError, "bits is 9; expected 1 to 8"),
            (dict(bits="4"), TypeError, "bits is '4'; expected an int"),
            (dict(bits=True), TypeError, "bits is True; expected an int"),
            (dict(bits=4.0), TypeError, "bits is 4.0; expected an int"),
            (dict(group_size=0), ValueError, "group_size is 0; expected a positive multiple of 16, or None"),
            (dict(group_size=-16), ValueError, "group_size is -16"),
            (dict(group_size=24), ValueError, "group_size is 24; expected a positive multiple of 16"),
            (dict(group_size=32.0), TypeError, "group_size is 32.0; expected an int or None"),
            (dict(group_size=True), TypeError, "group_size is True"),
            (dict(mapping="asymmetric"), ValueError, "mapping is 'asymmetric'; expected 'symmetric', 'affine' or 'levels'"),
            (dict(mapping=None), ValueError, "mapping is None"),
            (dict(scale="max"), ValueError, "scale is 'max'; expected 'absmax' or 'mse'"),
        ):
            with pytest.raises(error, match=message):
                config(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_and_bias_of_a_packed_layer(dtype):
    """What models read from a layer: the dtype to cast to, the shape, sometimes the values."""
    linear, table = nn.Linear(100, 9, dtype=dtype), nn.Embedding(9, 100, dtype=dtype)
    linear.bias.data = random_rows(9).to(dtype)
    packed = lowbit.nn.Linear.from_float(linear, LinearConfig(8))
    packed_table = lowbit.nn.Embedding.from_float(table, EmbeddingConfig(8))
    for layer in (packed, packed_table):
        weight = layer.weight
        assert (weight.shape, weight.dtype, weight.device) == ((9, 100), dtype, torch.device("cpu"))
        assert not weight.requires_grad and weight.numel() == 900
        assert torch.equal(weight + 0, layer.dequantize(dtype)) and torch.equal(weight[3], layer.dequantize(dtype)[3])
        assert list(layer.state_dict()) == ["packed_weight"] and not list(layer.parameters())
        for change in (weight.zero_, lambda w=weight: w.data.normal_(), lambda w=weight: nn.init.ones_(w)):
            with pytest.raises(RuntimeError, match="the weight of a packed layer cannot be changed"):
                change()
        for value in (nn.Parameter(torch.ones(9, 100)), torch.ones(9, 100)):
            with pytest.raises(AttributeError, match="the weight of a packed layer cannot be set"):
                layer.weight = value
        other = torch.zeros(9, 100, dtype=dtype)
        assert torch.equal(other.copy_(weight), layer.dequantize(dtype))
    assert torch.equal(packed.bias + 0, linear.bias) and packed.bias.dtype == dtype
    assert lowbit.nn.Linear.from_float(nn.Linear(32, 9, bias=False), LinearConfig()).bias is None
    model = nn.Sequential(packed, packed_table).to(torch.bfloat16)
    assert {model[0].weight.dtype, model[0].bias.dtype, model[1].weight.dtype} == {torch.bfloat16}
    assert model[1](torch.tensor([1])).dtype == torch.bfloat16


def test_changes_of_a_weight_that_would_be_lost_are_refused():
    """Views, and setting ``.data``: without an error, the layer would stay unchanged."""
    layer = lowbit.nn.Linear.from_float(nn.Linear(32, 9), LinearConfig(8))
    before = layer.dequantize()

    def set_row(weight):
        weight[2] = 0.0

    def set_data(weight):
        weight.data = torch.zeros(9, 32)

    for change in (
        set_row,
        set_data,
        lambda weight: weight[2].zero_(),
        lambda weight: weight.data[:, 3].mul_(2),
        lambda weight: weight.T.add_(1),
        lambda weight: weight.view(-1).zero_(),
        lambda weight: weight.chunk(2)[1].zero_(),
        lambda weight: torch._foreach_mul_([weight], 2),
        lambda weight: torch.add(torch.zeros(9, 32), 1, out=weight),
    ):
        for tensor in (layer.weight, layer.weight.detach()):
            with pytest.raises(RuntimeError, match="the weight of a packed layer cannot be changed"):
                change(tensor)
    with pytest.raises(RuntimeError, match="the weight of a packed layer cannot be changed"):
        layer.bias.data = torch.zeros(9)
    assert torch.equal(layer.dequantize(), before)
    # Reading, and changing a copy, are allowed.
    assert torch.equal(layer.weight.T + 0, before.T) and layer.weight.T.stride() == (1, 32)
    assert torch.equal(layer.weight[1:3, ::2] * 2, before[1:3, ::2] * 2)
    copied = layer.weight.clone()
    copied[2] = 0.0
    assert torch.equal(copied[2], torch.zeros(32)) and torch.equal(copied[3], before[3])


def test_the_values_of_a_weight_go_wherever_tensors_go():
    """The values are computed; the weight has no memory to point to, and invalid pointers would end the process."""
    layer = lowbit.nn.Linear.from_float(nn.Linear(32, 9), LinearConfig(8))
    weight, expected = layer.weight, layer.dequantize()
    for found in (
        torch.from_numpy(weight.numpy()),
        torch.from_numpy(weight.detach().cpu().numpy()),
        torch.tensor(weight.tolist()),
        torch.from_dlpack(weight),
        copy.deepcopy(weight),
        copy.deepcopy({"weight": weight})["weight"],
        pickle.loads(pickle.dumps(weight)),
    ):
        assert type(found) is torch.Tensor and torch.equal(found, expected)
    for ask in (weight.data_ptr, weight.share_memory_, weight.untyped_storage, weight.data.untyped_storage):
        with pytest.raises(RuntimeError, match="the weight of a packed layer has no storage"):
            ask()
    # A tensor whose data it becomes reads from an address without a check: this ended the process.
    other = nn.Linear(32, 9)
    for value in (weight, weight.detach(), weight[2:], weight.T):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            other.weight.data = value
    assert weight.device == weight.T.device == (weight + 0).device == torch.device("cpu") and weight.is_cpu
    other.weight.data = weight.data
    assert torch.equal(other.weight, expected)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(layer.weight, expected)


def test_models_that_read_a_weight_compile_and_export():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 48)

        def forward(self, x):
            return self.layer(x.to(self.layer.weight.dtype)) @ self.layer.weight + self.layer.bias.sum()

    model = lowbit.quantize_(Reads().eval(), LinearConfig(4))
    x = random_rows(3, 64).double()
    expected = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)


def test_hooks_and_attributes_stay():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 9)).eval()
    layer, seen = model[1], []
    layer.tag = "mine"
    layer.forward = layer.forward  # as set by a library that wraps a layer: it computes with the float weight
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append(("before", type(module)))),
        layer.register_forward_hook(
            lambda module, args, kwargs, output: seen.append(("after", type(module))), with_kwargs=True
        ),
        layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(("gradient", type(module)))),
    ]
    lowbit.quantize_(model, LinearConfig())
    x = random_rows(2, 32).requires_grad_()
    model(x).sum().backward()
    assert seen == [(when, lowbit.nn.Linear) for when in ("before", "after", "gradient")]
    assert model[1].tag == "mine" and not model[1].training and "forward" not in vars(model[1])
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert len(seen) == 3


def test_public_names():
    """Each public name exists and has its own docstring; one inherited from its class does not count."""
    assert len(set(lowbit.__all__)) == len(lowbit.__all__)
    values = {name for name in lowbit.__all__ if isinstance(getattr(lowbit, name), str)}
    assert values <= {"__version__", "cmake_prefix_path"}
    for name in set(lowbit.__all__) - values:
        public = getattr(lowbit, name)
        assert isinstance(public, types.ModuleType) or callable(public), name
        documented = vars(public).get("__doc__") if isinstance(public, type) else public.__doc__
        # A dataclass without a docstring gets its signature as one.
        assert documented and not documented.startswith(f"{name}("), name


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_other_libraries_do_to_a_packed_layer():
    """Operations that would have no effect or damage the packed bytes are refused or leave the bytes unchanged."""
    model = lowbit.quantize_(nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48)), LinearConfig(4, 32))
    before = copy.deepcopy(model.state_dict())
    for prune in (
        lambda: nn.utils.prune.l1_unstructured(model[0], "weight", 0.5),
        lambda: nn.utils.prune.random_structured(model[0], "bias", 0.5, 0),
        lambda: nn.utils.weight_norm(model[0]),
        lambda: nn.utils.weight_norm(model[0], "bias"),
        lambda: nn.utils.spectral_norm(model[0]),
    ):
        with pytest.raises(ValueError, match=r"a packed layer cannot be pruned or normalized: its (weight|bias) is fixed"):
            prune()
    for norm in (nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm):
        with pytest.raises(ValueError, match="does not have a parameter, a buffer, or a parametrized element with name"):
            norm(model[0])
    with pytest.raises(ValueError, match="a packed Linear cannot be trained: its weight is fixed"):
        model[0].requires_grad_(True)
    assert model[0].requires_grad_(False) is model[0] and model.requires_grad_()[1].weight.requires_grad
    with pytest.raises(ValueError, match="torch.jit.script does not compile packed layers"):
        torch.jit.script(model)
    model.type(torch.float16)
    assert model[0].weight.dtype == model[1].weight.dtype == torch.float16
    assert torch.equal(model[0].packed_weight, before["0.packed_weight"])
    prepared = lowbit.qat.prepare_(nn.Sequential(nn.Linear(64, 48)), LinearConfig(4, 32))
    with pytest.raises(ValueError, match="the model is prepared for training"):
        torch.jit.script(prepared)


def test_a_module_that_an_earlier_version_pickled():
    """Its info was an attribute."""
    layer = lowbit.nn.Linear.from_float(torch.nn.Linear(64, 32), lowbit.LinearConfig(4))
    state = {name: value for name, value in layer.__getstate__().items() if name not in ("_info", "_seen")}
    old = object.__new__(lowbit.nn.Linear)
    old.__setstate__(state | {"info": layer.info})
    x = torch.randn(2, 64)
    assert torch.equal(old(x), layer(x)) and old.info.bits == 4 and "bits=4" in repr(old)


@pytest.mark.parametrize("kind, lacking", [("Linear", "input_order"), ("Embedding", "_table")])
def test_attributes_that_earlier_versions_did_not_pickle(kind, lacking):
    layer, config = torch.nn.Embedding(32, 64), lowbit.EmbeddingConfig(4)
    if kind == "Linear":
        layer, config = torch.nn.Linear(64, 32), lowbit.LinearConfig(4)
    layer = getattr(lowbit.nn, kind).from_float(layer, config)
    state = {name: value for name, value in layer.__getstate__().items() if name != lacking}
    state["_buffers"] = {name: value for name, value in state["_buffers"].items() if name != lacking}
    old = object.__new__(type(layer))
    old.__setstate__(state)
    x = torch.randn(2, 64) if kind == "Linear" else torch.tensor([3, 1])
    assert torch.equal(old(x), layer(x)) and torch.equal(old.weight, layer.weight)
    assert not any("Seen" in type(value).__name__ for value in layer.__getstate__().values())
