"""lowbit.vllm in vLLM, in a separate environment: `make test-vllm`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import lowbit
import pytest
import torch
from generate import PROMPTS, TOKENS
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "examples" / "tiny_llama" / "model"
PATIENCE = 3600  # seconds; only for hangs
OPTIONS = {"bits": 4, "group_size": 32}
# Parts of a fused layer with different widths of weights and activations, and a float layer among packed ones.
MIXED = OPTIONS | {"overrides": [["*k_proj", {"bits": 8, "activation_bits": 16}], ["model.layers.0.mlp.down_proj", None]]}
EXPERTS = OPTIONS | {"overrides": [["*experts.down_proj", {"bits": 6, "group_size": 16, "activation_bits": 16}]]}
ENVIRONMENT = os.environ | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENGINE_READY_TIMEOUT_S": str(PATIENCE),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints by name."""
    directory = tmp_path_factory.mktemp("models")
    # Biases, a tied head, and a vocabulary that is not a multiple of 64, to which vLLM pads it.
    sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, attention_bias=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() == 2 else None
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    names = ("float", "mixed", "ordered", "tiny", "missing", "float experts", "experts", "missing experts")
    names += ("float gpt-oss", "gpt-oss")
    found = {name: directory / name for name in names}
    model.save_pretrained(found["float"])
    lowbit.quantize_checkpoint(found["float"], found["mixed"], lowbit.LowBitConfig(**MIXED))
    lowbit.quantize_checkpoint(TINY, found["tiny"], lowbit.LowBitConfig(**OPTIONS))
    found["tiny float"] = TINY
    # Layers with permuted inputs, some with another permutation than the layers that vLLM fuses them with.
    first, second = torch.randperm(128).int(), torch.randperm(128).int()
    names = {"0.self_attn.q": first, "0.self_attn.v": second, "1.mlp.gate": first, "1.mlp.up": first, "0.mlp.up": second}
    orders = {f"model.layers.{name}_proj.input_order": order.clone() for name, order in names.items()}
    changed(found["mixed"], found["ordered"], lambda tensors: tensors.update(orders))
    without(found["mixed"], "model.layers.1.input_layernorm.weight", found["missing"])
    # An embedding table that vLLM does not quantize, and experts with other names than in transformers.
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    model.save_pretrained(found["float experts"])
    lowbit.quantize_checkpoint(found["float experts"], found["experts"], lowbit.LowBitConfig(**EXPERTS))
    without(found["experts"], "model.layers.1.mlp.experts.down_proj.packed_weight", found["missing experts"])
    # Experts with biases, interleaved gate and up with a clamped activation, sinks, and a window shorter than the prompts.
    sizes |= {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, sliding_window=8, swiglu_limit=3.0))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(found["float gpt-oss"])
    lowbit.quantize_checkpoint(found["float gpt-oss"], found["gpt-oss"], lowbit.LowBitConfig(**OPTIONS))
    return found


def without(directory: Path, name: str, other: Path) -> None:
    """A checkpoint that lacks one tensor."""
    changed(directory, other, lambda tensors: tensors.pop(name))


