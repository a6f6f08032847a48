"""Errors that a user can correct give one line and exit code 1, wrong options exit code 2; bugs keep their traceback."""

import json
import os
import shutil
import signal
import subprocess
from contextlib import nullcontext

import lowbit
import pytest
import torch
import transformers
import typer.testing
from command_line import FLOAT, LOWBIT, PROMPT, TINY, broken, config, document, error, invoke
from lowbit.cli import models, options
from lowbit.cli.app import make_app
from lowbit.cli.serve import _refuse_unused

pytestmark = pytest.mark.first

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
        return  # it does not read further
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


@pytest.mark.parametrize("command", ["quantize", "generate", "tune"])
@pytest.mark.parametrize(
    "changes, said",
    [
        # transformers' text after it differs between versions; all contain the name.
        ({"num_hidden_layers": "five"}, "config.json has num_hidden_layers 'five'; expected a positive whole number"),
        ({"num_hidden_layers": 9000}, "describes a model of more than 1940 modules"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers 1000000000000; expected at most 10000"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"intermediate_size": -4}, "negative dimension -4"),
        ({"hidden_size": 10**12}, "expected [2048, 1000000000000], as config.json says"),
        ({"vocab_size": 10**30}, "config.json describes a model of type 'llama'"),
        ({"tie_word_embeddings": False}, "lacks 1 of the 48 tensors of LlamaForCausalLM: lm_head.weight"),
        ({"hidden_act": "nope"}, "KeyError: 'nope'"),
        ({"architectures": 3}, "config.json has architectures 3; expected a list of texts"),
        ({"dtype": "float99"}, "has no attribute 'float99'"),
    ],
)
def test_errors_of_configs(command, changes, said, tmp_path):
    model = broken(tmp_path, config__json=config(**changes))
    (tmp_path / "out").mkdir()
    message = error(invoke(*READING[command](model, tmp_path / "out")))
    assert said in message and str(model) in message
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_errors_of_json(name, tmp_path):
    weights = {"model.safetensors": None} if "index" in name else {}
    for content, said in (
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "has 'c' twice"),
        (b'{"a": "\xff"}', "utf-8"),
        (b" " * ((64 << 20) + 1), "67108865 bytes; expected at most 67108864"),
        (b"[1]", "holds a list; expected an object"),
    ):
        changes = {name: content} | weights
        model = broken(tmp_path, **{each.replace(".", "__"): value for each, value in changes.items()})
        message = error(invoke("generate", model, "--prompt", PROMPT))
        assert message.startswith(str(model / name)) and said in message
        shutil.rmtree(model)


def test_errors_of_another_models_files(tmp_path):
    tokenizer = json.loads((FLOAT / "tokenizer.json").read_text())
    other = {"id": 2048, "content": "<other>", "special": False}
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | other)
    model = broken(tmp_path, tokenizer__json=json.dumps(tokenizer))
    message = error(invoke("generate", model, "--prompt", "a <other> token"))
    assert "2048" in message and str(model) in message and "another model" in message


@pytest.mark.parametrize("temperature", ["1e-320", "1e-45", "1e308"])
def test_every_temperature_draws(packed, temperature):
    said = invoke("generate", packed[0], "--prompt", PROMPT, "--max-new-tokens", 3, "--temperature", temperature)
    assert said.exit_code == 0, said.exception


