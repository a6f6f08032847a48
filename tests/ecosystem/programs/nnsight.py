"""nnsight traces a packed model: the hidden states of a layer and the logits of transformers' own run.

Packages: nnsight
"""

from given import LLAMA, PROMPTS, same
from nnsight import LanguageModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(LLAMA).eval()
tokenizer = AutoTokenizer.from_pretrained(LLAMA)
wanted = model(**tokenizer(PROMPTS[0], return_tensors="pt"), output_hidden_states=True)
traced = LanguageModel(model, tokenizer=tokenizer)
with traced.trace(PROMPTS[0]):
    hidden = traced.model.layers[1].output[0].save()
    logits = traced.lm_head.output.save()
same(hidden.reshape(wanted.hidden_states[2].shape), wanted.hidden_states[2])
same(logits, wanted.logits)
