"""smolagents: `TransformersModel` gives lowbit's own text for a chat message.

Packages: smolagents
Group: hub
"""

from given import LLAMA, NEW_TOKENS, PROMPTS, expected, same
from smolagents import ChatMessage, TransformersModel

model = TransformersModel(str(LLAMA), device_map="cpu", torch_dtype="float32", max_new_tokens=NEW_TOKENS)
message = ChatMessage(role="user", content=[{"type": "text", "text": PROMPTS[0]}])
same(model.generate([message], do_sample=False, min_new_tokens=NEW_TOKENS).content, expected()["texts"][0])
