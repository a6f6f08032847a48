"""Images in chat completions: the text of transformers, no image computed twice, and refusals."""

import base64
import io
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import lowbit
import pytest
import torch
from command_line import invoke
from image_models import PIL, save_image_model
from lowbit import llm
from lowbit.llm.image_plan import ImagePlan
from lowbit.llm.images import inputs_of, message
from lowbit.llm.loading import load_image_model, load_image_processor, load_model, load_tokenizer
from lowbit.llm.stopping import TextUntil
from lowbit.plan.recording import Unplannable
from needs import need_packages

need_packages("starlette", "uvicorn", "python_multipart", "openai", "anthropic")

import anthropic
import openai
from lowbit.serve import image_conversations, run
from lowbit.serve.routes import Limits
from served_models import Client, made, serving

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

NEW = 8
SIZES = [(40, 30), (64, 64), (17, 50)]
LIMITS = Limits(images=4, image_pixels=20_000, images_at_once=1)


def make_image(seed, size=None):
    size = SIZES[seed] if size is None else size
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return PIL.Image.fromarray(pixels.numpy())


def url(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def seen(image, kind="PNG", **more):
    options = {"lossless": True} if kind == "WEBP" else {}
    return {"type": "image_url", "image_url": {"url": url(image, kind, **options), **more}}


def said(role, text, *images, **more):
    return {"role": role, "content": [*(seen(image, **more) for image in images), {"type": "text", "text": text}]}


class Family:
    """A float model with a server, and transformers' own text for a conversation."""

    def __init__(self, path, pixels=None):
        self.processor = load_image_processor(path)
        self.template = llm.images.image_template(self.processor, path)
        self.plain = transformers.AutoModelForImageTextToText.from_pretrained(path).eval()
        settings = {"at_once": 3, "rows": 48, "prefix_bytes": 1 << 24}
        self.served = image_conversations.load(
            "sees", path, load_image_model(path), max_length=512, cache=None, template=None, pixels=pixels, **settings
        )

    def expected(self, *messages):
        inputs = inputs_of(self.processor, messages, self.template)
        count = inputs["input_ids"].shape[1]
        tokens = self.plain.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0].tolist()
        text = TextUntil(self.processor.tokenizer, tokens[:count])  # without an incomplete last character
        for token in tokens[count:]:
            text(token)
        text.finish()
        return text.text, count


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    root, known = tmp_path_factory.mktemp("seen"), {}

    def of(kind):
        if kind not in known:
            save_image_model(kind, root / kind)
            known[kind] = Family(root / kind)
        return known[kind]

    return of


@pytest.fixture
def client(families):
    with serving([families("qwen2_5_vl").served], LIMITS) as (port, _):
        yield Client(port)


def ask(port, *messages, **more):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120, max_retries=0)
    settings = {"model": "sees", "max_tokens": NEW, "temperature": 0} | more
    return client.chat.completions.create(messages=list(messages), **settings)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_large", "idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_conversations_have_the_text_of_transformers(families, kind):
    family = families(kind)
    images = [make_image(number) for number in range(3)]
    first = [said("user", "What?", images[0])]
    own = [message("user", "What?", images[:1])]
    text, count = family.expected(*own)
    with serving([family.served], LIMITS) as (port, server):
        answer = ask(port, *first)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, count)
        computed = family.served.decoder.computed
        # Another turn with two images, one of them seen before, in another format.
        second = [*first, said("assistant", text), said("user", "And these?", images[2], images[0], kind="WEBP", detail="high")]
        own += [message("assistant", text), message("user", "And these?", [images[2], images[0]])]
        text, count = family.expected(*own)
        answer = ask(port, *second)
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == (text, count)
        assert family.served.decoder.computed == computed + 1
        assert answer.usage.prompt_tokens_details.cached_tokens > 0
        # The same again, as a stream: nothing is computed but the last token of the prompt.
        stream = list(ask(port, *second, stream=True, stream_options={"include_usage": True}))
        assert "".join(each.choices[0].delta.content or "" for each in stream if each.choices) == text
        assert stream[-1].usage.prompt_tokens_details.cached_tokens == count - 1
        # Without an image, and with the text of a control token.
        for words in ("What?", "a <eos> b"):
            answer = ask(port, {"role": "user", "content": words}).choices[0].message.content
            if words == "What?":
                assert answer == family.expected(message("user", words))[0]
        assert family.served.decoder.computed == computed + 1
        # Images of other pixels share no keys and values, whatever else is the same.
        answer = ask(port, said("user", "What?", images[1].resize(SIZES[0])))
        assert answer.choices[0].message.content == family.expected(message("user", "What?", [images[1].resize(SIZES[0])]))[0]
        cards = {card["id"]: card for card in json.loads(Client(port).get("/v1/models"))["data"]}
        assert cards["sees"]["images"] is True


