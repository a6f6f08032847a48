"""OpenAI's Responses API of `lowbit serve`, by its client library."""

import json

import pytest
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance", "anthropic", "openai")
import openai
from api_clients import CALL, USER, WEATHER, client, failing, gpt, model, prompt_tokens, says, served  # noqa: F401
from lowbit.serve.errors import ApiError
from lowbit.serve.messages import Messages, _encodable
from lowbit.serve.protocol import Chat
from lowbit.serve.responses import Responses, Store


def test_a_failed_response(gpt, failing):
    *_, last = gpt.responses.create(model="tiny", input="x", max_output_tokens=20, stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message.startswith("the model failed with ZeroDivisionError")
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(last.response.id)
    with pytest.raises(openai.InternalServerError, match="the model failed with ZeroDivisionError"):
        gpt.responses.create(model="tiny", input="x")


CALLED = {"type": "function", "name": "weather", "parameters": WEATHER["parameters"], "strict": False}


def strict(response):
    """A response, whose values have the types of OpenAI's library."""
    openai.types.responses.Response.model_validate(response.model_dump(by_alias=True), strict=False)
    return response


def test_a_response_is_the_answer_of_a_chat(client, gpt):
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    chat = client.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0.0)
    ask = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 12, "temperature": 0.0, "metadata": {"a": "b"}}
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER[0]["content"]}]}]
    for given in (USER[0]["content"], USER, parts):
        said = strict(gpt.responses.create(input=given, **ask))
        assert said.output_text == chat["choices"][0]["message"]["content"]
        assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (said.usage.input_tokens, said.usage.output_tokens) == (chat["usage"]["prompt_tokens"], 12)
        assert said.metadata == {"a": "b"} and said.temperature == 0.0 and said.instructions == "Be brief."
    with gpt.responses.stream(input=USER, **ask) as stream:
        events = list(stream)
    assert strict(events[-1].response).output_text == said.output_text
    kinds = [each.type for each in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [each.sequence_number for each in events] == list(range(len(events)))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == said.output_text


def test_a_function_and_its_output(client, gpt, says):
    says("I ask.\n<tool_call>" + CALL + "</tool_call>")
    ask = {"model": "tiny", "input": USER, "tools": [CALLED], "max_output_tokens": 200}
    said = strict(gpt.responses.create(**ask))
    message, call = said.output
    assert said.status == "completed" and said.output_text == "I ask.\n"
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"town": "Rome"})
    with gpt.responses.stream(**ask) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_response()
    assert [(each.type, getattr(each, "arguments", None)) for each in final.output] == [
        ("message", None), ("function_call", call.arguments),
    ]  # fmt: skip
    assert kinds[-5:] == [
        "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    whole = [*USER, *(each.model_dump(exclude_none=True) for each in said.output), output]
    expected = prompt_tokens(client, messages=[
        *USER, {"role": "assistant", "content": "I ask.\n", "tool_calls": [
            {"id": call.call_id, "function": {"name": "weather", "arguments": call.arguments}}]},
        {"role": "tool", "name": "weather", "content": "4 degrees"}])  # fmt: skip
    says("Fine.")
    one = gpt.responses.create(model="tiny", input=whole)
    other = gpt.responses.create(model="tiny", input=[output], previous_response_id=said.id)
    for each in (one, other):
        assert each.output_text == "Fine." and each.status == "completed"
    assert one.usage.input_tokens == len(expected)
    assert other.previous_response_id == said.id


def test_stored_responses(client, gpt, served):
    first = gpt.responses.create(model="tiny", input="One", instructions="Be brief.", max_output_tokens=5, temperature=0.0)
    two = {"input": "Two", "previous_response_id": first.id}
    *_, last = gpt.responses.create(model="tiny", **two, max_output_tokens=5, temperature=0.0, stream=True)
    second = last.response
    third = gpt.responses.create(
        model="tiny", input="Three", previous_response_id=second.id, max_output_tokens=5, temperature=0.0, store=False
    )
    messages = []  # instructions count for their own request only
    for text, answer in (("One", first), ("Two", second), ("Three", None)):
        messages.append({"role": "user", "content": text})
        messages += [] if answer is None else [{"role": "assistant", "content": answer.output_text}]
    chat = client.post("/v1/chat/completions", messages=messages, max_tokens=5, temperature=0.0)
    assert third.output_text == chat["choices"][0]["message"]["content"]
    assert third.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert gpt.responses.retrieve(second.id).output_text == second.output_text
    gpt.responses.delete(second.id)
    for lost in (second.id, third.id, "resp_x", "x" * 64):
        with pytest.raises(openai.NotFoundError, match="it was not stored, or was dropped for later ones"):
            gpt.responses.create(model="tiny", input="x", previous_response_id=lost)
        with pytest.raises(openai.NotFoundError):
            gpt.responses.retrieve(lost)
        with pytest.raises(openai.NotFoundError):
            gpt.responses.delete(lost)


def test_methods_of_a_response(client):
    status, headers, data = client.send("/v1/responses/x", {}, "POST")
    assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD", "DELETE"})
    assert json.loads(data)["error"]["code"] == "method_not_allowed"
    assert client.send("/v1/responses/x", None, "HEAD")[0] == 404


def test_the_store_has_a_limit():
    store = Store(1000)
    for number in range(30):
        store.add({"id": f"{number}", "output": ["x" * 100]}, [{"content": "y" * 100}])
        store.messages("0") if number < 2 else None
        assert store.nbytes <= 1000
    assert json.loads(store.document("29"))["id"] == "29" and json.loads(store.messages("27")) == [{"content": "y" * 100}]
    store.add({"id": "large", "output": ["x" * 1000]}, [])
    assert store.nbytes == 0 and not store._kept


def test_a_schema_and_a_forced_function(gpt):
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"]}
    form = {"format": {"type": "json_schema", "name": "five", "schema": schema, "strict": True}}
    said = strict(gpt.responses.create(model="tiny", input="x", text=form, max_output_tokens=100))
    assert json.loads(said.output_text) == {"x": 5} and said.text.format.name == "five"
    for choice in ("required", {"type": "function", "name": "weather"}):
        (call,) = gpt.responses.create(
            model="tiny", input="x", tools=[CALLED], tool_choice=choice, max_output_tokens=120, temperature=1.0
        ).output
        assert call.name == "weather" and json.loads(call.arguments)["town"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": []}, "input is empty; expected a text or items", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type is 'item_reference'; expected 'message'", "input"),
        ({"input": [{"role": "user"}]}, "input has an item without content; expected a value", "input"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]},
         "messages[0].tool_calls[0].function.arguments is", "messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type is 'input_file'; exp",
         "input"),
        ({"input": "x" * 100_000}, "messages has 100004 bytes; expected at most 65536", "messages"),
        ({"input": [{"role": "user", "content": "x"}] * 5000}, "input is an array; expected 0 to 4096 entries", "input"),
        ({"instructions": "x" * 100_000}, "messages has 1000", "messages"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type is 'web_search'; expected 'function'", "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice is 'f'; expected none,", "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format has no schema; expected an object", "text"),
        ({"metadata": {"x" * 65: "y"}}, "metadata has a name of more than 64", "metadata"),
        ({"metadata": {f"{n}": "y" for n in range(17)}}, "metadata is an object; expected 0 to 16 entries, not 17", "metadata"),
        ({"truncation": "auto"}, "truncation is 'auto'; expected 'disabled'", "truncation"),
        ({"background": True}, "background is true; expected False", "background"),
        ({"include": ["message.output_text.logprobs"]}, "include[0] is 'message.output_text.logprobs'; expected", "include"),
        ({"conversation": "x"}, "there is no parameter conversation", "conversation"),
        ({"previous_response_id": "x" * 100_000}, "previous_response_id is 'xxx", "previous_response_id"),
    ],
)  # fmt: skip
def test_errors_of_responses(client, body, message, param):
    error, _ = client.refused("/v1/responses", {"model": "tiny", "input": "x"} | body, 400)
    assert error["message"].startswith(message) and error["param"] == param, error
    assert client.get("/health")


def test_fields_of_calls_reach_the_chat():
    failed = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": "no such town"}
    called = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
    talk = [*USER, {"role": "assistant", "content": [called]}, {"role": "user", "content": [failed]}]
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    chat = Messages.model_validate({"messages": talk, "max_tokens": 5, "tools": tools, "tool_choice": choice}).chat()
    assert chat.documents[-1]["content"] == "Error: no such town" and not chat.parallel_tool_calls
    before = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}]}
    ]
    output = [{"type": "function_call_output", "call_id": "1", "output": "21"}]
    chat = Responses.model_validate({"input": output, "parallel_tool_calls": False}).chat(before)
    assert chat.documents[-1]["name"] == "weather" and not chat.parallel_tool_calls
    assert _encodable('{"a": "\\ud83d", "b": "\\ud83d\\ude00"}') == {"a": "\ufffd", "b": "\U0001f600"}
    form = {"response_format": {"type": "json_object"}}
    start = {"messages": [*USER, {"role": "assistant", "content": "{"}], "continue_final_message": True}
    with pytest.raises(ApiError, match="a format or a call is for a whole answer"):
        Chat.model_validate(start | form)
