"""LoRA with `target_modules="all-linear"` on a packed model: the loss falls, the saved adapter gives the same logits again.

Packages: peft
"""

import peft
import torch
from given import LLAMA, PROMPTS, expected, same
from transformers import AutoModelForCausalLM, AutoTokenizer


def load() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)


torch.manual_seed(0)
ids = AutoTokenizer.from_pretrained(LLAMA)(PROMPTS[0] + expected()["texts"][1], return_tensors="pt")["input_ids"]
model = peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules="all-linear"))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
assert len(trained) == 2 * 7 * model.config.num_hidden_layers, len(trained)  # A and B of each linear layer but the head
optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
for _ in range(8):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
model.save_pretrained("adapter")
with torch.inference_mode():
    same(peft.PeftModel.from_pretrained(load(), "adapter").eval()(ids).logits, model.eval()(ids).logits)
