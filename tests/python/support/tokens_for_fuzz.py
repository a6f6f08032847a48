"""Writes tokens files of several kinds into a directory, for tests/cpp/tokens_fuzz.cpp."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "exports"))
from lowbit.exports.token_file import TextSettings, token_bytes
from test_token_file import THINKING, trained

for case in ("gpt4", "bert", "unigram", "llama2", "suffix", "xlnet", "places"):
    tokenizer = trained(case)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    control = frozenset([tokenizer.token_to_id("<|im_start|>")])
    content = token_bytes(tokenizer, TextSettings(template=THINKING, control=control))
    (Path(sys.argv[1]) / f"{case}.tokens").write_bytes(content)
