"""Texts that fit a JSON schema: by llguidance, which ``lowbit[serve]`` brings."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor

from .errors import ApiError, bad
from .models import LanguageModel

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
            raise ValueError(f"no token fits the schema any more: {self._matcher.get_error() or 'the grammar has ended'}")
        return logits.float().masked_fill(~allowed, -torch.inf)

    def append(self, token: int) -> None:
        self._matcher.consume_token(token)


def make_constraint(model: LanguageModel, schema: Any) -> Matcher:
    """What lets only texts of a JSON schema come.

    Raises:
        ApiError: llguidance is not installed, or does not know what the schema has.
    """
    try:
        llguidance = import_module("llguidance")
        wrap = import_module("llguidance.hf").from_tokenizer
    except ModuleNotFoundError as error:
        raise ApiError(
            501, f"response_format needs {error.name}, which is not installed here: pip install 'lowbit[serve]'",
            param="response_format", code="unsupported_parameter",
        ) from error  # fmt: skip
    if not model.stop:
        raise bad("response_format", f"the model {model.name} has no token that ends a text; expected one for a schema")
    if model.grammar_tokenizer is None:
        model.grammar_tokenizer = wrap(model.tokenizer, eos_token=sorted(model.stop))
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": _SPACE})
        found = llguidance.LLMatcher(model.grammar_tokenizer, grammar, log_level=0)
        message = found.get_error()
    except ValueError as error:
        message = str(error)
    if message:
        line = message.strip().split("\n")[0]
        raise bad("response_format", f"the JSON schema is not supported: {line}", "unsupported_schema")
    return Matcher(found)
