"""`lowbit chat` in a pseudo-terminal, compared with the library, and with messages from a pipe."""

import os
import shutil
import signal
import termios

import pexpect
import pytest
import torch
from checkpoints import make_model
from command_line import FLOAT, LOWBIT, ONE_THREAD, TINY, document, documented_keys, error, invoke, keys_in
from gguf_files import write_model
from lowbit import llm
from lowbit.cli import chat_session as command
from lowbit.cli.output import Output
from lowbit.llm.loading import TextStream, load_model, load_tokenizer
from lowbit.llm.templates import render
from test_chat import PLAIN

READY, ACCEPTED = "\x1b[?2004h", "\x1b[?2004l"  # bracketed paste mode, on while a line is edited


@pytest.fixture(scope="module")
def talking(packed, tmp_path_factory):
    """The packed model with a chat template."""
    target = tmp_path_factory.mktemp("talking") / "model"
    shutil.copytree(packed[0], target)
    (target / "chat_template.jinja").write_text(PLAIN)
    return target


def answers(model, *messages: str, system: str = "", **options) -> list[str]:
    """Answers by generate, each computed from scratch."""
    decoder, tokenizer = llm.Decoder(load_model(model), 256), load_tokenizer(model)
    said, texts = [{"role": "system", "content": system}], []
    for message in messages:
        said.append({"role": "user", "content": message})
        ids = render(tokenizer, said, PLAIN)
        stream = TextStream(tokenizer, ids)
        tokens = llm.generate(decoder, ids, max_length=256, **{"max_new_tokens": 16} | options).tokens
        texts.append("".join(map(stream.push, tokens)))
        said.append({"role": "assistant", "content": texts[-1]})
    return texts


class Terminal:
    def __init__(self, *arguments, **more: str):
        environment = os.environ | ONE_THREAD | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": "100"} | more
        self.child = pexpect.spawn(str(LOWBIT), ["chat", *map(str, arguments)], env=environment, encoding="utf-8", timeout=300)
        self.modes = termios.tcgetattr(self.child.child_fd)
        self.child.expect_exact(READY)

    def type(self, keys: str) -> str:
        """Sends keys that end a line, and returns the output until the next prompt."""
        self.child.send(keys)
        self.child.expect_exact(ACCEPTED)
        self.child.expect_exact(READY)
        return self.child.before.replace("\r\n", "\n")

    def end(self, keys: str) -> int:
        self.child.send(keys)
        self.child.expect(pexpect.EOF)
        self.child.close()
        return self.child.exitstatus


@pytest.mark.more
def test_a_conversation_in_a_terminal(talking):
    one, two, three = answers(talking, "Return the number", "Return the numbers", "x\ny")
    (anew,) = answers(talking, "Return", system="Raise an error.")
    cut = "\n(cut off after 16 tokens, see --max-new-tokens)\n"
    terminal = Terminal(talking, "--max-new-tokens", 16, "--max-length", 256)
    assert terminal.type("Return the number\r") == one + cut
    up, left = "\x1b[A", "\x1b[D"
    assert terminal.type(f"{up}{left}rz\x7f\x1b[3~s\r") == two + cut  # the previous message, edited
    assert terminal.type("x\x1b\ry\r") == three + cut  # Alt-Enter
    assert terminal.type("thrown away\x03") == ""  # Ctrl-C clears the line
    assert "there is no command /never" in terminal.type("/never mind\r")
    assert "/system TEXT" in terminal.type("/help\r")
    assert "with this system prompt" in terminal.type("/system Raise an error. \r")
    assert terminal.type("Return\r") == anew + cut
    assert terminal.end("\x04") == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(talking):
    # The slowest kernels, so that the answers are not complete before the signals come.
    terminal = Terminal(talking, "--max-length", 1024, "--temperature", 0, LOWBIT_ISA="portable")
    child = terminal.child
    child.send("Return the number\r")
    child.expect_exact(ACCEPTED)
    child.expect_exact("of")  # the answer has started
    child.send("\x03")
    child.expect_exact(READY)
    assert child.before.endswith("(stopped)\r\n")
    child.send("and\r")
    child.expect_exact(ACCEPTED)
    child.expect("[a-z]{3}")
    os.kill(child.pid, signal.SIGINT)  # another way to interrupt
    child.expect_exact(READY)
    assert child.before.endswith("(stopped)\r\n")
    os.kill(child.pid, signal.SIGTERM)
    child.expect(pexpect.EOF)
    assert termios.tcgetattr(child.child_fd)[3] == terminal.modes[3]  # echo and line mode are back
    child.close()
    assert child.exitstatus == 128 + signal.SIGTERM


