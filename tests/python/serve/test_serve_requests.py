"""Invalid, odd and large requests to `lowbit serve`: each gets its answer, or one short sentence."""

import http.client
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from lowbit import llm
from lowbit.llm.loading import load_model, load_tokenizer
from lowbit.llm.penalties import Repetitions
from needs import need_packages

need_packages("starlette", "uvicorn", "pydantic", "llguidance")

from lowbit.serve.bodies import parse, validated
from lowbit.serve.constraints import _trial
from lowbit.serve.embeddings import Encoder
from lowbit.serve.errors import ApiError
from lowbit.serve.protocol import Chat, Completion
from lowbit.serve.routes import Limits
from lowbit.serve.tools import Held, find_calls
from served_models import CHAT, TOOLS, WITH_TOOLS, Client, FakeEncoder, made, serving


@pytest.fixture(scope="module")
def loaded(packed):
    return load_model(packed[0]), load_tokenizer(packed[0])


@pytest.fixture(scope="module")
def client(loaded):
    tooled = made(loaded, "tooled")
    tooled.template = WITH_TOOLS
    with serving([tooled, made(loaded), Encoder("encoder", FakeEncoder(loaded[1]))], Limits()) as (port, _):
        yield Client(port, model="tooled")


def refused(client, path, body, param):
    """A request gets a 4xx in OpenAI's shape with one short line, and the server still runs."""
    body = body if isinstance(body, bytes) else json.dumps({"model": "tooled"} | body).encode()
    status, _, data = client.send(path, body)
    error = json.loads(data)["error"]
    assert 400 <= status < 500 and set(error) == {"message", "type", "param", "code"}, error
    assert error["param"] == param and len(error["message"]) <= 400 and "\n" not in error["message"], error
    assert client.get("/health")
    return error["message"]


PROMPT, TEXT = "/v1/completions", "/v1/chat/completions"
HALF = "\\ud83d"  # half of a surrogate pair


