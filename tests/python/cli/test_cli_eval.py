"""`lowbit eval`, compared with the library."""

import json
import math
import re

import lowbit
import pytest
from command_line import FLOAT, TINY, broken, document, documented_keys, error, invoke, keys_in, run
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity
from lowbit.tools.divergence import compare, logits_bytes


@pytest.mark.more
def test_eval(packed, tmp_path):
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")[:3000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    options = ("--text", tmp_path / "text.txt", "--window", 128, "--stride", 64)
    result = run("eval", FLOAT, *options, "--bits", "8,2", "--group-size", 64, "--json")
    assert result.returncode == 0, result.stderr
    assert (
        len(result.stderr.splitlines()) == 8
    )  # loading and measuring three times, then two results; no output of other libraries
    said = document(result)
    assert set(said) | keys_in(said["results"]) == documented_keys("eval")
    tokens = load_tokenizer(FLOAT)(text)["input_ids"]
    assert (said["predicted_tokens"], said["text_bytes"]) == (len(tokens) - 1, len(text.encode()))
    configs = [None, *(lowbit.LowBitConfig(bits=bits, group_size=64) for bits in (8, 2))]
    for row, config in zip(said["results"], configs, strict=True):
        model = load_model(FLOAT, config)
        expected = perplexity(model, tokens, window=128, stride=64)
        assert math.isclose(row["perplexity"], expected.perplexity, rel_tol=1e-4)
        assert math.isclose(row["bits_per_byte"], expected.bits_per_byte(len(text.encode())), rel_tol=1e-4)
        assert row["bits"] == (None if config is None else config.bits)
    sizes = [row["weight_bytes"] for row in said["results"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sum(entry.bytes for entry in lowbit.inspect_checkpoint(FLOAT))

    table = invoke("eval", packed[0], *options, "--cache", "int8,int4")
    assert table.exit_code == 0, table.stderr
    assert table.stdout.splitlines()[0].split() == ["weights", "size", "perplexity", "bits", "per", "byte", "seconds"]
    assert table.stdout.splitlines()[1].startswith("packed, 4 and 6 and 8 bits ")


OPTIONS = ("--window", 128, "--stride", 64)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text((TINY / "heldout.txt").read_text(encoding="utf-8")[:1200], encoding="utf-8")
    return path


def test_a_reference(packed, text, tmp_path):
    logits = tmp_path / "logits.safetensors"
    written = invoke("eval", FLOAT, "--text", text, *OPTIONS, "--save-logits", logits, "--json")
    assert written.exit_code == 0, written.stderr
    tokens = load_tokenizer(FLOAT)(text.read_text(encoding="utf-8"))["input_ids"]
    floats = load_model(FLOAT).float()
    said = re.search(r"logits.safetensors will have ([\d.]+) MB: (\d+) predicted tokens, a vocabulary of (\d+)", written.stderr)
    expected = logits_bytes(len(tokens), floats.config.vocab_size)
    assert math.isclose(float(said[1]) * 1e6, expected, rel_tol=0.01)
    assert (int(said[2]), int(said[3])) == (len(tokens) - 1, floats.config.vocab_size)
    assert logits.stat().st_size - expected in range(1024)
    of_floats = document(written)
    assert of_floats["saved_logits"] == str(logits) and of_floats["results"][0]["kld"] is None

    expected = compare(load_model(packed[0]), tokens, floats, window=128, stride=64)
    assert expected.kld > 0.001
    for reference in (FLOAT, logits):
        found = document(invoke("eval", packed[0], "--text", text, *OPTIONS, "--reference", reference, "--json"))
        (row,) = found["results"]
        assert found["reference"] == str(reference)
        assert math.isclose(found["reference_perplexity"], of_floats["results"][0]["perplexity"], rel_tol=1e-5)
        assert math.isclose(row["perplexity"], expected.model.perplexity, rel_tol=1e-5)
        assert math.isclose(row["kld"], expected.kld, rel_tol=0.01)
        assert math.isclose(row["kld_99"], expected.kld_99, rel_tol=0.01)
        assert math.isclose(row["top1"], expected.top1, abs_tol=1e-9)
    table = invoke("eval", packed[0], "--text", text, *OPTIONS, "--reference", logits)
    header, row = (re.split(r"\s{2,}", line.strip()) for line in table.stdout.splitlines())
    assert header == ["weights", "size", "perplexity", "bits per byte", "KLD", "KLD 99 %", "top-1", "seconds"]
    assert math.isclose(float(row[4]), expected.kld, rel_tol=0.02)


def test_unusable_references(packed, text, tmp_path):
    logits = tmp_path / "logits.safetensors"
    assert invoke("eval", FLOAT, "--text", text, *OPTIONS, "--save-logits", logits).exit_code == 0
    found = error(invoke("eval", packed[0], "--text", text, *OPTIONS[:2], "--stride", 32, "--reference", logits))
    assert found == f"{logits} was made with a stride of 64; expected 32, as for the model"
    tokenizer = json.loads((FLOAT / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-200]
    other = broken(tmp_path, tokenizer__json=json.dumps(tokenizer))
    found = error(invoke("eval", packed[0], "--text", text, *OPTIONS, "--reference", other))
    assert found == f"the tokenizers in {other} and {packed[0]} give different tokens; a reference has the same tokenizer"
    text.write_text(text.read_text(encoding="utf-8") + "More of it.", encoding="utf-8")
    found = error(invoke("eval", packed[0], "--text", text, *OPTIONS, "--reference", logits))
    assert re.fullmatch(r".*logits.safetensors was made from \d+ tokens and the text has \d+; expected the same text", found)
    found = error(invoke("eval", packed[0], "--text", text, *OPTIONS, "--reference", tmp_path / "none"))
    assert "none" in found
    result = invoke("eval", FLOAT, "--text", text, "--save-logits", logits, "--bits", "4")
    assert result.exit_code == 2 and "it has no effect with --save-logits" in result.stderr
