"""OpenAI's client, langchain, Open WebUI's calls to `lowbit serve`: texts of `lowbit generate`, streamed, tools, embeddings.

Packages: openai, langchain-openai, starlette, uvicorn, python-multipart, llguidance
"""

import json
import re
import subprocess
import urllib.request
from pathlib import Path

import torch
from given import LLAMA, MINILM, NEW_TOKENS, PROMPTS, SENTENCES, expected, same
from langchain_openai import ChatOpenAI
from openai import OpenAI

Path("plain.jinja").write_text(
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
options = ["--port", "0", "--max-length", "512", "--template", "plain.jinja", "--api-key", "k"]
command = ["lowbit", "serve", str(LLAMA), str(MINILM), *options]
SCHEMA = {
    "title": "place", "type": "object", "properties": {"town": {"enum": ["Oslo"]}}, "required": ["town"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
written = []
for prompt in PROMPTS:
    alone = ["lowbit", "generate", str(LLAMA), "--prompt", prompt, "--max-new-tokens", str(NEW_TOKENS), "--json"]
    written.append(json.loads(subprocess.check_output(alone))["text"])
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+/v1", line)))
        client = OpenAI(base_url=url, api_key="k")
        model, encoder = client.models.list().data
        asked = {"model": model.id, "max_tokens": NEW_TOKENS, "temperature": 0}
        found = client.completions.create(prompt=PROMPTS, **asked)
        same([choice.text for choice in found.choices], written)
        streamed = [""] * len(PROMPTS)
        for chunk in client.completions.create(prompt=PROMPTS, stream=True, **asked):
            streamed[chunk.choices[0].index] += chunk.choices[0].text
        same(streamed, written)

        said = [{"role": "user", "content": PROMPTS[0]}]
        answer = client.chat.completions.create(messages=said, logprobs=True, top_logprobs=2, **asked).choices[0]
        assert len(answer.logprobs.content[0].top_logprobs) == 2 and answer.message.content
        long = asked | {"max_tokens": 300}
        called = client.chat.completions.create(messages=said, tools=[TOOL], tool_choice="required", **long).choices[0]
        same(json.loads(called.message.tool_calls[0].function.arguments), {"town": "Oslo"})

        rows = [each.embedding for each in client.embeddings.create(model=encoder.id, input=SENTENCES).data]
        same(client.embeddings.create(model=encoder.id, input=SENTENCES[0]).data[0].embedding, rows[0])
        cosine = torch.nn.functional.cosine_similarity(torch.tensor(rows), expected()["packed"]).min().item()
        assert cosine > 0.9999, cosine  # attention and padding are lowbit's, so the last bits differ

        settings = {"base_url": url, "api_key": "k", "model": model.id, "temperature": 0}
        chat = ChatOpenAI(max_tokens=NEW_TOKENS, **settings)
        same(chat.invoke(PROMPTS[0]).content, answer.message.content)
        same("".join(piece.content for piece in chat.stream(PROMPTS[0])), answer.message.content)
        place = ChatOpenAI(max_tokens=300, **settings).with_structured_output(SCHEMA, method="json_schema")
        same(place.invoke("a"), {"town": "Oslo"})

        # Open WebUI: the list of models, then a streamed chat that ends with the usage.
        headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/models", headers=headers)) as response:
            same([each["id"] for each in json.load(response)["data"]], [model.id, encoder.id])
        body = {"messages": said, "stream": True, "stream_options": {"include_usage": True}, **asked}
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            *events, done = [event for event in response.read().decode().split("\n\n") if event]
        same(done, "data: [DONE]")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
        same(text, answer.message.content)
        assert chunks[-1]["usage"]["completion_tokens"] >= 1
    finally:
        server.terminate()
