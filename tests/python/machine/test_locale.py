"""The same files, texts and numbers in any locale: with decimal commas, Turkish letters, or ASCII files."""

import json
import shutil
import subprocess

import pytest
from command_line import FLOAT
from gguf_files import file_bytes
from importing_files import METADATA, tensors
from needs import lacking

# Names, texts and numbers in files, and the commands' output.
SCRIPT = """
import hashlib, json, locale, os, sys
from pathlib import Path

locale.setlocale(locale.LC_ALL, "")
sys.modules["hqq"] = None  # not for transformers: it compiles by torch, which reads templates in the locale's encoding
import lowbit
from command_line import invoke

source, file, out = map(Path, sys.argv[1:])
lowbit.quantize_checkpoint(source, out / "packed", lowbit.LowBitConfig(bits=3))
lowbit.import_checkpoint(file, out / "imported")
prompt = ("--prompt", "Return the NUMBER of items IN")
said = invoke("generate", out / "packed", *prompt, "--max-new-tokens", "8", "--temperature", "0.5")
refused = invoke("generate", out / "packed", "--prompt", "a", "--top-p", "1.5")
names = sorted(path for path in out.rglob("*") if path.is_file())
hashes = {os.fsencode(path.relative_to(out)).hex(): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}
print(json.dumps({
    "files": hashes, "text": said.stdout, "code": said.exit_code, "refused": refused.exit_code,
    "comma": locale.localeconv()["decimal_point"], "encoding": locale.getpreferredencoding(False),
}))
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture
def turkish(tmp_path) -> dict[str, str]:
    """A locale with decimal commas, one byte per letter, and a different lower case of I."""
    made = subprocess.run(["localedef", "-i", "tr_TR", "-f", "ISO-8859-9", tmp_path / "tr_TR.ISO-8859-9"], capture_output=True)
    if not (tmp_path / "tr_TR.ISO-8859-9").exists():
        lacking(f"localedef makes no Turkish locale here: {made.stderr.decode(errors='replace')[:200]}")
    return {"LOCPATH": str(tmp_path), "LC_ALL": "tr_TR.ISO-8859-9", "PYTHONUTF8": "0"}


@pytest.mark.more
def test_any_locale_does_the_same(tmp_path, run_python, monkeypatch, turkish):
    source, file = tmp_path / "source", tmp_path / "m.gguf"
    shutil.copytree(FLOAT, source)
    (source / "größe.md").write_text("İıß €", encoding="utf-8")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }} — ş", encoding="utf-8")
    words = {"tokenizer.ggml.tokens": ["<s>", "ı", "İ", "ıİ"], "tokenizer.ggml.merges": ["ı İ"]}
    file.write_bytes(file_bytes(METADATA | words, tensors()))
    found = []
    for name, environment in (("usual", {}), ("ascii", ASCII), ("turkish", turkish)):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as changed:
            for variable, value in environment.items():
                changed.setenv(variable, value)
            done = run_python(SCRIPT, source, file, tmp_path / name)
        assert done.returncode == 0, (name, done.stderr[-3000:])
        found.append(json.loads(done.stdout.splitlines()[-1]))
    kinds = [(each.pop("comma"), each.pop("encoding").upper()) for each in found]
    assert kinds[1] in ((".", "ANSI_X3.4-1968"), (".", "ASCII"), (".", "US-ASCII")) and kinds[2] == (",", "ISO-8859-9")
    assert found[0] == found[1] == found[2]
    assert found[0]["code"] == 0 and found[0]["text"] and found[0]["refused"] != 0
