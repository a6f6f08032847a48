"""Small transformers models, texts for them, and measures of calibrated models."""

import copy

import lowbit
import torch
import transformers
from lowbit.calibration import calibrate
from torch import nn

SHARED = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


def llama(tied: bool = True, **others) -> nn.Module:
    config = transformers.LlamaConfig(
        **SHARED,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        **others,
    )
    return with_inputs_of_all_sizes(transformers.LlamaForCausalLM(config).eval())


def with_inputs_of_all_sizes(model: nn.Module) -> nn.Module:
    """Gives a model inputs of different sizes, as in trained models."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.weight.data.copy_(torch.linspace(-1.5, 1.5, 64).exp()[torch.randperm(64)])
    return model


def bert() -> nn.Module:
    config = transformers.BertConfig(**SHARED, intermediate_size=96, max_position_embeddings=64, initializer_range=0.1)
    return transformers.BertModel(config).eval()


def tokens(count: int = 4, length: int = 48, seed: int = 0, vocabulary: int = 120) -> list[torch.Tensor]:
    """Batches [2, length] of a text with predictable next tokens."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 6, (count, 2, length), generator=generator)
    return list((steps.cumsum(2) * 7 + torch.randint(0, vocabulary, (count, 2, 1), generator=generator)) % vocabulary)


def hidden(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        outputs = [model(input_ids=batch) for batch in batches]
    return torch.cat([o.logits if hasattr(o, "logits") else o.last_hidden_state for o in outputs]).float()


def errors(model: nn.Module, config, methods=("nearest", "importance", "gptq")) -> list[float]:
    """Relative squared errors of the outputs on held-out text."""
    test = tokens(seed=1)
    wanted = hidden(model, test)
    found = []
    for method in methods:
        changed = copy.deepcopy(model)
        if method == "nearest":
            lowbit.quantize_(changed, config)
        else:
            calibrate(changed, tokens(20), config, method)
        found.append(float((hidden(changed, test) - wanted).square().sum() / wanted.square().sum()))
    return found


def linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def packed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module) is lowbit.nn.Linear}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if name.endswith("packed_weight")}