def changed(directory: Path, other: Path, change) -> None:
    """A checkpoint with other tensors."""
    other.mkdir()
    (other / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The environment, with a shared cache for vLLM's inspection of architectures, which takes a process each."""
    return ENVIRONMENT | {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def found(models, environment, tmp_path_factory) -> dict:
    """vLLM's output by case, all in one process, because its start takes longest."""
    at_load = {"quant_method": "lowbit", **OPTIONS}
    cases = {
        "tiny": ("tiny", {}), "mixed": ("mixed", {}),
        "at load": ("tiny float", {"hf_overrides": {"quantization_config": at_load}}),
        "mixed at load": ("float", {"hf_overrides": {"quantization_config": at_load | MIXED}}),
        "missing": ("missing", {}),
        "missing experts": ("missing experts", {}),
        "experts": ("experts", {}),
        "experts at load": ("float experts", {"hf_overrides": {"quantization_config": at_load | EXPERTS}}),
        "experts on two": ("experts", {"tensor_parallel_size": 2}),
        # torch traces and vLLM splits the graph as usual; tests/python tests inductor's C++, which is slowest.
        "compiled": ("ordered", {"enforce_eager": False, "compilation_config": {"backend": "eager"}}),
        "gpt-oss": ("gpt-oss", {"enforce_eager": False, "compilation_config": {"backend": "eager"}}),
        "gpt-oss at load": ("float gpt-oss", {"hf_overrides": {"quantization_config": at_load}}),
        "two ranks": ("ordered", {"tensor_parallel_size": 2}),
        "other cache": ("tiny", {"kv_cache_dtype": "bfloat16"}),
    }  # fmt: skip
    arguments = {name: {"model": str(models[model]), **options} for name, (model, options) in cases.items()}
    output = tmp_path_factory.mktemp("found") / "found"
    command = [sys.executable, str(HERE / "generate.py"), str(output), json.dumps(arguments)]
    # One rank runs in this process, so users see its exceptions.
    one = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ended = subprocess.run(command, env=one, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(output.read_text())


class OfTwoRanks(torch.nn.Module):
    """A packed layer with half of its inputs on each of two ranks, with summed results."""

    def __init__(self, layer: lowbit.nn.Linear | lowbit.nn.LinearExperts):
        super().__init__()
        middle, end = layer.in_features // 2, layer.in_features
        packed = layer.packed_weight
        for name, first, last in (("first", 0, middle), ("second", middle, end)):
            if packed.dim() == 1:
                part = lowbit.slice_columns(packed, first, last)
            else:
                part = torch.stack([lowbit.slice_columns(expert, first, last) for expert in packed])
            setattr(self, name, type(layer)(part))

    def forward(self, x: torch.Tensor, *experts: torch.Tensor) -> torch.Tensor:
        return self.first(x.chunk(2, -1)[0], *experts) + self.second(x.chunk(2, -1)[1], *experts)


@torch.no_grad()
def eager(directory: Path, ranks: int = 1) -> list[list[int]]:
    """The greedy tokens of the model in transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, layer in list(model.named_modules()):
        shared = name.endswith(("o_proj", "down_proj")) and isinstance(layer, lowbit.nn.Linear | lowbit.nn.LinearExperts)
        if ranks == 2 and shared:
            model.set_submodule(name, OfTwoRanks(layer))
    texts = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(TOKENS):
            text.append(model(torch.tensor([text])).logits[0, -1].argmax().item())
        texts.append(text[len(prompt) :])
    return texts


def test_one_rank(found, models):
    assert found["tiny"] == eager(models["tiny"])
    assert found["mixed"] == eager(models["mixed"])
    assert found["at load"] == found["tiny"]
    assert found["mixed at load"] == found["mixed"]


def test_compiled(found, models):
    assert isinstance(found["compiled"], list), found["compiled"]
    assert found["compiled"] == eager(models["ordered"]) != found["mixed"]


def test_refusals(found):
    assert "model.layers.1.input_layernorm.weight" in found["missing"]
    assert "model.layers.1.mlp.experts.down_proj" in found["missing experts"]
    assert "the kv cache is to be bfloat16 and the activations float32" in found["other cache"]
    assert found["float in vLLM"].startswith("model.gate would be quantized, but vLLM does not quantize it; leave it float")
    assert found["order of shared inputs"].startswith("o_proj has an act-order permutation, which 2 ranks cannot")


def test_experts(found, models):
    assert found["experts"] == eager(models["experts"])
    assert found["experts at load"] == found["experts"]


def test_gpt_oss(found, models):
    assert found["gpt-oss"] == eager(models["gpt-oss"])
    assert "is gpt-oss and not packed; use `lowbit import` if its experts are MXFP4, or" in found["gpt-oss at load"]


@pytest.mark.parametrize("case, model", [("two ranks", "ordered"), ("experts on two", "experts")])
def test_two_ranks(found, models, case, model):
    assert isinstance(found[case], list), found[case]
    assert found[case] == eager(models[model], ranks=2)


def test_the_server(models, environment, tmp_path):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models["tiny"]), "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "64", "--kv-cache-memory-bytes", str(1 << 24), "--host", "127.0.0.1",
        "--port", str(port), "--served-model-name", "tiny",
    ]  # fmt: skip
    log = (tmp_path / "log").open("w+")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while True:
            try:
                direct.open(f"{url}/health", timeout=5)
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-5000:]
                time.sleep(0.5)  # between polls, because vLLM has no other way to signal that it is ready
        wish = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(wish | {"return_token_ids": True}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        answer = json.load(direct.open(request, timeout=PATIENCE))
    finally:
        server.terminate()
        server.wait(PATIENCE)
        log.close()
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert answer["choices"][0]["token_ids"] == eager(models["tiny"])[0]
