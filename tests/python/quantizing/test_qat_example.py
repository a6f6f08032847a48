"""examples/qat/train.py: a few steps improve the model, and the saved model is the measured one."""

import math
import os
import re
import runpy
import subprocess
import sys

import pytest
from command_line import ONE_THREAD, ROOT, TINY, shortened
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity

SCRIPT = ROOT / "examples" / "qat" / "train.py"


def train(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=os.environ | ONE_THREAD
    )


@pytest.mark.more
def test_a_few_steps_gain(tmp_path):
    process = train(
        "--output", tmp_path / "model", "--steps", 6, "--sequences", 2, "--threads", 1, "--documents", 40,
        "--heldout-tokens", 1500,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    first, *_, last = process.stdout.splitlines()
    whole, nearest = float(first.split()[2].rstrip(";")), float(first.split()[-3])
    trained = float(last.split()[1])
    assert trained < 0.95 * nearest
    tokens = load_tokenizer(TINY / "model")((TINY / "heldout.txt").read_text())["input_ids"][:1500]
    model = load_model(tmp_path / "model")
    assert math.isclose(perplexity(model, tokens).perplexity, trained * whole, rel_tol=2e-3)
    bits = {layer.info.bits for layer in model.model.layers.modules() if hasattr(layer, "info")}
    assert bits == {2} and model.lm_head.info.bits == 4


@pytest.mark.more
def test_each_matrix_gets_its_own_width(tmp_path):
    """--target-bits: all packed matrices together meet the mean, and these widths are trained and saved."""
    shortened(tmp_path / "float", 2)
    process = train(
        "--model", tmp_path / "float", "--output", tmp_path / "model", "--target-bits", 2.5, "--steps", 8, "--sequences", 2,
        "--threads", 1, "--documents", 40, "--heldout-tokens", 300, "--report", 1,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    losses = [float(found) for found in re.findall(r"^step \d+ of 8: loss ([\d.]+),", process.stdout, re.M)]
    assert len(losses) == 8 and sum(losses[-3:]) < 0.88 * sum(losses[:3]), losses
    said = float(re.search(r"([\d.]+) with the table$", process.stdout.strip())[1])
    trained = load_model(tmp_path / "model")
    packed = {name: layer.info for name, layer in trained.named_modules() if hasattr(layer, "info")}
    assert len(packed) == 2 * 7 + 2 and packed["lm_head"] == packed["model.embed_tokens"]
    once = [info for name, info in packed.items() if name != "lm_head"]  # which shares the table
    mean = 8 * sum(info.total_bytes for info in once) / sum(info.out_features * info.in_features for info in once)
    assert 2.4 < mean <= 2.5 and said == round(mean, 2)
    assert len({(info.bits, info.group_size) for info in once}) > 2


@pytest.mark.parametrize("option", [("--steps", 0), ("--distillation", 2.5), ("--documents", 0)])
def test_wrong_options(option, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, option)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2 and f"{option[0]} is {option[1]}; expected" in capsys.readouterr().err