def called(name, number):
    """A message with an earlier tool call."""
    return {"role": "assistant", "tool_calls": [{"id": number, "function": {"name": name, "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PROMPT, '{"prompt": "%s"}'), (PROMPT, '{"prompt": "a", "stop": "%s"}'), (PROMPT, '{"prompt": "a", "model": "%s"}'),
        (PROMPT, '{"prompt": "a", "%s": 1}'), (PROMPT, '{"prompt": "a", "structured_outputs": {"choice": ["%s"]}}'),
        (TEXT, '{"messages": [{"role": "user", "content": "%s"}]}'), (TEXT, '{"messages": [{"role": "%s", "content": ""}]}'),
        ("/v1/embeddings", '{"input": ["%s"]}'), ("/v1/rerank", '{"query": "%s", "documents": ["a"]}'),
        ("/tokenize", '{"content": "%s"}'),
    ],
)  # fmt: skip
def test_half_a_surrogate_pair_is_not_json(client, path, body):
    assert "is not JSON" in refused(client, path, (body % HALF).encode(), None)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PROMPT, {"prompt": "a", "temperature": 10**400}, "temperature"),
        (PROMPT, {"prompt": "a", "logit_bias": {"5": 10**400}}, "logit_bias"),
        (PROMPT, {"prompt": "a", "logit_bias": {"9" * 300: 1}}, "logit_bias"),
        (PROMPT, {"prompt": "a", "logit_bias": {"5000": 1}}, "logit_bias"),
        (PROMPT, {"prompt": "a", "seed": 10**400}, "seed"), (PROMPT, {"prompt": "a", "max_tokens": 2**70}, "max_tokens"),
        (PROMPT, {"prompt": [2**70]}, "prompt"), (PROMPT, {"prompt": "x" * 100_000}, "prompt"),
        (PROMPT, {"prompt": ["x", "x" * 100_000]}, "prompt[1]"), (PROMPT, {"prompt": "a", "stop": ["x" * 300]}, "stop"),
        (PROMPT, {"prompt": "a", "stop": [f"{n}" for n in range(100_000)]}, "stop"),
        (PROMPT, {"prompt": "a", "logit_bias": {f"{n}": 1 for n in range(5000)}}, "logit_bias"),
        (PROMPT, {"prompt": "a", "dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        (PROMPT, {"prompt": "a", "x" * 200_000: 1}, "x" * 61 + "..."),
        (PROMPT, {"prompt": "a", "model": "y" * 200_000}, "model"),
        (PROMPT, {"prompt": "a", "stream": "y" * 200_000}, "stream"),
        (PROMPT, {"prompt": "a", "structured_outputs": {"choice": [f"{n}" for n in range(100_000)]}}, "structured_outputs"),
        (PROMPT, {"prompt": "a", "structured_outputs": {"choice": ["y" * 4000] * 100}}, "structured_outputs"),
        (PROMPT, {"prompt": "a", "structured_outputs": {"regex": "y" * 5000}}, "structured_outputs"),
        (PROMPT, {"prompt": "a", "response_format": "json_schema"}, "response_format"),
        (PROMPT, {"prompt": "a", "response_format": {"type": "json_object", "schema": {"enum": ["y" * 200_000]}}},
         "response_format"),
        (TEXT, {"messages": [{"role": "user", "content": "x " * 50_000}]}, "messages"),
        (TEXT, {"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
        (TEXT, {"messages": [{"role": "user", "content": [{"type": "y" * 200_000}]}]}, "messages"),
        (TEXT, {"messages": [{"role": "user", "content": "x"}, called("f" * 100_000, "a")]}, "messages"),
        (TEXT, {"messages": [{"role": "user", "content": "x"}, called("f", "a" * 100_000)]}, "messages"),
        (TEXT, {"messages": [{"role": "user", "content": "x", "name": "y" * 1000}] * 100}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}, called("f" * 100_000, "a")]}, "messages"),
        (TEXT, CHAT | {"tools": TOOLS * 100}, "tools"), (TEXT, CHAT | {"echo": True}, "echo"),
        (TEXT, CHAT | {"tools": [{"type": "function", "function": {"name": "f", "description": "y" * 300_000}}]}, "tools"),
        (TEXT, CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        (TEXT, CHAT | {"tools": TOOLS, "tool_choice": {"function": {"name": "y" * 200_000}}}, "tool_choice"),
        ("/tokenize", {"content": "x" * 100_000}, "content"), ("/detokenize", {"tokens": [1] * 100_000}, "tokens"),
        ("/v1/embeddings", {"model": "encoder", "input": "x" * 100_000}, "input"),
        ("/v1/rerank", {"model": "encoder", "query": "x" * 100_000, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "encoder", "query": "x", "documents": ["a", "x" * 100_000]}, "documents"),
    ],
)  # fmt: skip
def test_every_field_has_a_limit(client, path, body, param):
    refused(client, path, body, param)


@pytest.mark.parametrize(("role", "expected"), [("User", "'user'"), (" system", "'system'"), ("", "system, developer, user")])
def test_a_role_that_no_model_knows(client, role, expected):
    message = refused(client, TEXT, {"messages": [{"role": role, "content": "x"}]}, "messages")
    assert message.startswith(f"messages has one of the role {role!r}; expected {expected}")


def test_ignored_parameters_are_not_kept():
    assert parse(Chat, json.dumps({"messages": CHAT["messages"], "metadata": {"a": "b"}}).encode()).model_extra == {}


def test_a_body_of_many_parts_is_not_parsed(client):
    for body, said in (
        (b'{"prompt": [' + b"{}," * 200_000 + b"1]}", "200002 brackets; expected at most 131072"),
        (b'{"tokens": [' + b"1," * 1_100_000 + b"1]}", "1100000 commas"),
        (b'{"a": 1, "b": ["' + b'a\\\\","' * 140_000 + b'"]}', "140003 strings; expected at most 131072"),
    ):
        assert said in refused(client, "/detokenize", body, None)
    deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert "recursion limit" in refused(client, PROMPT, deep, None)
    text = b'{"model": "tooled", "content": "' + b'\\"' * 300_000 + b'"}'  # an escaped quote does not begin a string
    assert "content has 300000 bytes" in refused(client, "/tokenize", text, "content")


def test_an_error_does_not_write_out_what_it_names():
    class Large(list):
        def __str__(self):
            raise AssertionError("it takes seconds")

    with pytest.raises(ApiError, match="prompt is an array; expected 1 to 16 entries, not 17"):
        validated(Completion, {"prompt": Large("a" * 17)})


def chain(count):
    return "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(count)) + f'r{count} ::= "a"'


def references(count):
    following = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": following | {f"d{count}": {"type": "null"}}}


def nested(count):
    schema = {"type": "null"}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"grammar": chain(5000)}, "it has 5002 rules; expected at most 1024"),
        ({"grammar": chain(5000).replace(" ::= ", ": ").replace("root", "start")}, "it has 5002 rules"),
        ({"json": references(1500)}, "it has 1501 references; expected at most 1024"),
        ({"json": nested(80)}, "it has 81 levels; expected at most 64"),
        ({"grammar": f"root ::= {'(' * 500}\"a\"{')' * 500}"}, "it has 500 levels"),
        ({"regex": "(" * 500 + "a" + ")" * 500}, "it has 500 levels"),
        ({"grammar": "start: <|nope|>"}, 'unknown special token: "<|nope|>"'),
        ({"grammar": "start: <[1-5000]>"}, "Token range end too large: 5000"),
        ({"grammar": "start: a\na: b\nb: a"}, "no text can continue"), ({"json": False}, 'Unimplemented keys: ["not"]'),
        ({"grammar": 'root ::= "a" ['}, "Unexpected end of input"), ({"grammar": 'root ::= "a" x'}, "Rule 'x' not found"),
        ({"grammar": "::= a"}, ""), ({"grammar": 'root ::= root "a"'}, "not supported: no text can continue"),
        ({"regex": "a("}, "a(; error: unclosed group"),
        ({"regex": "(?=a)b"}, "look-around, including look-ahead"),
        ({"json": {"type": "string", "pattern": "^(?=a)b"}}, "^(?=a)b; error: look-around"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum (3)"),
    ],
)  # fmt: skip
def test_grammars_that_are_refused(client, form, reason):
    message = refused(client, PROMPT, {"prompt": "a", "structured_outputs": form}, "structured_outputs")
    assert " is not supported: " in message and reason in message and "<state>" not in message, message


