"""Strict functions: their arguments follow the schema, in every form in which a text can have a call."""

import json
import random
from types import SimpleNamespace

import numpy
import pytest
from needs import need_packages

need_packages("starlette", "llguidance", "pydantic")

from lowbit.serve.constraints import make_constraint
from lowbit.serve.dialects import DIALECTS
from lowbit.serve.errors import ApiError
from lowbit.serve.messages import Messages
from lowbit.serve.protocol import Chat, Grammar, dumped_schema
from lowbit.serve.responses import Responses
from lowbit.serve.tools import find_calls, read_tools
from test_serve_dialects import FUNCTIONS, TEXTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

USER = [{"role": "user", "content": "?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "required": ["zone"]}}},
]  # fmt: skip
GOOD = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
BAD = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
NOW = '{"name": "now", "arguments": {"any": [1]}}'
HERMES = "{{ tools }}<tool_call>"
END = "</s>"
PLAIN = ("", "Nothing.", "a {b} [c]", "I say\n\n{}", "é <tool", "1 < 2", " [1]", "[a](b) c(d)", "now()")
WRONG = (
    "{}", '{"a": 1}', " [ {}", "[now()]", "\x1c[[ now(a=1)]", f"<tool_call>{GOOD}, {BAD}",
    f"<tool_call>\n{GOOD}\n{BAD}</tool_call>", f"a </think> {BAD}", "<tool_call>", f"a <|python_tag|>{GOOD}", "<tool_call>no",
    f"<tool_call>{BAD}</think>",
)  # fmt: skip


def model_of(template, *special):
    """A model whose tokens are bytes and these special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in (END, *special)])
    return SimpleNamespace(
        name="m", template=template, tokenizer=SimpleNamespace(backend_tokenizer=tokenizer), grammar_tokenizer=None,
        stop=frozenset({tokenizer.token_to_id(END)}),
    )  # fmt: skip


def grammar_of(model, answer=None, **more):
    return read_tools(Chat.model_validate({"messages": USER, "tools": TOOLS} | more)).grammar(answer, model)


def fits(model, text, constraint=None):
    constraint = (constraint or make_constraint(model, grammar_of(model))).copy()
    tokenizer = model.tokenizer.backend_tokenizer
    for token in tokenizer.encode(text + END).ids:
        try:
            if numpy.isneginf(constraint.mask(numpy.zeros(tokenizer.get_vocab_size(), numpy.float32))[token]):
                return False
        except ApiError:
            return False
        constraint.append(token)
    return True


@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>", "<think>", "</think>")])
def test_texts_with_calls(special):
    model = model_of(HERMES, *special)
    constraint = make_constraint(model, grammar_of(model))
    thinking = "<think>a {b} [c]</think>\n"
    for before in ("", thinking):
        for call, good in ((GOOD, True), (NOW, True), (BAD, False), (GOOD[:-1], False)):
            for text in (call, f"\n{call}\n", f"[{call}]", f"[{GOOD}, {call}]",
                         f"Hm, {{x}}:\n<tool_call>\n{call}\n</tool_call>",
                         f"<tool_call>{GOOD}</tool_call>\n<tool_call>\n[{call}]\n</tool_call> Done."):  # fmt: skip
                assert fits(model, before + text, constraint) == good, before + text
        for text in PLAIN:
            assert fits(model, before + text, constraint), before + text
        for text in WRONG:
            assert not fits(model, before + text, constraint), before + text


@pytest.mark.parametrize("template", [HERMES, "{{ tools }}", "{{ tools }}[TOOL_CALLS]<|python_tag|>"])
def test_no_other_form_of_a_call_fits(template):
    """The calls of every family's texts break the schema."""
    model = model_of(template)
    constraint = make_constraint(model, grammar_of(model))
    for family, (text, _) in TEXTS.items():
        assert find_calls(text, FUNCTIONS)[1] and not fits(model, text, constraint), family
        after = f"I ask. {text}"  # some families have no marker, so this text has no call
        assert fits(model, after, constraint) == (not find_calls(after, FUNCTIONS)[1]), family


def test_random_texts():
    """No text that fits has a call against the schema."""
    model, chance = model_of(HERMES), random.Random(0)
    constraint = make_constraint(model, grammar_of(model))
    pieces = [*WRONG, GOOD, BAD, "<tool_call>", "</tool_call>", "</think>", "[", "]", "{", ", ", ";", "\n", "a", "now("]
    functions = {"get_weather": SCHEMA, "now": {}}
    wrong = 0
    for _ in range(2000):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 5)))
        called = [json.loads(each["function"]["arguments"]) for each in find_calls(text, functions)[1] if "get" in str(each)]
        if any(each != {"city": "Rome"} for each in called):
            wrong += 1
            assert not fits(model, text, constraint), text
    assert wrong > 100


def test_markers_of_the_template():
    model = model_of("{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]")
    assert fits(model, f"[TOOL_CALLS] [{GOOD}, {NOW}]") and not fits(model, f"[TOOL_CALLS] [{BAD}]")
    assert not fits(model, f"<tool_call>{GOOD}</tool_call>")
    model = model_of("<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>")
    assert fits(model, f"So: <|tool_call_start|>[{GOOD}]<|tool_call_end|>That is all.")
    refused = []
    for dialect in DIALECTS:
        try:
            grammar_of(model_of(f"{{{{ tools }}}}{dialect.begin}"))
        except ApiError as error:
            refused.append(dialect.begin)
            assert error.message == (
                f"the model m writes calls after {dialect.begin!r} in a form that strict does not support; "
                "expected strict false, or a tool_choice that asks for a call"
            )
    assert "<｜tool▁calls▁begin｜>" in refused and " to=functions." in refused and len(refused) == 15


