"""A quantized vision transformer of timm: cosine with float above 0.995, and the same logits from its saved state_dict.

Packages: timm
Group: vision
Imports lowbit: the model is quantized here.
"""

import copy

import lowbit
import torch
from given import DIRECTORY, same

try:
    import torchvision  # noqa: F401
except RuntimeError:  # PyPI's torchvision is built for torch with CUDA; with another torch its operators are missing
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import timm

assert DIRECTORY.exists()
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, depth=4).eval()
torch.nn.init.normal_(model.head.weight, std=0.1)
config = lowbit.LinearConfig(bits=8, group_size=32)
packed, empty = (lowbit.quantize_(copy.deepcopy(model), config) for _ in range(2))
pixels = torch.randn(2, 3, 64, 64)
with torch.inference_mode():
    wanted, found = model(pixels), packed(pixels)
    cosine = torch.cosine_similarity(wanted.flatten(), found.flatten(), dim=0).item()
    assert 0.995 < cosine < 1, cosine
    torch.save(packed.state_dict(), "packed.pt")
    for parameter in empty.parameters():
        torch.nn.init.zeros_(parameter)
    empty.load_state_dict(torch.load("packed.pt"))
    same(empty(pixels), found)
