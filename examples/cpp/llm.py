"""Text in, text out for llm_runner and llm_runner_pt2, which only take tokens.

    python llm.py --tokenizer DIR --prompt TEXT build/runners/llm_runner [options of the runner] MODEL.pte

DIR is a directory that transformers' AutoTokenizer can read. README.md lists all commands.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys


def main() -> None:
    usage = "%(prog)s --tokenizer DIR --prompt TEXT RUNNER ... MODEL"
    parser = argparse.ArgumentParser(prog="llm.py", description=__doc__.splitlines()[0], usage=usage)
    parser.add_argument("--tokenizer", required=True, metavar="DIR", help="a directory with tokenizer.json")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("runner", nargs=argparse.REMAINDER, metavar="RUNNER ... MODEL", help="with its options")
    options = parser.parse_args()
    if not options.runner:
        parser.error("no runner was given")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    prompt = tokenizer(options.prompt)["input_ids"]
    command = [options.runner[0], "--ids", ",".join(map(str, prompt)), *options.runner[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    tokens, shown, number = [], "", b""
    # Ids arrive one by one; a token may be a part of a character, so all tokens are decoded again each time.
    while character := process.stdout.read(1):
        if not re.match(rb"\s", character):
            number += character
            continue
        if number:
            tokens.append(int(number))
            number = b""
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    print(text[len(shown) :])
    sys.exit(process.wait())


if __name__ == "__main__":
    main()
