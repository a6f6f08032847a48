"""`lowbit generate`, compared with the library."""

import io
import json
import math
import re
import shutil
import sys
from pathlib import Path

import lowbit
import pytest
import typer.testing
from command_line import FLOAT, PROMPT, document, documented_keys, error, invoke, run, section, text_of
from lowbit import llm
from lowbit.cli.generate import _lines, _read
from lowbit.llm.loading import TextStream, load_model, load_tokenizer

pytestmark = pytest.mark.first


def test_generate_streams_text(packed, expected):
    result = run("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 40)
    assert result.returncode == 0, result.stderr
    assert result.stdout == text_of(expected) + "\n"
    # Nothing else, in particular no output of other libraries.
    loading, figures = result.stderr.splitlines()
    assert loading == f"loading {packed[0]} ..."
    assert re.fullmatch(
        rf"{expected.prompt_tokens} prompt tokens, prefill [\d.]+ tokens/s; {len(expected.tokens)} new tokens, "
        r"decode [\d.]+ tokens/s, peak memory [\d.]+ [MG]B", figures,  # of the whole process, so GB after other tests
    ), figures  # fmt: skip


@pytest.mark.more
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
        steps = len(said["tokens"]) - (said["stopped"] != "stop")  # each gives a token; a stop token is not returned
        assert math.isclose(said["decode_tokens_per_second"], steps / said["decode_seconds"])
        assert said["peak_memory_bytes"] > sum(entry.bytes for entry in lowbit.inspect_checkpoint(packed[0]))
        assert set(said) == documented_keys("generate")
    one = document(invoke("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 1, "--threads", 2, "--json"))
    assert (one["tokens"], one["decode_tokens_per_second"], one["threads"]) == (expected.tokens[:1], None, 2)


def test_generate_quantizes_on_the_fly(packed):
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
    # A prompt without ties among the likeliest bfloat16 logits, because sampling chooses among equal ones.
    options = ("generate", packed[0], "--prompt", "Create a new", "--max-new-tokens", 24, "--temperature", 1.5, "--json")
    first, same, other, greedy = (
        document(invoke(*options, *more))["tokens"]
        for more in (("--seed", 1), ("--seed", 1), ("--seed", 2), ("--seed", 3, "--top-k", 1))
    )
    assert first == same != other
    assert (
        greedy == document(invoke(*options, "--temperature", 0))["tokens"] == document(invoke(*options, "--top-p", 0))["tokens"]
    )


def test_generate_runs_what_was_compiled(packed, expected, monkeypatch):
    calls, lengths = [], []

    def compile_decoder(decoder, directory):
        assert directory is None  # as LOWBIT_COMPILE_CACHE in conftest.py says
        lengths.append(decoder.max_length)

        def step(tokens, start):
            calls.append(tokens.shape[1])
            return decoder(tokens, start)

        return step

    monkeypatch.setattr(llm, "compile_decoder", compile_decoder)
    said = document(invoke("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 4, "--compile", "--json"))
    assert said["tokens"] == expected.tokens[:4]
    assert calls == [expected.prompt_tokens, 1, 1, 1]
    assert lengths == [min(1024, load_model(FLOAT).config.max_position_embeddings)]  # the same for all short texts


def test_no_compiler(packed, tmp_path):
    from torch._inductor import config

    for arguments in (
        ("generate", packed[0], "--prompt", PROMPT, "--compile"), ("bench", packed[0], "--mode", "aot"),
        ("export", packed[0], "--to", "pt2", "--output", tmp_path / "m.pt2"),
    ):  # fmt: skip
        # The system's errors for a directory and an empty name differ from that for a missing program.
        for compiler in ("no-such-compiler", str(tmp_path), ""):
            with config.patch({"cpp.cxx": (None, compiler)}):
                found = f"there is no C++ compiler: {compiler!r} does not run. Install g++ or clang, or name one in "
                assert found in error(invoke(*arguments))


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
    # As in the template, without another BOS.
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
    assert "" in pieces  # some characters take several tokens
    assert not any("\ufffd" in piece for piece in pieces)


def test_generate_continues_many_texts(packed, expected, tmp_path):
    first = "Return the number of names in the list, and raise an error if there are none. "
    texts = [PROMPT, first + "The names", "a", first + "An error"]
    (tmp_path / "prompts.txt").write_text("\n".join([texts[0], "", *texts[1:]]) + "\n")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": t} if t == "a" else t) for t in texts))
    base = ("generate", packed[0], "--max-new-tokens", 12, "--temperature", 0.7, "--seed", 4)
    alone = [document(invoke(*base[:-1], 4 + i, "--prompt", text, "--json")) for i, text in enumerate(texts)]
    for more in (("prompts.txt",), ("prompts.jsonl", "--at-once", 2), ("-",)):
        path = more[0] if more[0] == "-" else tmp_path / more[0]
        stdin = (tmp_path / "prompts.txt").read_text() if path == "-" else None
        said = document(invoke(*base, "--prompts", path, *more[1:], "--json", stdin=stdin))
        for i, (text, plain) in enumerate(zip(said["texts"], alone, strict=True)):
            assert text["number"] == i
            assert all(text[name] == plain[name] for name in ("text", "tokens", "stopped", "prompt_tokens"))
        assert [text["cached_tokens"] > 16 for text in said["texts"]] == [False, False, False, True]
        assert math.isclose(said["tokens_per_second"], 48 / said["seconds"])
    paragraph = section("generate").split("\nJSON with `--prompts`: ")[1]
    assert set(re.findall(r"`([a-z_]+)`", paragraph)) == set(said) | set(said["texts"][0])
    result = invoke(*base, "--prompts", tmp_path / "prompts.txt")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(lines, key=lambda line: line["number"]) == said["texts"]
    assert re.search(r"^4 texts, \d+ prompt tokens, of which \d+ were copied from another text; 48 new tokens, [\d.]+ "
                     r"tokens/s, peak memory", result.stderr, re.M)  # fmt: skip


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\x0c", "\x1e"])
def test_characters_that_do_not_end_a_line_of_prompts(inside, tmp_path):
    """JSON may contain U+2028; Python's splitlines takes it and other characters for line ends."""
    text = f"one{inside}two"
    for name, line in (("p.txt", text), ("p.jsonl", json.dumps(text, ensure_ascii=False))):
        assert _lines(tmp_path / name, f"{line}\n\n{line}\n") == [text, text]


def test_a_byte_order_mark_is_not_text(tmp_path, monkeypatch):
    marked = "\ufeffone"
    (tmp_path / "p.txt").write_text(marked, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(marked))
    assert [_read(path) for path in (tmp_path / "p.txt", Path("-"))] == ["one", "one"]


def test_invalid_prompts(packed, tmp_path):
    def refused(content: str, *more, name="prompts.txt"):
        (tmp_path / name).write_text(content)
        return error(invoke("generate", packed[0], "--prompts", tmp_path / name, *more))

    assert "has no prompts; expected one per line" in refused(" \n\n")
    assert "line 2 of" in (found := refused('"a"\n{', name="p.jsonl")) and "is not JSON" in found
    assert "line 2 of" in (found := refused('"a"\n"\\ud800"', name="p.jsonl")) and "is not UTF-8 text: found half of" in found
    for name in ("p.txt", "p.json"):
        assert "line 1 of" in (found := refused('{"prompt": "a"}', name=name)) and "name ends in .jsonl" in found
    for line in ("3", "{}", '{"prompt": 4}', "null", "[" * 100000):
        found = refused(line, name="p.jsonl")
        assert re.search("line 1 of .* (has no text; expected a string, or an object|is not JSON)", found)
    long = refused("a\n" + "one two " * 40, "--max-length", 32)
    assert re.search("prompt 1 has [0-9]+ tokens; expected fewer than the decoder's max_length of 32", long), long
    for more in (("--compile",), ("--guesses", 2), ("--draft", packed[0])):
        result = invoke("generate", packed[0], "--prompts", tmp_path / "prompts.txt", *more)
        assert result.exit_code == 2 and "is for one text at a time" in result.stderr
    result = invoke("generate", packed[0], "--prompts", tmp_path / "prompts.txt", "--prompt", "a")
    assert result.exit_code == 2 and "expected exactly one of the three" in " ".join(result.stderr.replace("│", " ").split())


def test_control_characters_stay_out_of_terminals(packed, monkeypatch):
    said = "a\x1b[31m\x9b31m\tb\r\n👩‍👧\x07"
    monkeypatch.setattr(TextStream, "push", lambda self, token: said)
    command = ("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 2)
    assert invoke(*command).stdout == 2 * said.replace("\r\n", "\n") + "\n"  # otherwise unchanged; the runner reads lines
    runner = sys.modules["typer.testing" if hasattr(typer.testing, "_NamedTextIOWrapper") else "click.testing"]
    monkeypatch.setattr(runner._NamedTextIOWrapper, "isatty", lambda self: self.name == "<stdout>", raising=False)
    assert invoke(*command).stdout == 2 * "a[31m31m\tb\n👩‍👧" + "\n"