def test_a_chain_of_a_thousand_references_is_accepted(client):
    for form, text in (({"grammar": chain(1000)}, "a"), ({"json": references(1000)}, "null")):
        (choice,) = client.post(PROMPT, prompt="a", max_tokens=50, structured_outputs=form)["choices"]
        assert (choice["text"].strip(), choice["finish_reason"]) == (text, "stop")


def test_a_schema_that_is_true(client):
    (choice,) = client.post(PROMPT, prompt="a", max_tokens=2, structured_outputs={"json": True})["choices"]
    assert choice["finish_reason"] in ("stop", "length")


def test_a_grammar_that_crashes_its_compiler():
    """The trial process ends by a stack overflow, which the server reports."""
    assert _trial("grammar", chain(5000), 300, (), (0,)) == "it is too complex"


def test_the_trial_knows_special_tokens(client):
    """A rule with a special token or token ids does not hide later parts from the trial."""
    deep = json.dumps(references(2800), separators=(",", ":")).replace("$ref", "\\u0024ref")
    for first in ("</s>", "<[1900-2000]>"):
        grammar = {"grammar": f"start: {first} a\na: %json {deep}"}
        assert "it is too complex" in refused(
            client, PROMPT, {"prompt": "a", "structured_outputs": grammar}, "structured_outputs"
        )
    (choice,) = client.post(PROMPT, prompt="a", structured_outputs={"grammar": 'start: "b" | "b" <s> "c"'})["choices"]
    assert choice["text"] in ("b", "bc")


def test_a_schema_of_json_object_and_blanks_in_calls(client):
    """json_object accepts llama.cpp's schema; a forced call without arguments ends, even if blanks are likely."""
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"]}
    form = {"type": "json_object", "schema": schema}
    (choice,) = client.post(TEXT, **CHAT | {"max_tokens": 100, "response_format": form})["choices"]
    assert json.loads(choice["message"]["content"]) == {"x": 5} and choice["finish_reason"] == "stop"
    blanks = {f"{client.post('/tokenize', content=text)['tokens'][-1]}": 100 for text in ("\n", " ", "\t")}
    for function in ({"name": "now"}, {"name": "now", "parameters": {}}, {"name": "now", "parameters": {"properties": {}}}):
        body = CHAT | {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "logit_bias": blanks}
        body |= {"max_tokens": 180} | ({} if "parameters" not in function else {"logit_bias": {}})
        (choice,) = client.post(TEXT, **body, temperature=0)["choices"]
        if not function.get("parameters"):
            assert choice["finish_reason"] == "tool_calls", choice
        assert not re.search(r"\s{21}", choice["message"]["content"] or "")


