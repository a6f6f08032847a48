"""KeyBERT finds the same three keywords in a text as with the float model, with scores within 0.02.

Packages: keybert
"""

from given import FLOAT_MINILM, MINILM, SENTENCES
from keybert import KeyBERT
from sentence_transformers import SentenceTransformer

text = " ".join(SENTENCES[:4])
found = [
    KeyBERT(SentenceTransformer(str(directory), device="cpu")).extract_keywords(text, top_n=3)
    for directory in (MINILM, FLOAT_MINILM)
]
packed, wanted = map(dict, found)
assert len(packed) == 3 and packed.keys() == wanted.keys(), found  # two scores differ by 0.002, so their order may change
assert all(abs(packed[word] - wanted[word]) < 0.02 for word in wanted), found
