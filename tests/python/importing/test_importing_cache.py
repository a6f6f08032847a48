"""The cached import next to a GGUF file, used by several processes at once."""

import os
import threading

import pytest
from command_line import invoke
from gguf_files import write_model
from lowbit.importing import cache as importing
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "m.gguf"
    write_model(path, LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), "Q8_0")
    return path


def test_only_one_of_two_simultaneous_imports_writes(file, monkeypatch):
    write, second_writes, calls, results = importing.write_checkpoint, threading.Event(), [], []
    second = threading.Thread(target=lambda: results.append(importing.import_to_cache(file)))

    def writing(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 1:
            second.start()
            second_writes.wait(0.5)  # gives it time to start
        else:
            second_writes.set()
        return write(*arguments, **named)

    monkeypatch.setattr(importing, "write_checkpoint", writing)
    results.append(importing.import_to_cache(file))
    second.join()
    assert len(calls) == 1 and results == 2 * [importing.cache_of(file)]
    assert sorted(os.listdir(file.parent)) == ["m.gguf", "m.gguf.lowbit"]


def test_an_old_import_stays_while_it_is_loaded(file):
    with importing.loading_from_cache(file) as cache:
        before = (cache / "model.safetensors").stat().st_ino
        os.utime(file, ns=(1, 1))
        waited = threading.Event()

        def replace():
            with importing.loading_from_cache(file, waiting=waited.set):
                pass

        other = threading.Thread(target=replace)
        other.start()
        assert waited.wait(60)
        assert (cache / "model.safetensors").stat().st_ino == before
    other.join()
    assert importing.is_current(file)


def test_a_file_system_without_locks(file, monkeypatch):
    def refuse(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(importing.fcntl, "flock", refuse)
    assert importing.import_to_cache(file) == importing.cache_of(file) and importing.is_current(file)


def test_options_are_checked_before_a_file_is_imported(file):
    for wrong in (["--prompt", "a", "--draft", file, "--guesses", "0"], ["--prompt", "a", "--prompt-file", "b"]):
        assert invoke("generate", file, *wrong).exit_code == 2
    assert not importing.cache_of(file).exists()
