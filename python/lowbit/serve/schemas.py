"""JSON schemas for constraints."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # have schemas by name
# With these, a value must fit (or not fit) several schemas, each of which may name some of its properties.
_COMBINING = frozenset(
    {"allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
_ALONE = frozenset({"properties", "$ref", "anyOf"})  # two of these in one schema combine, too
_OPEN = frozenset({"additionalProperties", "const", "enum", "minProperties"})


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and the schemas in it, but none in constants."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        below: list[Any] = []
        if key in _BY_NAME and isinstance(value, dict):
            below = list(value.values())
        elif key in ("anyOf", "prefixItems", "items", "additionalProperties"):
            below = value if isinstance(value, list) else [value]
        for each in below:
            yield from _parts(each)


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties: false`` in each object that names its properties and does not say more.

    JSON Schema allows any further properties. A small model then writes properties until its last token, and functions get
    arguments that they do not have. Every text that fits the result fits the schema, too. A schema that combines schemas, which
    this could contradict, stays as it is.
    """
    schema = copy.deepcopy(schema)
    parts = list(_parts(schema))
    if any(_COMBINING & part.keys() or len(_ALONE & part.keys()) > 1 for part in parts):
        return schema
    for part in parts:
        named, required = part.get("properties"), part.get("required", [])
        known = isinstance(named, dict) and isinstance(required, list) and set(map(str, required)) <= named.keys()
        if known and not _OPEN & part.keys():
            part["additionalProperties"] = False
    return schema
