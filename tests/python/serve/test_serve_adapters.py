"""LoRA adapters by request: each text has its own adapter's weights and prefixes, and the packed base is in memory once."""

import copy
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from command_line import PROMPT, TINY
from lowbit import llm
from lowbit.llm.loading import load_model, stop_tokens
from needs import need_packages

need_packages("starlette", "uvicorn", "peft", "openai")

import openai
import peft
from lowbit.cli import serve
from lowbit.cli.output import Output
from lowbit.serve.adapters import adapted
from lowbit.serve.routes import Limits
from safetensors.torch import load_file, save_file
from served_models import PLAIN, SYSTEM, Client, serving

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TARGETS = {"one": ["q_proj", "v_proj"], "other": ["q_proj", "v_proj"], "third": ["down_proj", "lm_head"]}


@pytest.fixture(scope="module")
def model(packed):
    return load_model(packed[0])


@pytest.fixture(scope="module")
def directories(model, tmp_path_factory):
    found = {}
    for seed, (name, targets) in enumerate(TARGETS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=targets, r=4, lora_alpha=32, init_lora_weights=False)
        found[name] = tmp_path_factory.mktemp(name)
        peft.get_peft_model(copy.deepcopy(model), config).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def models(packed, directories):
    wish = serve._Wish(Output(False), PLAIN, None, 256, 1, None, None, 6, 64, 1 << 24, None, dict(directories))
    found = [each for each, _ in serve._load(wish, "tiny", Path(packed[0]))]
    assert [(each.name, each.parent) for each in found] == [("tiny", None), *((name, "tiny") for name in TARGETS)]
    return found


@pytest.fixture(scope="module")
def expected(model, directories):
    """The text of each model for a prompt, by peft's own loading into a separate copy."""
    models = {"tiny": copy.deepcopy(model)}
    for name, directory in directories.items():
        wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(model), directory, autocast_adapter_dtype=False).eval()
        models[name] = wrapped.base_model.model
    decoders = {name: llm.Decoder(each, 256) for name, each in models.items()}

    def text(name, tokens, count):
        return llm.generate(decoders[name], tokens, count, stop=stop_tokens(model, None)).tokens

    return text


def test_each_text_has_its_adapter(models, expected):
    """Concurrent requests for all models, with the same prompts."""
    tokenizer = models[0].tokenizer
    with serving(models, Limits(waiting=100)) as (port, _), ThreadPoolExecutor(8) as pool:
        client = Client(port)
        cards = json.loads(client.get("/v1/models"))["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [("tiny", None), *((name, "tiny") for name in TARGETS)]
        asked = [(name, text) for text in (PROMPT, SYSTEM * 2, SYSTEM + "The") for name in ("tiny", *TARGETS)] * 2

        def ask(one):
            return client.post("/v1/completions", model=one[0], prompt=one[1], max_tokens=12, temperature=0)

        answers = list(pool.map(ask, asked))
        wanted = {(name, text): expected(name, tokenizer(text)["input_ids"], 12) for name, text in asked}
        for one, answer in zip(asked, answers, strict=True):
            text = llm.TextUntil(tokenizer, tokenizer(one[1])["input_ids"])
            for token in wanted[one]:
                text(token)
            assert answer["choices"][0]["text"] == text.finish(), one
        assert len({tuple(wanted[name, PROMPT]) for name in ("tiny", *TARGETS)}) == 4
        with pytest.raises(openai.NotFoundError, match="there is no model 'none'; expected tiny or one or other or third"):
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0).completions.create(
                model="none", prompt="a"
            )


def test_no_prefix_of_another_adapter(models):
    body = {"prompt": "Prefixes: " + SYSTEM, "max_tokens": 2, "temperature": 0}
    with serving(models, Limits()) as (port, _):
        for name in ("tiny", *TARGETS):
            cached = [
                Client(port).post("/v1/completions", model=name, **body)["usage"]["prompt_tokens_details"]["cached_tokens"]
                for _ in range(2)
            ]
            assert cached[0] < 16 < cached[1]


