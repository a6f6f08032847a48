"""`lowbit generate` and `lowbit chat` by the plan beside a model's weights, compared with the same commands by torch."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import change_a_bit
from command_line import FLOAT, PROGRAM, PROMPT, TINY, UNICODE, document, invoke
from lowbit.cli import plans
from lowbit.exports import plan_export
from lowbit.llm import plan_files
from lowbit.llm.loading import load_tokenizer
from lowbit.llm.plan_files import PLAN
from lowbit.machine.cpus import available_cpus, default_threads
from test_chat import PLAIN

TIMES = {"prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes"}


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    monkeypatch.setenv("LOWBIT_PLAN", "1")


def copy_of(packed, target: Path) -> Path:
    shutil.copytree(packed[0], target)
    (target / "chat_template.jinja").write_text(PLAIN)
    return target


@pytest.fixture(scope="module")
def planned(packed, tmp_path_factory):
    """A model with a plan, and with the cache types float32 and int8,int4 proven."""
    directory = copy_of(packed, tmp_path_factory.mktemp("planned") / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWBIT_PLAN", "1")
        for cache in ((), ("--cache", "int8,int4")):
            result = invoke("generate", directory, "--prompt", PROMPT, "--max-new-tokens", 2, *cache)
            assert result.stderr.splitlines()[-1] == f"{directory / PLAN} is written: the next run starts without torch"
    return directory


def both(monkeypatch, *arguments, stdin: str | None = None) -> tuple[dict, dict]:
    """The JSON documents by the plan and by torch, without times."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    by_plan = invoke(*arguments, "--json", stdin=stdin)
    assert by_plan.exit_code == 0 and "loading" not in by_plan.stderr, by_plan.stderr
    monkeypatch.setenv("LOWBIT_PLAN", "0")
    by_torch = invoke(*arguments, "--json", stdin=stdin)
    assert "loading" in by_torch.stderr
    monkeypatch.setenv("LOWBIT_PLAN", "1")
    found = tuple(document(each) for each in (by_plan, by_torch))
    for each in found:
        for turn in (each, *each.get("turns", ())):
            for name in TIMES | {"seconds"}:
                turn.pop(name, None)
    return found


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.95, "--min-p", 0.01, "--seed", 7),
        ("--temperature", 1.2, "--seed", -3, "--logprobs", 3, "--repetition-penalty", 1.2, "--presence-penalty", 0.5),
        ("--dry-multiplier", 0.8, "--frequency-penalty", 0.1, "--logit-bias", "300=-2", "--logprobs", 0),
        ("--stop", "the", "--stop", "\n\n"),
        ("--cache", "int8,int4", "--threads", 1),
        ("--chat",),
        ("--guesses", 3, "--temperature", 0.6),
        ("--draft", "DIRECTORY", "--guesses", 2),
        ("--max-length", 32, "--max-new-tokens", 100),
    ],
)
def test_generate_gives_the_document_of_torch(planned, monkeypatch, options):
    options = [planned if option == "DIRECTORY" else option for option in options]
    prompt = PROMPT if "--max-length" in options else f"{PROMPT} {UNICODE}"
    ours, theirs = both(monkeypatch, "generate", planned, "--prompt", prompt, "--max-new-tokens", 24, *options)
    assert ours == theirs and ours["tokens"] and ours["refusal"] is None


@pytest.mark.parametrize(
    "options",
    [(), ("--temperature", 0.8, "--seed", 4, "--system", "Be brief."), ("--stop", "in", "--template", TINY / "plain.jinja")],
)
def test_chat_gives_the_document_of_torch(planned, monkeypatch, options):
    lines = f"{PROMPT}\n{UNICODE} </s><s>\n/reset\nThe list\n" + f"{'a longer message ' * 8}\n" * 3 + "and\n"
    ours, theirs = both(
        monkeypatch, "chat", planned, "--max-length", 112, "--max-new-tokens", 12, *options, stdin=lines
    )  # fmt: skip
    assert ours == theirs and len(ours["turns"]) == 7
    assert max(turn["cached_tokens"] for turn in ours["turns"]) > 20 and any(turn["forgotten_turns"] for turn in ours["turns"])


@pytest.mark.parametrize(
    ("command", "stdin"),
    [
        (("generate", "--prompt", UNICODE, "--temperature", 0.7, "--stop", "zz"), None),
        (("generate", "--prompt", PROMPT, "--chat"), None),
        (("chat", "--max-length", 64), f"{PROMPT}\n{UNICODE}\n"),
        (("inspect",), None),
    ],
)
def test_neither_torch_nor_transformers_is_imported(planned, monkeypatch, command, stdin):
    name, *options = map(str, command)
    arguments = [name, str(planned), *options, *([] if name == "inspect" else ["--max-new-tokens", "8"])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], input=stdin, capture_output=True, text=True, env=environment, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == "", result.stderr
    monkeypatch.setenv("LOWBIT_PLAN", "0")
    assert result.stdout.encode() == invoke(*arguments, stdin=stdin).stdout.encode()