def test_errors_of_packed_checkpoints(packed, tmp_path):
    later = tmp_path / "later"
    shutil.copytree(packed[0], later)
    text = json.loads((later / "config.json").read_text())
    text["quantization_config"]["format_version"] = 3
    (later / "config.json").write_text(json.dumps(text))
    message = error(invoke("generate", later, "--prompt", PROMPT))
    assert "format_version 3; this lowbit reads versions 1 and 2" in message and str(later / "config.json") in message
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
    (tmp_path / "one").write_text("")
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
    assert "expected 2 or more" in error(invoke("eval", model, "--text", tmp_path / "one", "--window", 16))
    assert "stride is 512" in error(invoke("eval", model, "--text", TINY / "heldout.txt", "--stride", 512))
    without = broken(tmp_path, tokenizer__json=None, tokenizer_config__json=None)
    assert f"{without} has no tokenizer.json" in error(invoke("generate", without, "--prompt", "x"))
    (without / "tokenizer.json").write_text("{}")
    assert f"the tokenizer in {without} does not load" in error(invoke("generate", without, "--prompt", "x"))
    assert "expected a name that ends in .pte" in error(invoke("export", model, "--to", "pte", "--output", tmp_path / "m.pt2"))
    assert "is not a directory" in error(invoke("export", model, "--to", "pte", "--output", tmp_path / "no" / "m.pte"))
    assert "llama-3.2-1b, " in error(invoke("tune", "llama-3.2-2b"))


@pytest.mark.parametrize("kind", ["pte", "pt2", "gguf"])
def test_exports_need_a_name(packed, kind):
    result = invoke("export", packed[0], "--to", kind)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and f"--output: it is missing; expected the file to write, such as model.{kind}" in said


@pytest.mark.parametrize("kind", ["pte", "pt2", "gguf", "plan"])
def test_exports_keep_files_of_others(packed, tmp_path, kind):
    target = tmp_path / f"mine.{kind}"
    target.write_bytes(b"GGUF of another program")
    said = error(invoke("export", packed[0], "--to", kind, "--output", target))
    assert said == f"{target} exists and is not a .{kind} file of lowbit; choose another name, or delete it"
    assert target.read_bytes() == b"GGUF of another program"


def test_errors_with_json(tmp_path):
    result = invoke("generate", tmp_path / "none", "--prompt", "x", "--json")
    said = document(result)["error"]
    assert (result.exit_code, said["type"]) == (1, "NotADirectoryError")
    assert result.stderr.splitlines()[-1] == f"lowbit: error: {said['message']}"