def test_weights_are_in_memory_once(model, directories):
    copies = [adapted(model, each) for each in directories.values()]
    base = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for each, directory in zip(copies, directories.values(), strict=True):
        own = [tensor for tensor in each.state_dict().values() if tensor.data_ptr() not in base]
        assert len(own) == len(load_file(directory / WEIGHTS))
    assert not any("lora" in name for name, _ in model.named_parameters())


def changed(source, target, config=None, weights=None):
    shutil.copytree(source, target)
    if config is not None:
        (target / CONFIG).write_text(json.dumps(json.loads((target / CONFIG).read_text()) | config))
    if weights is not None:
        save_file(weights(load_file(target / WEIGHTS)), target / WEIGHTS)
    return target


def first(weights):
    return next(iter(weights))


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"peft_type": "IA3"}, None, "has peft_type 'IA3'; expected LORA"),
        ({"use_dora": True}, None, "has use_dora True; expected"),
        ({"bias": "all"}, None, "has bias 'all'; expected 'none'"),
        ({"init_lora_weights": "pissa"}, None, "has init_lora_weights 'pissa'; expected True, False"),
        ({"target_modules": ["nothing"]}, None, "is not an adapter of this model: Target modules"),
        ({"target_parameters": ["x"]}, None, r"has target_parameters \['x'\]; expected an adapter without"),
        ({"modules_to_save": ["lm_head"]}, None, "is not an adapter of this model: modules_to_save has 'lm_head'"),
        ({"r": 8}, None, "is not an adapter of this model: "), ({"r": "x"}, None, "is not an adapter of this model: "),
        (None, lambda found: {name: found[name] for name in found if name != first(found)}, "has no .*lora_A.*; exp"),
        (None, lambda found: found | {first(found).replace("layers.0", "layers.99"): found[first(found)].clone()},
         "has a tensor .*layers.99.*; expected none"),
        (None, lambda found: found | {first(found): found[first(found)] * float("nan")}, "numbers that are not finite in base"),
        (None, lambda found: {name: each[:, :3].contiguous() for name, each in found.items()},
         "is not an adapter of this model"),
    ],
)  # fmt: skip
def test_adapters_that_are_refused(model, directories, tmp_path, config, weights, message):
    with pytest.raises(ValueError, match=message) as caught:
        adapted(model, changed(directories["one"], tmp_path / "a", config, weights))
    assert "\n" not in str(caught.value)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_missing_and_damaged_files(model, directories, tmp_path):
    for name in (CONFIG, WEIGHTS):
        target = changed(directories["one"], tmp_path / name)
        (target / name).write_bytes(b"{")
        with pytest.raises(ValueError, match="not JSON" if name == CONFIG else "is not an adapter of this model"):
            adapted(model, target)
        (target / name).unlink()
        with pytest.raises(ValueError, match=f"has no {name}; expected a directory saved by peft"):
            adapted(model, target)


@pytest.mark.parametrize(
    ("given", "models", "message"),
    [
        (["a"], ["m"], "--adapter is 'a'; expected NAME=DIRECTORY"), (["=a"], ["m"], "--adapter is '=a'; expected NAME"),
        (["a=b", "a=c"], ["m"], "two models have the name a"), (["m=b"], ["m"], "two models have the name m"),
        (["a=b"], ["m", "n"], "--adapter is for one model; found 2"),
    ],
)  # fmt: skip
def test_options_that_are_refused(given, models, message):
    with pytest.raises(ValueError, match=message):
        serve._adapters(given, models)


def test_adapters_of_other_kinds_of_models(tmp_path):
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "config.json").write_text("{}")
    wish = serve._Wish(Output(False), None, None, None, 1, None, None, 1, 1, 0, None, {"a": TINY})
    with pytest.raises(ValueError, match="--adapter is for language models"):
        serve._load(wish, "a", tmp_path)
