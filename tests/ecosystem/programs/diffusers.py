"""A transformer of diffusers, quantized by `quantization_config`: the bits of `quantize_`, also after saving and loading.

Packages: diffusers
Imports lowbit: for the configuration, and to compare with a model quantized here.
"""

import copy
import json
from pathlib import Path

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


def run(each: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return each(**inputs).sample


model.save_pretrained("float")
config = lowbit.LowBitConfig(bits=8, group_size=32)
loaded = DiTTransformer2DModel.from_pretrained("float", quantization_config=config)
wanted = lowbit.quantize_(copy.deepcopy(model), config.select(model))
same(run(loaded), run(wanted))
cosine = torch.cosine_similarity(run(model).flatten(), run(loaded).flatten(), dim=0).item()
assert 0.995 < cosine < 1, cosine
loaded.save_pretrained("packed")
assert json.loads(Path("packed/config.json").read_text())["quantization_config"]["quant_method"] == "lowbit"
again = DiTTransformer2DModel.from_pretrained("packed")
assert sum(isinstance(layer, lowbit.nn.Packed) for layer in again.modules()) > 10
same(run(again), run(loaded))

(file,) = Path("packed").glob("*.safetensors")
data = bytearray(file.read_bytes())
data[-5] ^= 1  # in the last packed weight
file.write_bytes(data)
try:
    DiTTransformer2DModel.from_pretrained("packed")
except ValueError as error:
    assert "The file was damaged" in str(error), error
else:
    raise AssertionError("a damaged file was loaded")
try:
    wanted.save_pretrained("saved")
except RuntimeError as error:
    assert "that model can be saved" in str(error), error
else:
    raise AssertionError("save_pretrained wrote what diffusers cannot load")
