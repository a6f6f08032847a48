"""The command line as a user runs it, beside the library; docs/cli.md beside the command line.

Each command runs once as a process of its own, which takes seconds to import torch and transformers. Further cases
run in this process, through the same entry.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main
import typer.testing

import lowbit
from lowbit import llm
from lowbit.cli.commands import app
from lowbit.llm.loading import TextStream, load_model, load_tokenizer, stop_tokens
from lowbit.llm.perplexity import perplexity

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny_llama"
FLOAT = TINY / "model"
LOWBIT = Path(sys.executable).with_name("lowbit")
PROMPT = "Return the number of items"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    # As in conftest.py: on a busy machine threads wait for each other.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def run(
    *arguments, stdin: str | None = None, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Runs the installed `lowbit`."""
    return subprocess.run(
        [LOWBIT, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=900, cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | environment,
    )  # fmt: skip


def invoke(*arguments, stdin: str | None = None):
    """The same in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM,)}
    try:
        runner = typer.testing.CliRunner(env={"COLUMNS": None})  # a pytest that runs tests in parallel sets it
        return runner.invoke(app, [str(argument) for argument in arguments], input=stdin)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def document(result) -> dict:
    """What --json printed, and nothing else beside it; its keys are those that docs/cli.md lists."""
    assert result.stdout.startswith("{") and result.stdout.endswith("}\n"), (result.stdout, result.stderr)
    return json.loads(result.stdout)


def section(command: str) -> str:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    return re.search(rf"^## {command}$(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def documented_keys(command: str) -> set[str]:
    keys = section(command).split("\nJSON: ")[1]
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", keys)))


def keys_in(value, depth: int = 0) -> set[str]:
    if isinstance(value, list):
        return set().union(*(keys_in(item, depth) for item in value), set())
    return set(value) if isinstance(value, dict) else set()


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, dict]:
    """The shipped model with 4 bits, the way a user makes it, and what `lowbit quantize --json` said."""
    target = tmp_path_factory.mktemp("packed") / "model"
    result = run("quantize", FLOAT, target, "--embedding-bits", 6, "--override", "*.0.*o_proj=8,none,affine", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [f"quantising {FLOAT} ..."]
    return target, document(result)


@pytest.fixture(scope="module")
def expected(packed) -> llm.Generation:
    """What the library makes of PROMPT with the packed model."""
    model = load_model(packed[0])
    tokens = load_tokenizer(FLOAT)(PROMPT)["input_ids"]
    stop = stop_tokens(model, load_tokenizer(FLOAT))
    return llm.generate(llm.Decoder(model, 128), tokens, 40, max_length=128, stop=stop)


def text_of(generation: llm.Generation) -> str:
    tokenizer = load_tokenizer(FLOAT)
    stream = TextStream(tokenizer, tokenizer(PROMPT)["input_ids"])
    return "".join(map(stream.push, generation.tokens))


# quantize and inspect


def test_quantize_writes_what_the_library_writes(packed, tmp_path):
    target, said = packed
    override = {"*.0.*o_proj": {"bits": 8, "group_size": None, "mapping": "affine"}}
    config = lowbit.LowBitConfig(bits=4, embedding_bits=6, overrides=override)
    summary = lowbit.quantize_checkpoint(FLOAT, tmp_path / "other", config)
    assert sorted(os.listdir(target)) == sorted(os.listdir(tmp_path / "other"))
    for name in os.listdir(target):
        assert (target / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    entries = [entry for entry in summary.entries if entry.kind == "packed"]
    assert {entry.bits for entry in entries} == {4, 6, 8}
    assert said["packed_layers"] == len(entries)
    assert said["packed_bytes"] == sum(entry.bytes for entry in entries)
    assert said["packed_weights"] == sum(math.prod(entry.shape) for entry in entries)
    assert said["bits_per_weight"] == 8 * said["packed_bytes"] / said["packed_weights"]
    assert said["bytes_before"] == summary.source_bytes
    assert said["bytes_after"] == summary.target_bytes == said["packed_bytes"] + said["float_bytes"]
    assert (said["source"], said["target"], said["left_float"]) == (str(FLOAT), str(target), {})
    assert set(said) == documented_keys("quantize")


def test_quantize_prints_a_summary_and_leaves_layers_float(tmp_path):
    result = invoke(
        "quantize", FLOAT, tmp_path / "out", "--bits", 2, "--scale", "absmax", "--override", "*.mlp.*=float"
    )
    assert result.exit_code == 0, result.stderr
    entries = lowbit.inspect_checkpoint(tmp_path / "out")
    assert all(
        (entry.kind == "packed") == ("norm" not in entry.name and ".mlp." not in entry.name) for entry in entries
    )
    assert {entry.bits for entry in entries if entry.kind == "packed"} == {2}
    layers = sum(entry.kind == "packed" for entry in entries)
    assert re.search(rf"^{layers} packed layers .* 2\.\d\d bits per weight$", result.stdout, re.M)


def test_quantize_warns_of_patterns_that_match_nothing(tmp_path):
    result = invoke("quantize", FLOAT, tmp_path / "out", "--override", "lm_haed=8", "--override", "*.q_proj=8")
    assert result.exit_code == 0
    warning = "lowbit: warning: the pattern 'lm_haed' matches no linear layer or embedding of LlamaForCausalLM"
    assert [line for line in result.stderr.splitlines() if not line.endswith(" ...")] == [warning]


def test_quantize_shows_progress_on_a_terminal(tmp_path, monkeypatch):
    import io

    from rich.console import Console

    from lowbit.cli import output

    terminal = io.StringIO()
    plain = output.console
    monkeypatch.setattr(
        output, "console",
        lambda stderr: Console(file=terminal, force_terminal=True, width=200) if stderr else plain(stderr=False),
    )  # fmt: skip
    assert invoke("quantize", FLOAT, tmp_path / "out").exit_code == 0
    total = sum(entry.bytes for entry in lowbit.inspect_checkpoint(FLOAT))
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    assert f"quantising {FLOAT}" in shown
    assert re.search(rf"\b{total / 1e6:.1f}/{total / 1e6:.1f} MB", shown), shown[-500:]
    assert any(entry.name in shown for entry in lowbit.inspect_checkpoint(tmp_path / "out"))


def test_inspect(packed):
    result = run("inspect", packed[0])
    assert (result.returncode, result.stderr) == (0, "")
    entries = lowbit.inspect_checkpoint(packed[0])
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["tensor", "kind", "shape", "bits", "group", "mapping", "bytes"]
    for line, entry in zip(lines[1:-1], entries, strict=True):
        shown = [entry.name, entry.kind, *" x ".join(map(str, entry.shape)).split(), str(entry.bits)]
        if entry.kind == "packed":
            shown += [str(entry.group_size or "row"), entry.mapping]
        assert line.split() == [*shown, str(entry.bytes)]
    assert lines[-1].startswith(f"{len(entries)} tensors, ")


@pytest.mark.parametrize("of_file", [False, True])
def test_inspect_json(packed, of_file):
    path = packed[0] / "model.safetensors" if of_file else packed[0]
    said = document(invoke("inspect", path, "--json"))
    entries = [dataclasses.asdict(entry) for entry in lowbit.inspect_checkpoint(packed[0])]
    assert said["tensors"] == json.loads(json.dumps(entries))
    assert said["bytes"] == sum(entry["bytes"] for entry in entries)
    assert said["bits_per_weight"] == packed[1]["bits_per_weight"]
    assert set(said) | keys_in(said["tensors"]) == documented_keys("inspect")


def test_inspect_a_float_checkpoint():
    said = document(invoke("inspect", FLOAT, "--json"))
    assert (said["packed_bytes"], said["packed_weights"], said["bits_per_weight"]) == (0, 0, None)


# generate


def test_generate_streams_text(packed, expected):
    result = run("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 40)
    assert result.returncode == 0, result.stderr
    assert result.stdout == text_of(expected) + "\n"
    # Nothing else: no other library's noise.
    loading, figures = result.stderr.splitlines()
    assert loading == f"loading {packed[0]} ..."
    assert re.fullmatch(
        rf"{expected.prompt_tokens} prompt tokens, prefill [\d.]+ tokens/s; {len(expected.tokens)} new tokens, "
        r"decode [\d.]+ tokens/s, peak memory [\d.]+ MB", figures,
    ), figures  # fmt: skip


def test_generate_writes_each_token_before_the_next_is_computed(packed, expected, run_python):
    script = """
import os, sys
from lowbit import llm
from lowbit.cli import main
os.dup2(1, 2)  # one pipe: what is written first comes first
forward = llm.Decoder.forward
def marked(*arguments):
    os.write(2, b"\\x00")
    return forward(*arguments)
llm.Decoder.forward = marked
sys.argv[0] = "lowbit"
main()
"""
    result = run_python(script, "generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 40)
    _, *pieces = result.stdout.split("\0")
    tokenizer = load_tokenizer(FLOAT)
    stream = TextStream(tokenizer, tokenizer(PROMPT)["input_ids"])
    texts = [stream.push(token) for token in expected.tokens]
    assert pieces[: len(texts) - 1] == texts[:-1]


def test_generate_json_and_prompts(packed, expected, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    base = ("generate", packed[0], "--max-new-tokens", 40, "--json")
    for prompt, stdin in (
        (("--prompt", PROMPT), None), (("--prompt", "-"), PROMPT), (("--prompt-file", "-"), PROMPT),
        (("--prompt-file", tmp_path / "prompt.txt"), None),
    ):  # fmt: skip
        said = document(invoke(*base, *prompt, stdin=stdin))
        assert (said["tokens"], said["text"]) == (expected.tokens, text_of(expected))
        assert said["stopped"] == expected.stopped
        assert said["prompt_tokens"] == expected.prompt_tokens
        assert math.isclose(said["prefill_tokens_per_second"], said["prompt_tokens"] / said["prefill_seconds"])
        assert math.isclose(said["decode_tokens_per_second"], (len(said["tokens"]) - 1) / said["decode_seconds"])
        assert said["peak_memory_bytes"] > sum(entry.bytes for entry in lowbit.inspect_checkpoint(packed[0]))
        assert set(said) == documented_keys("generate")
    one = document(invoke("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 1, "--threads", 2, "--json"))
    assert (one["tokens"], one["decode_tokens_per_second"], one["threads"]) == (expected.tokens[:1], None, 2)


def test_generate_quantises_on_the_fly(packed):
    options = ("--prompt", PROMPT, "--max-new-tokens", 24, "--json")
    said = document(invoke("generate", FLOAT, *options, "--bits", 3, "--group-size", "none", "--mapping", "affine"))
    config = lowbit.LowBitConfig(bits=3, group_size=None, mapping="affine")
    model = load_model(FLOAT, config)
    assert {m.info.bits for m in model.modules() if isinstance(m, lowbit.nn.Linear)} == {3}
    tokens = load_tokenizer(FLOAT)(PROMPT)["input_ids"]
    assert said["tokens"] == llm.generate(llm.Decoder(model, 128), tokens, 24, max_length=128).tokens
    plain = document(invoke("generate", FLOAT, *options))
    assert plain["tokens"] == llm.generate(llm.Decoder(load_model(FLOAT), 128), tokens, 24, max_length=128).tokens


def test_generate_draws(packed):
    options = ("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 24, "--temperature", 1.5, "--json")
    first, same, other, greedy = (
        document(invoke(*options, *more))["tokens"]
        for more in (("--seed", 1), ("--seed", 1), ("--seed", 2), ("--seed", 3, "--top-k", 1))
    )
    assert first == same != other
    assert (
        greedy
        == document(invoke(*options, "--temperature", 0))["tokens"]
        == document(invoke(*options, "--top-p", 0))["tokens"]
    )


def test_generate_runs_what_was_compiled(packed, expected, monkeypatch):
    calls = []

    def compile_decoder(decoder):
        def step(tokens, start):
            calls.append(tokens.shape[1])
            return decoder(tokens, start)

        return step

    monkeypatch.setattr(llm, "compile_decoder", compile_decoder)
    said = document(invoke("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 4, "--compile", "--json"))
    assert said["tokens"] == expected.tokens[:4]
    assert calls == [expected.prompt_tokens, 1, 1, 1]


def test_no_compiler(packed, tmp_path):
    from torch._inductor import config

    for arguments in (
        ("generate", packed[0], "--prompt", PROMPT, "--compile"), ("bench", packed[0]),
        ("export", packed[0], "--to", "pt2", "--output", tmp_path / "m.pt2"),
    ):  # fmt: skip
        with config.patch({"cpp.cxx": ("no-such-compiler",)}):
            assert "Install g++ or clang" in error(invoke(*arguments))


def test_generate_stops(packed, expected, tmp_path):
    stop = expected.tokens[5]
    shutil.copytree(packed[0], tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 0]}))
    said = document(invoke("generate", tmp_path / "model", "--prompt", PROMPT, "--json"))
    assert said["tokens"] == expected.tokens[: expected.tokens.index(stop)]
    assert said["stopped"] == "stop"
    said = document(invoke("generate", packed[0], "--prompt", PROMPT, "--max-length", 16, "--json"))
    assert len(said["tokens"]) == 16 - expected.prompt_tokens
    assert said["stopped"] == "max_length"


def test_generate_with_a_chat_template(packed, tmp_path):
    shutil.copytree(packed[0], tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "user: {{ messages[0].content }}{% if add_generation_prompt %} bot:{% endif %}"
    )
    options = ("--max-new-tokens", 8, "--json")
    chat = document(invoke("generate", tmp_path / "model", "--chat", "--prompt", "Hello", *options))
    # As the template has it: without a further BOS.
    tokens = load_tokenizer(FLOAT)("user: Hello bot:", add_special_tokens=False)["input_ids"]
    assert chat["prompt_tokens"] == len(tokens)
    assert chat["tokens"] == llm.generate(llm.Decoder(load_model(packed[0]), 128), tokens, 8, max_length=128).tokens


def test_text_stream_keeps_characters_whole():
    tokenizer = load_tokenizer(FLOAT)
    text = "a é 世界 🙂 👩‍👩‍👧 ñ\n  z"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, [])
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert "" in pieces  # some character takes several tokens
    assert not any("\ufffd" in piece for piece in pieces)


# eval


def test_eval(packed, tmp_path):
    text = (TINY / "heldout.txt").read_text(encoding="utf-8")[:3000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    options = ("--text", tmp_path / "text.txt", "--window", 128, "--stride", 64)
    result = run("eval", FLOAT, *options, "--bits", "8,2", "--group-size", 64, "--json")
    assert result.returncode == 0, result.stderr
    assert len(result.stderr.splitlines()) == 6  # three times loading and measuring: no other library's noise
    said = document(result)
    assert set(said) | keys_in(said["results"]) == documented_keys("eval")
    tokens = load_tokenizer(FLOAT)(text)["input_ids"]
    assert (said["predicted_tokens"], said["text_bytes"]) == (len(tokens) - 1, len(text.encode()))
    configs = [None, *(lowbit.LowBitConfig(bits=bits, group_size=64) for bits in (8, 2))]
    for row, config in zip(said["results"], configs, strict=True):
        model = load_model(FLOAT, config)
        expected = perplexity(model, tokens, window=128, stride=64)
        assert math.isclose(row["perplexity"], expected.perplexity, rel_tol=1e-4)
        assert math.isclose(row["bits_per_byte"], expected.bits_per_byte(len(text.encode())), rel_tol=1e-4)
        assert row["bits"] == (None if config is None else config.bits)
    sizes = [row["weight_bytes"] for row in said["results"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == sum(entry.bytes for entry in lowbit.inspect_checkpoint(FLOAT))

    table = invoke("eval", packed[0], *options)
    assert table.exit_code == 0, table.stderr
    assert table.stdout.splitlines()[0].split() == ["weights", "size", "perplexity", "bits", "per", "byte", "seconds"]
    assert table.stdout.splitlines()[1].startswith("packed, 4 and 6 and 8 bits ")


# export


@torch.inference_mode()
def check_likeliest(packed, step) -> None:
    """Each token that an exported program makes is the likeliest one in eager behind those before it, or all but: between
    lowbit's operators the two round bfloat16 differently."""
    text = load_tokenizer(FLOAT)(PROMPT)["input_ids"]
    made = llm.generate(step, text, 40, max_length=128, stop=step.stop).tokens
    assert len(made) == 40
    decoder, start = llm.Decoder(load_model(packed[0]), 128), 0
    for token in made:
        logits = decoder(torch.tensor([text]), torch.tensor([start]))[0]
        assert logits.max() - logits[token] < 0.5
        start, text = start + len(text), [token]


def test_export_pte(packed, executorch, tmp_path):
    result = run("export", packed[0], "--to", "pte", "--output", tmp_path / "m.pte", "--max-length", 128, "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines() == [f"loading {packed[0]} ...", f"exporting to {tmp_path / 'm.pte'} ..."]
    said = document(result)
    assert set(said) == documented_keys("export")
    assert said["bytes"] == (tmp_path / "m.pte").stat().st_size
    step = llm.load_pte(tmp_path / "m.pte")
    assert (step.max_length, step.chunk) == (128, 128) == (said["max_length"], said["chunk"])
    check_likeliest(packed, step)


def test_export_pt2(packed, tmp_path):
    result = invoke(
        "export", packed[0], "--to", "pt2", "--output", tmp_path / "m.pt2", "--max-length", 128, "--chunk", 64
    )
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'm.pt2'}: ")
    step = llm.load_pt2(tmp_path / "m.pt2")
    assert (step.max_length, step.chunk) == (128, 64)
    check_likeliest(packed, step)


# bench, tune and info


def test_bench(packed, capfd):
    from lowbit.llm.bench import bytes_per_token

    options = ("--prompt", 32, "--new", 4, "--rounds", 1, "--mode", "eager")
    said = document(invoke("bench", packed[0], *options, "--json"))
    model = load_model(packed[0])
    assert said["packed_bytes_per_token"] == bytes_per_token(model)
    assert (said["prompt"], said["new"], said["threads"], list(said["modes"])) == (32, 4, 1, ["eager"])
    figures = said["modes"]["eager"]
    assert math.isclose(figures["prefill_tokens_per_second"], 32 / figures["seconds_to_first_token"])
    assert set(said) | set(figures) == documented_keys("bench")
    table = invoke("bench", FLOAT, *options, "--bits", 2)
    assert table.exit_code == 0, table.stderr
    weights = bytes_per_token(load_model(FLOAT, lowbit.LowBitConfig(bits=2)))
    assert table.stdout.startswith(f"{FLOAT}: {weights / 1e6:.2f} MB of packed weights per token; 1 threads of ")
    assert re.search(r"^eager( +[\d.]+( %)?){5}$", table.stdout, re.M)
    assert "profiler" not in capfd.readouterr().err


def test_bench_asks_for_what_it_was_told(monkeypatch):
    from lowbit.llm import bench

    asked = []

    def run(*arguments, **options):
        asked.append((arguments, options))
        raise ValueError("enough")

    monkeypatch.setattr(bench, "run", run)
    for more, modes in (((), ["aot"]), (("--mode", "eager", "--mode", "compile"), ["eager", "compile"])):
        options = ("--bits", 3, "--group-size", "none", "--prompt", 7, "--new", 5, "--rounds", 2, "--threads", 2)
        assert error(invoke("bench", "llama-3.1-8b", *options, *more)) == "enough"
        assert asked.pop() == (("llama-3.1-8b", 3, None), {"prompt": 7, "new": 5, "modes": modes, "rounds": 2})
        assert torch.get_num_threads() == 2


def test_tune(packed, monkeypatch):
    said = document(run("tune", packed[0], "--seconds", 0.1, "--json"))
    assert set(said) == documented_keys("tune")
    assert list(said["seconds"]) == [str(count) for count in range(1, len(said["seconds"]) + 1)]
    best = min(said["seconds"].values())
    assert said["seconds"][str(said["threads"])] <= 1.02 * best

    asked = []

    def tuning(model_or_shapes, **options):
        asked.append((model_or_shapes, options))
        return lowbit.ThreadTuning(2, {1: 2e-3, 2: 1e-3})

    monkeypatch.setattr(lowbit, "tune_threads", tuning)
    result = invoke("tune", "qwen3-0.6b", "--bits", 3, "--group-size", "none", "--rows", 7, "--seconds", 1)
    assert [line.split() for line in result.stdout.splitlines()[:3]] == [
        ["threads", "ms", "per", "pass"],
        ["1", "2.000"],
        ["2", "*", "1.000"],
    ]
    shapes, options = asked[0]
    assert shapes == [
        (2048, 1024),
        (1024, 1024),
        (1024, 1024),
        (1024, 2048),
        (3072, 1024),
        (3072, 1024),
        (1024, 3072),
        (151936, 1024),
    ]
    assert options == {"rows": 7, "bits": 3, "group_size": None, "seconds": 1.0, "apply": False}


def test_info():
    result = run("info", "--json", LOWBIT_ISA="portable")
    assert (result.returncode, result.stderr) == (0, "")
    said = document(result)
    assert set(said) | {"kernels", "supported", "active"} == documented_keys("info")
    assert said["isa"] == {**lowbit.isa(), "cap": "portable", "active": ["portable"]}
    assert (said["lowbit"], said["torch"]) == (lowbit.__version__, torch.__version__)
    for family, isas in said["kernels"].items():
        for isa, counts in isas.items():
            rows = [row for row in lowbit.kernels() if (row["family"], row["isa"]) == (family, isa)]
            assert (counts["kernels"], counts["supported"]) == (len(rows), sum(row["supported"] for row in rows))
            assert (counts["active"] > 0) == (isa == "portable")
    text = invoke("info").stdout
    for value in (said["cpu"], said["torch"], *lowbit.isa()["cpu"]):
        assert value in text


def test_help_and_info_do_not_import_transformers(run_python):
    script = """
import contextlib, sys
from lowbit.cli import main
for sys.argv in (["lowbit", "--help"], ["lowbit", "generate", "--help"], ["lowbit", "info"]):
    with contextlib.suppress(SystemExit):
        main()
print(sorted({"transformers", "torchao", "executorch"} & set(sys.modules)))
"""
    assert run_python(script).stdout.endswith("\n[]\n")


def test_version():
    assert invoke("--version").stdout == f"lowbit {lowbit.__version__}\n"


# errors


def broken(tmp_path: Path, **files) -> Path:
    """A copy of the float model with some files replaced, or removed where they are None."""
    target = tmp_path / "broken"
    shutil.copytree(FLOAT, target)
    for name, content in files.items():
        path = target / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return target


def config(**changes) -> str:
    return json.dumps(json.loads((FLOAT / "config.json").read_text()) | changes)


def error(result) -> str:
    """The one line on stderr of a command that failed, without its beginning; stdout is empty."""
    assert result.exit_code == 1, (result.exit_code, result.stdout, result.stderr, result.exception)
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and lines[0].startswith("lowbit: error: "), lines
    assert result.stdout == ""
    return lines[0].removeprefix("lowbit: error: ")


READING = {
    "quantize": lambda model, out: ("quantize", model, out / "new"),
    "generate": lambda model, out: ("generate", model, "--prompt", PROMPT),
    "eval": lambda model, out: ("eval", model, "--text", TINY / "heldout.txt"),
    "export": lambda model, out: ("export", model, "--to", "pte", "--output", out / "new.pte"),
    "inspect": lambda model, out: ("inspect", model),
    "tune": lambda model, out: ("tune", model),
}


@pytest.mark.parametrize("command", READING)
def test_errors_of_files(command, tmp_path):
    (tmp_path / "out").mkdir()

    def fails(model) -> str:
        message = error(invoke(*READING[command](model, tmp_path / "out")))
        assert list((tmp_path / "out").iterdir()) == []
        return message

    missing = tmp_path / "missing"
    assert str(missing) in fails(missing) and "expected" in fails(missing)
    weights = (FLOAT / "model.safetensors").read_bytes()
    for cut in (len(weights) - 1, 100, 0):
        model = broken(tmp_path, model__safetensors=weights[:cut])
        assert f"{model / 'model.safetensors'} is not a whole safetensors file" in fails(model)
        shutil.rmtree(model)
    model = broken(tmp_path, model__safetensors=None)
    assert f"{model} has neither model.safetensors nor model.safetensors.index.json" in fails(model)
    if command == "inspect":
        return  # it reads no more than that
    for content, said in (
        (None, "has no config.json"),
        ("{", "config.json is not"),
        ("[]", "config.json"),
        (config(model_type="unheard_of", architectures=["UnheardOf"]), "'unheard_of'"),
        (config(quantization_config={"quant_method": "gptq"}), "'gptq'"),
    ):
        shutil.rmtree(model)
        model = broken(tmp_path, config__json=content)
        assert said in fails(model)


def test_errors_of_packed_checkpoints(packed, tmp_path):
    later = tmp_path / "later"
    shutil.copytree(packed[0], later)
    text = json.loads((later / "config.json").read_text())
    text["quantization_config"]["format_version"] = 2
    (later / "config.json").write_text(json.dumps(text))
    message = error(invoke("generate", later, "--prompt", PROMPT))
    assert "format_version 2; this lowbit reads version 1" in message and str(later / "config.json") in message
    text["quantization_config"] |= {"format_version": 1, "something": "new"}
    (later / "config.json").write_text(json.dumps(text))
    assert "'something'" in error(invoke("eval", later, "--text", TINY / "heldout.txt"))
    for arguments in (("generate", packed[0], "--prompt", "x"), ("eval", packed[0], "--text", TINY / "heldout.txt")):
        assert f"{packed[0]} is packed already" in error(invoke(*arguments, "--bits", "4"))
    altered = bytearray((packed[0] / "model.safetensors").read_bytes())
    offset = int.from_bytes(altered[:8], "little") + 8
    altered[offset + 5000] ^= 1
    (later / "model.safetensors").write_bytes(altered)
    shutil.copy(packed[0] / "config.json", later)
    assert str(later / "model.safetensors") in error(invoke("generate", later, "--prompt", PROMPT))


def test_errors_of_inputs(packed, tmp_path):
    model = packed[0]
    assert (
        error(invoke("generate", model, "--prompt-file", tmp_path / "none"))
        == f"{tmp_path / 'none'}: No such file or directory"
    )
    (tmp_path / "latin").write_bytes(b"abc\xe9 def")
    for arguments in (("generate", model, "--prompt-file"), ("eval", model, "--text")):
        assert f"{tmp_path / 'latin'} is not UTF-8 text" in error(invoke(*arguments, tmp_path / "latin"))
    assert "has no chat template" in error(invoke("generate", model, "--prompt", "x", "--chat"))
    assert "expected fewer than the decoder's max_length of 16" in error(
        invoke("generate", model, "--prompt", "x " * 40, "--max-length", 16)
    )
    assert "max_length is 40; expected a positive multiple of 16" in error(
        invoke("generate", model, "--prompt", "x", "--max-length", 40)
    )
    assert "group_size is 33" in error(invoke("generate", FLOAT, "--prompt", "x", "--bits", 4, "--group-size", 33))
    assert "stride is 512" in error(invoke("eval", model, "--text", TINY / "heldout.txt", "--stride", 512))
    without = broken(tmp_path, tokenizer__json=None, tokenizer_config__json=None)
    assert f"{without} has no tokenizer.json" in error(invoke("generate", without, "--prompt", "x"))
    (without / "tokenizer.json").write_text("{}")
    assert f"the tokenizer in {without} does not load" in error(invoke("generate", without, "--prompt", "x"))
    assert "expected a name that ends in .pte" in error(
        invoke("export", model, "--to", "pte", "--output", tmp_path / "m.pt2")
    )
    assert "is not a directory" in error(invoke("export", model, "--to", "pte", "--output", tmp_path / "no" / "m.pte"))
    assert "llama-3.2-1b, " in error(invoke("tune", "llama-3.2-2b"))


def test_errors_with_json(tmp_path):
    result = invoke("generate", tmp_path / "none", "--prompt", "x", "--json")
    said = document(result)["error"]
    assert (result.exit_code, said["type"]) == (1, "NotADirectoryError")
    assert result.stderr.splitlines()[-1] == f"lowbit: error: {said['message']}"


def test_quantize_keeps_what_is_there(packed, tmp_path):
    before = sorted(packed[0].iterdir())
    assert f"{packed[0]} has {len(before)} files" in error(invoke("quantize", FLOAT, packed[0]))
    assert sorted(packed[0].iterdir()) == before
    assert "share one weight but have different configs" in error(
        invoke("quantize", FLOAT, tmp_path / "new", "--override", "lm_head=8")
    )
    assert f"{packed[0]} is quantised already" in error(invoke("quantize", packed[0], tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_no_space(tmp_path):
    # A limit on the size of files fails as a full disk does, in the middle of the file.
    script = 'ulimit -f 256 && trap "" XFSZ && exec "$@"'
    result = subprocess.run(
        ["bash", "-c", script, "bash", LOWBIT, "quantize", FLOAT, tmp_path / "new"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (result.returncode, result.stdout) == (1, "")
    started, said = result.stderr.splitlines()
    assert said.startswith("lowbit: error: ") and f"{tmp_path / 'new'}" in said and "nothing of it was kept" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number, code, tmp_path, run_python):
    script = """
import os, signal, sys
import lowbit.checkpoint
from lowbit.cli import main
number, target = int(sys.argv.pop(1)), sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
pack = lowbit.checkpoint._pack
def interrupted(*arguments):
    pack(*arguments)
    assert any(name.endswith(".partial") for name in os.listdir(os.path.dirname(target)))
    os.kill(os.getpid(), number)
lowbit.checkpoint._pack = interrupted
main()
"""
    result = run_python(script, int(number), "quantize", FLOAT, tmp_path / "new")
    assert (result.returncode, result.stdout) == (code, "")
    assert result.stderr.splitlines() == [f"quantising {FLOAT} ..."]
    assert list(tmp_path.iterdir()) == []


def test_broken_pipe():
    with subprocess.Popen([LOWBIT, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_usage_errors():
    for arguments, said in (
        (("generate", FLOAT), "--prompt"),
        (("generate", FLOAT, "--prompt", "a", "--prompt-file", "b"), "--prompt"),
        (("generate", FLOAT, "--prompt", "a", "--bits", 9), "--bits"),
        (("generate", FLOAT, "--prompt", "a", "--bits", 4, "--group-size", "many"), "--group-size"),
        (("eval", FLOAT, "--text", TINY / "heldout.txt", "--bits", "8,x"), "--bits"),
        (("quantize", FLOAT, "target", "--override", "lm_head"), "--override"),
        (("quantize", FLOAT, "target", "--override", "lm_head=x"), "--override"),
        (("export", FLOAT, "--to", "onnx", "--output", "m"), "--to"),
        (("frobnicate",), "frobnicate"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert said in result.stderr


def test_bugs_keep_their_traceback(monkeypatch):
    def fails():
        raise RuntimeError("a bug")

    monkeypatch.setattr(lowbit, "kernels", fails)
    assert repr(invoke("info").exception) == "RuntimeError('a bug')"


def test_debug_shows_where_an_error_comes_from(tmp_path):
    result = invoke("--debug", "inspect", tmp_path)
    assert isinstance(result.exception, FileNotFoundError)
    assert isinstance(invoke("inspect", tmp_path).exception, SystemExit)


@pytest.mark.parametrize("package", ["typer", "rich", "transformers", "safetensors"])
def test_missing_packages(package, packed, run_python):
    script = "import sys; sys.modules[sys.argv.pop(1)] = None; from lowbit.cli import main; main()"
    result = run_python(script, package, "generate", packed[0], "--prompt", "x")
    assert (result.returncode, result.stdout) == (1, "")
    message = result.stderr.splitlines()[-1]
    assert message.startswith("lowbit: error: ") and package in message and "pip install 'lowbit[llm]'" in message
    assert "Traceback" not in result.stderr


# docs/cli.md


def test_docs_have_every_command():
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == list(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app).commands))
def test_docs_have_every_option_and_default(command):
    documented = {
        option: default.strip()
        for option, default in re.findall(r"^\| `(--[a-z-]+)` \|(.*?)\|", section(command), re.M)
    }
    options = {}
    for parameter in typer.main.get_command(app).commands[command].params:
        if parameter.param_type_name == "option" and parameter.name not in ("as_json", "help"):
            default = parameter.default
            if isinstance(default, tuple | list):
                default = ", ".join(each.value for each in default)
            shown = "" if default is None else "off" if default is False else str(default)
            options[parameter.opts[0]] = "required" if parameter.required else shown
    assert documented == options
    assert f"\n    lowbit {command} " in section(command) or command == "info"
