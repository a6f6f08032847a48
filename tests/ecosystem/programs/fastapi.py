"""A FastAPI app with one packed model answers eight requests at once with lowbit's own texts.

Packages: fastapi, uvicorn
"""

import json
import threading
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from fastapi import FastAPI
from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from transformers import AutoModelForCausalLM, AutoTokenizer

app, tokenizer = FastAPI(), AutoTokenizer.from_pretrained(LLAMA)
model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32").eval()


@app.get("/")
def answer(prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.1)
port = server.servers[0].sockets[0].getsockname()[1]


def ask(prompt: str) -> str:
    url = f"http://127.0.0.1:{port}/?prompt={urllib.parse.quote(prompt)}"
    with urllib.request.urlopen(url, timeout=300) as reply:
        return json.load(reply)


order = [number % 3 for number in range(8)]
with ThreadPoolExecutor(8) as pool:
    same(list(pool.map(ask, [PROMPTS[number] for number in order])), [expected()["texts"][number] for number in order])
