"""Compares the speed of a hybrid (Qwen3.5) and a dense model (Qwen3) of the same sizes, random weights, one thread.

python3 bench/hybrid.py
"""

import statistics

import lowbit
import torch
import transformers
from lowbit import llm

SIZES = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {"num_value_heads": 16, "num_key_heads": 16, "key_head_dim": 128, "value_head_dim": 128}
ROUNDS, PROMPT, NEW = 4, 256, 20


def decoder_of(config: transformers.PretrainedConfig) -> llm.Decoder:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lowbit.quantize_(model, lowbit.LinearConfig(bits=4, group_size=32))
    return llm.Decoder(model, 512)


def main() -> None:
    torch.set_num_threads(1)
    linear = {f"linear_{name}": value for name, value in LINEAR.items()}
    decoders = {
        "Qwen3": decoder_of(transformers.Qwen3Config(**SIZES)),
        "Qwen3.5": decoder_of(transformers.Qwen3_5TextConfig(**SIZES, **linear)),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in decoders}
    for _ in range(ROUNDS):
        for name, decoder in decoders.items():
            result = llm.generate(decoder, range(1, PROMPT + 1), NEW)
            rates[name].append((result.prefill_rate, result.decode_rate))
    for name, decoder in decoders.items():
        size = sum(buffer.nbytes for key, buffer in decoder.model.named_buffers() if "packed" in key)
        prefill, decode = (statistics.median(column) for column in zip(*rates[name]))
        print(f"{name}: {size / 1e6:.0f} MB packed, prefill {prefill:.0f} tokens/s, decode {decode:.1f} tokens/s")


if __name__ == "__main__":
    main()
