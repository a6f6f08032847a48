"""langchain: `HuggingFacePipeline` gives lowbit's own text, `HuggingFaceEmbeddings` lowbit's own embeddings.

Packages: langchain-huggingface
Group: hub
"""

import torch
from given import LLAMA, MINILM, NEW_TOKENS, PROMPTS, SENTENCES, expected
from langchain_huggingface import HuggingFaceEmbeddings, HuggingFacePipeline

options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "return_full_text": False}
model = HuggingFacePipeline.from_model_id(
    str(LLAMA), "text-generation", model_kwargs={"dtype": "float32"}, pipeline_kwargs=options
)
found = model.invoke(PROMPTS[0])
assert found == expected()["texts"][0], found
encoder = HuggingFaceEmbeddings(model_name=str(MINILM), encode_kwargs={"normalize_embeddings": True})
vectors = torch.tensor(encoder.embed_documents(SENTENCES))
assert torch.equal(vectors, expected()["packed"]), (vectors - expected()["packed"]).abs().max()
