"""bench/grids.py: a permuted model computes the same, and each row is measured on both."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from lowbit.llm.loading import load_model

sys.path.append(str(Path(__file__).parents[3] / "bench"))
import grids

MODEL = Path(__file__).parents[3] / "examples" / "tiny_llama" / "model"


def gemma():
    config = transformers.Gemma3TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight)
    return model


def untied():
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize("make", [lambda: load_model(MODEL), gemma, untied])
@torch.no_grad()
def test_permuted_channels_compute_the_same(make):
    model = make().float().eval()
    permuted = copy.deepcopy(model)
    grids.permute(permuted)
    tokens = torch.arange(1, 40)[None]
    expected = model(tokens).logits
    assert torch.allclose(permuted(tokens).logits, expected, rtol=0, atol=1e-4 * float(expected.std()))
    for (name, old), (_, new) in zip(model.named_parameters(), permuted.named_parameters(), strict=True):
        if old.dim() == 2:  # the same weights, and each row in another order
            assert not torch.equal(old, new) and torch.equal(old.flatten().sort()[0], new.flatten().sort()[0]), name
            if "embed" in name:
                assert torch.equal(old.sort(1)[0], new.sort(1)[0])


def test_rows(monkeypatch, capsys):
    monkeypatch.setattr(grids.weights, "calibration_text", lambda: "def f(x):\n    return x + 1\n" * 50)
    monkeypatch.setattr(grids.weights, "mean_squares", lambda source, tokens: {})
    monkeypatch.setattr(grids.weights, "dequantized", lambda source, peer, squares: (source.floats, 1, 4.5))
    monkeypatch.setattr(grids, "peers", lambda bits, importance: {"GGUF Q4_K, importance": None})
    monkeypatch.setattr(
        sys, "argv", ["grids.py", str(MODEL), "--rows", "groups of 64, a minimum, not", "llama.cpp", "--tokens", "24",
                      "--calibration-tokens", "128"]
    )  # fmt: skip
    grids.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    names = ["lowbit, groups of 64, a minimum, not rotated", "llama.cpp's Q4_K, importance"]
    assert [row[:2] for row in rows] == [[channels, name] for channels in ("permuted", "as they are") for name in names]
    assert [float(row[3]) > 1e-4 for row in rows] == [True, False, True, False]  # this peer keeps the weights
    assert {row[2] for row in rows[1::2]} == {"4.50"}


def test_rows_have_the_settings_of_their_names(monkeypatch):
    asked = {}
    monkeypatch.setattr(grids.weights, "calibrate", lambda *given: asked.update({name: given[2:]}) or torch.nn.Identity())
    monkeypatch.setattr(grids.weights, "packed_size", lambda model: (1, 4.5))
    for name, make in grids.ROWS.items():
        if name.startswith("lowbit"):
            assert make(None, 128)[1] == 4.5
    for name, (config, target) in asked.items():
        assert config.bits == 4 and config.rotate == ("not rotated" not in name), name
        assert config.group_size == (64 if "of 64" in name else 32), name
        assert config.mapping == {"minimum": "affine", "table": "levels"}.get(name.split("a ")[-1].split(",")[0], "symmetric")
        assert target == (4.5 if "4.5" in name else None), name
