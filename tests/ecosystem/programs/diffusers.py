"""A quantized transformer of diffusers: cosine with float above 0.995; its state_dict loads; `save_pretrained` is refused.

Packages: diffusers
Imports lowbit: the model is quantized here.
"""

import copy

import lowbit
import torch
from diffusers import DiTTransformer2DModel
from given import DIRECTORY, same

assert DIRECTORY.exists()
torch.manual_seed(0)
sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "out_channels": 4, "num_layers": 2}
model = DiTTransformer2DModel(**sizes, sample_size=8, patch_size=2, num_embeds_ada_norm=10).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() == 2 else None
inputs = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([1, 7]), "class_labels": torch.tensor([0, 3])}
config = lowbit.LinearConfig(bits=8, group_size=32)
packed, empty = (lowbit.quantize_(copy.deepcopy(model), config) for _ in range(2))
with torch.inference_mode():
    wanted, found = model(**inputs).sample, packed(**inputs).sample
cosine = torch.cosine_similarity(wanted.flatten(), found.flatten(), dim=0).item()
assert 0.995 < cosine < 1, cosine
torch.save(packed.state_dict(), "packed.pt")
for parameter in empty.parameters():
    torch.nn.init.zeros_(parameter)
empty.load_state_dict(torch.load("packed.pt"))
with torch.inference_mode():
    same(empty(**inputs).sample, found)
try:
    packed.save_pretrained("saved")
except RuntimeError as error:
    assert "diffusers saves packed layers, but cannot load them" in str(error), error
else:
    raise AssertionError("save_pretrained wrote what diffusers cannot load")
