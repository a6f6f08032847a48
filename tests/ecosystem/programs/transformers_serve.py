"""`transformers serve` answers a chat request over HTTP with the text of lowbit's own run.

Packages: transformers, fastapi, uvicorn, openai
"""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
cli = [
    sys.executable,
    "-c",
    "from transformers.cli.transformers import main; main()",
]  # because its script is in another environment
command = [*cli, "serve", str(LLAMA), "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
server = subprocess.Popen([*command, "--port", str(port)])
try:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            break
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300, max_retries=0)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    answer = client.chat.completions.create(model=str(LLAMA), messages=messages, max_tokens=NEW_TOKENS, temperature=0)
    same(answer.choices[0].message.content, expected()["texts"][0])
finally:
    server.terminate()
    server.wait(timeout=60)
