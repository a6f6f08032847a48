"""Compiles a grammar like :func:`lowbit.serve.constraints.make_constraint`, in a process that a bad grammar may crash.

A script that runs without the package, whose import takes seconds. It reads a JSON array from stdin: the arguments of
:func:`compiled` except the tokenizer, and those of :func:`_tokenizer`. It writes the error as JSON, or an empty string.
"""

import contextlib
import itertools
import json
import re
import sys
import threading
from typing import Any

SECONDS = 5  # of CPU time; a schema of 1,000 properties takes 0.3
_BYTES = 1 << 30
_STACK = 4 << 20  # half of what the server's threads have, because llguidance recurses along chains of rules


def lines(message: str) -> str:
    """Joins the lines of an error, without the drawing of its position and llguidance's internal state."""
    message = message.partition("<state>")[0].replace("NoExtensionBias", "no text can continue")
    parts = [line.strip() for line in message.splitlines()]
    found = "; ".join(part for part in parts if part and not set(part) <= set("^~ ") and not re.match(r"\d+ \|", part))
    return found or "it cannot be compiled"


def compiled(tokenizer: Any, kind: str, text: str, space: str) -> Any:
    """An llguidance.LLMatcher in its initial state.

    Raises:
        ValueError: the grammar is not supported.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        if kind == "json":
            text = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": space})
        elif kind == "regex":
            text = LLMatcher.grammar_from_regex(text)
        else:
            text = LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # including GbnfToLarkError and plain Exception
        raise ValueError(lines(str(error))) from error
    found = LLMatcher(tokenizer, text, log_level=0)
    if message := found.get_error():
        raise ValueError("it is too complex" if message.startswith("panic") else lines(message))
    return found


def _tokenizer(size: int, special: list[tuple[str, int]], ends: list[int]) -> Any:
    """A tokenizer of single bytes and a model's special tokens.

    A grammar may name special tokens or ranges of token ids, and could not be compiled without them.

    Args:
        size: size of the vocabulary.
        special: names and ids of special tokens.
        ends: stop tokens.
    """
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id = ends[0], None
        special_token_ids = [token for _, token in special]

        def __init__(self) -> None:
            names = {token: name.encode() for name, token in special}
            free = (token for token in itertools.count() if token not in names)
            self._bytes = {byte: next(free) for byte in range(256)}
            known = names | {token: bytes([byte]) for byte, token in self._bytes.items()}
            self.tokens = [known.get(token, b"%09d" % token) for token in range(max(size, max(known) + 1))]

        def __call__(self, text: bytes) -> list[int]:
            return [self._bytes[byte] for byte in text]

    return LLTokenizer(TokenizerWrapper(Bytes()), eos_token=ends)


def _main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no limits, and macOS no limit of address space
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    message = ""
    kind, text, space, *known = json.load(sys.stdin)
    try:
        matcher = compiled(_tokenizer(*known), kind, text, space)
        matcher.compute_bitmask()
        if matcher.is_error():
            message = lines(matcher.get_error())
    except ValueError as error:
        message = str(error)
    json.dump(message[:300], sys.stdout)


if __name__ == "__main__":
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_main)
    thread.start()
    thread.join()