def test_requests_at_the_same_time(families):
    family = families("qwen3_vl")
    talks = [[("user", "What is it? " * number, numbers)] for number, numbers in enumerate([(0,), (1, 2), (), (2, 0, 1)], 1)]
    expected = [family.expected(*(message(r, t, [make_image(n) for n in ns]) for r, t, ns in talk))[0] for talk in talks]
    with serving([family.served], Limits()) as (port, _), ThreadPoolExecutor(8) as pool:

        def answer(number):
            talk = talks[number % len(talks)]
            found = ask(port, *(said(r, t, *(make_image(n) for n in ns)) for r, t, ns in talk), n=1 + number % 2)
            return [choice.message.content for choice in found.choices]

        for number, texts in enumerate(pool.map(answer, range(12))):
            assert set(texts) == {expected[number % len(talks)]}


def test_a_text_does_not_depend_on_other_requests(tmp_path):
    """With packed layers, whatever other requests run at the same time, and whether its prefix is known."""
    save_image_model("qwen3_vl", tmp_path / "model")
    model = load_image_model(tmp_path / "model", lowbit.LowBitConfig(bits=4))
    settings = {"max_length": 512, "cache": None, "template": None, "pixels": None, "at_once": 4, "rows": 40}
    served = image_conversations.load("sees", tmp_path / "model", model, prefix_bytes=1 << 24, **settings)
    talks = [[said("user", "What? " * number, *map(make_image, shown))] for number, shown in enumerate([(0,), (1, 2), ()], 1)]

    def texts(port, number):
        found = ask(port, *talks[number % 3], temperature=1.5, seed=number % 3, max_tokens=2 * NEW)
        return found.choices[0].message.content

    with serving([served], Limits()) as (port, _), ThreadPoolExecutor(6) as pool:
        alone = [texts(port, number) for number in range(3)]
        assert len(set(alone)) == 3
        assert list(pool.map(lambda number: texts(port, number), range(12))) == alone * 4


