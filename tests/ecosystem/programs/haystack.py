"""haystack: `SentenceTransformersTextEmbedder` gives lowbit's own embeddings of single sentences.

Packages: haystack-ai, sentence-transformers-haystack
Group: hub
"""

import torch
from given import MINILM, SENTENCES, expected
from haystack.utils import ComponentDevice
from haystack_integrations.components.embedders.sentence_transformers import SentenceTransformersTextEmbedder

embedder = SentenceTransformersTextEmbedder(
    model=str(MINILM), device=ComponentDevice.from_str("cpu"), normalize_embeddings=True
)
embedder.warm_up()
found = torch.tensor([embedder.run(sentence)["embedding"] for sentence in SENTENCES])
# One at a time: in a batch, float32 sums have another order, which may round an activation to the next integer.
cosine = (found * expected()["packed"]).sum(1).min().item()
assert cosine > 0.999, cosine
