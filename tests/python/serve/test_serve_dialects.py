"""Tool calls as the templates of many families of models write them."""

import json

import pytest
from lowbit import llm
from needs import need_packages

need_packages("pydantic")

from lowbit.serve.dialects import DIALECTS, TOKENS
from lowbit.serve.tools import Held, find_calls

PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "code": {"type": "string"}, "unit": {"enum": ["5", "C"]},
    "hourly": {"type": "boolean"}, "at": {"type": ["string", "null"]}, "tags": {"type": "array"}, "more": {"type": "object"},
    "scale": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}  # fmt: skip
FUNCTIONS = {"get_weather": {"type": "object", "properties": PROPERTIES}, "now": {}, "to_json": {}, "a.b-c": {}}
OSLO, TWO = {"city": "Oslo"}, {"city": "Oslo", "days": 2}
JSON = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
ARGS = '{"city": "Oslo", "days": 2}'
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

# Family -> a text as its template writes it, and the calls in it.
TEXTS = {
    "Hermes, Qwen 2.5 and 3, SmolLM3": (f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>", [TWO, TWO]),
    "Granite 3.1": (f"<tool_call>[{JSON}]", [TWO]), "Granite 3": (f"<|tool_call|>[{JSON}]", [TWO]),
    "Granite 4": (f"<tool_call>\n{JSON}\n</tool_call>", [TWO]),
    "Phi-4-mini": (f"<|tool_call|>[{JSON}]<|/tool_call|>", [TWO]), "Phi-4-mini, functools": (f"functools[{JSON}]", [TWO]),
    "Llama 3.1": ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}<|eom_id|>', [OSLO]),
    "Llama 3.2": ("[get_weather(city='Oslo', days=2), now()]", [TWO, {}]),
    "Llama 4": ('<|python_start|>[get_weather(city="Oslo", days=2)]<|python_end|>', [TWO]),
    "Mistral 7B v0.3": (f"[TOOL_CALLS] [{JSON[:-1]}, \"id\": \"abcdefghi\"}}]", [TWO]),
    "Mistral Small 3.2": (f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{ARGS}[TOOL_CALLS]now[ARGS]{{}}", [TWO, {}]),
    "Ministral 3, without special tokens": (f"[TOOL_CALLS]get_weather{ARGS}", [TWO]),
    "Gemma 4": ('<|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:2,more:{a:[1,<|"|>x{}<|"|>]},hourly:true}<tool_call|>',
                [TWO | {"more": {"a": [1, "x{}"]}, "hourly": True}]),
    "FunctionGemma": ("<start_function_call>call:get_weather{city:<escape>Oslo, \"x\"<escape>,days:2}<end_function_call>"
                      "<start_function_call>call:now{}<end_function_call>", [{"city": 'Oslo, "x"', "days": 2}, {}]),
    "DeepSeek V3, R1": (f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}get_weather\n```json\n{ARGS}\n```{END}\n"
                        f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>", [TWO, {}]),
    "DeepSeek V3.1": (f"<｜tool▁calls▁begin｜>{BEGIN}get_weather{SEP}{ARGS}{END}{BEGIN}now{SEP}{{}}{END}<｜tool▁calls▁end｜>",
                      [TWO, {}]),
    "DeepSeek V3.2": ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
                      'Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
                      '</｜DSML｜invoke>\n</｜DSML｜function_calls>', [TWO]),
    "DeepSeek V4": ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="x" string="true">2</｜DSML｜parameter>'
                    '\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', [{"x": "2"}]),
    "GLM 4.5": ("<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
                "<arg_value>2</arg_value>\n</tool_call>", [TWO]),
    "GLM 4.7": ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
                "<tool_call>now</tool_call>", [OSLO, {}]),
    "Qwen3-Coder, Qwen 3.5, Nemotron 3": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "<parameter=code>\n5\n  if a < b:\n\n</parameter>\n<parameter=unit>\n5\n</parameter>\n<parameter=hourly>\nTrue\n"
        '</parameter>\n<parameter=at>\nnull\n</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n<parameter=scale>\n1.5\n'
        "</parameter>\n</function>\n</tool_call>",
        [TWO | {"code": "5\n  if a < b:\n", "unit": "5", "hourly": True, "at": None, "tags": ["a"], "scale": 1.5}],
    ),
    "Seed-OSS": ("<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
                 [OSLO]),
    "MiniMax M2": ('<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
                   '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
                   [TWO, {}]),
    "Kimi K2": (f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{ARGS}"
                "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
                "<|tool_calls_section_end|>", [TWO, {}]),
    "LFM2": ('<|tool_call_start|>[get_weather(city="Oslo", days=2)]<|tool_call_end|>', [TWO]),
    "LFM2, JSON": (f"<|tool_call_start|>[{JSON}]<|tool_call_end|>", [TWO]),
    "Jamba, Hunyuan": (f"<tool_calls>[\n{JSON}\n]</tool_calls>", [TWO]),
    "MiniMax M1": (f"<tool_calls>\n{JSON}\n</tool_calls>", [TWO]),
    "Olmo 3": ('<function_calls>\nget_weather(city="Oslo", days=2)\nnow()\n</function_calls>', [TWO, {}]),
    "Cohere": ('<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}}\n]'
               "<|END_ACTION|>", [OSLO]),
    "InternLM": ('<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>', [OSLO]),
    "Apertus": (f'<|tools_prefix|>[{{"get_weather": {ARGS}}}, {{"now": {{}}}}]<|tools_suffix|>', [TWO, {}]),
    "gpt-oss": (f" to=functions.get_weather json{ARGS}", [TWO]),
    "gpt-oss, role first": (f" to=functions.get_weathercommentary json{ARGS}", [TWO]),
    "gpt-oss, a name with json": (f" to=functions.to_json json{ARGS}", [TWO]),
    "xLAM": (f"[{JSON}]", [TWO]),
}  # fmt: skip


