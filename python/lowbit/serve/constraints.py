"""Texts that fit a JSON schema or a grammar: by llguidance, which ``lowbit[serve]`` installs."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor

from .errors import ApiError, bad
from .models import LanguageModel
from .protocol import Grammar

# Between the parts of a JSON document: enough for an indented one, but a text of nothing else has an end.
_SPACE = r"[ \t\n\r]{0,20}"


class Matcher:
    """A :class:`lowbit.llm.penalties.Constraint`: tokens that go on with a text of a grammar."""

    def __init__(self, matcher: Any):
        """
        Args:
            matcher: an llguidance.LLMatcher at its beginning.
        """
        self._matcher = matcher

    def mask(self, logits: Tensor) -> Tensor:
        bits = numpy.unpackbits(numpy.frombuffer(self._matcher.compute_bitmask(), dtype=numpy.uint8), bitorder="little")
        allowed = torch.zeros(logits.numel(), dtype=torch.bool)
        count = min(len(bits), logits.numel())
        allowed[:count] = torch.from_numpy(bits[:count].astype(bool))
        if not allowed.any():
            raise ValueError(f"no token fits the grammar any more: {self._matcher.get_error() or 'the grammar has ended'}")
        return logits.float().masked_fill(~allowed, -torch.inf)

    def append(self, token: int) -> None:
        self._matcher.consume_token(token)


def make_constraint(model: LanguageModel, grammar: Grammar) -> Matcher:
    """What lets only texts of a grammar come.

    Raises:
        ApiError: llguidance is not installed, or does not support what the grammar has.
    """
    param = grammar.param
    try:
        llguidance, gbnf = import_module("llguidance"), import_module("llguidance.gbnf_to_lark")
        huggingface = import_module("llguidance.hf")
    except ModuleNotFoundError as error:
        raise ApiError(
            501, f"{param} needs {error.name}, which is not installed here: pip install 'lowbit[serve]'", param=param,
            code="unsupported_parameter",
        ) from error  # fmt: skip
    if not model.stop:
        raise bad(param, f"the model {model.name} has no token that ends a text, which {param} needs")
    if model.grammar_tokenizer is None:
        model.grammar_tokenizer = huggingface.from_tokenizer(model.tokenizer, eos_token=sorted(model.stop))
    matcher = llguidance.LLMatcher
    try:
        if grammar.kind == "json":
            text = matcher.grammar_from_json_schema(json.dumps(grammar.value), overrides={"whitespace_pattern": _SPACE})
        elif grammar.kind == "regex":
            text = matcher.grammar_from_regex(grammar.value)
        else:
            text = matcher.grammar_from_lark(gbnf.any_to_lark(grammar.value))
        found = matcher(model.grammar_tokenizer, text, log_level=0)
        message = found.get_error()
    except ValueError as error:  # also GbnfToLarkError
        message = str(error)
    if message:
        what = {"json": "JSON schema", "regex": "regular expression"}.get(grammar.kind, "grammar")
        raise bad(param, f"the {what} is not supported: {message.strip().splitlines()[0]}", "unsupported_schema")
    return Matcher(found)
