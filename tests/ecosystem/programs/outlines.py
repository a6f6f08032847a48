"""outlines: a packed model's text matches a regular expression, and is the same in each call.

Packages: outlines
Group: hub
"""

import re

import outlines
from given import LLAMA, PROMPTS, same
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32").eval()
constrained = outlines.from_transformers(model, AutoTokenizer.from_pretrained(LLAMA))
pattern = r"[a-z]{3,8}=[0-9]{2}"
found = [constrained(PROMPTS[1], outlines.regex(pattern), max_new_tokens=24, do_sample=False) for _ in range(2)]
assert re.fullmatch(pattern, found[0]), found
same(found[1], found[0])
