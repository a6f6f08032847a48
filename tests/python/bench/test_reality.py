"""bench/reality.py: its simulations, and a whole run on examples/tiny_llama."""

import json
import sys
from pathlib import Path

import lowbit
import pytest
import torch
import transformers
from lowbit.tools.report.peers import Peer

sys.path.append(str(Path(__file__).parents[3] / "bench"))
import reality
import reality_rounding as rounding
import reality_weights as weights


@pytest.mark.parametrize(
    "group, ends", [(16, [16, 32, 48, 64]), (32, [32, 64]), (64, [64, 128]), (128, [64, 128, 192]), (96, [64, 96, 160, 192])]
)
def test_blocks_are_cut_from_the_start_of_each_group(group, ends):
    """A large input affects all others of its block, and none outside."""
    round_ = rounding.blocks_of(group)
    begin = 0
    for end in ends:
        for at in (begin, end - 1):
            x = torch.full((192,), 0.5)
            x[at] = 127 * 2.0
            zeros = [i for i, value in enumerate(round_(x).tolist()) if value == 0]
            assert zeros == [i for i in range(begin, end) if i != at]
        begin = end


def test_roundings():
    x = torch.randn(5, 640, generator=torch.Generator().manual_seed(0))
    x[1], x[2] = 0, x[2].abs() + 1
    for round_, step in (
        (rounding.rows, x.abs().amax(1) / 127),
        (rounding.rows_with_zero_point, (x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)) / 255),
    ):
        error = (round_(x) - x).abs()
        assert (error <= 0.501 * step[:, None] + 1e-6).all() and error[0].max() > 0.4 * step[0]
        assert torch.equal(round_(x)[1], x[1])
        assert len(round_(x)[0].unique()) <= 256
    for size in (32, 64, 256):  # 640 is not a multiple of 256
        expected = torch.cat([rounding.rows(part) for part in x.split(size, dim=1)], dim=1)
        assert torch.equal(rounding.blocks(size)(x), expected)


def test_rotation():
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
    x[:, 7] = 100
    for size, width in ((16, 16), (None, 64)):
        seen = []
        same = rounding.rotated(lambda turned: seen.append(turned) or turned, size)(x)
        assert torch.allclose(same, x, atol=1e-4)
        assert torch.allclose(seen[0].unflatten(-1, (-1, width)).norm(dim=-1), x.unflatten(-1, (-1, width)).norm(dim=-1))
        assert seen[0].abs().max() < 1.5 * 100 / width**0.5 + 5


@pytest.fixture
def packed():
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, initializer_range=0.3,
    )  # fmt: skip
    return lowbit.quantize_(transformers.Gemma3ForCausalLM(config).eval(), {"*_proj": lowbit.LinearConfig(4, 32)})


@torch.inference_mode()
def test_parts_in_bfloat16(packed):
    tokens = torch.arange(40)[None]

    def logits():
        return packed(tokens, use_cache=False).logits

    exact = logits()
    found = {}
    for part in rounding.PARTS:
        with rounding.in_bfloat16(packed, {part}):
            found[part] = logits()
        assert not torch.equal(found[part], exact), part
        assert torch.equal(logits(), exact), part  # the rounding is removed
    assert torch.equal(found["logits"], exact.bfloat16().float())
    with rounding.in_bfloat16(packed, set()):
        assert torch.equal(logits(), exact)


@torch.inference_mode()
def test_hooks_end(packed):
    tokens = torch.arange(40)[None]
    exact = packed(tokens, use_cache=False).logits
    name = "model.layers.1.mlp.down_proj"
    assert rounding.kind_of(name) == "down"
    for within in (rounding.rounded_inputs(packed, {name: rounding.rows}), rounding.noisy_embeddings(packed, 1e-3, 0)):
        with within:
            assert not torch.equal(packed(tokens, use_cache=False).logits, exact)
        assert torch.equal(packed(tokens, use_cache=False).logits, exact)


