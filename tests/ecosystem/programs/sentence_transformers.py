"""`SentenceTransformer` and `CrossEncoder` load packed models: embeddings of lowbit's own run, cosine with float above 0.998.

Packages: sentence-transformers
"""

import torch
from given import FLOAT_MINILM, MINILM, SENTENCES, expected, same
from sentence_transformers import CrossEncoder, SentenceTransformer

encoder = SentenceTransformer(str(MINILM), device="cpu")
found = encoder.encode(SENTENCES, convert_to_tensor=True, normalize_embeddings=True)
same(found, expected()["packed"])
cosine = (found * expected()["float"]).sum(1).mean().item()
assert cosine > 0.998, cosine

# MiniLM has no cross-encoder head, so both models get the same random one.
scores = []
for directory in (MINILM, FLOAT_MINILM):
    torch.manual_seed(0)
    ranker = CrossEncoder(str(directory), num_labels=1, device="cpu")
    scores.append(ranker.predict([(SENTENCES[0], other) for other in SENTENCES], convert_to_tensor=True))
assert torch.corrcoef(torch.stack(scores))[0, 1] > 0.99, scores
