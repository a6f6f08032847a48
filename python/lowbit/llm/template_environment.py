"""The environment in which chat templates run without transformers: a sandbox of jinja2 with transformers' extensions."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


class _Generation(Extension):
    """``{% generation %}``, which marks answers for training, and does nothing here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Refuses names that begin with an underscore, through which a template could reach Python's own attributes."""

    def __init__(*arguments: Any, **named: Any) -> None:  # without the name `self`, which a template may use
        namespace, *values = arguments
        content = dict(*values, **named)
        for name in content:
            _check_name(name)
        Namespace.__init__(namespace, content)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"the chat template sets {name!r} in a namespace; expected a name without an underscore in front")


def _fail(message: Any) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _dict(*values: Any, **named: Any) -> dict[Any, Any]:
    return dict(*values, **named)


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _fail, "strftime_now": _now, "dict": _dict, "namespace": _Namespace}
    return environment


@lru_cache
def compiled(template: str) -> Template:
    """A template that is compiled in the sandbox."""
    return _environment().from_string(template)


@lru_cache
def variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not set, except those that are always given, such as the messages."""
    environment = _environment()
    found = find_undeclared_variables(environment.parse(template)) - environment.globals.keys() - _GIVEN
    return frozenset(name for name in found if not name.endswith("_token"))
