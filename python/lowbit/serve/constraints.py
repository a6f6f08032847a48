"""Constrains texts to a JSON schema or a grammar by llguidance, which ``lowbit[serve]`` installs."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy

from . import grammar_trial
from .errors import ApiError, bad
from .model_list import LanguageModel
from .protocol import Grammar
from .tools import SPACE

_MOST_RULES = _MOST_REFERENCES = 1024
_MOST_DEPTH = 64
_WAIT = 4 * grammar_trial.SECONDS  # on a busy machine
_WHATS = {"json": "JSON schema", "regex": "regular expression"}


class Matcher:
    """A :class:`lowbit.llm.penalties.Constraint` that allows only tokens that continue a text of a grammar."""

    def __init__(self, matcher: Any, grammar: Grammar):
        """
        Args:
            matcher: an llguidance.LLMatcher in its initial state.
        """
        self._matcher, self._grammar = matcher, grammar

    def copy(self) -> Matcher:
        """A copy in the same state, for another text."""
        return Matcher(self._matcher.deep_copy(), self._grammar)

    def mask(self, logits: numpy.ndarray) -> numpy.ndarray:
        bits = numpy.unpackbits(numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8), bitorder="little")
        if self._matcher.is_error():  # a dead end, or llguidance's limit per token
            raise _refuse(self._grammar, f"no further token fits: {grammar_trial.lines(self._matcher.get_error())}")
        allowed = numpy.zeros(len(logits), dtype=bool)
        count = min(len(bits), len(logits))
        allowed[:count] = bits[:count]
        if not allowed.any():
            raise _refuse(self._grammar, "no further token fits")
        return numpy.where(allowed, logits, numpy.float32(-numpy.inf))

    def append(self, token: int) -> None:
        self._matcher.consume_token(token)

    def check(self, text: str) -> None:
        """Raises ApiError for a text that has ended but does not fit; llguidance also ends texts that cannot continue."""
        if not self._matcher.is_accepting():
            raise _refuse(self._grammar, "the text cannot continue, and does not fit yet")
        if self._grammar.kind in ("json", "call"):
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                raise _refuse(self._grammar, "the text has ended, and is not JSON") from None


def _refuse(grammar: Grammar, reason: str) -> ApiError:
    return bad(grammar.param, f"the {_WHATS.get(grammar.kind, 'grammar')} is not supported: {reason}", "unsupported_schema")


def _check_size(grammar: Grammar) -> None:
    """Raises ApiError for a grammar that would take too much time or stack to compile."""
    text = grammar.value
    rules = 0 if grammar.kind in ("json", "regex") else len(re.findall(r"^[ \t]*[?!]?[\w-]+[^\n\"/:]{0,99}:", text, re.M))
    depth = deepest = 0
    for character in re.findall(r"[(\[{}\])]", re.sub(r'\\.|"(?:[^"\\\n]|\\.)*"', "", text)):
        depth = max(0, depth + (1 if character in "([{" else -1))
        deepest = max(deepest, depth)
    for what, found, most in (
        ("rules", rules, _MOST_RULES), ("references", text.count('"$ref"'), _MOST_REFERENCES), ("levels", deepest, _MOST_DEPTH)
    ):  # fmt: skip
        if found > most:
            raise _refuse(grammar, f"it has {found} {what}; expected at most {most}")


@lru_cache(256)
def _trial(kind: str, text: str, size: int, special: tuple[tuple[str, int], ...], ends: tuple[int, ...]) -> str:
    """The error of a grammar, found in a separate process, or an empty string. The arguments are those of the script."""
    command = [sys.executable, "-P", "-W", "ignore", grammar_trial.__file__]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps([kind, text, SPACE, size, special, ends]),
            capture_output=True,
            text=True,
            timeout=_WAIT,
            check=False,
        )
        found: str = json.loads(ended.stdout)
    except (ValueError, subprocess.TimeoutExpired):  # the process was ended by a limit, or by a stack overflow
        return "it is too complex"
    return found


def make_constraint(model: LanguageModel, grammar: Grammar) -> Matcher:
    """Makes the constraint for a grammar.

    Raises:
        ApiError: llguidance is not installed, or does not support the grammar.
    """
    param = grammar.param
    try:
        llguidance = import_module("llguidance")
    except ModuleNotFoundError as error:
        raise ApiError(
            501, f"{param} needs {error.name}, which is not installed here: pip install 'lowbit[serve]'", param=param,
            code="unsupported_parameter",
        ) from error  # fmt: skip
    if not model.stop:
        raise bad(param, f"the model {model.name} has no token that ends a text, which {param} needs")
    _check_size(grammar)
    backend = model.tokenizer.backend_tokenizer
    special = tuple((each.content, token) for token, each in backend.get_added_tokens_decoder().items())
    size, ends = backend.get_vocab_size(with_added_tokens=True), sorted(model.stop)
    if message := _trial(grammar.kind, grammar.value, size, special, tuple(ends)):
        raise _refuse(grammar, message)
    if model.grammar_tokenizer is None:
        plain = copy.copy(backend)
        plain.no_padding()
        plain.no_truncation()
        model.grammar_tokenizer = llguidance.LLTokenizer(plain.to_str(), eos_token=ends)
    try:
        return Matcher(grammar_trial.compiled(model.grammar_tokenizer, grammar.kind, grammar.value, SPACE), grammar)
    except ValueError as error:
        raise _refuse(grammar, str(error)) from error
