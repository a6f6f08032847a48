"""Anthropic's Messages API of `lowbit serve`, by its client library."""

import json

import pytest
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance", "anthropic", "openai")
import anthropic
from api_clients import CALL, USER, WEATHER, claude, client, failing, gpt, model, prompt_tokens, says, served  # noqa: F401
from served_models import TOOLS, Client


def function(tool):
    return {"name": tool["name"], "description": tool.get("description", ""), "input_schema": tool["parameters"]}


def test_a_message_is_the_answer_of_a_chat(client, claude):
    ask = {"max_tokens": 12, "extra_body": {"temperature": 0.0, "seed": 7}}
    chat = client.post(
        "/v1/chat/completions", messages=[{"role": "system", "content": "Be brief."}, *USER], max_tokens=12, temperature=0.0
    )
    system = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief."}]
    for given in ("Be brief.", system):
        said = claude.messages.create(model="tiny", system=given, messages=USER, **ask)
        (block,) = said.content
        assert (block.type, block.text) == ("text", chat["choices"][0]["message"]["content"])
        assert (said.role, said.model, said.stop_reason, said.stop_sequence) == ("assistant", "tiny", "max_tokens", None)
        usage = said.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
        assert usage.output_tokens == chat["usage"]["completion_tokens"] == 12
        assert (
            claude.messages.count_tokens(model="tiny", system=given, messages=USER).input_tokens
            == (chat["usage"]["prompt_tokens"])
        )
        anthropic.types.Message.model_validate(said.model_dump(), strict=False)
    with claude.messages.stream(model="tiny", system=system, messages=USER, **ask) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert [one.model_dump(exclude={"id", "usage"}) for one in (final,)] == [said.model_dump(exclude={"id", "usage"})]
    assert (
        final.usage.output_tokens == 12
        and final.usage.input_tokens + final.usage.cache_read_input_tokens == (chat["usage"]["prompt_tokens"])
    )
    assert events[0] == "message_start" and events[-1] == "message_stop" and "text" in events


def test_the_events_of_a_message(client, says):
    says("I ask. <tool_call>" + CALL + "</tool_call>")
    body = {"model": "tiny", "messages": USER, "tools": [function(WEATHER)], "max_tokens": 200, "stream": True}
    status, headers, data = client.send("/v1/messages", body)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = []
    for each in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = each.split("\n")
        events.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    kinds = [each["type"] for each in events]
    texts = kinds.count("content_block_delta") - 1
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * texts, "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta") == "I ask. "
    start, delta, _ = events[-5:-2]
    assert (start["index"], start["content_block"]["name"], start["content_block"]["input"]) == (1, "weather", {})
    assert delta["delta"] == {"type": "input_json_delta", "partial_json": '{"town": "Rome"}'}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("before", ["", "\n", "I ask. "])
def test_a_tool_and_its_result(client, claude, says, before):
    says(before + "<tool_call>" + CALL + "</tool_call>")
    body = {"model": "tiny", "messages": USER, "tools": [function(WEATHER)], "max_tokens": 200}
    said = claude.messages.create(**body)
    assert said.stop_reason == "tool_use" and [each.type for each in said.content] == ["text"] * bool(before.strip()) + [
        "tool_use"
    ]
    use = said.content[-1]
    assert (use.name, use.input) == ("weather", {"town": "Rome"})
    with claude.messages.stream(**body) as stream:
        assert [each.model_dump(exclude={"id"}) for each in stream.get_final_message().content] == [
            each.model_dump(exclude={"id"}) for each in said.content
        ]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4 degrees"}]}
    content = [each.model_dump(exclude_none=True) for each in said.content]
    messages = [
        *USER,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "?"}]},
    ]
    count = claude.messages.count_tokens(model="tiny", messages=messages, tools=body["tools"]).input_tokens
    call = {"id": use.id, "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
    said = before if before.strip() else ""
    expected = [*USER, {"role": "assistant", "content": said, "tool_calls": [call]},
                {"role": "tool", "name": "weather", "tool_call_id": use.id, "content": "4 degrees"},
                {"role": "user", "content": "?"}]  # fmt: skip
    without = prompt_tokens(client, messages=expected)
    assert claude.messages.count_tokens(model="tiny", messages=messages).input_tokens == len(without) < count


def test_consecutive_messages_of_one_role_become_one(client, claude):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"},
                {"role": "system", "content": "d"}, {"role": "user", "content": "e"}]  # fmt: skip
    whole = [{"role": "user", "content": "a\n\nb"}, *messages[2:]]
    count = claude.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert count == len(prompt_tokens(client, messages=whole))