def test_a_run(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{reality.BEGIN}\nold\n{reality.END}\n\nAfter.\n", encoding="utf-8")
    options = "--only tiny_llama --parts table layers sensitivity --tokens 40"
    places = ["--directory", tmp_path / "models", "--output", tmp_path / "out" / "reality", "--document", page]
    monkeypatch.setattr(sys, "argv", ["reality.py", *options.split(), *map(str, places)])
    assert reality.main() == 0
    found = json.loads((tmp_path / "out" / "reality.json").read_text(encoding="utf-8"))["models"]["tiny_llama"]
    rows = {row["name"]: row for row in found["table"]}
    assert rows["float, float32"]["kld"] < 1e-6 < rows["blocks of 32"]["kld"] < rows["a row, symmetric"]["kld"]
    assert 1e-6 < rows["lowbit, float32"]["kld"] < 0.1
    assert rows["lowbit, float32, activations of 16 bits"]["kld"] < 0.1 * rows["lowbit, float32"]["kld"]
    moved = {row["name"]: row["most"] for row in found["sensitivity"]}
    assert moved["float"] < 1e-3 < moved["lowbit, float32"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Page\n\n{reality.BEGIN}\nWritten by") and text.endswith(f"|\n{reality.END}\n\nAfter.\n")
    assert "old" not in text and "| only down |" in text
    assert text.count(reality.BEGIN) == 1
    with pytest.raises(ValueError, match="has no .*figures"):
        reality.insert("# Page\n", "text\n")


@pytest.mark.more
def test_weights(tmp_path, monkeypatch, capsys):
    """Calibrated weights, and those of another library, for which this test rounds to bfloat16."""
    asked = []

    def hold(weight, importance):
        asked.append((tuple(weight.shape), len(importance)))
        assert (importance > 0).all()
        return weight.bfloat16().float(), weight.numel() // 2

    monkeypatch.setattr(weights, "WIDTHS", (3,))
    monkeypatch.setattr(weights, "TARGETS", (3.5,))
    monkeypatch.setattr(weights, "peers", lambda bits, importance: {"GGUF Q4_K, importance": Peer(hold, importance=True)})
    options = "--only tiny_llama --parts weights --tokens 40 --calibration-tokens 128"
    places = ["--directory", tmp_path / "models", "--output", tmp_path / "reality"]
    monkeypatch.setattr(sys, "argv", ["reality.py", *options.split(), *map(str, places)])
    assert reality.main() == 0
    rows = json.loads((tmp_path / "reality.json").read_text(encoding="utf-8"))["models"]["tiny_llama"]["weights"]
    other, *own = rows
    assert other["bits"] == 4.0 and ["inputs rotated" in row["name"] for row in own] == [False] * 3 + [True] * 3
    for one_width, levels, mixed in (own[:3], own[3:]):
        assert "3 bits, groups" in one_width["name"] and "fitted levels" in levels["name"] and "mixed" in mixed["name"]
        assert one_width["bits"] > 3.5 >= mixed["bits"] > 3 > levels["bits"]
        assert other["kld"] < min(one_width["kld"], mixed["kld"]) and max(one_width["kld"], mixed["kld"]) < levels["kld"]
    assert all(inputs % 256 == 0 and inputs == count for (_, inputs), count in asked)
    assert f"| {other['name']} | " in (tmp_path / "reality.md").read_text(encoding="utf-8")


def test_blocks_go_on_in_the_next_row():
    weight, importance = torch.arange(4 * 640.0).view(4, 640), torch.rand(640)

    def hold(runs, each):
        assert runs.shape == (2, 1280) and torch.equal(each, torch.cat([importance, importance]))
        return runs + 1, 7

    held, size = weights.held_in_runs(Peer(hold, importance=True), weight, importance)
    assert torch.equal(held, weight + 1) and size == 7
    with pytest.raises(ValueError, match=r"has shape \[3, 640\]; expected a multiple of 256 weights"):
        weights.held_in_runs(Peer(hold), weight[:3], importance)
