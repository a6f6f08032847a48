"""lowbit.files.untrusted: untrusted JSON, its error messages, and which library an exception comes from."""

import gc
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from lowbit.files.config_json import read_config
from lowbit.files.gguf_reader import read_gguf
from lowbit.files.untrusted import MOST_JSON, interpreting, one_line, printable, raised_by_reader, read_json


def test_a_file_with_one_object(tmp_path):
    file = tmp_path / "config.json"
    largest = b'{"a": {"b": 1}}'.ljust(64 << 20)
    assert len(largest) == MOST_JSON
    file.write_bytes(largest)
    assert read_json(file) == {"a": {"b": 1}}
    deep = b'{"a": [' * 49 + b'{"b": [1, 2]}' + b"]}" * 49
    file.write_bytes(deep)
    assert read_json(file) == json.loads(deep)
    for content, message in (
        (largest + b" ", "has 67108865 bytes; expected at most 67108864"),
        (b'{"a": 1, "b": 2, "c": {"x": 1, "y": 2, "x": 3}}', "is not JSON: an object has 'x' twice"),
        (b"[1]", "holds a list; expected an object"),
        (b"[" * 200_000, "is nested too deeply"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "is nested too deeply; expected up to 100 levels"),
        (b'{"a": ' * 101 + b"{}" + b"}" * 101, "is nested too deeply; expected up to 100 levels"),
        (b'{"\xff": 1}', "is not JSON: 'utf-8' codec"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            read_json(file)
        assert str(caught.value).startswith(str(file)) and message in str(caught.value)


def test_fields_of_config_json_have_their_types(tmp_path):
    file = tmp_path / "config.json"
    right = {
        "model_type": "llama", "architectures": ["A"], "vocab_size": 8, "hidden_size": 1, "num_hidden_layers": 2, "more": [1],
        "tie_word_embeddings": False, "rope_scaling": None, "quantization_config": {"quant_method": "x"}, "text_config": None,
    }  # fmt: skip
    file.write_text(json.dumps(right | {"vision_config": right}))
    assert read_config(tmp_path)["vision_config"] == right
    odd = [["llama"], {"a": 1}, "x", -1, 0, True, 1.5, "8"]
    for name, good in {
        "model_type": (str,), "transformers_version": (str,), "architectures": (), "tie_word_embeddings": (bool,),
        "vocab_size": (), "hidden_size": (), "num_hidden_layers": (),
        "rope_scaling": (dict,), "rope_parameters": (dict,), "text_config": (dict,),
    }.items():  # fmt: skip
        for value in [*odd, [1]] if name == "architectures" else odd:
            for inner in (False, True):
                wrong = right | {name: value}
                file.write_text(json.dumps({"text_config": wrong} if inner else wrong))
                if isinstance(value, good) or (name == "architectures" and value == ["llama"]):
                    assert read_config(tmp_path)
                    continue
                with pytest.raises(ValueError) as caught:
                    read_config(tmp_path)
                assert str(caught.value).startswith(f"{file} has {'text_config.' * inner}{name} {value!r}; expected ")


def test_not_a_file(tmp_path):
    """A pipe would block, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        for read in (read_json, read_gguf):
            with pytest.raises(ValueError, match=f"{path} is a pipe, a socket or a device; expected a file"):
                read(path)
    with pytest.raises(ValueError, match="is a directory; expected a file"):
        read_json(tmp_path)


def test_what_a_terminal_is_shown():
    assert printable("\x1b[2Jname\u202e") == r"\x1b[2Jname\u202e" and printable("größe") == "größe"
    assert one_line("a\n  b\t\x07") == r"a b \x07" and one_line(KeyError()) == "KeyError"
    assert one_line("x" * 1000) == "x" * 1000 and one_line("x" * 1001) == "x" * 1000 + " [...]"
    assert one_line("abcd", 3) == "abc [...]"


def raised(error: BaseException, *packages: str) -> BaseException:
    """An exception as if raised by code of the last package, called by the package before it."""

    def call(packages):
        if not packages:
            raise error
        exec("call(rest)", {"call": call, "rest": packages[1:], "__name__": packages[0]})

    try:
        call(packages)
    except BaseException as caught:
        return caught
    raise AssertionError


def test_the_cause_of_an_error_is_recognized():
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    for error in (
        panic("a slice"), Exception("tokenizers"), raised(KeyError("a"), "transformers.models"),
        raised(json.JSONDecodeError("", "", 0), "lowbit.nn", "jinja2"), raised(KeyError("a"), "tokenizers", "numpy"),
    ):  # fmt: skip
        assert raised_by_reader(error), error
    for error in (
        KeyError("a"), KeyboardInterrupt(), raised(KeyboardInterrupt(), "transformers"), raised(KeyError("a")),
        raised(KeyError("a"), "transformers", "lowbit.nn"), raised(KeyError("a"), "numpy"),
    ):  # fmt: skip
        assert not raised_by_reader(error), error
    for error, said in ((panic("a slice"), "model: PanicException: a slice"), (Exception("no"), "model: Exception: no")):
        with pytest.raises(ValueError) as caught, interpreting("model"):
            raise error
        assert str(caught.value) == said and caught.value.__cause__ is error
    for error in (KeyError("a"), MemoryError(), ImportError("x")):
        with pytest.raises(type(error)), interpreting("model"):
            raise error


def test_parsing_keeps_the_garbage_collector(tmp_path):
    file = tmp_path / "a.json"
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            for text in ("{}", "{"):
                file.write_text(text)
                with nullcontext() if text == "{}" else pytest.raises(ValueError, match="is not JSON"):
                    read_json(file)
                assert gc.isenabled() == enabled
        finally:
            gc.enable()