@pytest.mark.more
def test_broken_pipe():
    with subprocess.Popen([LOWBIT, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_ctrl_c_while_libraries_are_imported_is_quiet(run_python):
    script = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *others):
        if name == "lowbit.cli":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from lowbit_autoload.command import main
main()
"""
    found = run_python(script, "info")
    assert (found.returncode, found.stdout, found.stderr) == (-signal.SIGINT, "", "")


def test_a_command_restores_the_signal_handlers(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        for arguments in (["info"], ["inspect", str(tmp_path)]):
            typer.testing.CliRunner().invoke(make_app(), arguments)
            assert signal.getsignal(number) is before


@pytest.mark.more
@pytest.mark.parametrize("arguments", ["info", "info --json"])
def test_stdout_that_cannot_be_written(arguments):
    command = [LOWBIT, *arguments.split()]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (1, "lowbit: error: No space left on device\n")
    found = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    expected = "lowbit: error: stdout is closed; expected an open stream for the result\n"
    assert (found.returncode, found.stderr) == (1, expected)


def test_a_sentence_model_is_not_mistaken_for_a_language_model(tmp_path):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    message = error(invoke("tune", tmp_path))
    assert (
        "tensors of BertLMHeadModel" in message
        and "says that it has a BertModel, which is not a causal language model" in message
    )


def test_usage_errors():
    for arguments, said in (
        (("generate", FLOAT), "--prompt"),
        (("generate", FLOAT, "--prompt", "a", "--prompt-file", "b"), "--prompt"),
        (("generate", FLOAT, "--prompt", "a", "--bits", 9), "--bits"),
        (("generate", FLOAT, "--prompt", "a", "--bits", 4, "--group-size", "many"), "--group-size"),
        (("generate", FLOAT, "--prompt", "a", "--bits", 4, "--group-size", 33), "'33' is not a group size; expected a"),
        (("quantize", FLOAT, "target", "--override", "*=4,7"), "value for --override: '7' is not a group size"),
        (("quantize", FLOAT, "target", "--target-bits", 3, "--target-size", "1GB", "--calibrate", FLOAT), "--target-bits"),
        (("generate", FLOAT, "--prompt", "a", "--threads", 100_000), "--threads"),
        (("eval", FLOAT, "--text", TINY / "heldout.txt", "--bits", "8,x"), "--bits"),
        (("eval", FLOAT, "--text", TINY / "heldout.txt", "--bits", "4,9"), "expected numbers from 1 to 8"),
        (("quantize", FLOAT, "target", "--override", "lm_head"), "--override"),
        (("quantize", FLOAT, "target", "--override", "lm_head=x"), "--override"),
        (("export", FLOAT, "--to", "onnx", "--output", "m"), "--to"),
        (("generate", FLOAT, "--prompt", "a", "--top-k", 0), "--top-k"),
        (("generate", FLOAT, "--prompt", "a", "--logit-bias", "5=1", "--logit-bias", "5=-3"), "token 5 has two; expected one"),
        (("generate", FLOAT, "--prompt", "a", "--top-p", 1.5), "--top-p"),
        (("generate", FLOAT, "--prompt", "a", "--top-p", "nan"), "--top-p"),
        (("generate", FLOAT, "--prompt", "a", "--temperature", -1), "--temperature"),
        (("generate", FLOAT, "--prompt", "a", "--temperature", "inf"), "--temperature"),
        (("generate", FLOAT, "--prompt", "a", "--temperature", "nan"), "--temperature"),
        (("tune", FLOAT, "--seconds", "nan"), "--seconds"),
        (("frobnicate",), "frobnicate"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), arguments
        assert said in result.stderr


@pytest.mark.parametrize(
    "arguments, found",
    [
        (("quantize", FLOAT, "target", "--bits", "4,"), "'4,'"),
        (("quantize", FLOAT, "target", "--bits=-1"), "'-1'"),
        (("quantize", FLOAT, "target", "--bits", 3, "--bits", ""), "''"),
        (("quantize", FLOAT, "target", "--mapping", "Affine"), "'Affine'"),
        (("generate", FLOAT, "--prompt", "a", "--threads", 0), "'0'"),
        (("tune", FLOAT, "--seconds", "-0"), "'-0'"),
        (("bench", FLOAT, "--mode", "fast"), "'fast'"),
    ],
)
def test_usage_errors_say_what_was_found(arguments, found):
    result = invoke(*arguments)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, said.count(found)) == (2, 1), said
    assert f": {found}" in said  # after the option's name


def test_errors_of_paths_and_overrides_name_what_is_wrong(packed, tmp_path):
    draft = ("generate", packed[0], "--prompt", "a", "--draft", tmp_path / "none")
    assert f"{tmp_path / 'none'} is not a directory; expected one with tokenizer.json" in error(invoke(*draft))
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    assert "expected .safetensors or .gguf at the end of its name" in error(invoke("inspect", tmp_path / "model.bin"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    says = f"{tmp_path / 'model.gguf'} is a GGUF file; expected a checkpoint's directory: lowbit import converts it"
    readers = {**READING, "report": lambda model, out: ("report", model, out, "--text", TINY / "heldout.txt")}
    for command in ("eval", "export", "tune", "report"):
        assert error(invoke(*readers[command](tmp_path / "model.gguf", tmp_path))) == says, command
    (tmp_path / "model").mkdir()
    whole = ("quantize", tmp_path / "model.gguf", tmp_path / "new", "--bits", 3, "--override", "a*=8", "--override", "b=float")
    assert error(invoke(*whole)).endswith(
        f": lowbit import {tmp_path}/model.gguf {tmp_path}/model-imported && lowbit quantize {tmp_path}/model-imported "
        f"{tmp_path}/new --bits 3 --override 'a*=8' --override b=float"
    )
    levels = ("quantize", FLOAT, tmp_path / "new", "--bits", 3, "--mapping", "levels", "--override", "lm_head=8")
    assert "overrides has 'lm_head': bits is 8; expected 2, 3 or 4 with a table of levels" in error(invoke(*levels))


def test_options_that_would_not_count_are_refused(packed, tmp_path):
    text, page = TINY / "heldout.txt", tmp_path / "page.html"
    write, to = ("generate", FLOAT, "--prompt", "a"), ("export", packed[0], "--to")
    for arguments, option, why in (
        ((*write, "--mapping", "levels"), "--mapping", "without --bits"),
        ((*write, "--embedding-bits", 4), "--embedding-bits", "without --bits"),
        ((*write, "--activation-bits", 16), "--activation-bits", "without --bits"),
        ((*write, "--at-once", 4), "--at-once", "without --prompts"),
        ((*write, "--top-k", 4), "--top-k", "at --temperature 0"),
        ((*write, "--top-p", 0.5), "--top-p", "at --temperature 0"),
        (("chat", packed[0], "--group-size", 64), "--group-size", "without --bits"),
        ((*to, "pte", "--output", tmp_path / "m.pte", "--mapping", "affine"), "--mapping", "without --bits"),
        ((*to, "gguf", "--output", tmp_path / "m.gguf", "--chunk", 4), "--chunk", "with --to gguf"),
        (("eval", FLOAT, "--text", text, "--group-size", 64), "--group-size", "without --bits"),
        (("quantize", FLOAT, tmp_path / "new", "--method", "gptq"), "--method", "without --calibrate"),
        (("quantize", FLOAT, tmp_path / "new", "--window", 64), "--window", "without --calibrate"),
        (("quantize", FLOAT, tmp_path / "new", "--target-bits", 3), "--target-bits", "without --calibrate"),
        (("report", FLOAT, page, "--text", text, "--calibrate-tokens", 999), "--calibrate-tokens", "without --calibrate"),
        (("report", FLOAT, page, "--text", text, "--methods", "gptq"), "--methods", "without --calibrate"),
        (("tune", packed[0], "--group-size", 64), "--group-size", "which is packed already"),
        (("bench", packed[0], "--mode", "eager", "--activation-bits", 16), "--activation-bits", "which is packed already"),
        (("serve", packed[0], "--image-pixels", 999), "--image-pixels", "without a vision model"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (2, ""), (arguments, result.output)
        assert f"Invalid value for {option}: it has no effect" in result.stderr.replace("\n", " "), result.stderr
        assert why in " ".join(result.stderr.replace("│", " ").split()), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_options_that_no_served_model_uses(monkeypatch):
    from lowbit.serve.embeddings import Encoder
    from lowbit.serve.image_conversations import ImageModel
    from lowbit.serve.model_list import LanguageModel
    from lowbit.serve.speech import SpeechModel

    used = {"image_pixels": {ImageModel}, "bits": {ImageModel, LanguageModel, SpeechModel}}
    used |= {"cache": used["bits"], "draft": used["bits"] - {SpeechModel}, "template": used["bits"] - {SpeechModel}}
    for name, kinds in used.items():
        monkeypatch.setattr(options, "on_command_line", {name: f"--{name}"})
        for kind in (Encoder, ImageModel, LanguageModel, SpeechModel):
            models = [object.__new__(kind), object.__new__(Encoder)]
            with nullcontext() if kind in kinds else pytest.raises(typer.BadParameter, match="no effect without a .* model"):
                _refuse_unused(models)


def test_bugs_keep_their_traceback(monkeypatch):
    def fails():
        raise RuntimeError("a bug")

    monkeypatch.setattr(lowbit, "kernels", fails)
    assert repr(invoke("info").exception) == "RuntimeError('a bug')"


def test_bugs_keep_their_traceback_within_other_libraries(packed, monkeypatch):
    from lowbit.hf import quantizer

    def fails(*arguments):
        raise TypeError("a bug")

    monkeypatch.setattr(quantizer, "place_packed", fails)  # called indirectly by transformers
    assert repr(invoke("generate", packed[0], "--prompt", PROMPT).exception) == "TypeError('a bug')"


def test_a_model_that_does_not_run(packed, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    code: dict = {"__name__": "transformers.models.llama.modeling_llama"}
    exec("def forward(*arguments): raise RuntimeError('sizes do not match')", code)
    monkeypatch.setattr(LlamaMLP, "forward", code["forward"])
    message = error(invoke("eval", packed[0], "--text", TINY / "heldout.txt"))
    assert message == f"the model in {packed[0]} does not run: RuntimeError: sizes do not match"


def test_debug_shows_where_an_error_comes_from(tmp_path):
    result = invoke("--debug", "inspect", tmp_path)
    assert isinstance(result.exception, FileNotFoundError)
    assert isinstance(invoke("inspect", tmp_path).exception, SystemExit)


@pytest.mark.parametrize("package", ["typer", "rich", "transformers", "safetensors"])
def test_missing_packages(package, packed, fork_python):
    script = "import sys; sys.modules[sys.argv.pop(1)] = None; from lowbit.cli import main; main()"
    result = fork_python(script, package, "generate", packed[0], "--prompt", "x")
    assert (result.returncode, result.stdout) == (1, "")
    message = result.stderr.splitlines()[-1]
    assert message.startswith("lowbit: error: ") and package in message
    assert ("pip install " + (package if package in ("typer", "rich") else "'lowbit[llm]'")) in message
    assert "Traceback" not in result.stderr


def test_a_prompt_that_is_not_utf8(packed):
    """As passed by a shell; the error is about the prompt, not the model."""
    prompt = os.fsdecode(b"caf\xe9")
    assert error(invoke("generate", packed[0], "--prompt", prompt)) == (
        "--prompt is not UTF-8 text: found the byte 0xe9 at character 3"
    )
    assert "--system is not UTF-8 text: found half of a character, 0xd800, at character 0" in error(
        invoke("chat", packed[0], "--system", "\ud800", stdin="")
    )
    odd = "\udcff"
    assert "--dry-breaker is not UTF-8 text: found the byte 0xff at character 0" in error(
        invoke("generate", packed[0], "--prompt", "a", "--dry-multiplier", 1, "--dry-breaker", odd)
    )
    assert "--override is not UTF-8 text: found the byte 0xff at character 0" in error(
        invoke("quantize", FLOAT, "target", "--override", f"{odd}=4")
    )


def test_a_message_that_is_not_utf8(packed):
    found = invoke("chat", packed[0], "--template", TINY / "plain.jinja", stdin=b"caf\xe9\n")
    assert "the message is not UTF-8 text: found the byte 0xe9 at character 3" in error(found)


def test_more_threads_than_cpus(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "available_cpus", lambda: 2)
    warning = "lowbit: warning: --threads is 3, and this process may use 2 CPUs; expected at most 2, because"
    for arguments in (
        ("generate", packed[0], "--prompt", "a", "--max-new-tokens", 1),
        ("quantize", FLOAT, tmp_path / "quantized"),
        ("dequantize", packed[0], tmp_path / "float"),
    ):
        for threads, count in ((3, 1), (2, 0)):
            if threads == 2:
                arguments = [*arguments[:2], tmp_path / "again", *arguments[3:]] if "generate" not in arguments else arguments
                shutil.rmtree(tmp_path / "again", ignore_errors=True)
            result = invoke(*arguments, "--threads", threads)
            assert result.exit_code == 0, result.stderr
            assert result.stderr.count(warning) == count
            assert torch.get_num_threads() == threads
    assert invoke("import", FLOAT, tmp_path / "x", "--threads", 3).exit_code == 1
    assert invoke("export", packed[0], "--to", "gguf", "--output", tmp_path / "x.pte", "--threads", 3).exit_code == 1
