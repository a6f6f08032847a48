"""quantize_: replaced and unchanged layers."""

import copy
import io
import pickle
import re
import warnings

import lowbit
import pytest
import torch
from lowbit import EmbeddingConfig, LinearConfig
from reference import random_rows
from torch import nn

# The warning about the convolution, which these tests do not quantize.
pytestmark = pytest.mark.filterwarnings("ignore:.* a convolution, which a lowbit.ConvConfig packs")


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, tied: bool = True, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(50, width, padding_idx=0)
        self.position = nn.Embedding(8, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.conv = nn.Conv1d(width, width, 1)
        self.head = nn.Linear(width, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, indices):
        x = self.embed(indices) + self.position(torch.arange(indices.shape[-1]))
        x = self.blocks(x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


LINEARS = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}
INDICES = torch.tensor([[1, 2, 3, 49], [0, 7, 7, 8]])


def quantized(model: nn.Module) -> dict[str, int]:
    """name -> bits"""
    return {
        name: module.info.bits
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, (lowbit.nn.Linear, lowbit.nn.Embedding))
    }


def same_state(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def refused(model: nn.Module, error: type, message: str, *arguments) -> None:
    """quantize_ raises, and the model is the same as before."""
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    with pytest.raises(error, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowbit.quantize_(model, *arguments)
    after = dict(model.named_modules())
    assert list(after) == list(modules) and all(after[name] is modules[name] for name in modules)
    assert not quantized(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_a_linear_config_selects_the_linear_layers():
    model = Model(tied=False)
    kept = {name: module for name, module in model.named_modules() if name not in LINEARS}
    assert lowbit.quantize_(model, LinearConfig(bits=4)) is model
    assert quantized(model) == dict.fromkeys(LINEARS, 4)
    for name, module in kept.items():
        assert model.get_submodule(name) is module
    assert type(model.embed) is nn.Embedding and type(model.conv) is nn.Conv1d


def test_an_embedding_config_selects_the_tables():
    model = lowbit.quantize_(Model(tied=False), EmbeddingConfig(bits=3))
    assert quantized(model) == {"embed": 3, "position": 3}
    assert model.embed.padding_idx == 0 and model.position.padding_idx is None


def test_the_last_pattern_that_matches_wins():
    model = Model(tied=False)
    lowbit.quantize_(
        model,
        {
            "*": LinearConfig(bits=4),
            "blocks.?.down": LinearConfig(bits=8),
            "blocks.1.*": LinearConfig(bits=2),
            "embed": EmbeddingConfig(bits=5),
            "*.0.up": None,
        },
    )
    assert quantized(model) == {"blocks.0.down": 8, "blocks.1.up": 2, "blocks.1.down": 2, "head": 4, "embed": 5}
    # None overrides only earlier entries.
    other = lowbit.quantize_(Model(tied=False), {"blocks*": None, "*": LinearConfig(bits=4)})
    assert set(quantized(other)) == LINEARS


def test_one_star_may_hold_both_kinds():
    model = Model(tied=False)
    configs = {"*": LinearConfig(bits=4), "*embed*": EmbeddingConfig(bits=8), "posi*": EmbeddingConfig(bits=2)}
    lowbit.quantize_(model, configs)
    assert quantized(model) == {**dict.fromkeys(LINEARS, 4), "embed": 8, "position": 2}


def test_a_pattern_without_a_layer_warns():
    with pytest.warns(UserWarning, match="'attention.*' matches no layer") as caught:
        lowbit.quantize_(Model(tied=False), {"*": LinearConfig(), "attention.*": LinearConfig(), "blocks.*": None})
    assert [record.filename for record in caught if "attention" in str(record.message)] == [__file__]
    # A linear config never applies to a table.
    with pytest.warns(UserWarning, match="'embed' matches no layer that its config applies to"):
        lowbit.quantize_(Model(tied=False), {"embed": LinearConfig(), "head": LinearConfig()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the pattern")
        lowbit.quantize_(Model(tied=False), {"*": LinearConfig(), "blocks.*": None})


def test_filter_function():
    seen = []

    def keep_small(module, name):
        seen.append((type(module), name))
        return module.out_features <= 32

    model = lowbit.quantize_(Model(tied=False), {"*": LinearConfig(), "head": None}, keep_small)
    assert set(quantized(model)) == {"blocks.0.down", "blocks.1.down"}
    assert {name for _, name in seen} == LINEARS - {"head"} and {kind for kind, _ in seen} == {nn.Linear}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_quantized_model_is_near_the_float_one(dtype):
    model = Model().eval().to(dtype)
    with torch.no_grad():
        expected = model(INDICES).double()
        eight = EmbeddingConfig(bits=8)
        lowbit.quantize_(model, {"*": LinearConfig(bits=8), "position": eight, "embed": eight})
        found = model(INDICES)
    assert found.dtype == dtype
    # Measured: 0.9999 for float32, 0.9998 for bfloat16.
    assert torch.cosine_similarity(found.double().flatten(), expected.flatten(), dim=0) > 0.999


def test_the_dtype_of_a_table_follows_the_model():
    model = lowbit.quantize_(Model(tied=False).bfloat16(), EmbeddingConfig(bits=4))
    assert model.embed(INDICES).dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        packed = model.embed.packed_weight.clone()
        model.to(dtype)
        assert model.embed(INDICES).dtype == dtype and torch.equal(model.embed.packed_weight, packed)
        assert model.embed.dequantize(dtype).dtype == dtype
    assert model.half().embed(INDICES).dtype == torch.float16
    assert "_dtype" not in "".join(model.state_dict())


def tied_model(bits: int = 4) -> Model:
    configs = {"*": LinearConfig(bits, 16), "embed": EmbeddingConfig(bits, 16)}
    model = lowbit.quantize_(Model().eval(), configs)
    assert set(quantized(model)) == LINEARS | {"embed"}
    return model


def is_tied(model: Model) -> bool:
    return model.embed.packed_weight.data_ptr() == model.head.packed_weight.data_ptr()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def loaded(model):
    other = tied_model()
    other.load_state_dict(model.state_dict())
    return other


def loaded_with_assign(model):
    other = tied_model()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def loaded_over_another_width(model):
    other = tied_model(bits=7)
    assert other.embed.packed_weight.numel() != model.embed.packed_weight.numel()
    other.load_state_dict(model.state_dict())
    assert quantized(other) == quantized(model)
    return other


def loaded_over_the_same_size(model):
    # A scale per 16 inputs takes as many bytes as a scale and a minimum per 32.
    configs = {"*": LinearConfig(4, 32, "affine"), "embed": EmbeddingConfig(4, 32, "affine")}
    other = lowbit.quantize_(Model().eval(), configs)
    assert other.embed.packed_weight.numel() == model.embed.packed_weight.numel()
    other.load_state_dict(model.state_dict())
    assert other.embed.info == other.head.info == model.head.info
    return other


COPIES = [copy.deepcopy, pickled, saved_whole, loaded, loaded_with_assign]
COPIES += [loaded_over_another_width, loaded_over_the_same_size]


@pytest.mark.parametrize("copied", COPIES)
def test_a_tied_head_shares_its_bytes(copied):
    model = tied_model()
    assert is_tied(model)
    other = copied(model)
    assert is_tied(other)
    assert same_state(other.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(other(INDICES), model(INDICES))
    # Head and lookup use the same table.
    assert torch.equal(other.head.dequantize(), other.embed.dequantize())


def test_tied_layers_with_different_configs_are_refused():
    message = "embed and head share one weight but have different configs"
    refused(Model(), ValueError, message, {"*": LinearConfig(4), "embed": EmbeddingConfig(8)})
    untied = lowbit.quantize_(Model(), {"*": LinearConfig(4), "embed": EmbeddingConfig(8), "head": None})
    assert quantized(untied)["embed"] == 8 and type(untied.head) is nn.Linear


def test_tied_layers_with_different_biases():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(20, 32)
            self.a, self.b, self.c = nn.Linear(32, 20), nn.Linear(32, 20), nn.Linear(32, 20, bias=False)
            self.a.weight = self.b.weight = self.c.weight = self.table.weight

    model = lowbit.quantize_(Twins(), {"*": LinearConfig(8), "table": EmbeddingConfig(8)})
    assert [module.info.has_bias for module in (model.table, model.a, model.b, model.c)] == [False, True, True, False]
    assert not torch.equal(lowbit.unpack(model.a.packed_weight).bias, lowbit.unpack(model.b.packed_weight).bias)
    x = random_rows(3, 32)
    bias = lowbit.unpack(model.a.packed_weight).bias
    torch.testing.assert_close(model.a(x) - bias, model.c(x), rtol=0, atol=1e-5)

    one_bias = Twins()
    del one_bias.b, one_bias.c
    bias = one_bias.a.bias.detach().clone()
    lowbit.quantize_(one_bias, {"*": LinearConfig(8), "table": EmbeddingConfig(8)})
    assert one_bias.a.packed_weight is one_bias.table.packed_weight  # a table ignores the bias
    assert torch.equal(lowbit.unpack(one_bias.a.packed_weight).bias, bias)


def test_a_linear_without_bias_takes_none_from_its_twin():
    a, b = nn.Linear(32, 20), nn.Linear(32, 20, bias=False)
    b.weight = a.weight
    for order in ([a, b], [b, a]):
        model = lowbit.quantize_(nn.Sequential(*order), LinearConfig(8))
        assert [layer.info.has_bias for layer in model] == [layer is a for layer in order]


def test_a_shared_module_stays_shared():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": shared, "c": nn.Linear(32, 32)})
    lowbit.quantize_(model, LinearConfig(4))
    assert model["a"][0] is model["b"] and type(model["b"]) is lowbit.nn.Linear
    assert set(quantized(model)) == {"a.0", "b", "c"}


def test_a_shared_block_stays_shared():
    block = Block(32)
    model = lowbit.quantize_(nn.Sequential(block, nn.ReLU(), block), LinearConfig(4))
    assert model[0] is model[2] and type(block.up) is lowbit.nn.Linear


class OfItsOwn(torch.Tensor):
    """Like torchao's tensors, which define each operator."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    "change, found",
    [
        (OfItsOwn, "0.weight is a OfItsOwn; expected a plain tensor"),
        (torch.Tensor.to_sparse, "0.weight has the layout torch.sparse_coo; expected torch.strided"),
        (lambda weight: weight.to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn; expected float32, bfloat16, float16"),
    ],
)
def test_weights_of_other_kinds_are_refused_by_name(change, found):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight = nn.Parameter(change(model[0].weight.detach()))
    with pytest.raises(TypeError, match=re.escape(found)):
        lowbit.quantize_(model, LinearConfig())


def test_a_lazy_layer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^0\.weight has no shape yet; call the model once"):
        lowbit.quantize_(nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32)), LinearConfig())


def test_training_mode_is_kept():
    for training in (True, False):
        model = lowbit.quantize_(Model().train(training), {"*": LinearConfig(4), "embed": EmbeddingConfig(4)})
        assert all(module.training == training for module in model.modules())


def test_packed_weights_are_buffers():
    model = tied_model()
    assert not [name for name, _ in model.blocks.named_parameters() if "norm" not in name]
    assert "blocks.0.up.packed_weight" in dict(model.named_buffers())
    assert set(model.blocks[0].state_dict()) == {"norm.weight", "norm.bias", "up.packed_weight", "down.packed_weight"}
