"""examples/qat/train.py: a few steps gain, and what it saves is the model that it measured."""

import math
import os
import subprocess
import sys

import pytest

from command_line import ONE_THREAD, ROOT, TINY
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity

SCRIPT = ROOT / "examples" / "qat" / "train.py"


def train(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=os.environ | ONE_THREAD
    )


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


@pytest.mark.parametrize("option", [("--steps", 0), ("--distillation", 2.5), ("--documents", 0)])
def test_wrong_options(option):
    process = train(*option)
    assert process.returncode == 2 and f"{option[0]} is {option[1]}; expected" in process.stderr
