"""bench/equal_texts.py: its measure on lists of tokens, and a whole run on examples/tiny_llama."""

import math
import sys
from pathlib import Path

import lowbit
import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "bench"))
import equal_texts

MODEL = ROOT / "examples" / "tiny_llama" / "model"


def test_texts_are_compared():
    texts = [[1, 2, 3], [1, 2, 3], [4], [], [5, 6]]
    assert equal_texts.compare(texts, [[1, 2, 3], [1, 2], [4], [], [6, 6]]) == {"equal": 0.6, "first": 1.0}
    same = equal_texts.compare(texts, texts)
    assert same["equal"] == 1 and math.isnan(same["first"])
    assert equal_texts.cells({"activations": "8 bits", "programs": {"equal": 0.25, "first": 7.6}, "decoder": same}) == [
        "8 bits", "25% (8)", "100%", ""
    ]  # fmt: skip


def test_prompts():
    lines = equal_texts.PROMPTS.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines)) == 96 and all(line == line.strip() != "" for line in lines)


def test_options_that_are_refused(monkeypatch, capsys):
    for option, says in (
        (("--prompts", "97"), "--prompts is 97; expected 1 to 96"),
        (("--new", "0"), "--new is 0; expected 1"),
    ):
        monkeypatch.setattr(sys, "argv", ["equal_texts.py", str(MODEL), *option])
        with pytest.raises(SystemExit):
            equal_texts.main()
        assert says in capsys.readouterr().err


@pytest.mark.more
def test_activations_of_16_bits_give_the_texts_of_the_float_model(tmp_path, monkeypatch, capsys):
    """In lowbit's decoder and in transformers. With 8 bits many texts differ."""
    lowbit.quantize_checkpoint(MODEL, tmp_path / "packed", lowbit.LowBitConfig(4))
    monkeypatch.setattr(sys, "argv", ["equal_texts.py", str(tmp_path / "packed"), "--prompts", "20", "--new", "48"])
    equal_texts.main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert lines[0] == ["Activations", *equal_texts.TITLES.values()]
    shares = {row[0]: [int(cell.partition("%")[0]) for cell in row[1:] if cell] for row in lines[2:]}
    assert list(shares) == ["16 bits", "8 bits", "16 bits in the head", "float model"]
    # Two tokens may be so close that the last bit of float code, which depends on the CPU, decides.
    assert min(shares["16 bits"]) >= 90 and shares["float model"][0] >= 90
    assert max(shares["8 bits"][1:] + shares["16 bits in the head"][1:]) < 85
