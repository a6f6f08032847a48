"""`lowbit eval`, beside the library."""

import math

import lowbit
from command_line import FLOAT, TINY, document, documented_keys, invoke, keys_in, run
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.perplexity import perplexity


def test_eval(packed, tmp_path):
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")[:3000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    options = ("--text", tmp_path / "text.txt", "--window", 128, "--stride", 64)
    result = run("eval", FLOAT, *options, "--bits", "8,2", "--group-size", 64, "--json")
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 6  # three times loading and measuring: no other library's noise
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

    table = invoke("eval", packed[0], *options)
    assert table.exit_code == 0, table.stderr
    assert table.stdout.splitlines()[0].split() == ["weights", "size", "perplexity", "bits", "per", "byte", "seconds"]
    assert table.stdout.splitlines()[1].startswith("packed, 4 and 6 and 8 bits ")