def test_tools_with_a_schema(client):
    """The model writes either an answer that fits the schema, or a call."""
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"]}
    body = CHAT | {"tools": TOOLS, "response_format": {"type": "json_object", "schema": schema}, "max_tokens": 150}
    found = set()
    for seed in range(12):
        (choice,) = client.post(TEXT, **body, temperature=1.5, seed=seed)["choices"]
        found.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) == {"x": 5}
    assert found == {"stop", "tool_calls"}


class _DeadEnd:
    """A constraint that allows any token, but never ends."""

    def copy(self):
        return self

    def mask(self, logits):
        return logits

    def append(self, token):
        pass

    def check(self, text):
        from lowbit.serve.errors import bad

        raise bad("response_format", f"{text!r} does not fit")


def test_a_text_that_does_not_fit_is_not_complete(loaded, monkeypatch):
    model = made(loaded)
    model.stop = frozenset(range(2048))  # any token ends a text
    monkeypatch.setattr("lowbit.serve.routes.make_constraint", lambda *_: _DeadEnd())
    with serving([model], Limits()) as (port, _):
        body = {"prompt": "a", "response_format": {"type": "json_object"}}
        for more in ({}, {"stream": True}):
            error, _ = Client(port).refused(PROMPT, body | more, 400)
            assert error["message"] == "'' does not fit" and error["param"] == "response_format"


def test_a_schema_without_a_way_to_its_end(client):
    """If llguidance must end a text, it is not reported as complete."""
    schema = {
        "type": "object", "properties": {"aa": {"type": "integer"}}, "patternProperties": {"^a": {"type": "string"}},
        "minProperties": 1, "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(6):
        body = CHAT | {"model": "tooled", "max_tokens": 60, "temperature": 1.5, "seed": seed, "response_format": form}
        status, _, data = client.send(TEXT, body)
        if status == 200:
            (choice,) = json.loads(data)["choices"]
            assert choice["finish_reason"] == "length" or json.loads(choice["message"]["content"])
        else:
            assert status == 400 and json.loads(data)["error"]["code"] == "unsupported_schema"


def test_stop_strings_of_special_tokens_and_their_log_probabilities(loaded, client):
    tokenizer = loaded[1]
    special = tokenizer.all_special_tokens[-1]
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "two three"))
    ids = [*one, tokenizer.convert_tokens_to_ids(special), *two]
    for stop, expected in ((special, "one"), (f"{special}two", "one"), ("three", "onetwo "), ("zzz", "onetwo three")):
        text = llm.TextUntil(tokenizer, tokenizer(PROMPT)["input_ids"], [stop])
        ended = any(text(token) for token in ids)
        kept = text.tokens
        assert (text.finish(), ended) == (expected, stop != "zzz") and kept <= text.tokens
    body = {"prompt": "x", "max_tokens": 30, "temperature": 0, "structured_outputs": {"choice": ["one two three four"]}}
    whole = client.post(PROMPT, **body, logprobs=0)["choices"][0]
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"] == "one two three four"
    cut = client.post(PROMPT, **body, logprobs=0, stop=" three")["choices"][0]
    assert "".join(cut["logprobs"]["tokens"]).startswith(cut["text"]) and cut["text"] == "one two"
    assert cut["logprobs"]["text_offset"][-1] < len(cut["text"]) and cut["finish_reason"] == "stop"
    pieces = [chunk["choices"][0]["logprobs"] for chunk in client.stream(PROMPT, **body, logprobs=0, stop=" three")]
    assert [token for each in pieces if each for token in each["tokens"]] == cut["logprobs"]["tokens"]


