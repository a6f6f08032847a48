"""Attacks on a server by bodies of requests: grammars, forms, JSON."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import sources
from mutants import damaged, damaged_json
from outcomes import Found
from service import COMPLETIONS, Service, completion, serving_packed
from sources import PROMPT


# Grammars of any size n, sent as structured_outputs or as response_format.
def _schema(document: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": document}}}


def structured(**value: object) -> dict:
    return {"structured_outputs": value}


def _references(n: int) -> dict:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)}
    return _schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{n}": {"type": "string"}}})


def _doubling(n: int) -> dict:
    """A schema whose expansion has 2^n parts."""
    pairs = {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 2, "minItems": 2} for i in range(n)}
    return _schema({"$ref": "#/$defs/a0", "$defs": {**pairs, f"a{n}": {"type": "integer"}}})


def _nested(n: int, wrap: Callable[[object], object], inner: object) -> object:
    for _ in range(min(n, 400)):  # json.dumps cannot go deeper
        inner = wrap(inner)
    return inner


def _lines(n: int, form: str, last: str) -> str:
    return "\n".join([*(form.format(i, i + 1) for i in range(n)), last.format(n)])


GRAMMARS: list[Callable[[int], dict]] = [
    lambda n: structured(grammar="root ::= r0\n" + _lines(n, "r{0} ::= r{1}", 'r{0} ::= "a"')),
    lambda n: structured(grammar="root ::= r0\n" + _lines(n, "r{0} ::= r{1} r{1}", 'r{0} ::= "a"')),
    lambda n: structured(grammar="start: r0\n" + _lines(n, 'r{0}: r{1} | "b" r{1}', 'r{0}: "a"')),
    lambda n: structured(grammar="start: r0\n" + _lines(n, 'r{0}: r{1}? "b"*', "r{0}: r0?")),
    lambda n: structured(grammar="start: R0\n" + _lines(n, "R{0}: R{1} R{1}", "R{0}: /[a-z]+/")),
    lambda n: structured(grammar="root ::= " + "(" * n + '"a"' + ")" * n),
    lambda n: structured(grammar="root ::= " + "(" * n + '"a"' + ")*" * n),
    lambda n: structured(grammar=f'root ::= "a"{{{n}}}'),
    lambda n: structured(grammar=f'root ::= ("a"{{0,{n}}} "b"{{0,{n}}}){{0,{n}}}'),
    lambda n: structured(grammar="root ::= " + " | ".join(f'"t{i}"' for i in range(n))),
    lambda n: structured(grammar='root ::= root root | "a" | ' + " ".join(["root"] * n)),
    lambda n: structured(grammar='root ::= root "a"' + '\nx ::= y\ny ::= x' * min(n, 2)),
    lambda n: structured(grammar='root ::= "' + "\\\\" * n + '"'),
    lambda n: structured(grammar="root ::= [" + "a-z" * n + "]+"),
    lambda n: structured(grammar="start: " + "/a/ " * n),
    lambda n: structured(grammar="%" * n),
    lambda n: structured(grammar="start: /(" + "a|" * n + "b)+/"),
    lambda n: structured(grammar="\n" * n + f"start: A\nA: /.{{{n}}}/"),
    lambda n: structured(regex="(" * n + "a" + ")" * n),
    lambda n: structured(regex="(" * n + "a" + ")*" * n),
    lambda n: structured(regex="(a|aa|aaa)+" * min(n, 300) + "$"),
    lambda n: structured(regex=f"a{{{n}}}"),
    lambda n: structured(regex=f"(([ab]{{{n}}}){{{n}}}){{{n}}}"),
    lambda n: structured(regex=f".*a.{{{n}}}"),
    lambda n: structured(regex=f"(?i)\\p{{L}}{{1,{n}}}\\w*\\d{{{n}}}"),
    lambda n: structured(regex="|".join(f"x{i}" for i in range(n))),
    lambda n: structured(regex="(?=a)" * min(n, 100) + "a(?!b)\\1"),
    lambda n: structured(regex="[" + "\\U0001F600-\\U0001F64F" * min(n, 200) + "]"),
    lambda n: structured(choice=[f"text {i}" for i in range(n)]),
    lambda n: structured(choice=["a" * n + str(i) for i in range(min(n, 20))]),
    lambda n: structured(choice=["a" * i for i in range(1, min(n, 900))]),
    lambda n: structured(choice=["\ud83d\ude00" * n, "\0", "\u202e", '"' * n]),
    _references,
    lambda n: _doubling(min(n, 300)),
    lambda n: _schema({"$ref": "#"} if n % 2 else {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    lambda n: _schema({"$ref": "https://example.com/" + "a" * n}),
    lambda n: _schema({"$ref": "#/" + "a/" * n}),
    lambda n: _schema(_nested(n, lambda inner: {"type": "array", "items": inner}, {"type": "null"})),
    lambda n: _schema(_nested(n, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}, True)),
    lambda n: _schema(_nested(n, lambda inner: {"anyOf": [inner, {"type": "integer"}]}, {"type": "string"})),
    lambda n: _schema(_nested(n, lambda inner: {"allOf": [inner, {"minLength": n}]}, {"type": "string"})),
    lambda n: _schema(_nested(min(n, 12), lambda inner: {"oneOf": [inner, inner]}, {"const": 1})),
    lambda n: _schema({"enum": [f"text {i}" for i in range(n)]}),
    lambda n: _schema({"enum": [i / 7 for i in range(n)]}),
    lambda n: _schema({"const": _nested(n, lambda inner: [inner], 1)}),
    lambda n: _schema({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}),
    lambda n: _schema({"properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{n - i}" for i in range(n)]}),
    lambda n: _schema({"type": "string", "minLength": n, "maxLength": n * n}),
    lambda n: _schema({"type": "array", "minItems": n, "maxItems": 2**n if n < 60 else n, "items": {"type": "array"}}),
    lambda n: _schema({"type": "integer", "minimum": -(10 ** min(n, 300)), "multipleOf": 7}),
    lambda n: _schema({"type": "number", "exclusiveMinimum": 10.0 ** -min(n, 300), "maximum": 1e308}),
    lambda n: _schema({"type": "string", "pattern": "^(a+)+" * min(n, 500) + "$"}),
    lambda n: _schema({"patternProperties": {f"^a{{{i}}}": {"type": "integer"} for i in range(n)}}),
    lambda n: _schema({"type": ["string"] * n, "format": "uuid" if n % 2 else "x" * n}),
    lambda n: _schema({"allOf": [{"properties": {f"a{i}": {"anyOf": [{}, {"minimum": i}]}}} for i in range(n)]}),
    lambda n: _schema({"anyOf": [{"pattern": f"{i}+"} for i in range(n)]}),
    lambda n: _schema({"unevaluatedProperties": False, "dependentSchemas": {str(i): {} for i in range(n)}}),
    lambda n: _schema([{}] * n),
    lambda n: {"response_format": {"type": "json_object", "schema": {"title": "a" * n}}},
    lambda n: {"structured_outputs": {"json": json.dumps({"enum": list(range(n))})}},
]  # fmt: skip


@contextlib.contextmanager
def grammars(room: Path, quick: bool) -> Iterator:
    with serving_packed(room) as service:
        service.post(COMPLETIONS, completion(PROMPT, 4, **structured(regex="a+")))  # it imports llguidance

        def case(number: int, draw: random.Random, place: Path) -> Found:
            size = int(math.exp(draw.uniform(0, math.log(200 if quick else 30_000))))
            body = completion(PROMPT, 6, seed=0, **GRAMMARS[number % len(GRAMMARS)](size))
            (place / "body").write_bytes(body)
            return service.request(COMPLETIONS, body, lambda document: True)

        yield case


@contextlib.contextmanager
def multipart(room: Path, quick: bool) -> Iterator:
    sources.helper("speech_models").tiny_whisper(room / "whisper")
    border = b"0123456789abcdef"
    fields = {"language": "en", "response_format": "json", "temperature": "0"}
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    whole = b"".join(head % (border, name.encode(), value.encode()) for name, value in fields.items())
    hot = [(0, len(whole) + 110)]
    whole += (
        b'--%s\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n' % border
    )
    whole += sources.wav(0.3) + b"\r\n--%s--\r\n" % border
    hot.append((len(whole) - 40, len(whole)))
    kind = f"multipart/form-data; boundary={border.decode()}"
    path = "/v1/audio/transcriptions"
    with Service(room, room / "whisper") as service:
        status, expected = service.send(path, whole, **{"Content-Type": kind})
        assert status == 200, expected

        def case(number: int, draw: random.Random, place: Path) -> Found:
            body, named = damaged(whole, draw, hot), kind
            if draw.random() < 0.2:
                changed = damaged(kind.encode(), draw).decode("latin-1")
                named = re.sub(r"[\x00-\x1f\x7f]", "?", changed).strip()  # must be valid HTTP; the part http sends invalid HTTP
            if draw.random() < 0.05:
                part = head % (border, b"x" * draw.randrange(1, 3000), b"1")
                body = part * draw.choice((10, 1000, 20_000)) + whole
            (place / "body").write_bytes(body)
            (place / "type").write_text(named)
            return service.request(path, body, lambda document: document == expected, **{"Content-Type": named})

        yield case


# A request of each endpoint of chats; the small model's template has no tools.
_SAID = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USED = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "b"}, {"type": "text", "text": "c"}]},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "b"},
]
BODIES: list[tuple[str, dict]] = [
    ("/v1/chat/completions", {"messages": [_SAID, {"role": "assistant", "tool_calls": [_CALL]}], "max_tokens": 2}),
    (
        "/v1/chat/completions",
        {"messages": [_SAID], "continue_final_message": True, "chat_template_kwargs": {}, "max_tokens": 2},
    ),
    ("/v1/messages", {"messages": [_SAID, *_USED], "system": "d", "stop_sequences": ["e"], "max_tokens": 2, "stream": True}),
    ("/v1/messages", {"messages": [_SAID, {"role": "assistant", "content": "d"}], "max_tokens": 2, "top_k": 3, "seed": 1}),
    ("/v1/messages/count_tokens", {"messages": [_SAID, *_USED], "system": [{"type": "text", "text": "d"}]}),
    ("/v1/responses", {"input": _ITEMS, "instructions": "d", "max_output_tokens": 2, "metadata": {"a": "b"}, "stream": True}),
    ("/v1/responses", {"input": PROMPT, "text": {"format": {"type": "text"}}, "max_output_tokens": 2, "store": False}),
]


@contextlib.contextmanager
def requests(room: Path, quick: bool) -> Iterator:
    with serving_packed(room, "--template", sources.TINY.with_name("plain.jinja")) as service:
        for path, body in BODIES:
            status, document = service.send(path, json.dumps(body).encode())
            assert status == 200, document

        def case(number: int, draw: random.Random, place: Path) -> Found:
            path, whole = BODIES[number % len(BODIES)]
            body = damaged_json(json.dumps(whole).encode(), draw)
            (place / "body").write_bytes(body)
            return service.request(path, body, lambda document: True)

        yield case