def test_bench_measures_the_plan_without_torch(planned, monkeypatch):
    options = ("--prompt", 16, "--new", 2, "--rounds", 1, "--threads", 1)
    arguments = list(map(str, ("bench", planned, *options, "--json")))
    result = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0 and result.stderr.splitlines()[-1] == "", result.stderr
    by_plan = json.loads(result.stdout)
    monkeypatch.setenv("LOWBIT_PLAN", "0")
    by_torch = document(invoke(*arguments))
    assert by_plan.keys() == by_torch.keys()
    for name in by_plan.keys() - {"modes", "read_bandwidth", "peak_memory_bytes"}:
        assert by_plan[name] == by_torch[name], name
    figures, expected = (each["modes"]["plan"] for each in (by_plan, by_torch))
    assert figures.keys() == expected.keys() and figures["parts"].keys() == expected["parts"].keys()
    assert figures["prefill_tokens_per_second"] * figures["seconds_to_first_token"] == pytest.approx(16)
    assert min(figures["parts"].values()) > 0 and by_plan["read_bandwidth"] > 1e8
    monkeypatch.setenv("LOWBIT_PLAN", "1")
    assert "--group-size" in invoke(*arguments, "--group-size", 64).stderr  # it is packed already


def test_the_doctor_imports_no_torch(tmp_path):
    # Every process that it starts ends at once.
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif '-m' in sys.orig_argv: os._exit(3)\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for options, code in (([], 1), (["--fast"], 0)):
        command = [sys.executable, "-c", PROGRAM, "doctor", *options, "--json"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert result.returncode == code and result.stderr.splitlines()[-1] == "", result.stderr
        said = json.loads(result.stdout)
        assert {each["state"] for each in said["surfaces"]} == (set() if options else {"broken"})
        assert said["works"] is (None if options else False)
        assert said["advised_threads"] is None and said["read_bandwidth"] > 1e8 and said["kernels"]


def test_the_program_without_torch_still_has_every_command_and_refuses_options(planned):
    for arguments, code, said in (
        (["generate", "--help"], 0, "--expert-memory"),
        (["generate", str(planned), "--prompt", "a", "--top-k", "3"], 2, "--top-k"),
        (
            ["generate", str(planned), "--prompt", "a", "--max-length", "24"],
            1,
            "max_length is 24; expected a positive multiple",
        ),
        (["generate", str(planned), "--prompt", "a", "--max-length", "4096"], 1, "expected at most the model's 1024 positions"),
    ):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=environment, timeout=600
        )
        assert result.returncode == code and said in result.stdout + result.stderr, result.stderr
        assert result.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("settings", "is not used: the files of settings beside it have changed"),
        ("tokenizer", "is not used: the files of settings beside it have changed"),
        ("weights", "has changed since the plan was made; make it again"),
        ("bytes", "the plan's checksum does not fit its bytes"),
        ("version", None),
        ("missing", None),
    ],
)
def test_a_plan_that_does_not_fit_is_replaced(planned, tmp_path, monkeypatch, damage, said):
    shutil.copytree(planned, tmp_path / "model")
    plan = tmp_path / "model" / PLAN
    run = ("generate", tmp_path / "model", "--prompt", PROMPT, "--max-new-tokens", 8)
    if damage == "settings":
        file = tmp_path / "model" / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.5}))
    elif damage == "tokenizer":
        file = tmp_path / "model" / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    elif damage == "weights":
        change_a_bit(tmp_path / "model" / "model.safetensors", "norm.weight")
    elif damage == "bytes":
        content = bytearray(plan.read_bytes())
        content[len(content) // 2] ^= 1
        plan.write_bytes(content)
    elif damage == "version":
        with monkeypatch.context() as patch:
            patch.setattr(plan_files, "__version__", "0.0.9")
            plan.unlink()
            assert "is written" in invoke(*run).stderr
    else:
        plan.unlink()
    first = invoke(*run)
    *notes, loading, figures, written = first.stderr.splitlines()
    assert len(notes) == (said is not None) and all(said in note for note in notes), first.stderr
    assert loading.startswith("loading ") and "prompt tokens" in figures and written.startswith(f"{plan} is written")
    second = invoke(*run)
    assert len(second.stderr.splitlines()) == 1 and second.stdout == first.stdout
    # The tables beside the plan are those of the same tokenizer.json.
    made = plan_files.open_planned(tmp_path / "model", 1, None).tokenizer
    assert made.tables.encode(PROMPT, True) == load_tokenizer(tmp_path / "model")(PROMPT)["input_ids"]
    old = plan_files.open_planned(planned, 1, None).tokenizer.tables.encode(PROMPT, True)
    assert (made.tables.encode(PROMPT, True) == old) == (damage != "tokenizer")


def test_prompts_and_prefixes_on_disk_are_those_of_torch(planned, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [PROMPT, f"{PROMPT} {UNICODE}", "a", PROMPT * 9])))
    many = (
        "generate",
        planned,
        "--prompts",
        tmp_path / "prompts.jsonl",
        "--at-once",
        3,
        "--max-new-tokens",
        9,
        "--logprobs",
        1,
    )
    ours, theirs = both(monkeypatch, *many, "--temperature", 0.7)
    ours.pop("tokens_per_second"), theirs.pop("tokens_per_second")
    assert ours == theirs and len(ours["texts"]) == 4
    one = ("generate", planned, "--prompt", PROMPT * 20, "--max-new-tokens", 5, "--prefix-cache", tmp_path / "prefixes")
    ours, theirs = both(monkeypatch, *one)  # torch reads the plan's files
    assert (ours["text"], ours["cached_tokens"]) == (theirs["text"], 0) and theirs["cached_tokens"] >= 64


