"""llama-index: `HuggingFaceLLM.complete` gives lowbit's own text.

Packages: llama-index-llms-huggingface
Group: hub
"""

from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from llama_index.llms.huggingface import HuggingFaceLLM

options = {"min_new_tokens": NEW_TOKENS, "do_sample": False}
model = HuggingFaceLLM(
    model_name=str(LLAMA), tokenizer_name=str(LLAMA), device_map="cpu", max_new_tokens=NEW_TOKENS,
    generate_kwargs=options, model_kwargs={"dtype": "float32"},
)  # fmt: skip
same(model.complete(PROMPTS[0]).text, expected()["texts"][0])
