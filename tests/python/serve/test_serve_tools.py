"""`lowbit serve`: calls of tools, schemas and grammars."""

import json
import re

import pytest
from needs import need_packages

need_packages("starlette", "uvicorn")
from lowbit.serve.routes import Limits
from served_models import CHAT, TOOLS, WITH_TOOLS, Client, client, loaded, made, served, serving  # noqa: F401

SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["list", "dict"]}, "empty": {"type": "boolean"}},
    "required": ["name", "empty"],
}  # fmt: skip


def test_a_text_fits_its_schema(served, client):
    need_packages("llguidance")
    for seed in range(4):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 150, "temperature": 1.0, "seed": seed}
        (choice,) = client.post("/v1/chat/completions", **body, response_format=form)["choices"]
        found = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and found["name"] in ("list", "dict") and isinstance(found["empty"], bool)
    form["json_schema"]["schema"] = {"type": "object", "unevaluatedProperties": {"contentEncoding": 5}, "type ": 1, "not": 5}
    error, _ = client.refused("/v1/chat/completions", body | {"response_format": form}, 400)
    assert error["code"] == "unsupported_schema" and error["param"] == "response_format"


@pytest.fixture(scope="module")
def tooled(loaded):
    model = made(loaded)
    model.template = WITH_TOOLS
    with serving([model], Limits()) as (port, _):
        yield Client(port), model


def of_stream(chunks):
    """The message of a stream's only choice, and its finish reason."""
    message = {"content": ""}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", []):
            message.setdefault("tool_calls", []).append({key: call[key] for key in ("type", "function")})
            assert call["index"] == len(message["tool_calls"]) - 1 and call["id"]
    return message, chunks[-1]["choices"][0]["finish_reason"]


def test_a_forced_call_of_a_tool(loaded, tooled):
    need_packages("llguidance")
    client, _ = tooled
    named = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        body = CHAT | {"max_tokens": 120, "temperature": 1.0, "seed": seed, "tools": TOOLS, "parallel_tool_calls": False}
        for choice in ("required", named):
            (answer,) = client.post("/v1/chat/completions", **body, tool_choice=choice)["choices"]
            assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
            (call,) = answer["message"]["tool_calls"]
            assert call["type"] == "function" and call["function"]["name"] in ("weather", "now")[: 1 + (choice == "required")]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {} if call["function"]["name"] == "now" else arguments["town"] in ("Oslo", "Rome")
            message, reason = of_stream(client.stream("/v1/chat/completions", **body, tool_choice=choice))
            assert message == {"content": "", "tool_calls": [{key: call[key] for key in ("type", "function")}]}
            assert reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', None, ["now"]),
        ('I ask. <tool_call>{"name": "now", "arguments": {}}</tool_call><tool_call>{"name": "weather", "arguments": '
         '{"town": "Rome"}}</tool_call>', "I ask. ", ["now", "weather"]),
        ('{"name": "weather", "parameters": {"town": "Oslo"}}', None, ["weather"]),
        ('[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]', None, ["now", "now"]),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
        ("[1, 2] is a list", "[1, 2] is a list", []), ("a < b <tool_call", "a < b <tool_call", []),
        ('<tool_call>{"name": </tool_call>', '<tool_call>{"name": </tool_call>', []), ("[]", "[]", []),
    ],
)  # fmt: skip
def test_calls_of_tools_in_a_text(tooled, text, content, names):
    """The grammar allows only this text."""
    need_packages("llguidance")
    body = CHAT | {"max_tokens": 200, "tools": TOOLS, "structured_outputs": {"choice": [text]}}
    (answer,) = tooled[0].post("/v1/chat/completions", **body)["choices"]
    calls = answer["message"].get("tool_calls", [])
    assert answer["message"]["content"] == content and [call["function"]["name"] for call in calls] == names
    assert answer["finish_reason"] == ("tool_calls" if names else "stop")
    message, reason = of_stream(tooled[0].stream("/v1/chat/completions", **body))
    assert (message["content"] or None, reason) == (content, answer["finish_reason"])
    assert [call["function"] for call in message.get("tool_calls", [])] == [call["function"] for call in calls]
    plain = tooled[0].post("/v1/chat/completions", **body | {"tool_choice": "none"})["choices"][0]
    assert plain["message"] == {"role": "assistant", "content": text, "refusal": None}  # as without tools


def test_a_conversation_with_tools(loaded, tooled):
    client, model = tooled
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Oslo"}'}}
    said = [
        {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "4 degrees"},
    ]  # fmt: skip
    expected = loaded[1]("weather now How warm?weatherOslo4 degrees")["input_ids"]
    answer = client.post("/v1/chat/completions", messages=said, tools=TOOLS, max_tokens=3)
    assert answer["usage"]["prompt_tokens"] == len(expected)
    without = client.post("/v1/chat/completions", messages=said, tools=TOOLS, tool_choice="none", max_tokens=3)
    assert without["usage"]["prompt_tokens"] == len(loaded[1]("How warm?weatherOslo4 degrees")["input_ids"])


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"tools": [{}]}, r"tools\[0\].type is missing; expected a value", "tools"),
        ({"tools": 5}, "tools is 5; expected an array", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, r"tools\[0\].function.para",
         "tools"),
        ({"tool_choice": "required"}, "tool_choice requires a call, but the request has no tools", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice is 'x'; expected none,",
         "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]}, r"messages\[0\].tool_calls\[0\].id is 5; exp",
         "messages"),
        ({"structured_outputs": {"regex": "a("}}, "the regular expression is not supported: ", "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: x"}}, "the grammar is not supported: ", "structured_outputs"),
        ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml is 'x'; expected no such name", "structured_outputs"),
        ({"structured_outputs": 5}, "structured_outputs is 5; expected an object", "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs and response_format", "structured_outputs"),
    ],
)  # fmt: skip
def test_invalid_tools_and_grammars(tooled, more, message, param):
    need_packages("llguidance")
    error, _ = tooled[0].refused("/v1/chat/completions", CHAT | more, 400)
    assert re.match(message, error["message"]) and error["param"] == param and "\n" not in error["message"], error


def test_a_template_without_tools(client):
    error, _ = client.refused("/v1/chat/completions", CHAT | {"model": "tiny", "tools": TOOLS}, 400)
    assert error["message"].startswith("the chat template of tiny has no tools; expected a request without them, or")


def test_texts_fit_their_grammar(served, client):
    need_packages("llguidance")
    for form, pattern in (
        ({"regex": "[a-f]{3,5}-[0-9]"}, "[a-f]{3,5}-[0-9]"), ({"grammar": 'start: "yes" | "no" /[!?]/'}, "yes|no[!?]"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"), ({"choice": ["left", 'r"ight']}, 'left|r"ight'),
        ({"json": SCHEMA}, "(?s){.*}"),
    ):  # fmt: skip
        for seed in range(3):
            body = {"prompt": "a", "max_tokens": 200, "temperature": 1.0, "seed": seed, "structured_outputs": form}
            (choice,) = client.post("/v1/completions", **body)["choices"]
            assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop", (form, choice)
