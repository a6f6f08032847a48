"""examples/tiny_llama: the repository's model, its text, and a small training run."""

import functools
import math
import platform
import re
import sys
from pathlib import Path

import lowbit
import pytest
import torch
import transformers
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny_llama"
sys.path.insert(0, str(EXAMPLE))
import corpus
import perplexity
import train

MODEL = EXAMPLE / "model"
BOUND = 60.0  # perplexity; README.md has the actual one, and uniform guessing has 2048


@pytest.fixture(scope="module", autouse=True)
def _offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module", autouse=True)
def _documentation_read_once():
    # All of Python's sources; parsing takes seconds.
    read = functools.cache(lambda everything=corpus.raw_documents: list(everything()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "raw_documents", read)
        yield


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def heldout():
    return corpus.read_heldout()


def perplexity_of(model, tokenizer, texts) -> float:
    total, count = perplexity.losses(model, tokenizer, texts)
    return math.exp(total / count)


# ---- the files


def test_files_are_what_a_llama_needs_and_no_more():
    assert {path.name for path in MODEL.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 12e6


def test_shape(model):
    config = model.config
    assert type(model) is transformers.LlamaForCausalLM
    assert 2e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 6e6
    assert config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert 1 < config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings == 1024 and config.vocab_size % 16 == 0
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 128 == 0 and module.bias is None


def test_weights_are_stored_once_and_as_bfloat16():
    tensors = load_file(MODEL / "model.safetensors")
    assert "lm_head.weight" not in tensors
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16 and tensor.isfinite().all(), name


# ---- the tokenizer


def test_tokenizer_gives_the_held_out_text_back(tokenizer, heldout):
    count = 0
    for name, text in heldout.items():
        tokens = tokenizer(text, verbose=False)["input_ids"]
        assert tokens[0] == tokenizer.bos_token_id
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text, name
        count += len(tokens)
    assert count < sum(map(len, heldout.values())) / 2.5  # tokens are words, not only letters


TEXTS = ["", "caf\u00e9 \u4f60", "  two\n\n\n  tabs\t\tand spaces  \n", "\x00\x7f", "don't x12==5"]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_any_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_tokens_are_ascii_or_single_bytes(tokenizer):
    """Programs that print single tokens may not handle parts of a character; ASCII text has no such tokens."""
    for token in range(3, len(tokenizer)):
        assert tokenizer.decode([token]).isascii() or len(tokenizer.convert_ids_to_tokens(token)) == 1


def test_special_tokens(tokenizer, model):
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    config = model.generation_config
    assert ids == (0, 1, 2) == (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert len(tokenizer) == model.config.vocab_size


def test_executorch_reads_the_tokenizer(executorch, tokenizer, heldout):
    from pytorch_tokenizers import CppHFTokenizer, get_tokenizer

    ours = get_tokenizer(str(MODEL / "tokenizer.json"), str(MODEL / "tokenizer_config.json"))
    theirs = CppHFTokenizer()
    theirs.load(str(MODEL))
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_tok(), theirs.eos_tok()) == (0, 1)
    for name, text in heldout.items():
        tokens = tokenizer(text, verbose=False)["input_ids"]
        assert ours.encode(text, bos=True, eos=False) == tokens, name
        assert ours.decode(tokens) == text, name
        assert theirs.encode(text, 1, 0) == tokens, name
        assert "".join(map(theirs.decode, tokens[1:])) == text, name


# ---- the text


@pytest.fixture(scope="module")
def training_texts(heldout):
    return corpus.documents(heldout)


def test_held_out_text_is_not_in_the_training_text(heldout, training_texts):
    """No name, paragraph or run of eight words is in both, to avoid data leakage."""
    assert len(heldout) >= 10 and 60e3 <= sum(map(len, heldout.values())) <= 100e3
    assert len(training_texts) > 200 and sum(map(len, training_texts.values())) > 1e6
    assert heldout.keys().isdisjoint(training_texts)

    def runs(texts) -> set[str]:
        paragraphs = [paragraph for text in texts.values() for paragraph in text.split("\n\n")[1:]]
        words = [re.findall(r"\w+", paragraph.lower()) for paragraph in paragraphs]
        return set(paragraphs) | {" ".join(row[i : i + 8]) for row in words for i in range(len(row) - 7)}

    shared = runs(heldout) & runs(training_texts)
    assert not shared, sorted(shared)[:3]


def test_text_is_ascii_and_english(training_texts):
    text = "\n".join(training_texts.values())
    assert text.isascii() and ">>>" not in text
    assert len(re.findall(r"\bthe\b", text)) > len(text) / 200


def test_held_out_text_is_what_the_script_writes(training_texts, heldout, tmp_path):
    """The bytes are equal for the Python version of the training. Other versions' documentation differs in some documents."""
    corpus.write_heldout(tmp_path / "again.txt", heldout)
    assert (tmp_path / "again.txt").read_bytes() == corpus.HELDOUT.read_bytes()
    chosen = corpus.choose_heldout()
    corpus.write_heldout(tmp_path / "heldout.txt", chosen)
    assert corpus.read_heldout(tmp_path / "heldout.txt") == chosen
    same = [name for name in heldout if chosen.get(name) == heldout[name]]
    assert len(same) >= len(heldout) / 2  # 3.13: 18 of 27
    if platform.python_version() == train.SHIPPED_PYTHON:
        assert corpus.fingerprint(training_texts) == train.SHIPPED_CORPUS
        assert (tmp_path / "heldout.txt").read_bytes() == corpus.HELDOUT.read_bytes()


# ---- the model


def test_perplexity(model, tokenizer, heldout):
    """Near README.md's value, far from a damaged model's."""
    texts = list(heldout.values())
    assert perplexity_of(model, tokenizer, texts) < BOUND


@pytest.mark.more
def test_perplexity_at_low_widths(model, tokenizer, heldout):
    texts = list(heldout.values())[:8]
    whole = perplexity_of(model, tokenizer, texts)
    at = {bits: perplexity_of(perplexity.quantized(model, bits, 32), tokenizer, texts) for bits in (8, 4, 2)}
    assert abs(at[8] / whole - 1) < 0.02
    assert at[8] < at[4] < at[2]


def test_damage_shows_in_the_perplexity(model, tokenizer, heldout):
    """With the rows of one matrix out of order, it exceeds the bound."""
    damaged = perplexity.copy.deepcopy(model)
    down = damaged.model.layers[0].mlp.down_proj.weight
    down.data = down.data.roll(1, 0)
    assert perplexity_of(damaged, tokenizer, list(heldout.values())[:8]) > BOUND


def test_quantized_embedding_and_head_share_their_bytes(model):
    quantized = perplexity.quantized(model, 4, 32)
    head, embedding = quantized.lm_head, quantized.model.embed_tokens
    assert isinstance(head, lowbit.nn.Linear) and isinstance(embedding, lowbit.nn.Embedding)
    assert head.packed_weight.data_ptr() == embedding.packed_weight.data_ptr()
    assert perplexity.megabytes(quantized) < perplexity.megabytes(model) / 6.5


def test_text_is_made_of_known_words(model, tokenizer, training_texts):
    """Nine in ten words of four letters or more occur in the training text, and they vary."""
    known = set(re.findall(r"[A-Z]?[a-z]+", "\n".join(training_texts.values())))
    words = []
    for prompt in perplexity.PROMPTS:
        text = perplexity.complete(model, tokenizer, prompt, 50)
        assert text.startswith(prompt)
        # The first word may continue the prompt, the last one may be unfinished.
        words += [word for word in re.findall(r"[A-Z]?[a-z]+", text[len(prompt) :])[1:-1] if len(word) >= 4]
    assert len(words) >= 30 and len(set(words)) >= 12, words
    assert sum(word in known for word in words) >= 0.9 * len(words), words


# ---- the training


@pytest.mark.more
def test_training_in_small_learns_and_repeats(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    losses = train.main(["--small", "--steps", "24", "--output", str(first)])
    assert losses[-1] < losses[0] - 0.5
    assert train.main(["--small", "--steps", "24", "--output", str(second)]) == losses
    for file in (first / "model").iterdir():
        assert file.read_bytes() == (second / "model" / file.name).read_bytes(), file.name
    assert {path.name for path in (first / "model").iterdir()} == {path.name for path in MODEL.iterdir()}
    assert not (first / "checkpoint.pt").exists()


@pytest.mark.more
def test_stopped_training_resumes(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    monkeypatch.setattr(train, "CHECKPOINT", 2)
    train.main(["--small", "--steps", "4", "--output", str(whole)])
    step = train.Optimizer.step
    calls = []

    def stop_in_the_fourth(self, share):
        calls.append(share)
        if len(calls) == 4:
            raise KeyboardInterrupt
        step(self, share)

    with monkeypatch.context() as patch:
        patch.setattr(train.Optimizer, "step", stop_in_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            train.main(["--small", "--steps", "4", "--output", str(parts)])
    with pytest.raises(SystemExit, match="step 2 of 4, not of 2"):
        train.main(["--small", "--steps", "2", "--output", str(parts)])
    train.main(["--small", "--steps", "4", "--output", str(parts)])
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]


def test_training_refuses_a_checkpoint_of_another_model(tmp_path):
    torch.save({"size": "Size(hidden=1)", "steps": 4, "step": 2}, tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"is of Size\(hidden=1\), not of Size\(hidden=64"):
        train.main(["--small", "--steps", "4", "--output", str(tmp_path)])
