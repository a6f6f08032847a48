"""Divergences from models and from files of logits, compared with a plain computation."""

import copy
import math
import os
from types import SimpleNamespace

import lowbit
import pytest
import safetensors.torch
import torch
import transformers
from lowbit.llm.perplexity import perplexity
from lowbit.tools import divergence
from lowbit.tools.divergence import Expected, compare, judge, logits_bytes, save_logits

TOKENS = torch.randint(50, (90,), generator=torch.Generator().manual_seed(1)).tolist()
WINDOWS = {"window": 32, "stride": 20}


def make(**changes):
    torch.manual_seed(0)
    config = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
        "max_position_embeddings": 64, "initializer_range": 0.3,
    } | changes  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


@pytest.fixture(scope="module")
def floats():
    return make()


@pytest.fixture(scope="module")
def packed(floats):
    return lowbit.quantize_(copy.deepcopy(floats), lowbit.LinearConfig(bits=3))


@pytest.fixture(scope="module")
def file(floats, tmp_path_factory):
    path = tmp_path_factory.mktemp("logits") / "reference.safetensors"
    save_logits(floats, TOKENS, path, **WINDOWS)
    return path


@torch.inference_mode()
def log_probabilities(model, tokens, window, stride):
    """After each token except the last, in double precision, from the first window that contains the next token."""
    found = []
    for token in range(1, len(tokens)):
        begin = 0
        while begin + window <= token:
            begin += stride
        found.append(model(torch.tensor([tokens[begin:token]])).logits[0, -1].double().log_softmax(0))
    return torch.stack(found)


@pytest.mark.parametrize("length, window, stride", [(90, 32, 20), (33, 32, 31), (10, 32, 16), (2, 2, 1)])
def test_a_model_compared_with_a_plain_computation(floats, packed, length, window, stride):
    tokens = TOKENS[:length]
    theirs, ours = (log_probabilities(model, tokens, window, stride) for model in (floats, packed))
    each = (theirs.exp() * (theirs - ours)).sum(1)
    seen = []
    found = compare(packed, tokens, floats, window=window, stride=stride, progress=lambda *counts: seen.append(counts))
    assert each.mean() > 0.001  # 3 bits change the model
    assert math.isclose(found.kld, each.mean(), rel_tol=1e-4)
    assert math.isclose(found.kld_99, each.quantile(0.99), rel_tol=1e-4)
    assert found.top1 == (theirs.argmax(1) == ours.argmax(1)).double().mean().item()
    of_text = torch.tensor(tokens[1:])[:, None]
    difference = (theirs - ours).gather(1, of_text)
    assert math.isclose(found.nats_error, difference.std(correction=0) / len(difference) ** 0.5, rel_tol=1e-4, abs_tol=1e-9)
    for result, model in ((found.model, packed), (found.reference, floats)):
        expected = perplexity(model, tokens, window=window, stride=stride)
        assert (result.tokens, math.isclose(result.nats, expected.nats, rel_tol=1e-6)) == (length - 1, True)
    assert seen[-1] == (length - 1, length - 1)


def test_a_file_describes_its_model(floats, packed, file):
    assert os.path.getsize(file) - logits_bytes(len(TOKENS), 50) in range(1024)  # the header
    from_file, from_model = (compare(packed, TOKENS, reference, **WINDOWS) for reference in (file, floats))
    assert math.isclose(from_file.kld, from_model.kld, rel_tol=1e-3)
    assert math.isclose(from_file.kld_99, from_model.kld_99, rel_tol=1e-3)
    assert from_file.top1 == from_model.top1
    assert math.isclose(from_file.reference.nats, from_model.reference.nats, rel_tol=1e-6)
    same = compare(floats, TOKENS, file, **WINDOWS)
    assert 0 <= same.kld < 1e-6 and same.top1 == 1
    assert compare(floats, TOKENS, floats, **WINDOWS).kld == 0


def test_tokens_in_pieces(floats, packed, file, monkeypatch):
    whole = [compare(packed, TOKENS, reference, **WINDOWS) for reference in (floats, file)]
    monkeypatch.setattr(divergence, "_ROWS", 3)
    assert [compare(packed, TOKENS, reference, **WINDOWS) for reference in (floats, file)] == whole


def test_a_cache_type_does_not_change_the_reference(floats, packed, file):
    exact, rounded = (compare(packed, TOKENS, file, cache=cache, **WINDOWS) for cache in ("float32", "int4"))
    assert math.isclose(exact.kld, compare(packed, TOKENS, file, **WINDOWS).kld, rel_tol=1e-3)
    assert rounded.kld != exact.kld
    assert rounded.reference == exact.reference


def test_a_token_that_is_never_predicted(floats, packed, tmp_path):
    """A probability below float16's range, in a file."""

    def suppressed(model):
        def suppress(module, arguments, output):
            output.logits[..., 7] = -1e6

        model = copy.deepcopy(model)
        model.register_forward_hook(suppress)
        return model

    tokens = [token for token in TOKENS if token != 7]
    save_logits(suppressed(floats), tokens, tmp_path / "logits.safetensors", **WINDOWS)
    from_model = compare(suppressed(packed), tokens, suppressed(floats), **WINDOWS).kld
    from_file = compare(suppressed(packed), tokens, tmp_path / "logits.safetensors", **WINDOWS).kld
    assert 0 < from_model < 10 and math.isclose(from_file, from_model, rel_tol=1e-3)