@pytest.mark.parametrize("family", TEXTS)
@pytest.mark.parametrize("before", ["", "I ask.\n"])
def test_calls_of_each_family(family, before):
    """Calls as the whole text, after other text, and in a stream."""
    text, expected = TEXTS[family]
    if before and (text[0] == "[" and not text.startswith("[TOOL")):
        pytest.skip("only a whole text is a call without a marker")
    text = before + text
    content, calls = find_calls(text, FUNCTIONS)
    assert content == before
    assert [json.loads(each["function"]["arguments"]) for each in calls] == expected
    names = [each["function"]["name"] for each in calls]
    assert set(names) <= FUNCTIONS.keys() and all(text.index(name) for name in names)
    for size in (1, 5, 1000):
        held = Held()
        told = "".join(held.more(text[at : at + size]) for at in range(0, len(text), size))
        assert told + held.rest(content) == before


@pytest.mark.parametrize("family", TEXTS)
def test_unknown_and_incomplete_calls_stay_in_the_text(family):
    text, _ = TEXTS[family]
    assert find_calls(text, {}) == (text, []) and find_calls(text, {"nothing": {}}) == (text, [])
    for end in range(len(text)):  # nothing fails, and no argument is lost
        _, calls = find_calls(text[:end], FUNCTIONS)
        for each, whole in zip(calls, TEXTS[family][1], strict=False):
            assert json.loads(each["function"]["arguments"]) == whole, text[:end]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f(a='it\\'s \\u00e9\\n', b=\"x\\\\y\")", {"a": "it's é\n", "b": "x\\y"}),
        ("f(a=-1.5e3, b=+2, c=.5)", {"a": -1500.0, "b": 2, "c": 0.5}),
        ("f(a=[1, (2, 3,), {'k': None}], b={}, c=[])", {"a": [1, [2, 3], {"k": None}], "b": {}, "c": []}),
        ("f(a=True, b=false, c=null,)", {"a": True, "b": False, "c": None}), ("f(a='\\ud83d\\ude00')", {"a": "\U0001f600"}),
        ("f( a = 'x' )", {"a": "x"}), ("f(a='(,)]')", {"a": "(,)]"}), ("f(a=1) ", {"a": 1}),
        ("f(1)", None), ("f(a=g())", None), ("f(a=b)", None), ("f(a=1 b=2)", None), ("f(a='x)", None), ("f(a=1", None),
        ("f", None),
        ("f(a=__import__('os'))", None), ("f(**{})", None), ("f(a=1+1)", None), ("f(a=0x10)", None), ("f(a=1__0)", None),
        ("f(a=" + "[" * 40 + "]" * 40 + ")", None), ("f(a=" + "9" * 400 + ")", None),
    ],
)  # fmt: skip
def test_calls_as_code(code, expected):
    _, calls = find_calls(f"<|tool_call_start|>[{code}]<|tool_call_end|>", {"f": {}})
    assert [json.loads(each["function"]["arguments"]) for each in calls] == ([] if expected is None else [expected])


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.begin)
@pytest.mark.parametrize(
    "inner",
    ["", " ", "[", "{", "now", "now(", "[now(a=", "call:now{a:", "call:now{a:[", "<function=now><parameter=a>",
     '<invoke name="now">', "now<arg_key>a</arg_key><arg_value>", '{"name": "now", "arguments": {"a": ',
     f"now{SEP}", "now(a='\\"],
)  # fmt: skip
def test_texts_of_many_marks_of_each_family(dialect, inner):
    """Quadratic time would take hours."""
    for text in ((dialect.begin + inner) * 20_000, dialect.begin + inner * 20_000):
        _, calls = find_calls(text, {"other": {}})
        assert not calls


