"""`pipeline("text-generation")` gives the texts of lowbit's own run, with a batch of one.

Packages: transformers
"""

from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from transformers import pipeline

generate = pipeline("text-generation", model=str(LLAMA), dtype="float32", device="cpu")
options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "return_full_text": False}
same([answer[0]["generated_text"] for answer in generate(PROMPTS, **options)], expected()["texts"])
