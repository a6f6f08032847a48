"""`lowbit export` writes a GGUF file that transformers reads with the `gguf` package: cosine of the logits above 0.995.

Packages: gguf
"""

import subprocess

import torch
from given import LLAMA, PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer

subprocess.run(["lowbit", "export", str(LLAMA), "--to", "gguf", "--output", "llama.gguf"], check=True)
ids = AutoTokenizer.from_pretrained(LLAMA)("".join(PROMPTS), return_tensors="pt")
with torch.inference_mode():
    packed = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)(**ids).logits
    read = AutoModelForCausalLM.from_pretrained(".", gguf_file="llama.gguf", dtype=torch.float32)(**ids).logits
cosine = torch.cosine_similarity(packed.flatten(), read.flatten(), dim=0).item()
assert packed.shape == read.shape and cosine > 0.995, (packed.shape, read.shape, cosine)