CALL = '{"name": "now", "arguments": {"a": "b"}}'
FUNCTIONS = {"now": {}, "weather": {}}
DEEP = '{"a": ' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "now", "arguments": {"a": "</tool_call>"}}</tool_call>', "", ['{"a": "</tool_call>"}']),
        ('<tool_call>{"name": "now", "arguments": {"a": "</think>"}}</tool_call>', "", ['{"a": "</think>"}']),
        ('{"name": "now", "arguments": {"a": "x</think>y"}}', "", ['{"a": "x</think>y"}']),
        ('{"name": "now", "arguments": {"a": "<tool_call>now</tool_call>"}}', "", ['{"a": "<tool_call>now</tool_call>"}']),
        (f'<think>{{}}</think>\n[{CALL}, {{"name": "now", "arguments": {{"a": "</think>[TOOL_CALLS]"}}}}]', "<think>{}</think>",
         ['{"a": "b"}', '{"a": "</think>[TOOL_CALLS]"}']),
        (f"[1] see <tool_call>{CALL}</tool_call>", "[1] see ", ['{"a": "b"}']),
        (f"[1] </think>{CALL}", "[1] </think>", ['{"a": "b"}']), ('{"a": "</think>', '{"a": "</think>', []),
        (f"<tool_call>\n{CALL}", "", ['{"a": "b"}']), (f"<tool_call>{CALL}<tool_call>{CALL}", "", ['{"a": "b"}'] * 2),
        (f'<tool_call>{CALL}</tool_call><tool_call>{{"name": }}</tool_call>', '<tool_call>{"name": }</tool_call>',
         ['{"a": "b"}']),
        (f'<tool_call>{{"name": "x"}}</tool_call>\n<tool_call>{CALL}</tool_call>', '<tool_call>{"name": "x"}</tool_call>\n',
         ['{"a": "b"}']),
        (f"{CALL}{CALL}", "", ['{"a": "b"}'] * 2), (f"{CALL}\n{CALL}\n", "", ['{"a": "b"}'] * 2),
        ('<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['{"a": 1}']),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', "", ["{}"]),
        ('<tool_call>{"name": "now"}</tool_call>', "", ["{}"]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", ["{}"]),
        (f"Sure.\n<tool_call>{CALL}</tool_call>\nDone.", "Sure.\n\nDone.", ['{"a": "b"}']),
        (f"{CALL} is the call.", f"{CALL} is the call.", []), ('{"name": "now"}', '{"name": "now"}', []),
        (f"<|python_tag|>{CALL}; {CALL}", "", ['{"a": "b"}'] * 2), (f"[TOOL_CALLS][{CALL}]", "", ['{"a": "b"}']),
        ('[TOOL_CALLS]now[ARGS]{"a": 2}[TOOL_CALLS]now[CALL_ID]x1[ARGS]{}', "", ['{"a": 2}', "{}"]),
        (f"<think>Maybe <tool_call>{CALL}</tool_call></think>No.",
         f"<think>Maybe <tool_call>{CALL}</tool_call></think>No.", []),
        (f"<think>\n<tool_call>\n</think>\n<tool_call>{CALL}</tool_call>", "<think>\n<tool_call>\n</think>\n", ['{"a": "b"}']),
        (f"Hm.</think>{CALL}", "Hm.</think>", ['{"a": "b"}']), (f"<think><tool_call>{CALL}", f"<think><tool_call>{CALL}", []),
        ('<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>', None, []),
        ('<tool_call>{"name": "now", "arguments": {"a": %s}}</tool_call>' % ("1" * 5000), None, []),
        (f'<tool_call>{{"name": "now", "arguments": {DEEP}}}</tool_call>', None, []), ('{"answer": 42}', None, []),
        ('<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>', "", ['{"a": "\\ud83d"}']),
        ('<tool_call>{"name": "now", "arguments": {"a": "h\u00e9"}}</tool_call>', "", ['{"a": "h\u00e9"}']),
    ],
)  # fmt: skip
def test_odd_texts_with_calls(text, content, arguments):
    """The whole text, and a stream, which repeats nothing and has no parts of a call."""
    left, calls = find_calls(text, FUNCTIONS)
    assert left == (text if content is None else content)
    assert [each["function"]["arguments"] for each in calls] == arguments
    json.dumps(calls, ensure_ascii=False).encode()
    for size in (1, 7, len(text)):
        held = Held()
        told = "".join(held.more(text[at : at + size]) for at in range(0, len(text), size)) if len(text) < 2000 else ""
        assert left.startswith(told)
        assert held.text != text or told + held.rest(left) == left


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + " " * 300_000, '<tool_call>{"' * 100_000, "<tool_call>" * 100_000, "<tool_call>[" * 100_000,
     '<tool_call>{"a": ' * 50_000, " " * 300_000 + "{", "</think>" * 50_000, "[TOOL_CALLS]a[ARGS]" * 50_000],
)  # fmt: skip
def test_texts_with_many_markers_are_read_in_linear_time(text):
    """Quadratic time would take hours."""
    assert find_calls(text, FUNCTIONS) == (text, [])