def test_models_in_each_format(claude, gpt, client):
    (card,) = claude.models.list().data
    assert (card.id, card.type, card.display_name, card.max_input_tokens) == ("tiny", "model", "tiny", 256)
    assert claude.models.retrieve("tiny") == card
    (other,) = gpt.models.list().data
    assert (other.id, other.object, other.created) == ("tiny", "model", int(card.created_at.timestamp()))


def test_special_tokens_are_shown_with_tools(model, client, says, monkeypatch):
    """Only special tokens of calls are shown."""
    special = model.tokenizer.bos_token
    for tokens, tools, expected in (({special}, TOOLS, f"one{special}two"), ({special}, [], "onetwo"), ((), TOOLS, "onetwo")):
        monkeypatch.setattr("lowbit.serve.routes.TOKENS", frozenset(tokens))
        says(f"one{special}two")
        (choice,) = client.post("/v1/chat/completions", messages=USER, tools=tools)["choices"]
        assert choice["message"]["content"] == expected


def test_a_forced_tool_and_a_schema(claude):
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        said = claude.messages.create(
            model="tiny",
            messages=USER,
            tools=[function(WEATHER)],
            tool_choice=choice,
            max_tokens=120,
            extra_body={"temperature": 1.0},
        )
        (use,) = said.content
        assert use.name == "weather" and use.input["town"] in ("Oslo", "Rome") and said.stop_reason == "tool_use"
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"]}
    said = claude.messages.create(
        model="tiny", messages=USER, max_tokens=100, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(said.content[0].text) == {"x": 5} and said.stop_reason == "end_turn"


def test_stop_sequences(claude, says):
    says("one, two; three")
    said = claude.messages.create(model="tiny", messages=USER, max_tokens=50, stop_sequences=["four", "; "])
    assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("one, two", "stop_sequence", "; ")
    says("one, two")
    said = claude.messages.create(model="tiny", messages=USER, max_tokens=50, stop_sequences=["four", "; "])
    assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("one, two", "end_turn", None)
    says("")
    assert claude.messages.create(model="tiny", messages=USER, max_tokens=50).content == []


def test_the_last_message_is_continued(client, claude):
    """Each API gives the text that the model writes after the template's text up to the message."""
    last = {"role": "assistant", "content": "It is"}
    more = {"max_tokens": 8, "temperature": 0.0}
    expected = client.post("/v1/completions", prompt=f"user: {USER[0]['content']}\nassistant: It is", **more)
    said = claude.messages.create(model="tiny", messages=[*USER, last], max_tokens=8, extra_body={"temperature": 0.0})
    assert said.content[0].text == expected["choices"][0]["text"]
    chat = client.post("/v1/chat/completions", messages=[*USER, last], continue_final_message=True, **more)
    assert chat["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert chat["usage"] == expected["usage"] | {"prompt_tokens_details": chat["usage"]["prompt_tokens_details"]}
    ids = prompt_tokens(client, messages=[*USER, last], continue_final_message=True, add_generation_prompt=False)
    assert ids == prompt_tokens(client, prompt=f"user: {USER[0]['content']}\nassistant: It is")
    ids = prompt_tokens(client, messages=[*USER, last], add_generation_prompt=False)
    assert ids == prompt_tokens(client, prompt=f"user: {USER[0]['content']}\nassistant: It is\n")


@pytest.mark.parametrize(
    ("more", "message", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt and continue_final_message",
         "add_generation_prompt"),
        ({"continue_final_message": True, "messages": [*USER, {"role": "assistant", "tool_calls": [
            {"id": "x", "function": {"name": "f", "arguments": "{}"}}]}]}, "the last message has calls of tools; expected",
         "messages"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "the chat template reads no 'enable_thinking'; expected mood",
         "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "the chat template reads no 'messages'; expected mood", "messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "the chat template reads no 'bos_token'; expected mood", "messages"),
        ({"chat_template_kwargs": {"mood": 5}}, "the chat template does not take this conversation", "messages"),
        ({"chat_template_kwargs": {"mood": "x" * 70_000}}, "chat_template_kwargs has 70012 bytes; expected at most 65536",
         "chat_template_kwargs"),
        ({"chat_template_kwargs": ["mood"]}, "chat_template_kwargs is an array; expected an object", "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_the_template(client, more, message, param):
    for path in ("/v1/chat/completions", "/tokenize"):
        error, _ = client.refused(path, {"messages": USER} | more, 400)
        assert error["message"].startswith(message) and error["param"] == param, error


def test_arguments_of_the_template(client, claude, gpt):
    text = f"user: {USER[0]['content']}\nassistant: sad"
    mood = {"chat_template_kwargs": {"mood": "sad"}}
    expected = prompt_tokens(client, prompt=text)
    assert prompt_tokens(client, messages=USER, **mood) == expected
    assert claude.messages.count_tokens(model="tiny", messages=USER, extra_body=mood).input_tokens == len(expected)
    said = gpt.responses.create(model="tiny", input=USER, max_output_tokens=1, extra_body=mood)
    assert said.usage.input_tokens == len(expected)
    hidden = prompt_tokens(client, messages=USER, chat_template_kwargs={"mood": "</s>"})
    assert 2 not in hidden[1:]  # the text of a control token stays text
    assert client.post("/detokenize", tokens=hidden)["content"].endswith("</s>")


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is 0; expected greater"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"model": "claude"}, 404, "not_found_error", "there is no model 'claude'; expected tiny"),
        ({"messages": []}, 400, "invalid_request_error", "messages is an array; expected 1 to 4096 entries"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error",
         "messages[0].role is 'tool'; expected 'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "invalid_request_error",
         "messages[0].content[0].type is 'document'; expected 'text', 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "invalid_request_error",
         "messages has a block without text; expected a value"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, 400,
         "invalid_request_error", "messages has a tool_result block in a message of the assistant; expected"),
        ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
         400, "invalid_request_error", "the last message has calls of tools; expected a text to continue"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400, "invalid_request_error", "messages has 1000"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, 400, "invalid_request_error", "messages is an array"),
        ({"system": "x" * 100_000}, 400, "invalid_request_error", "messages has 1000"),
        ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "system[0].type is 'image'; expected 'text'"),
        ({"stop_sequences": ["x" * 300]}, 400, "invalid_request_error", "stop_sequences[0] is 'xxx"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema is missing"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error",
         "tools[0].type is 'web_search_20250305'; expected 'custom'"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, 400, "invalid_request_error", "tools[0].function.p"),
        ({"tools": [{"name": "f", "input_schema": {"a": "y" * 300_000}}]}, 400, "invalid_request_error", "tools has 3000"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, 400, "invalid_request_error", "tool_choice is 'f'; expected none,"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice has either type tool or a name"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice requires a call, but the request has no"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "there is no parameter mcp_servers"),
    ],
)  # fmt: skip
def test_errors_of_messages(client, claude, body, status, kind, message):
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.post(
            "/v1/messages", body={"model": "tiny", "messages": USER, "max_tokens": 5} | body, cast_to=anthropic.types.Message
        )
    error = caught.value
    assert error.status_code == status and error.body["type"] == "error" and error.body["error"]["type"] == kind
    assert error.body["error"]["message"].startswith(message), error.body
    assert client.get("/health")


def test_a_key_of_messages(served):
    url = f"http://127.0.0.1:{served[0]}"
    with pytest.raises(anthropic.AuthenticationError, match="an API key is needed, and the request has another one"):
        anthropic.Anthropic(api_key="kex", base_url=url).messages.create(model="tiny", messages=USER, max_tokens=5)
    by_token = anthropic.Anthropic(auth_token="key", base_url=url)
    assert by_token.messages.create(model="tiny", messages=USER, max_tokens=5).usage.output_tokens == 5
    status, _, data = Client(served[0], "key").send("/v1/messages/batches", {})
    assert status == 404 and json.loads(data)["error"]["type"] == "not_found_error"


def test_an_error_in_a_stream(claude, gpt, failing):
    with (
        claude.messages.stream(model="tiny", messages=USER, max_tokens=20) as stream,
        pytest.raises(anthropic.APIStatusError, match="the model failed with ZeroDivisionError") as caught,
    ):
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"
