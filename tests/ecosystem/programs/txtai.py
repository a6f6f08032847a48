"""txtai: a search over packed MiniLM's embeddings has the first hits of the float model.

Packages: txtai
Group: hub
"""

from given import FLOAT_MINILM, MINILM, SENTENCES
from txtai import Embeddings

found = []
for directory in (MINILM, FLOAT_MINILM):
    index = Embeddings(path=str(directory), content=True, gpu=False)
    index.index(SENTENCES)
    found.append([index.search(f"select text from txtai where similar('{word}')", 1)[0]["text"] for word in ("bread", "salt")])
assert found[0] == found[1] and set(found[0]) <= set(SENTENCES), found
