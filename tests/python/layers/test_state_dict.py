"""Checkpoints are checked when loaded, and a module that refuses one stays unchanged."""

import copy
import pickle
import warnings

import lowbit
import pytest
import torch
from lowbit import EmbeddingConfig, LinearConfig
from reference import HEADER_BYTES, WIDTHS, random_packed, random_rows
from torch import nn

KEY = "1.packed_weight"


def model(bits: int = 4, seed: int = 0, mapping: str = "symmetric") -> nn.Sequential:
    """A table [20, 40] and a layer [17, 40] with a bias."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Embedding(20, 40), nn.Linear(40, 17)).eval()
    return lowbit.quantize_(layers, {"0": EmbeddingConfig(bits, 16, mapping), "1": LinearConfig(bits, 16, mapping)})


INDICES = torch.tensor([[0, 19], [3, 3]])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("mapping", ["symmetric", "affine"])
def test_save_and_load(tmp_path, bits, mapping):
    saved = model(bits, 0, mapping)
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(state) == ["0.packed_weight", KEY] and {v.dtype for v in state.values()} == {torch.uint8}
    # A mapped file is used in place.
    mapped = torch.load(tmp_path / "model.pt", weights_only=True, mmap=True)
    for values, assign in ((state, False), (state, True), (mapped, False), (mapped, True)):
        loaded = model(bits, 1, mapping)
        assert not torch.equal(loaded(INDICES), saved(INDICES))
        assert str(loaded.load_state_dict(values, strict=True, assign=assign)) == "<All keys matched successfully>"
        assert torch.equal(loaded(INDICES), saved(INDICES))
        assert (loaded[1].packed_weight.data_ptr() == values[KEY].data_ptr()) == assign


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bits", WIDTHS)
def test_a_checkpoint_of_another_width(bits, assign):
    saved, loaded = model(bits), model(4 if bits != 4 else 3, seed=1, mapping="affine")
    loaded.load_state_dict(saved.state_dict(), assign=assign)
    assert loaded[0].info == saved[0].info and loaded[1].info == saved[1].info
    assert repr(loaded) == repr(saved)
    assert torch.equal(loaded(INDICES), saved(INDICES))
    assert torch.equal(loaded[1].dequantize(), saved[1].dequantize())


def test_loading_copies_without_assign():
    saved, loaded = model(), model(seed=1)
    state = saved.state_dict()
    loaded.load_state_dict(state)
    expected = loaded(INDICES)
    state[KEY].zero_()
    assert torch.equal(loaded(INDICES), expected)


def altered(packed: torch.Tensor, at: int) -> torch.Tensor:
    packed = packed.clone()
    packed[at] ^= 1
    return packed


def another_version(packed: torch.Tensor) -> torch.Tensor:
    packed = packed.clone()
    packed[8:10] = torch.tensor([5, 0])
    return packed


PANEL_BYTES = 2 * 4 * 64 + 3 * 32 + 3 * 64  # two blocks of 4 bits, three groups, the head: 800, padded to 832
DAMAGE = {
    "magic": (lambda p: altered(p, 0), "not a packed weight: its first eight bytes are 884c4f5742"),
    "version": (another_version, "is of format version 5; this library reads versions 1 to 4"),
    "header": (lambda p: altered(p, 11), "altered header: its checksum does not match"),
    "header checksum": (lambda p: altered(p, 63), "altered header"),
    "payload checksum": (lambda p: altered(p, 48), "altered header"),
    "first code": (lambda p: altered(p, HEADER_BYTES), "altered bytes: their checksum is"),
    "first scale": (lambda p: altered(p, HEADER_BYTES + 4 * 64), "altered bytes"),
    "head": (lambda p: altered(p, HEADER_BYTES + PANEL_BYTES - 192), "altered bytes"),
    "padding": (lambda p: altered(p, HEADER_BYTES + PANEL_BYTES + 31), "altered bytes"),
    "second panel": (lambda p: altered(p, HEADER_BYTES + PANEL_BYTES + 32), "altered bytes"),
    "last byte": (lambda p: altered(p, p.numel() - 1), "altered bytes"),
    "one byte short": (lambda p: p[:-1], "has 1727 bytes, its header says 1728; expected 1728 for 17 x 40"),
    "one panel": (lambda p: p[: HEADER_BYTES + 832], "packed weight has 896 bytes, its header says 1728"),
    "one byte more": (lambda p: torch.cat([p, p[:1]]), "packed weight has 1729 bytes"),
    "header alone": (lambda p: p[:64], "packed weight has 64 bytes, its header says 1728"),
    "half a header": (lambda p: p[:32], "packed weight has 32 bytes; expected a header of 64 bytes"),
    "nothing": (lambda p: p[:0], "packed weight has 0 bytes"),
    "more rows": (lambda p: random_packed(18, 40, 4, 16, "symmetric"), r"has shape \[18, 40\]; expected \[17, 40\]"),
    "other inputs": (lambda p: random_packed(17, 41, 4, 16, "affine"), r"has shape \[17, 41\]; expected \[17, 40\]"),
    "float weights": (lambda p: torch.zeros(17, 40), r"dtype torch.float32 and shape \[17, 40\]; expected torch.uint8"),
    "signed bytes": (lambda p: p.view(torch.int8), "packed has dtype torch.int8"),
    "two dimensions": (lambda p: p.view(1, -1), r"shape \[1, 1728\]; expected torch.uint8 and one dimension"),
    "strided": (lambda p: p.repeat_interleave(2)[::2], "packed is not contiguous"),
    "meta": (lambda p: p.to("meta"), "packed is on meta; expected the CPU"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("assign", [False, True])
def test_damaged_bytes_are_refused(name, assign):
    damage, reason = DAMAGE[name]
    source, target = model(), model(seed=1)
    before, expected = copy.deepcopy(target[1].state_dict()), target[1](random_rows(3, 40))
    state = source.state_dict()
    state[KEY] = damage(state[KEY])
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=reason) as caught:
            target.load_state_dict(state, strict=strict, assign=assign)
        assert f"{KEY}: " in str(caught.value)
    assert torch.equal(target[1].packed_weight, before["packed_weight"])
    assert torch.equal(target[1](random_rows(3, 40)), expected)
    # A valid checkpoint still loads afterwards.
    target.load_state_dict(source.state_dict())
    assert torch.equal(target(INDICES), source(INDICES))


def test_all_damage_is_reported_at_once():
    target, state = model(), model(seed=1).state_dict()
    state = {key: altered(value, 70) for key, value in state.items()}
    with pytest.raises(RuntimeError) as caught:
        target.load_state_dict(state)
    assert "0.packed_weight: packed weight has altered bytes" in str(caught.value)
    assert "1.packed_weight: packed weight has altered bytes" in str(caught.value)


def test_missing_and_unexpected_keys():
    target, state = model(), model(seed=1).state_dict()
    before = target[1].packed_weight.clone()
    del state[KEY]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{KEY}"'):
        target.load_state_dict(state)
    assert str(target.load_state_dict(state, strict=False)).startswith(f"_IncompatibleKeys(missing_keys=['{KEY}']")
    assert torch.equal(target[1].packed_weight, before)
    state = {**model(seed=1).state_dict(), "1.bias": torch.zeros(17)}
    with pytest.raises(RuntimeError, match='Unexpected key.*"1.bias"'):
        target.load_state_dict(state)


def test_a_float_checkpoint_is_refused():
    state = nn.Sequential(nn.Embedding(20, 40), nn.Linear(40, 17)).state_dict()
    with pytest.raises(RuntimeError, match=f"Missing key.*{KEY}"):
        model().load_state_dict(state)
    # peft loads fully trained layers like this; without an error they would be ignored.
    with pytest.raises(RuntimeError, match="1.weight: it is a float weight, and the layer is packed"):
        model().load_state_dict(state, strict=False)


def test_a_layer_on_the_meta_device_loads_with_assign_only():
    source, empty = model(), copy.deepcopy(model()).to("meta")
    with pytest.warns(UserWarning, match="pass `assign=True`"):
        empty.load_state_dict(source.state_dict())
    assert empty[1].packed_weight.is_meta
    empty.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(empty(INDICES), source(INDICES))


@pytest.mark.parametrize("bits", WIDTHS)
def test_deepcopy_and_pickle(bits):
    source = model(bits, mapping="affine")
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert repr(other) == repr(source) and other[1].info == source[1].info
        assert torch.equal(other(INDICES), source(INDICES))
        assert other[1].packed_weight.data_ptr() != source[1].packed_weight.data_ptr()
        other[1].packed_weight.zero_()
        with pytest.raises(ValueError, match="not a packed weight"):
            other(INDICES)
        source(INDICES)


def test_a_checkpoint_from_a_model_of_another_dtype():
    source, target = model().half(), model(seed=1).bfloat16()
    target.load_state_dict(source.state_dict())
    assert target[0](INDICES).dtype == torch.bfloat16  # the model's dtype, not the checkpoint's
    assert torch.equal(target[0].dequantize(), source[0].dequantize())


@pytest.mark.parametrize("config", [EmbeddingConfig(8), EmbeddingConfig(4, activation_bits=16)], ids=str)
def test_tied_layers_describe_a_weight_that_one_of_them_has_loaded(config):
    """Of another size, or of the same size with other activations."""
    tied = nn.ModuleDict({"table": nn.Embedding(64, 32), "head": nn.Linear(32, 64, bias=False)})
    tied["head"].weight = tied["table"].weight
    lowbit.quantize_(tied, {"table": EmbeddingConfig(4), "head": LinearConfig(4)})
    assert tied["head"].info.bits == 4
    table = lowbit.nn.Embedding.from_float(nn.Embedding(64, 32), config)
    tied["table"].load_state_dict(table.state_dict())
    assert tied["head"].info == tied["table"].info == table.info
    assert copy.deepcopy(tied)["head"].info == table.info
    # Damaged bytes are reported when they are used.
    tied["table"].packed_weight.zero_()
    assert tied["head"].info == table.info
    with pytest.raises(ValueError, match="not a packed weight"):
        tied["head"](torch.ones(1, 32))


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().load_state_dict(model(bits=3, seed=1).state_dict())