def test_clients_that_disconnect(families, monkeypatch):
    """Few threads open images of disconnected clients, and later requests get their answers."""
    family, opened, most = families("qwen2_5_vl"), threading.Semaphore(0), [0, 0]
    read = llm.images.read_image

    def slow(*arguments):
        most[0] += 1
        most[1] = max(most)
        opened.acquire()
        most[0] -= 1
        return read(*arguments)

    monkeypatch.setattr(llm.images, "read_image", slow)
    body = json.dumps({"messages": [said("user", "?", make_image(0))], "max_tokens": 1}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving([family.served], LIMITS) as (port, server):
        for _ in range(6):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(head + body)
                while server.gate.busy != 1 or server.gate.bodies or not most[0]:
                    time.sleep(0.001)
            while server.gate.busy:
                time.sleep(0.001)
        opened.release(50)
        assert ask(port, said("user", "What?", make_image(0))).choices
    assert most[1] == 1  # as many as the limit


def test_budgets_of_pixels(families, tmp_path):
    save_image_model("qwen2_5_vl", tmp_path / "model")
    family = Family(tmp_path / "model", pixels=1500)
    large = make_image(1, (100, 60))
    with serving([family.served], LIMITS) as (port, _):
        answer = ask(port, said("user", "What?", large))
        scaled = llm.images.scaled(large, 1500)
        assert scaled.size == (50, 30)
        assert answer.choices[0].message.content == family.expected(message("user", "What?", [scaled]))[0]
        family.served.pixels = None
        assert ask(port, said("user", "What?", large)).usage.prompt_tokens > answer.usage.prompt_tokens
    assert llm.images.scaled(large, 6000) is large


def test_a_low_detail_is_a_smaller_image(families, monkeypatch):
    monkeypatch.setattr(image_conversations, "_LOW_PIXELS", 1500)
    family, large = families("qwen2_5_vl"), make_image(1, (100, 60))
    with serving([family.served], LIMITS) as (port, _):
        high, low = (ask(port, said("user", "What?", large, detail=detail)) for detail in ("high", "low"))
    assert low.usage.prompt_tokens < high.usage.prompt_tokens
    expected = family.expected(message("user", "What?", [llm.images.scaled(large, 1500)]))
    assert (low.choices[0].message.content, low.usage.prompt_tokens) == expected


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(client, kind):
    assert client.post("/v1/chat/completions", messages=[said("user", "?", make_image(0), kind=kind)], max_tokens=1)["choices"]


TIFF = base64.b64encode(b"II*\0" + bytes(40)).decode()


@pytest.mark.parametrize(
    ("part", "said_of_it", "code"),
    [
        ("http://127.0.0.1:1/cat.png", "at 'http://127.0.0.1:1/cat.png'; expected a data URL", "invalid_image_url"),
        ("https://example.com/" + "x" * 999, r"at 'https://example.com/x+\.\.\.'; expected a data URL", "invalid_image_url"),
        ("file:///etc/hostname", "expected a data URL", "invalid_image_url"),
        ("/etc/hostname", "expected a data URL", "invalid_image_url"),
        ("data:text/plain;base64,aGk=", "expected a data URL", "invalid_image_url"),
        ("data:image/png,%00", "expected a data URL", "invalid_image_url"),
        ("data:image/png;base64,a*b", "the image is not base64", "invalid_image_url"),
        ("data:image/png;base64,\u00e9", "the image is not base64", "invalid_image_url"),
        ("data:image/png;base64,", "the image is not a readable image; expected PNG, JPEG, WEBP", "invalid_image"),
        (f"data:image/tiff;base64,{TIFF}", "the image is not a readable image; expected PNG", "invalid_image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "the image is not a readable image", "invalid_image"),
    ],
)
def test_refused_addresses_and_files(client, part, said_of_it, code):
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": part}]}]}
    error, _ = client.refused("/v1/chat/completions", body, 400)
    assert error["param"] == "messages" and error["code"] == code
    assert re.search(said_of_it, error["message"]), error
    assert len(error["message"]) < 250


def test_refusals(client, families):
    def refused(content, **more):
        body = {"messages": [{"role": "user", "content": content}], **more}
        return client.refused("/v1/chat/completions", body, 400)[0]["message"]

    def bomb(kind):
        file = io.BytesIO()
        PIL.Image.new("1", (9000, 9000)).save(file, kind)
        return {"type": "image_url", "image_url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}

    before = families("qwen2_5_vl").served.decoder.computed
    assert "the image has 81000000 pixels; expected at most 20000" in refused([bomb("PNG")])
    assert "image 1 has 10000 pixels; expected at most 8800" in refused(
        [seen(make_image(0, (112, 100))), seen(make_image(0, (100, 100)))]
    )
    assert "messages has 5 images; expected at most 4" in refused([seen(make_image(0))] * 5)
    cut = url(make_image(1))[:4000]
    assert "the image is a damaged image" in refused(
        [{"type": "image_url", "image_url": {"url": cut[: len(cut) // 4 * 4 - 2]}}]
    )
    assert "image_url.detail is 'huge'; expected" in refused([seen(make_image(0), detail="huge")])
    assert "image_url is 5; expected" in refused([{"type": "image_url", "image_url": 5}])
    assert "a part of type image_url without image_url" in refused([{"type": "image_url"}])
    assert "url is missing" in refused([{"type": "image_url", "image_url": {}}])
    assert "type is 'input_audio'; expected 'text' or 'image_url'" in refused([{"type": "input_audio"}])
    assert "has the text of a control token" in refused([seen(make_image(0)), {"type": "text", "text": "a <|image_pad|> b"}])
    assert "expected fewer than the 512 of the context" in refused(
        [seen(make_image(0)), {"type": "text", "text": "word " * 600}]
    )
    assert families("qwen2_5_vl").served.decoder.computed == before
    body = {"messages": [{"role": "user", "content": [seen(make_image(0))]}]}
    assert client.refused("/tokenize", body, 400)[0]["code"] == "no_images"
    assert client.post("/tokenize", messages=[{"role": "user", "content": "a"}])["count"] > 1


def test_command(tmp_path, monkeypatch):
    """Which models are served with images, and with which options."""
    served = []
    monkeypatch.setattr(run, "run", lambda models, *_, **settings: served.extend(models))
    for kind in ("gemma3", "gemma4", "qwen2_5_vl"):
        save_image_model(kind, tmp_path / kind)

    def serve(kind, *options):
        result = invoke("serve", tmp_path / kind, "--max-length", 128, *options)
        assert result.exit_code == 0, result.output
        return served.pop(), result.stderr

    for kind in ("gemma3", "qwen2_5_vl"):
        model, _ = serve(kind, "--image-pixels", 2000, "--cache", "int8")
        assert isinstance(model, image_conversations.ImageModel) and (model.pixels, model.max_length) == (2000, 128)
        assert model.decoder.cache_type == "int8"
    model, said = serve("gemma3", "--guesses", 2, "--image-pixels", 2000)
    assert not isinstance(model, image_conversations.ImageModel)
    assert "gemma3 is served without images, because of --guesses" in said
    model, said = serve("gemma4", "--cache", "int8")
    assert isinstance(model, image_conversations.ImageModel) and model.decoder.cache_type == "int8"

    def refuse(*_):
        raise Unplannable("its logits differ")

    monkeypatch.setattr(ImagePlan, "_prove", refuse)
    model, said = serve("gemma4", "--image-pixels", 2000)
    assert not isinstance(model, image_conversations.ImageModel) and "gemma4 is served without images: " in said
    assert "its logits differ" in said
    for option in (("--guesses", 2), ("--adapter", f"a={tmp_path}")):
        refused = invoke("serve", tmp_path / "qwen2_5_vl", *option)
        assert refused.exit_code == 2 and "it has no effect for" in refused.stderr


def test_the_command_with_an_adapter(tmp_path, monkeypatch):
    """A limit for images is accepted: the model takes images, and is served without them because of the adapter."""
    served = []
    monkeypatch.setattr(run, "run", lambda models, *_, **settings: served.extend(models))
    save_image_model("gemma3", tmp_path / "gemma3")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.get_peft_model(load_model(tmp_path / "gemma3"), config).save_pretrained(tmp_path / "adapter")
    options = ("--adapter", f"other={tmp_path / 'adapter'}", "--image-pixels", 2000, "--max-length", 128)
    result = invoke("serve", tmp_path / "gemma3", *options)
    assert result.exit_code == 0, result.output
    assert [(model.name, model.parent) for model in served] == [("gemma3", None), ("other", "gemma3")]
    assert "gemma3 is served without images, because of --adapter" in result.stderr


def test_a_model_of_texts_takes_no_images(packed):
    with serving([made((load_model(packed[0]), load_tokenizer(packed[0])))], Limits()) as (port, _):
        body = {"messages": [said("user", "?", make_image(0))]}
        error, _ = Client(port).refused("/v1/chat/completions", body, 400)
        assert error["code"] == "no_images" and "the model tiny takes no images" in error["message"]


def test_images_of_other_apis(families):
    """Anthropic's blocks and the items of the Responses API give the text of the chat."""
    family, image = families("qwen2_5_vl"), make_image(0)
    data = url(image).partition("base64,")[2]
    with serving([family.served], LIMITS) as (port, _):
        chat = ask(port, said("user", "What?", image))
        expected, count = chat.choices[0].message.content, chat.usage.prompt_tokens
        claude = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
        block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        turn = {"role": "user", "content": [block, {"type": "text", "text": "What?"}]}
        given = {"model": "sees", "max_tokens": NEW, "extra_body": {"temperature": 0}}
        assert claude.messages.create(messages=[turn], **given).content[0].text == expected
        assert claude.messages.count_tokens(model="sees", messages=[turn]).input_tokens == count
        with pytest.raises(anthropic.BadRequestError, match="messages has images; expected no message to continue"):
            claude.messages.create(messages=[turn, {"role": "assistant", "content": "It"}], **given)
        block["source"] = {"type": "url", "url": "https://a.example/b.png"}
        with pytest.raises(anthropic.BadRequestError, match="expected a data URL"):
            claude.messages.create(messages=[turn], **given)
        gpt = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        parts = [{"type": "input_image", "image_url": url(image)}, {"type": "input_text", "text": "What?"}]
        settings = {"model": "sees", "max_output_tokens": NEW, "temperature": 0}
        first = gpt.responses.create(input=[{"role": "user", "content": parts}], **settings)
        assert (first.output_text, first.usage.input_tokens) == (expected, count)
        second = gpt.responses.create(input="And?", previous_response_id=first.id, **settings)
        turns = [said("user", "What?", image), {"role": "assistant", "content": expected}, {"role": "user", "content": "And?"}]
        assert second.output_text == ask(port, *turns).choices[0].message.content


def test_images_in_the_results_of_tools(families, monkeypatch):
    """The same text by each API. Refused before they are computed if the template does not show them."""
    family, image = families("qwen2_5_vl"), make_image(0)
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "content": [], "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    expected = family.expected(message("user", "What?"), call, message("tool", "A cat", [image]))
    messages = [{"role": "user", "content": "What?"}, call, said("tool", "A cat", image) | {"tool_call_id": "1"}]
    with serving([family.served], LIMITS) as (port, _):
        chat = ask(port, *messages)
        assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == expected
        claude = anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
        source = {"type": "base64", "media_type": "image/png", "data": url(image).partition("base64,")[2]}
        result = [{"type": "image", "source": source}, {"type": "text", "text": "A cat"}]
        turns = [
            {"role": "user", "content": "What?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": result}]},
        ]
        given = claude.messages.create(model="sees", messages=turns, max_tokens=NEW, extra_body={"temperature": 0})
        assert given.content[0].text == expected[0]
        assert given.usage.input_tokens + given.usage.cache_read_input_tokens == expected[1]
        gpt = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        output = [{"type": "input_image", "image_url": url(image)}, {"type": "input_text", "text": "A cat"}]
        items = [
            {"role": "user", "content": "What?"}, {"type": "function_call", "call_id": "1", **function},
            {"type": "function_call_output", "call_id": "1", "output": output},
        ]  # fmt: skip
        response = gpt.responses.create(model="sees", input=items, max_output_tokens=NEW, temperature=0)
        assert (response.output_text, response.usage.input_tokens) == expected
        parts = "{% for part in message.content %}"
        for shown in ("{{ message.content }}", parts + "{{ part.text }}{% endfor %}"):
            of_tools = f"{{% if message.role == 'tool' %}}{shown}{{% endif %}}"
            template = family.template.replace(parts, of_tools + parts.replace(" %}", " if message.role != 'tool' %}"))
            monkeypatch.setattr(family.served, "template", template)
            before = family.served.decoder.computed
            body = {"messages": [*messages[:2], said("tool", "Two", make_image(1, (30, 30))) | {"tool_call_id": "1"}]}
            error, _ = Client(port).refused("/v1/chat/completions", body, 400)
            assert "does not take this conversation" in error["message"] and family.served.decoder.computed == before


def test_a_text_is_continued_by_a_model_of_images(families):
    """Its templates get lists of parts."""
    family = families("qwen2_5_vl")
    messages = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is"}]
    parts = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
    text = family.processor.apply_chat_template(
        parts, chat_template=family.template, continue_final_message=True, tokenize=False
    )
    ids = family.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    with serving([family.served], LIMITS) as (port, _):
        body = {"messages": messages, "continue_final_message": True}
        assert Client(port).post("/tokenize", **body)["tokens"] == ids


def test_images_are_counted_before_they_are_prepared(families, monkeypatch):
    """Prepared images take much memory: a conversation that does not fit is refused after one of them."""
    served, prepared = families("qwen2_5_vl").served, []
    inputs = served.inputs

    def counting(messages, tools=None):
        prepared.append(sum(part["type"] == "image" for each in messages for part in each["content"]))
        return inputs(messages, tools)

    monkeypatch.setattr(served, "inputs", counting)
    monkeypatch.setattr(type(served), "max_length", 30)
    body = {"messages": [said("user", "?", *(make_image(number, (150, 150)) for number in range(4)))]}
    with serving([served], Limits(images=4, image_pixels=200_000)) as (port, _):
        error, _ = Client(port).refused("/v1/chat/completions", body, 400)
    assert re.search("messages has images of [0-9]{2} tokens or more; expected fewer than the 30 ", error["message"])
    assert error["code"] == "context_length_exceeded" and set(prepared) == {1} and len(prepared) < 4


def test_images_that_the_tower_does_not_take(families, monkeypatch):
    def odd(*_):
        raise ValueError("the image is odd")

    served = families("qwen2_5_vl").served
    monkeypatch.setattr(served.decoder, "look", odd)
    with serving([served], LIMITS) as (port, _):
        error, _ = Client(port).refused("/v1/chat/completions", {"messages": [said("user", "?", make_image(0, (33, 33)))]}, 400)
        assert Client(port).post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=1)["choices"]
    assert error["message"] == "the model sees does not take these images: the image is odd"
    assert error["code"] == "invalid_image"


def test_tools_beside_an_image(families, monkeypatch):
    """They are refused if the template does not show them. A tool's result stays a string, which templates insert unchanged."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
    served = families("qwen2_5_vl").served
    assert "tools" not in served.template
    with serving([served], LIMITS) as (port, _):
        body = {"messages": [said("user", "?", make_image(0))], "tools": tools}
        error, _ = Client(port).refused("/v1/chat/completions", body, 400)
        assert error["code"] == "no_tools" and "the chat template of sees has no tools" in error["message"]
    monkeypatch.setattr(served, "template", "{% for m in messages if m.role == 'tool' %}{{ m.content }}{% endfor %}{{ tools }}")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]  # fmt: skip
    with serving([served], LIMITS) as (port, _):
        tokens = Client(port).post("/tokenize", messages=messages)["tokens"]
    assert served.tokenizer.decode(tokens).startswith("rain")