def test_special_tokens_of_calls_are_shown():
    """Tokenizers of Mistral, LFM2 and others call the marks special, and a text without them has no calls."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["[TOOL_CALLS]", "[ARGS]", "get_weather", ARGS, "</s>", "Hi"]

    class Fast:
        backend_tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "Hi"))
        backend_tokenizer.add_special_tokens([AddedToken(words[number], special=True) for number in (0, 1, 4)])
        backend_tokenizer.decoder = decoders.Fuse()
        added_tokens_decoder = backend_tokenizer.get_added_tokens_decoder()

    hidden, shown = (llm.TextUntil(Fast(), [5], shown=each) for each in ((), TOKENS))
    for token in (0, 2, 1, 3, 4):
        hidden(token)
        shown(token)
    assert hidden.finish() == f"get_weather{ARGS}" and find_calls(hidden.text, FUNCTIONS) == (hidden.text, [])
    assert shown.finish() == f"[TOOL_CALLS]get_weather[ARGS]{ARGS}"
    _, (call,) = find_calls(shown.text, FUNCTIONS)
    assert json.loads(call["function"]["arguments"]) == TWO and len(call["id"]) == 9 and call["id"].isalnum()


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (OPTIONAL, "5", "5"), (OPTIONAL, "true", "true"), (OPTIONAL, "null", None), (OPTIONAL, '"x"', "x"),
        (OPTIONAL, "{}", "{}"),
        ({"type": ["string", "null"]}, "1e3", "1e3"), ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5), ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"$ref": "#/$defs/a~1b"}, "5", "5"), ({"allOf": [{"$ref": "#/$defs/a~1b"}, {"minLength": 1}]}, "5", "5"),
        ({"enum": ["5", "6"]}, "7", "7"), ({"const": "5"}, "5", "5"), ({"$ref": "#/$defs/self"}, "5", 5), ({}, "5", 5),
        ({"anyOf": [{"type": "string"}, {}]}, "5", 5), ({"type": "integer"}, "x", "x"), ({"type": "string"}, '"x"', '"x"'),
        ({"oneOf": [{"$ref": "#/$defs/self"}] * 50}, "5", 5), ({"$ref": "#/none/0"}, "5", 5), ({"enum": [1e999]}, "5", 5),
        ({"type": ["string", "number"], "enum": ["auto", 1]}, "1", 1), ({"type": ["string", "number"], "const": 2}, "2", 2),
        ({"type": ["string", "number"], "allOf": [{"type": ["string", "integer"]}]}, "5", 5),
    ],
)  # fmt: skip
def test_values_in_tags_have_a_type_of_the_schema(schema, text, expected):
    definitions = {"a/b": {"type": "string"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}] * 9}}
    functions = {"f": {"properties": {"a": schema}, "$defs": definitions}}
    called = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    _, (call,) = find_calls(called, functions)
    assert json.loads(call["function"]["arguments"]) == {"a": expected}
    assert type(json.loads(call["function"]["arguments"])["a"]) is type(expected)
