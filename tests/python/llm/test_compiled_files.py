"""Compiled decoders on disk: the second start compiles nothing, and no other decoder matches."""

import os
import stat
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from lowbit.llm import Decoder, compile_decoder, compiled, compiled_files
from test_llm import PROMPT, make

KEY = """
import sys
sys.path[:0] = {tests!r}
import torch
torch.set_num_threads(1)
from test_llm import make
from lowbit.llm import Decoder, compiled_files
print(compiled_files.key_of(Decoder(make("llama"), 32), None))
"""


def key(model=None, *arguments) -> str:
    return compiled_files.key_of(Decoder(model or make("llama"), *(arguments or (32,))), None)


def logits(step, tokens, start=0):
    with torch.inference_mode():
        return step(torch.tensor([tokens]), torch.tensor([start])).clone()


def reweighted() -> torch.nn.Module:
    """The same model with other weights."""
    model = make("llama")
    state = model.state_dict()
    model.load_state_dict(state | {name: state[name.replace("layers.0", "layers.1")] for name in state if "layers.0" in name})
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
    return model


@pytest.mark.more
def test_the_second_start_compiles_nothing(tmp_path, monkeypatch):
    directory = tmp_path / "compiled"
    first = compile_decoder(Decoder(make("llama"), 32), directory=directory)
    (file,) = directory.iterdir()
    assert file.suffix == ".pt2" and stat.S_IMODE(directory.stat().st_mode) == 0o700

    def package(*_):
        raise AssertionError("something is compiled")

    monkeypatch.setattr(compiled, "_package", package)
    again = compile_decoder(Decoder(make("llama"), 32), directory=directory)
    for tokens, start in ((PROMPT, 0), ([5], len(PROMPT))):
        assert torch.equal(logits(again, tokens, start), logits(first, tokens, start))
    # The weights come from the decoder, not from the file.
    decoder = Decoder(reweighted(), 32)
    other = compile_decoder(decoder, directory=directory)
    assert not torch.allclose(logits(other, PROMPT), logits(first, PROMPT), rtol=0.1, atol=0.1)
    torch.testing.assert_close(logits(other, PROMPT), logits(decoder, PROMPT), rtol=0.05, atol=0.05)
    with pytest.raises(AssertionError, match="something is compiled"):
        compile_decoder(Decoder(make("llama"), 48), directory=directory)


@pytest.mark.more
def test_keys_are_those_of_other_processes(run_python):
    said = run_python(
        KEY.format(tests=[str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")])
    ).stdout.split()[-1]
    assert said == key() == key(reweighted())


def changed(name: str, value: object) -> torch.nn.Module:
    """The model with a changed attribute of its first layer's norm, or another function."""
    model = make("llama")
    setattr(model.model.layers[0].input_layernorm, name, value)
    return model


def test_keys_differ_with_what_the_code_depends_on(monkeypatch):
    torch.set_num_threads(1)
    seen = {key()}

    def new(found: str) -> bool:
        fresh = found not in seen
        seen.add(found)
        return fresh

    assert new(key(None, 48))
    assert new(key(None, 32, "bfloat16"))
    assert new(key(make("qwen3")))
    assert new(key(make("llama", vocab_size=98)))
    assert new(key(changed("variance_epsilon", 0.125)))
    assert new(compiled_files.key_of(Decoder(make("llama"), 32), {"option": 1}))
    torch.set_num_threads(2)
    assert new(key())
    torch.set_num_threads(1)
    assert not new(key())
    with torch._inductor.config.patch({"cpp.min_chunk_size": 7}):
        assert new(key())
    for name, other in (("_own_code", ["other text of lowbit"]), ("_file_of", lambda kind: "other text of the model")):
        with monkeypatch.context() as patch:
            patch.setattr(compiled_files, name, (lambda: other) if isinstance(other, list) else other)
            assert new(key())


def test_code_that_the_key_cannot_know():
    model = make("llama")
    decoder = Decoder(model, 32)
    model.model.norm.register_forward_hook(lambda module, arguments, output: 2 * output)
    with pytest.raises(compiled_files.Unknown, match=r"test_compiled_files\..*<lambda>, which is code of another package"):
        compiled_files.key_of(decoder, None)


@pytest.fixture
def packages(monkeypatch):
    """Packages that contain a word instead of machine code, and a list of them."""
    made = []

    def package(decoder, path):
        made.append(path)
        path.write_text("good")

    def load(path):
        if path.read_text() != "good":
            raise RuntimeError("not an archive")
        return {"decode": None, "prefill": None}

    monkeypatch.setattr(compiled, "_package", package)
    monkeypatch.setattr(compiled, "_load", load)
    return made


def test_files(packages, tmp_path, caplog, monkeypatch):
    decoder = Decoder(make("llama"), 32)
    find = compiled._load_or_compile
    assert find(decoder, tmp_path) == find(decoder, tmp_path)
    assert len(packages) == 1
    (file,) = tmp_path.iterdir()
    file.write_text("bad")
    find(decoder, tmp_path)
    assert file.read_text() == "good" and len(packages) == 2
    assert "is damaged (RuntimeError: not an archive) and compiled again" in caplog.text
    for number in range(20):
        (tmp_path / f"{number}.pt2").touch()
        os.utime(tmp_path / f"{number}.pt2", (number, number))
    os.utime(file, (0, 0))
    find(decoder, tmp_path)  # marks it as used now
    gone = tmp_path / "gone.pt2"  # removed by another process after it was listed
    with monkeypatch.context() as patch:
        patch.setattr(type(tmp_path), "glob", lambda *_: iter([gone, *(path for path in tmp_path.iterdir())]))
        compiled_files.prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file.name, *(f"{number}.pt2" for number in range(5, 20))}
    decoder.model.model.norm.register_forward_hook(lambda module, arguments, output: output)
    with caplog.at_level("INFO"):
        find(decoder, tmp_path)
    assert len(packages) == 3 and "is not kept: the model has" in caplog.text
    assert find(decoder, None) and len(packages) == 4


def test_directories(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(OSError, match="is writable for others, who could put machine code into it"):
        compile_decoder(Decoder(make("llama"), 32), directory=shared)
    with pytest.raises(ValueError, match="for 'inductor', which has torch's own cache; expected None"):
        compile_decoder(Decoder(make("llama"), 32), "inductor", tmp_path)
    notes = []
    monkeypatch.setenv("LOWBIT_COMPILE_CACHE", str(shared))
    assert compiled_files.usable_directory(notes.append) is None
    assert "the compiled decoder is not kept: " in notes[0] and "LOWBIT_COMPILE_CACHE names another" in notes[0]
    monkeypatch.setenv("LOWBIT_COMPILE_CACHE", str(tmp_path / "own"))
    assert compiled_files.usable_directory(notes.append) == tmp_path / "own"
    monkeypatch.setenv("LOWBIT_COMPILE_CACHE", "")
    assert compiled_files.usable_directory(notes.append) is None and len(notes) == 1
    monkeypatch.delenv("LOWBIT_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compiled_files.default_directory() == tmp_path / "cache" / "lowbit" / "compiled"
