"""Calibration within a budget: mixed precision per layer for a file size, or for mean bits per weight."""

import itertools
import os
import re
from pathlib import Path

import lowbit
import pytest
import torch
import transformers
from calibration_files import hidden, make, relative, save, source, text, words  # noqa: F401
from command_line import document, error, invoke
from lowbit.calibration import widths
from lowbit.calibration.checkpoint import calibrate_checkpoint
from lowbit.calibration.model import evaluating
from lowbit.calibration.widths import Item, Option, _hull, assign, extremes, options_of
from lowbit.checkpoint import planned_size

pytestmark = pytest.mark.more


def mean_bits(model) -> float:
    """Bits per packed weight; small matrices have overhead besides codes and scales."""
    packed = [module.info for module in model.modules() if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding)]
    return 8 * sum(info.total_bytes for info in packed) / sum(info.out_features * info.in_features for info in packed)


def weights_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def test_a_target_size_is_met_to_the_byte(source, text, tmp_path):
    sizes = {}
    for bits in (2, 5):
        lowbit.quantize_checkpoint(source, tmp_path / f"{bits}", lowbit.LowBitConfig(bits=bits))
        sizes[bits] = weights_bytes(tmp_path / f"{bits}")
    largest = 0
    for target in (sizes[2] + 1, sizes[2] + 4000, sizes[5] - 1):
        out = tmp_path / f"target-{target}"
        options = ["--calibrate", text, "--target-size", target, "--method", "importance"]
        said = document(invoke("quantize", source, out, *options, "--json"))
        found = weights_bytes(out)
        assert largest < found <= target and target - found < 4000
        largest = found
        entries = [entry for entry in lowbit.inspect_checkpoint(out) if entry.kind == "packed"]
        assert len({(entry.bits, entry.group_size) for entry in entries}) > 1
        assert all(1 <= entry.bits <= 8 and entry.group_size in (16, 32, 64, 128) for entry in entries)
        assert said["bits_per_weight"] == 8 * said["packed_bytes"] / said["packed_weights"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert hidden(loaded).isfinite().all()


def test_named_layers_keep_their_width(source, text, tmp_path):
    options = ["--calibrate", text, "--target-bits", 7, "--method", "importance"]
    pins = ["--override", "*.0.*=7,64", "--override", "*.1.mlp.*=float", "--embedding-bits", "8"]
    assert invoke("quantize", source, tmp_path / "out", *options, *pins).exit_code == 0
    entries = {entry.name: entry for entry in lowbit.inspect_checkpoint(tmp_path / "out")}
    assert entries["model.embed_tokens.packed_weight"].bits == 8
    named = [entry for name, entry in entries.items() if ".layers.0." in name and entry.kind == "packed"]
    assert {(entry.bits, entry.group_size) for entry in named} == {(7, 64)}
    assert all(entry.kind != "packed" for name, entry in entries.items() if ".layers.1.mlp" in name)


def test_widths_in_memory_and_that_they_pay():
    model = make("untied")
    # Blocks of different importance: the first matters most.
    for at, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data.mul_((4.0, 1.0, 0.05)[at])
        layer.mlp.down_proj.weight.data.mul_((4.0, 1.0, 0.05)[at])
    ids = [torch.tensor([[int(word[1:]) for word in words(48, seed).split()]]) for seed in range(20)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = lowbit.assign_widths(model, ids, lowbit.LowBitConfig(bits=3), 5.4)
    assert config.overrides == lowbit.assign_widths(model, ids, lowbit.LowBitConfig(bits=3), 5.4).overrides
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    chosen = {name: each for name, each in config.select(model).items() if "down_proj" in name}
    assert chosen["model.layers.0.mlp.down_proj"].bits > chosen["model.layers.2.mlp.down_proj"].bits
    wanted = hidden(model)
    uniform, mixed = make("untied"), make("untied")
    for each in (uniform, mixed):
        each.load_state_dict(before)
    lowbit.calibrate(uniform, ids, lowbit.LowBitConfig(bits=3), "importance")
    # A text that can be read only once must serve for both widths and scales.
    lowbit.calibrate(mixed, iter(ids), lowbit.LowBitConfig(bits=3), "importance", target_bits=mean_bits(uniform))
    assert mean_bits(uniform) - 0.1 < mean_bits(mixed) <= mean_bits(uniform)
    assert relative(hidden(mixed), wanted) < 0.8 * relative(hidden(uniform), wanted)


def test_a_table_that_is_also_the_head_counts_twice_as_much(monkeypatch):
    """Because calibration reduces its error less than that of layers."""
    losses = {}
    for factor in (1, 2):
        monkeypatch.setattr(widths, "_OVERSTATED", factor)
        model = make("tied")
        items = widths.options_of(model, lowbit.LowBitConfig())
        with evaluating(model):
            widths.measure_losses(model, [{"input_ids": torch.arange(300)[None] % 64}], items, 2)
        losses[factor] = {" ".join(item.layers): item.options[0].loss for item in items}
    (table,) = (name for name in losses[1] if "embed_tokens" in name)
    for name, loss in losses[1].items():
        assert losses[2][name] == (loss if name == table else loss / 2) > 0, name


@pytest.mark.parametrize("alternatives", [(), ("affine",), ("levels",), ("affine", "levels")])
def test_alternatives_to_a_plain_scale(alternatives):
    items = options_of(make("untied"), lowbit.LowBitConfig(), alternatives)
    for bits in range(1, 9):
        found = {option.config.mapping for item in items for option in item.options if option.config.bits == bits}
        assert found == {"symmetric", *(alternatives if 2 <= bits <= 4 else ())}


@pytest.mark.parametrize("alternatives", ["affine", ("affine", "nf4")])
def test_invalid_alternatives(alternatives):
    ids = [torch.zeros(1, 200, dtype=torch.int64)]
    with pytest.raises(ValueError, match=r"^alternatives are .*; expected some of 'affine', 'levels'$"):
        lowbit.assign_widths(make("untied"), ids, lowbit.LowBitConfig(), 4, alternatives=alternatives)


def test_assignment_is_best_at_its_size():
    """Compared with all combinations: at a corner of the convex hull, none of the same size or smaller is better."""
    generator = torch.Generator().manual_seed(0)
    items = []
    for index in range(4):
        losses = torch.rand(5, generator=generator).cumsum(0).flip(0) * 10**index
        options = [Option(100 + 60 * at + 7 * index, float(loss), None) for at, loss in enumerate(losses)]
        items.append(Item([f"layer{index}"], 1000, options, None))
    smallest, largest = extremes(items)
    seen = set()
    for most in range(smallest, largest + 1, 13):
        chosen = assign(items, most)
        total, loss = sum(each.bytes for each in chosen), sum(each.loss for each in chosen)
        assert total <= most
        seen.add(total)
        everything = list(itertools.product(*(item.options for item in items)))
        best = min(sum(each.loss for each in way) for way in everything if sum(each.bytes for each in way) <= most)
        hulls = [_hull(item.options) for item in items]
        step = max(first.loss - second.loss for hull in hulls for first, second in zip(hull, hull[1:]))
        assert loss <= best + step  # between two corners of the hull, the loss is at most one step larger
    assert len(seen) > 5
    with pytest.raises(ValueError, match=f"the smallest widths take {smallest} bytes"):
        assign(items, smallest - 1)


def test_a_size_for_a_model_with_experts(tmp_path):
    source, text = save(make("mixtral"), tmp_path / "mixtral"), words(1500)
    whole = planned_size(source, lowbit.LowBitConfig(bits=4)).bytes
    summary, result = calibrate_checkpoint(source, tmp_path / "out", lowbit.LowBitConfig(), text, "auto", target_bytes=whole)
    assert 0.9 * whole < summary.target_bytes <= whole  # a tensor of experts has one width
    assert sum(".experts." in name for name in result.methods) == 3 * 2 * 4
    with pytest.raises(ValueError, match="bytes cannot be reached; the weight files of this model take"):
        calibrate_checkpoint(source, tmp_path / "none", lowbit.LowBitConfig(), text, "auto", target_bytes=whole // 8)


def test_budgets_that_cannot_be(source, text, tmp_path):
    out = tmp_path / "out"
    for target in ("1kB", "1GB"):
        said = error(invoke("quantize", source, out, "--calibrate", text, "--target-size", target))
        found = re.search(r"cannot be reached; .* take (\d+) to (\d+) bytes", said)
        assert found, said
        assert int(found[1]) < int(found[2])
    # Both extremes can be reached.
    for end in found.groups():
        options = ["--calibrate", text, "--target-size", end, "--method", "importance"]
        assert invoke("quantize", source, tmp_path / end, *options).exit_code == 0
    assert weights_bytes(tmp_path / found[1]) == int(found[1])
    for bits in (1.1, 20):
        said = error(invoke("quantize", source, out, "--calibrate", text, "--target-bits", bits))
        assert re.search(r"bits per weight cannot be reached; this model takes [\d.]+ to [\d.]+, scales", said)
    for options, says in (
        (["--target-bits", 3], "without --calibrate"),
        (["--calibrate", text, "--target-bits", 3, "--target-size", "1MB"], "expected only one of the two"),
    ):
        refused = invoke("quantize", source, out, *options)
        assert refused.exit_code == 2 and says in " ".join(refused.stderr.replace("│", " ").split()), refused.stderr
    assert invoke("quantize", source, out, "--calibrate", text, "--target-size", "much").exit_code == 2
    assert sorted(os.listdir(tmp_path)) == sorted(found.groups())