def test_messages_from_a_pipe(talking):
    options = ("chat", talking, "--max-new-tokens", 16, "--max-length", 256)
    one, two = answers(talking, "Return the number", " of")
    result = invoke(*options, stdin="Return the number\n\n of\n/quit\nnever")
    assert (result.exit_code, result.stdout) == (0, f"{one}\n{two}\n"), result.stderr
    said = document(invoke(*options, "--json", stdin="Return the number\n of\n/reset\nReturn the number\n"))
    assert set(said) | keys_in(said["turns"]) == documented_keys("chat")
    turns = said["turns"]
    assert [turn["answer"] for turn in turns] == [one, two, one]
    assert turns[1]["cached_tokens"] == turns[0]["prompt_tokens"] + 15
    assert turns[1]["prompt_tokens"] > turns[1]["cached_tokens"] and turns[2]["cached_tokens"] >= 1
    drawn = ("--temperature", 0.8, "--top-k", 50, "--top-p", 0.9, "--repetition-penalty", 1.2, "--seed", 5)
    said = document(invoke(*options, *drawn, "--system", "Raise.", "--json", stdin="Return the number\n"))
    settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5}
    assert {name: said["sampling"][name] for name in settings} == settings and said["sampling"]["max_new_tokens"] == 16
    assert [turn["answer"] for turn in said["turns"]] == answers(talking, "Return the number", system="Raise.", **settings)


def test_settings_come_from_the_model(talking, tmp_path):
    shutil.copytree(talking, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "max_new_tokens": 3, "min_p": 0.1, "top_h": 0.5, '
        '"eos_token_id": 1}'
    )
    result = invoke("chat", tmp_path / "model", "--top-p", 0.5, "--json", stdin="Return\n")
    said = document(result)
    assert said["sampling"] == {
        "temperature": 0.7, "top_k": 50, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_breakers": [],
        "logit_bias": {}, "stop": [], "seed": 0, "max_new_tokens": 3,
    }  # fmt: skip
    assert len(said["turns"][0]["tokens"]) <= 3
    assert "sets top_h, which lowbit does not support" in result.stderr


def test_an_answer_ends_at_a_string(talking):
    (whole,) = answers(talking, "Return the number")
    options = ("chat", talking, "--max-new-tokens", 16, "--max-length", 128, "--json")
    said = document(invoke(*options, "--stop", whole[3:6], stdin="Return the number\n"))
    (turn,) = said["turns"]
    assert (turn["answer"], turn["stopped"]) == (whole[: whole.find(whole[3:6])], "until")
    assert said["sampling"]["stop"] == [whole[3:6]]


def test_a_model_without_template(packed):
    message = error(invoke("chat", packed[0], stdin="Return\n"))
    assert "has no chat template" in message and "--template FILE gives one" in message
    options = ("--template", TINY / "plain.jinja", "--max-new-tokens", 16, "--max-length", 256)
    result = invoke("chat", packed[0], *options, stdin="Return the number\n")
    assert result.stdout == answers(packed[0], "Return the number")[0] + "\n"


def test_a_gguf_file_is_imported_first(tmp_path):
    tokens = ["<s>", "</s>", "t", "h", "th", "e", "the", *[chr(0x100 + number) for number in range(396)]]
    write_model(tmp_path / "m.gguf", make_model(dtype=torch.float32, intermediate_size=96), "Q4_0", tokens)
    options = ("chat", tmp_path / "m.gguf", "--max-new-tokens", 3, "--max-length", 32, "--json")
    first, second = (invoke(*options, stdin="the the\n") for _ in range(2))
    assert "is imported to" in first.stderr and "was imported before" in second.stderr
    turns = document(first)["turns"]
    assert turns[0]["tokens"] == document(second)["turns"][0]["tokens"] and len(turns[0]["tokens"]) == 3


def test_a_float_checkpoint_is_quantized_on_the_way():
    options = ("--template", TINY / "plain.jinja", "--bits", 4, "--max-new-tokens", 4, "--json")
    said = document(invoke("chat", FLOAT, *options, stdin="Return\n"))
    assert len(said["turns"][0]["tokens"]) == 4
    assert "no command /x" in error(invoke("chat", FLOAT, *options[:-1], stdin="/x\n"))


def test_the_library_for_terminals_is_missing(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(command, "import_module", missing)
    with pytest.raises(ImportError, match=r"prompt_toolkit not installed.*pip install prompt_toolkit"):
        command._typed(Output(False))
