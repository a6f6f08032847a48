"""A SetFit head on packed MiniLM learns the same labels as one on the float model.

Packages: setfit
"""

from given import FLOAT_MINILM, MINILM, SENTENCES
from setfit import SetFitModel

labels = [number // 8 for number in range(len(SENTENCES))]
found = []
for directory in (MINILM, FLOAT_MINILM):
    model = SetFitModel.from_pretrained(str(directory), device="cpu")
    model.fit(SENTENCES, labels, num_epochs=1, batch_size=16)
    found.append([int(label) for label in model.predict(SENTENCES)])
assert found[0] == found[1] == labels, (found, labels)