def test_a_draft_without_a_plan_uses_torch_and_gets_one(planned, packed, tmp_path):
    draft = copy_of(packed, tmp_path / "draft")
    options = ("generate", planned, "--prompt", PROMPT, "--max-new-tokens", 4, "--draft", draft)
    first, second = invoke(*options), invoke(*options)
    assert first.stderr.startswith("loading ") and f"{draft / PLAN} is written" in first.stderr
    assert f"{planned / PLAN}" not in first.stderr and "accepted" in first.stderr
    assert len(second.stderr.splitlines()) == 1 and "accepted" in second.stderr and second.stdout == first.stdout


def test_quantize_convert_and_import_write_plans(tmp_path, monkeypatch):
    made = [tmp_path / name for name in ("quantized", "converted", "imported")]
    for command in (
        ("quantize", FLOAT, made[0], "--embedding-bits", 4),
        ("convert", made[0], made[1], "--activation-bits", 16),
        ("import", tmp_path / "model.gguf", made[2]),
    ):
        if command[0] == "import":
            assert invoke("export", made[0], "--to", "gguf", "--output", command[1]).exit_code == 0
        result = invoke(*command)
        assert result.exit_code == 0 and f"{command[2] / PLAN} is written: the next run starts without torch" in result.stderr
        first = invoke("generate", command[2], "--prompt", PROMPT, "--max-new-tokens", 2)
        assert first.exit_code == 0 and len(first.stderr.splitlines()) == 1, first.stderr
    assert len({(each / PLAN).read_bytes() for each in made}) == 3
    monkeypatch.setattr(plans, "free_memory", lambda: 1000)
    assert PLAN not in invoke("quantize", FLOAT, tmp_path / "large").stderr and not (tmp_path / "large" / PLAN).exists()


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForCausalLM"])
def test_only_language_models_get_the_plan_of_a_decoder(head, packed, tmp_path):
    """Many encoders have a model_type that has a causal language model, too; a note would say that the decoder refuses them."""
    model, said = copy_of(packed, tmp_path / "model"), []
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": [f"Llama{head}"]}))
    (model / PLAN).unlink(missing_ok=True)
    plans.make_plan(SimpleNamespace(progress=lambda _: nullcontext(), note=said.append), model)
    assert bool(said) == (model / PLAN).exists() == (head == "ForCausalLM"), said


def test_a_plan_that_cannot_be_written_is_a_note(packed, tmp_path, monkeypatch):
    model = copy_of(packed, tmp_path / "model")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(plan_export, "write_plan", fail)
    result = invoke("generate", model, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert result.exit_code == 0 and result.stderr.splitlines()[-1] == f"{model / PLAN} is not written: the disk is full"
    monkeypatch.setattr(plans.os, "access", lambda *_: False)
    assert PLAN not in invoke("generate", model, "--prompt", PROMPT, "--max-new-tokens", 2).stderr


def test_a_tokenizer_that_differs_from_transformers_is_not_used(packed, tmp_path, monkeypatch):
    model = copy_of(packed, tmp_path / "model")
    monkeypatch.setattr("lowbit.llm.plain_tokenizer.difference", lambda *_: "the tokens of 'x' differ")
    run = ("generate", model, "--prompt", PROMPT, "--max-new-tokens", 2)
    assert "is written" in invoke(*run).stderr
    for _ in range(2):  # a new plan would not help
        lines = invoke(*run).stderr.splitlines()
        assert lines[0] == f"{model / PLAN} is not used: the tokens of 'x' differ" and len(lines) == 3


def test_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert 1 <= default_threads() <= available_cpus()
    for given, expected in (("3", 3), ("5,2", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert default_threads() == expected
    for given in ("0", "-1", "many", ""):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert 1 <= default_threads() <= available_cpus()