def test_minus_infinity():
    theirs, ours = torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([[1.0, 0.0, 0.0]])

    def kld(logits, reference):
        reference = reference.log_softmax(-1)
        expected = Expected(lambda begin, end: reference[begin:end], reference.argmax(-1), -reference[:, 0])
        return judge(iter([(logits, torch.tensor([0]))]), iter([expected])).kld

    p, q = theirs[0].softmax(0)[:2], ours[0].softmax(0)[:2]
    assert math.isclose(kld(ours, theirs), float((p * (p / q).log()).sum()), rel_tol=1e-6)
    assert kld(theirs, theirs) == 0
    assert kld(theirs, ours) == math.inf


def test_another_vocabulary(file, packed):
    wider = make(vocab_size=51)
    with pytest.raises(ValueError, match="the model predicts 51 tokens and the reference 50; expected the same vocabulary"):
        compare(wider, TOKENS, file, **WINDOWS)
    with pytest.raises(ValueError, match="the model predicts 50 tokens and the reference 51; expected the same vocabulary"):
        compare(packed, TOKENS, wider, **WINDOWS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokens": TOKENS[:-1]}, "{file} was made from 90 tokens and the text has 89; expected the same text"),
        (
            {"tokens": [*TOKENS[:5], (TOKENS[5] + 1) % 50, *TOKENS[6:]]},
            f"{{file}} was made from another text or by another tokenizer: its token 5 is {TOKENS[5]}, that of the text is "
            f"{(TOKENS[5] + 1) % 50}",
        ),
        ({"window": 31}, "{file} was made with a window of 32; expected 31, as for the model"),
        ({"stride": 16}, "{file} was made with a stride of 20; expected 16, as for the model"),
    ],
)
def test_another_text_or_setting(packed, file, changes, message):
    arguments = {"tokens": TOKENS, **WINDOWS} | changes
    with pytest.raises(ValueError) as caught:
        compare(packed, reference=file, **arguments)
    assert str(caught.value) == message.format(file=file)


def test_files_that_are_no_reference(packed, file, tmp_path):
    tensors, metadata = safetensors.torch.load_file(file), {"window": "32", "stride": "20", "lowbit_reference": "1"}

    def refusal(tensors, metadata):
        safetensors.torch.save_file(tensors, tmp_path / "other.safetensors", metadata)
        with pytest.raises(ValueError) as caught:
            compare(packed, TOKENS, tmp_path / "other.safetensors", **WINDOWS)
        return str(caught.value).removeprefix(f"{tmp_path / 'other.safetensors'} ")

    assert refusal(tensors, {}) == "holds no reference logits; expected a file that lowbit eval --save-logits wrote"
    assert refusal(tensors, metadata | {"lowbit_reference": "2"}) == (
        "has version 2; expected 1: install a newer lowbit or write it again"
    )
    damage = "is not a complete file of reference logits; write it again"
    assert refusal({name: tensor for name, tensor in tensors.items() if name != "nats"}, metadata) == damage
    assert refusal(tensors | {"nats": tensors["nats"][1:].clone()}, metadata) == damage
    assert refusal(tensors | {"log_probabilities": tensors["log_probabilities"].float()}, metadata) == damage
    (tmp_path / "short.safetensors").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        compare(packed, TOKENS, tmp_path / "short.safetensors", **WINDOWS)
    with pytest.raises(FileNotFoundError):
        compare(packed, TOKENS, tmp_path / "none.safetensors", **WINDOWS)
    with pytest.raises(IsADirectoryError, match="is a directory; expected a file of logits"):
        compare(packed, TOKENS, tmp_path, **WINDOWS)


def test_refused_logits_are_not_written(floats, file, tmp_path, monkeypatch):
    before = file.read_bytes()
    with pytest.raises(ValueError, match="the text has 1 tokens"):
        save_logits(floats, TOKENS[:1], file, **WINDOWS)
    with pytest.raises(ValueError, match="expected a name that ends in .safetensors"):
        save_logits(floats, TOKENS, tmp_path / "logits.bin", **WINDOWS)
    weights, text = tmp_path / "model.safetensors", tmp_path / "text.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(3)}, weights)
    text.write_text("text")
    for other in (weights, text):  # such as the weights of the model itself
        kept = other.read_bytes()
        with pytest.raises(FileExistsError, match=f"{other.name} exists and holds no reference logits; choose another name"):
            save_logits(floats, TOKENS, other, **WINDOWS)
        assert other.read_bytes() == kept
        other.unlink()
    monkeypatch.setattr(divergence.shutil, "disk_usage", lambda path: SimpleNamespace(free=9000))
    with pytest.raises(OSError, match=r"needs 9.97 kB and the disk has 9.00 kB left; use another disk or a shorter text"):
        save_logits(floats, TOKENS, file, **WINDOWS)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == []
