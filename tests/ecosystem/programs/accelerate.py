"""accelerate: a packed model placed by `device_map="auto"`, and one from `Accelerator.prepare`, give lowbit's own texts.

Packages: accelerate
"""

from accelerate import Accelerator
from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(LLAMA)
ids = tokenizer(PROMPTS[0], return_tensors="pt")
first = ids["input_ids"].shape[1]
placed = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32", device_map="auto")
prepared = Accelerator(cpu=True).prepare(AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32")).eval()
for model in (placed, prepared):
    out = model.generate(**ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    same(tokenizer.decode(out[0, first:], skip_special_tokens=True), expected()["texts"][0])
