"""A model behind the APIs of other companies, and their client libraries."""

import numpy
import pytest
from lowbit.llm.loading import load_model, load_tokenizer
from needs import need_packages

need_packages("starlette", "uvicorn", "llguidance", "anthropic", "openai")
import anthropic
import openai
from lowbit.serve.routes import Limits
from served_models import TOOLS, Client, made, serving

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
