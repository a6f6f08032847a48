"""A model of openai-whisper, quantized at 8 bits: all linear layers are packed, cosine of the logits with float above 0.995.

Packages: openai-whisper
Imports lowbit: the model is quantized here.
"""

import copy

import lowbit
import torch
from given import same
from whisper.model import Linear, ModelDimensions, Whisper

torch.manual_seed(0)
model = Whisper(ModelDimensions(80, 1500, 128, 2, 2, 51865, 448, 128, 2, 2)).eval()
torch.nn.init.normal_(model.decoder.positional_embedding, std=0.02)  # left uninitialized by its class
packed = lowbit.quantize_(copy.deepcopy(model), lowbit.LinearConfig(bits=8))
floats = [name for name, layer in model.named_modules() if isinstance(layer, Linear)]
same([name for name, layer in packed.named_modules() if isinstance(layer, lowbit.nn.Linear)], floats)
mel, tokens = torch.randn(1, 80, 3000), torch.randint(51865, (1, 12))
with torch.inference_mode():
    cosine = torch.nn.functional.cosine_similarity(model(mel, tokens), packed(mel, tokens), dim=-1).min().item()
assert cosine > 0.995, cosine