def test_other_grammars():
    """Without strict functions an answer is free; a forced call and response_format have the schemas of all functions."""
    model = model_of("{{ tools }} to=functions.")
    plain = [
        {"type": "function", "function": TOOLS[0]["function"] | {"strict": each, "name": f"f{each}"}} for each in (False, None)
    ]
    assert grammar_of(model, tools=plain) is None
    assert read_tools(Chat.model_validate({"messages": USER, "tools": TOOLS, "tool_choice": "none"})) is None
    forced = make_constraint(model, grammar_of(model, tool_choice="required"))
    assert fits(model, GOOD, forced) and not fits(model, BAD, forced) and not fits(model, "Nothing.", forced)
    formed = make_constraint(model, grammar_of(model, json.dumps({"type": "integer"})))
    assert fits(model, "5", formed) and fits(model, GOOD, formed) and not fits(model, BAD, formed)


def test_a_schema_that_is_not_supported():
    function = {"name": "f", "strict": True, "parameters": {"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}}
    model = model_of(HERMES)
    with pytest.raises(ApiError, match="the grammar is not supported: .*look-around") as refused:
        make_constraint(model, grammar_of(model, tools=[{"type": "function", "function": function}]))
    assert refused.value.param == "tools"
    last = {"role": "assistant", "content": "It"}
    with pytest.raises(ApiError, match="a format or a call is for a whole answer"):
        Chat.model_validate({"messages": [*USER, last], "tools": TOOLS, "continue_final_message": True})


def test_each_api_has_strict_functions():
    """The template does not see the word."""
    model, (tool, _) = model_of(HERMES), TOOLS
    expected = grammar_of(model, tools=[tool])
    assert expected is not None
    given = {"name": "get_weather", "strict": True}
    responses = Responses.model_validate({"input": "?", "tools": [{"type": "function", "parameters": SCHEMA, **given}]})
    messages = Messages.model_validate({"messages": USER, "max_tokens": 5, "tools": [{"input_schema": SCHEMA, **given}]})
    for chat in (responses.chat([]), messages.chat()):
        tools = read_tools(chat)
        assert tools.grammar(None, model) == expected
        assert tools.documents == [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(ApiError, match="^tools has two functions now; expected a name of its own for each$") as refused:
        read_tools(Chat.model_validate({"messages": USER, "tools": [*TOOLS, TOOLS[1]]}))
    assert refused.value.param == "tools"


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    "schema", [{"const": LARGE}, {"enum": ["a", -LARGE]}, {"items": {"anyOf": [{"const": {"properties": {"a": [10**400]}}}]}}]
)
def test_constants_that_would_become_others_are_refused(schema):
    """llguidance reads numbers as float64."""
    said = r"has the constant -?[\d.]+; expected -2\^53 to 2\^53, or a string"
    function = {"name": "f", "strict": True, "parameters": {"properties": {"const": schema}}}
    tools = [{"type": "function", "function": function}]
    for more in ({}, {"tool_choice": "required"}):
        with pytest.raises(ApiError, match=f"^tools {said}"):
            grammar_of(model_of(HERMES), tools=tools, **more)
    with pytest.raises(ApiError, match=f"^response_format {said}"):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        Chat.model_validate({"messages": USER, "response_format": form}).grammar  # noqa: B018
    function["strict"] = False
    assert grammar_of(model_of(HERMES), tools=tools) is None
    limits = {"properties": {"const": {"maximum": 2**63 - 1, "const": 2**53}, "enum": {"minimum": -LARGE}}}
    assert grammar_of(
        model_of(HERMES), tools=[{"type": "function", "function": {"name": "f", "strict": True, "parameters": limits}}]
    )


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, '{"a": {"c": 1}}', '{"a": 1, "b": 1}'),
        (A | {"additionalProperties": True}, '{"a": 1, "b": 1}', None),
        (
            {"properties": {"a": {"items": {"$ref": "#/$defs/B"}}}, "$defs": {"B": B}},
            '{"a": [{"b": 1}]}', '{"a": [{"b": 1, "c": 1}]}',
        ),
        ({"anyOf": [A, B]}, '{"b": 1}', '{"c": 1}'),
        ({"properties": {"properties": A}}, '{"properties": {"a": 1}}', '{"properties": {"c": 1}}'),
        ({"properties": {"a": {"const": A}}}, json.dumps({"a": A}), '{"a": {}}'),
        ({"type": "object"}, '{"c": 1}', None),
        (A | {"required": ["b"]}, '{"b": 1}', "{}"),
        ({"allOf": [A, B]}, '{"a": 1, "b": 1}', "{}"),
        (A | {"anyOf": [B]}, '{"a": 1, "b": 1}', "{}"),
    ],
)  # fmt: skip
def test_an_object_has_only_the_properties_of_its_schema(schema, good, bad):
    """Without this, small models write properties until their last token. No schema becomes one that nothing fits."""
    model = model_of("")
    constraint = make_constraint(model, Grammar("json", dumped_schema("response_format", schema), "response_format"))
    assert fits(model, good, constraint) and (bad is None or not fits(model, bad, constraint))