def test_a_prompt_is_compared_in_linear_time():
    """With the result of a token-by-token comparison; and 200,000 equal tokens, which would take minutes in quadratic time."""
    for text, breakers in (([1, 2, 1, 2, 3, 1, 2] * 3, ()), ([1, 1, 1, 2, 1, 1], (2,)), ([0, 1, 0, 0, 1, 0], (1,)), ([], ())):
        whole, grown = Repetitions(text, breakers), Repetitions((), breakers)
        for token in text:
            grown.append(token)
        for token in (1, 2, 1):
            assert [whole.lengths(n) for n in (1, 2, 3)] == [grown.lengths(n) for n in (1, 2, 3)]
            whole.append(token)
            grown.append(token)
    assert Repetitions([5] * 200_000, ()).lengths(2) == {5: 199_999}


@pytest.mark.parametrize("value", [0, -1, None])
def test_all_tokens_may_be_drawn(client, value):
    body = {"prompt": "a", "max_tokens": 8, "temperature": 1.5, "seed": 3}
    expected = client.post(PROMPT, **body)["choices"]
    assert client.post(PROMPT, **body, top_k=value)["choices"] == expected


def history(arguments):
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return CHAT | {"messages": messages}


def test_arguments_of_earlier_calls(client):
    for arguments in ("", " ", None, "{}", '{"town": "Oslo"}', {"town": "Oslo"}):
        assert client.post(TEXT, **history(arguments))["choices"]
    for arguments in ("3", "[1]", "null", "{", '{"a": NaN}', "[" * 5000, 5):
        assert "function.arguments is " in refused(client, TEXT, history(arguments), "messages")


def test_names_of_hosts_in_any_case(loaded):
    with serving([made(loaded)], Limits(hosts=("127.0.0.1", "localhost"))) as (port, _):
        for host in (f"LOCALHOST:{port}", "LocalHost"):
            assert Client(port).send("/v1/models", Host=host)[0] == 200
            assert Client(port).send("/v1/models", Host=host, Origin=f"http://{host.lower()}")[0] == 200
        assert Client(port).send("/v1/models", Host="localhost.example")[0] == 403


def test_tokenizing_ends_with_its_client(loaded):
    """Texts that are not yet tokenized when the client disconnects are skipped."""
    encoder = Encoder("encoder", FakeEncoder(loaded[1]))
    started, go, counted = threading.Event(), threading.Event(), []

    def tokens(item):
        counted.append(item)
        started.set()
        go.wait(60)
        return [1]

    encoder.tokens = tokens
    with serving([encoder], Limits()) as (port, server):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/embeddings", json.dumps({"input": ["a"] * 2048}))
        assert started.wait(60)
        assert Client(port).get("/health")  # the event loop is not blocked
        connection.close()
        while "lowbit_canceled_requests_total 1.0" not in Client(port).get("/metrics"):
            pass
        go.set()
        with ThreadPoolExecutor(1):
            assert server._reader.submit(len, counted).result(60) <= 32


def test_a_fault_leaves_a_traceback(loaded, caplog):
    model = made(loaded)
    model.encode = lambda text: 1 / 0
    with serving([model], Limits()) as (port, _):
        error, _ = Client(port).refused(PROMPT, {"prompt": "a"}, 500)
    assert "the server's log has the traceback" in error["message"] and "ZeroDivisionError" in caplog.text


def test_sampling_of_special_numbers(client):
    for more in ({"temperature": 2**64}, {"temperature": 1e-30}, {"top_p": 0, "temperature": 1}, {"repetition_penalty": 1e30}):
        assert client.post(PROMPT, prompt="a", max_tokens=2, **more)["usage"]["completion_tokens"] == 2
