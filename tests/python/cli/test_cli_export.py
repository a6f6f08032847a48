"""`lowbit export`: its files run."""

import lowbit
import pytest
import torch
from command_line import FLOAT, PROMPT, document, documented_keys, invoke, shortened
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """One layer of examples/tiny_llama. test_llm_export.py exports two; test_readme.py uses a separate process."""
    directory = tmp_path_factory.mktemp("short")
    lowbit.quantize_checkpoint(shortened(directory / "float", 1), directory / "packed", lowbit.LowBitConfig(bits=4))
    return directory / "packed"


@torch.inference_mode()
def check_likeliest(packed, step) -> None:
    """Each token of an exported program is the likeliest one in eager after the same tokens, or a near tie: between lowbit's
    operators the two round bfloat16 differently."""
    text = load_tokenizer(FLOAT)(PROMPT)["input_ids"]
    made = llm.generate(step, text, 40, max_length=128, stop=step.stop).tokens
    assert len(made) == 40
    decoder, start = llm.Decoder(load_model(packed), 128), 0
    for token in made:
        logits = decoder(torch.tensor([text]), torch.tensor([start]))[0]
        assert logits.max() - logits[token] < 0.5
        start, text = start + len(text), [token]


def test_export_pte(packed, executorch, tmp_path):
    result = invoke("export", packed, "--to", "pte", "--output", tmp_path / "m.pte", "--max-length", 128, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == [f"loading {packed} ...", f"exporting to {tmp_path / 'm.pte'} ..."]
    said = document(result)
    assert set(said) == documented_keys("export") - {"name", "type", "kind", "steps"}  # of a GGUF file's tensors
    assert said["bytes"] == (tmp_path / "m.pte").stat().st_size
    step = llm.load_decoder(tmp_path / "m.pte")
    assert (step.max_length, step.chunk) == (128, 128) == (said["max_length"], said["chunk"])
    check_likeliest(packed, step)


def test_export_pt2(packed, tmp_path):
    result = invoke("export", packed, "--to", "pt2", "--output", tmp_path / "m.pt2", "--max-length", 128, "--chunk", 64)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'm.pt2'}: ")
    step = llm.load_decoder(tmp_path / "m.pt2")
    assert (step.max_length, step.chunk) == (128, 64)
    check_likeliest(packed, step)
