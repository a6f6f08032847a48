"""lowbit-run: its texts == those of lowbit generate and lowbit chat, and errors as sentences."""

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import lowbit
import lowbit.llm
import pytest

pytest.importorskip("transformers")
from lowbit.llm import Decoder, TextUntil, generate
from lowbit.llm.chat import Chat, sampling_of
from lowbit.llm.loading import load_model, load_tokenizer, stop_tokens
from lowbit.llm.templates import render

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny_llama"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}# {{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "tiny"
    lowbit.quantize_checkpoint(TINY / "model", directory, lowbit.LowBitConfig(bits=4))
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    lowbit.llm.export_decoder(Decoder(load_model(directory), 256), directory / "lowbit.plan")
    return directory


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Compiled against the installed library, whose hidden functions it does not use."""
    built = tmp_path_factory.mktemp("program") / "lowbit-run"
    libraries = Path(lowbit._C.__file__).parent
    sources = [ROOT / "runner" / "main.cpp"]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", f"-L{libraries}", "-llowbit", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["c++", *map(str, sources), *flags, "-o", built], check=True)
    return built


def run(program: Path, *arguments, text: str = "") -> subprocess.CompletedProcess:
    return subprocess.run([program, *map(str, arguments)], input=text.encode(), capture_output=True, timeout=300)


@lru_cache
def opened(model: Path):
    return load_model(model), load_tokenizer(model)


def python_text(
    model: Path, prompt: list[int], count: int, length: int, cache: str | None = None, seed: int = 0, **sampling
) -> str:
    loaded, tokenizer = opened(model)
    text = TextUntil(tokenizer, prompt)
    decoder = Decoder(loaded, length, cache, plan=False)
    generate(decoder, prompt, count, until=text, seed=seed, stop=stop_tokens(loaded, tokenizer), **sampling)
    return text.finish()


@pytest.mark.parametrize("cache", ["float32", "int8", "float16"])
def test_a_greedy_text(program, model, cache):
    for prompt in ("Return the", "  def f(x):\n", "Größe 東京 \U0001f600"):
        ids = opened(model)[1](prompt)["input_ids"]
        length = -(-(len(ids) + 40) // 16) * 16
        found = run(program, model, "-p", prompt, "--max-new-tokens", 40, "--cache", cache, "--threads", 1)
        assert found.stderr == b"" and found.stdout.decode() == python_text(model, ids, 40, length, cache) + "\n"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8}, {"temperature": 1.5, "top_k": 7}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "min_p": 0.05}, {"repetition_penalty": 1.2},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3},
    ],
)  # fmt: skip
def test_a_sampled_text(program, model, sampling):
    ids = opened(model)[1]("Return the")["input_ids"]
    options = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", value)]
    for seed in (7, -3):
        found = run(
            program, model, "-p", "-", "--max-new-tokens", 30, f"--seed={seed}", "--max-length=64", *options, text="Return the"
        )
        assert found.stdout.decode() == python_text(model, ids, 30, 64, seed=seed, **sampling) + "\n"


def test_a_message(program, model):
    tokenizer = opened(model)[1]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi </s>"}]
    ids = render(tokenizer, messages, tokenizer.chat_template)
    found = run(program, model, "--chat", "--system", "Be brief.", "-p", "Hi </s>", "--max-new-tokens", 20)
    assert found.stdout.decode() == python_text(model, ids, 20, -(-(len(ids) + 20) // 16) * 16) + "\n"


def test_a_conversation(program, model):
    """Turns that fill the context, so that the oldest are dropped."""
    loaded, tokenizer = opened(model)
    sampling, _, _ = sampling_of(loaded)
    step = Decoder(loaded, 128)
    chat = Chat(
        step, loaded, tokenizer, tokenizer.chat_template, 128, system="You help.", sampling=sampling, max_new_tokens=24, seed=5,
        stop=stop_tokens(loaded, tokenizer),
    )  # fmt: skip
    messages = ["Hello", "Tell me about lists", "x " * 20, "and tuples?", "more", "end"]
    answers = [chat.answer(message) for message in messages]
    assert any(answer.forgotten for answer in answers) and any(answer.cached_tokens for answer in answers)
    lines = "".join(message + "\n" for message in messages) + "\n/quit\n"
    found = run(program, model, "--system", "You help.", "--max-length", 128, "--max-new-tokens", 24, "--seed", 5, text=lines)
    assert found.returncode == 0, found.stderr
    assert found.stdout.decode() == "".join(answer.text + "\n" for answer in answers)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "there is no directory of a model"),
        (["{model}", "--cache", "int5", "-p", "a"], 2, "--cache is 'int5'; expected float32, bfloat16"),
        (["{model}", "--temperature", "x"], 2, "--temperature is 'x'; expected a number"),
        (["{model}", "--temperature=-1"], 2, "temperature is -1; expected 0 or more"),
        (["{model}", "--seed", "1.5"], 2, "--seed is '1.5'; expected a whole number"),
        (["{model}", "--max-new-tokens", "0"], 2, "--max-new-tokens is '0'; expected a whole number, 1 or more"),
        (["{model}", "--nothing", "1"], 2, "there is no option --nothing"),
        (["{model}", "-p"], 2, "-p has no value"),
        (["{model}", "--chat"], 2, "--chat is given without -p"),
        (["{model}", "-p", "a", "--max-length", "40"], 1, "--max-length is 40; expected a multiple of 16"),
        (["{model}", "-p", "a b c " * 40, "--max-length", "16"], 1, "expected fewer than the context's 16"),
        (["{model}/none", "-p", "a"], 1, "lowbit.tokens does not open; to write it: lowbit export"),
    ],
)
def test_wrong_arguments(program, model, arguments, code, message):
    found = run(program, *(argument.replace("{model}", str(model)) for argument in arguments))
    assert found.returncode == code and found.stdout == b""
    assert found.stderr.decode().startswith("lowbit-run: ") and message in found.stderr.decode()


def test_a_text_until_the_context_is_full(program, model):
    many, most = (run(program, model, "-p", "a", "--max-new-tokens", count) for count in (5000, 2**63 - 1))
    assert most.returncode == 0 and most.stdout == many.stdout


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_plan_of_other_settings_is_refused(program, model, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    content = (copy / name).read_bytes() if (copy / name).exists() else b""
    (copy / name).unlink(missing_ok=True)  # a device needs none of them
    assert run(program, copy, "-p", "a", "--max-new-tokens", 1).returncode == 0
    for other in {content + b" ", content[:-1], content.replace(b"1", b"2", 1).replace(b"a", b"b", 1)} - {content}:
        (copy / name).write_bytes(other)
        found = run(program, copy, "-p", "a", "--max-new-tokens", 1)
        assert found.returncode == 1 and found.stdout == b""
        assert f"{name} beside {copy}/lowbit.plan has changed since the plan was made" in found.stderr.decode()


def test_tokens_of_another_plan_are_refused(program, model, tmp_path):
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    content = (model / "lowbit.plan").read_bytes()
    (tmp_path / "lowbit.plan").unlink()
    (tmp_path / "lowbit.plan").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = run(program, tmp_path, "-p", "a")
    assert found.returncode == 1 and b"belongs to another plan" in found.stderr
