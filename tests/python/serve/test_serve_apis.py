"""Anthropic's Messages API and OpenAI's Responses API of `lowbit serve`, by their client libraries."""

import json

import numpy
import pytest
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance", "anthropic", "openai")

import anthropic
import openai
from lowbit.serve.errors import ApiError
from lowbit.serve.messages import Messages, _encodable
from lowbit.serve.protocol import Chat
from lowbit.serve.responses import Responses, Store
from lowbit.serve.routes import Limits
from test_serve import TOOLS, Client, made, serving

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}{{ ' ' + message.name if message.name }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.town }}{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{{ ' ' + mood if mood }}{% endif %}"
)
CALL = '{"name": "weather", "arguments": {"town": "Rome"}}'
WEATHER = TOOLS[0]["function"]
USER = [{"role": "user", "content": "How warm is it?"}]


class Says:
    """A constraint that allows only one text."""

    def __init__(self, tokens):
        self.tokens = tokens

    def mask(self, logits):
        return numpy.where(numpy.arange(len(logits)) == self.tokens[0], logits, numpy.float32(-numpy.inf))

    def append(self, token):
        assert token == self.tokens.pop(0)

    def check(self, text):
        assert len(self.tokens) == 1  # the one that ends a text


@pytest.fixture(scope="module")
def model(packed):
    model = made((load_model(packed[0]), load_tokenizer(packed[0])))
    model.template = TEMPLATE
    return model


@pytest.fixture(scope="module")
def client(served):
    return Client(served[0], "key")


@pytest.fixture(scope="module")
def served(model):
    with serving([model], Limits(api_key="key")) as found:
        yield found


@pytest.fixture(scope="module")
def claude(served):
    return anthropic.Anthropic(api_key="key", base_url=f"http://127.0.0.1:{served[0]}", max_retries=0)


@pytest.fixture(scope="module")
def gpt(served):
    return openai.OpenAI(api_key="key", base_url=f"http://127.0.0.1:{served[0]}/v1", max_retries=0)


@pytest.fixture
def says(model, monkeypatch):
    """Makes the model write one text."""
    of, tokenizer = type(model).text, model.tokenizer

    def say(written):
        def text(self, *arguments):
            made = of(self, *arguments)
            before = tokenizer("a", add_special_tokens=False)["input_ids"]
            ids = tokenizer("a" + written, add_special_tokens=False)["input_ids"]
            assert ids[: len(before)] == before
            made.constraint = Says([*ids[len(before) :], min(self.stop)])
            return made

        monkeypatch.setattr(type(model), "text", text)

    return say


def prompt_tokens(client, **body):
    return client.post("/tokenize", **body)["tokens"]


# Messages


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
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"], "additionalProperties": False}
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


@pytest.fixture
def failing(model):
    """The model fails after its third call."""
    run, calls = model.batch.decoder.run_texts, []

    def fail(texts):
        calls.append(texts)
        return 1 / 0 if len(calls) > 3 else run(texts)

    model.batch.decoder.run_texts = fail
    yield
    model.batch.decoder.run_texts = run


def test_an_error_in_a_stream(claude, gpt, failing):
    with (
        claude.messages.stream(model="tiny", messages=USER, max_tokens=20) as stream,
        pytest.raises(anthropic.APIStatusError, match="the model failed with ZeroDivisionError") as caught,
    ):
        list(stream)
    assert caught.value.body["error"]["type"] == "api_error"


def test_a_failed_response(gpt, failing):
    *_, last = gpt.responses.create(model="tiny", input="x", max_output_tokens=20, stream=True)
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message.startswith("the model failed with ZeroDivisionError")
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(last.response.id)
    with pytest.raises(openai.InternalServerError, match="the model failed with ZeroDivisionError"):
        gpt.responses.create(model="tiny", input="x")


# Responses

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
    schema = {"type": "object", "properties": {"x": {"enum": [5]}}, "required": ["x"], "additionalProperties": False}
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


# Pages of other sites


def test_allowed_origins(model):
    with serving([model], Limits(hosts=("127.0.0.1",), origins=("https://a.example",))) as (port, _):
        client, site = Client(port), {"Origin": "https://a.example"}
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-api-key,x-b"}
        asks["Access-Control-Request-Private-Network"] = "true"
        status, headers, _ = client.send("/v1/messages", None, "OPTIONS", **site, **asks)
        assert (status, headers["access-control-allow-origin"]) == (200, "https://a.example")
        assert headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
        body = {"messages": USER, "max_tokens": 3}
        for path, more in (
            ("/v1/chat/completions", {}),
            ("/v1/messages", {"stream": True}),
            ("/v1/messages", {"max_tokens": 0}),
        ):
            status, headers, _ = client.send(path, body | more, **site)
            assert headers["access-control-allow-origin"] == "https://a.example" and status == (
                400 if 0 in more.values() else 200
            )
        for origin in ("https://b.example", "http://a.example", "https://a.example.b", "null"):
            for path, method, more in (("/v1/chat/completions", "OPTIONS", asks), ("/tokenize", "POST", {})):
                status, headers, data = client.send(
                    path, {"content": "a"} if method == "POST" else None, method, Origin=origin, **more
                )
                assert status == 403 and "access-control-allow-origin" not in headers
                assert (
                    f"a page of {origin}; expected one of this server or https://a.example"
                    in json.loads(data)["error"]["message"]
                )
        status, _, data = client.send("/tokenize", None, "OPTIONS", **site, **{"Access-Control-Request-Method": "PATCH"})
        assert status == 405 and json.loads(data)["error"]["code"] == "method_not_allowed"
        assert client.send("/v1/models", Host="evil.example", **site)[0] == 403
    with serving([model], Limits(origins=("*",))) as (port, _):
        status, headers, _ = Client(port).send("/v1/models", Origin="https://b.example")
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
    with serving([model], Limits()) as (port, _):
        status, headers, _ = Client(port).send("/v1/models", None, "OPTIONS", Origin="https://b.example", **asks)
        assert status == 405 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("given", "expected"),
    [("https://A.example", "https://a.example"), ("http://localhost:3000/", "http://localhost:3000"), ("*", "*"),
     ("a.example", None),
     ("https://a.example/path", None), ("ftp://a.example", None), ("https://", None), ("", None), ("null", None)],
)  # fmt: skip
def test_the_option_of_origins(given, expected):
    from lowbit.cli.serve import _origin

    if expected is not None:
        assert _origin(given) == expected
        return
    with pytest.raises(ValueError, match="--allowed-origin is .*; expected a site such as https://example.com, or \\*"):
        _origin(given)


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
