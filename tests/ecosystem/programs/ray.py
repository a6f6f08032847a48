"""A worker process of ray loads a packed model and gives lowbit's own text; packed weights come back through its store.

Packages: ray
"""

import ray
from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from transformers import AutoModelForCausalLM, pipeline


@ray.remote
def answer(prompt: str) -> str:
    generate = pipeline("text-generation", model=str(LLAMA), dtype="float32", device="cpu")
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "return_full_text": False}
    return generate(prompt, **options)[0]["generated_text"]


ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
same(ray.get(answer.remote(PROMPTS[0])), expected()["texts"][0])
state = AutoModelForCausalLM.from_pretrained(LLAMA, dtype="float32").state_dict()
returned = ray.get(ray.put(state))
assert state.keys() == returned.keys() and any("packed_weight" in name for name in state), list(state)[:5]
for name, tensor in state.items():
    same(returned[name], tensor)
ray.shutdown()
