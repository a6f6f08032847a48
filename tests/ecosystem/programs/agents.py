"""LiteLLM, PydanticAI, Instructor and OpenAI Agents ask `lowbit serve`: lowbit's text, calls, objects of a schema.

Packages: litellm, pydantic-ai-slim, instructor, openai-agents, openai, starlette, uvicorn, python-multipart, llguidance
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Literal

import instructor
import litellm
from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, set_tracing_disabled
from given import LLAMA, NEW_TOKENS, PROMPTS, same
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider as PydanticProvider


class Place(BaseModel):  # without additionalProperties, so the server must not let the small model write further properties
    town: Literal["Oslo"]


Path("plain.jinja").write_text(
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
os.environ["OPENAI_API_KEY"] = "none"
set_tracing_disabled(True)
command = ["lowbit", "serve", str(LLAMA), "--port", "0", "--max-length", "512", "--template", "plain.jinja"]
with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
    try:
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+/v1", line)))
        name, said = LLAMA.name, [{"role": "user", "content": PROMPTS[0]}]
        plain = OpenAI(base_url=url).chat.completions.create(model=name, messages=said, max_tokens=NEW_TOKENS, temperature=0)
        text = plain.choices[0].message.content
        asked = {"messages": said, "max_tokens": NEW_TOKENS, "temperature": 0}
        for model, base in (
            (f"openai/{name}", url),
            (f"hosted_vllm/{name}", url),
            (f"anthropic/{name}", url.removesuffix("/v1")),
        ):
            same(litellm.completion(model=model, api_base=base, api_key="none", **asked).choices[0].message.content, text)

        settings = {"temperature": 0, "max_tokens": NEW_TOKENS}
        model = OpenAIChatModel(name, provider=PydanticProvider(base_url=url, api_key="none"))
        same(PydanticAgent(model).run_sync(PROMPTS[0], model_settings=settings).output, text)
        for kind in (Place, NativeOutput(Place)):  # by a call, by response_format
            same(PydanticAgent(model, output_type=kind).run_sync("a", model_settings={"max_tokens": 200}).output.town, "Oslo")

        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(OpenAI(base_url=url), mode=mode)
            found = client.chat.completions.create(
                model=name, response_model=Place, messages=said, max_tokens=200, max_retries=0
            )
            same(found.town, "Oslo")

        config = RunConfig(
            model_provider=OpenAIProvider(base_url=url, api_key="none")
        )  # Responses API; a text that is cut is an error there
        agent = Agent(name="a", model=name, output_type=Place, model_settings=ModelSettings(max_tokens=200))
        same(Runner.run_sync(agent, "a", run_config=config).final_output.town, "Oslo")
    finally:
        server.terminate()
