"""Whatever config.json, an index, a header, tokenizer.json or generation_config.json contains, commands that read it give a
result, or one line and exit code 1, within limits of time and memory, and leave no files.

The files of examples/tiny_llama are changed as data (a value replaced, removed, renamed, wrapped) and as bytes.
`LOWBIT_FUZZ_EXAMPLES=2000` tries that many for each file, different ones in each run; the few default examples are always the
same.
"""

import copy
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
from command_line import FLOAT, PROMPT, invoke
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.first

MANY = int(os.environ.get("LOWBIT_FUZZ_EXAMPLES", 0))
FUZZ = settings(
    max_examples=MANY or 20,
    derandomize=not MANY,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SECONDS = 600  # on a quiet machine an example takes less than one
MEMORY = 4 << 30  # bytes beyond what is mapped before

HOSTILE = [
    None, True, False, -1, 0, 1, 2, 3, 16, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**12, -(10**18), 10**400, 0.5, -1.5,
    1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "", "five", "../x", "float16", "[/b]", "a\0b",
    "\x1b[31m\n", "\ud800", "é" * 300, [], {}, [[]], [None], [0] * 300, {"": {}}, ["a", 1], {"a": [1]},
]  # fmt: skip


_HOSTILE = st.sampled_from(HOSTILE).map(copy.deepcopy)  # copied, because the next change may be inside


@st.composite
def changed(draw, document):
    """A JSON document with one to three changes, at uniformly random places."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        parent, node = None, document
        while isinstance(node, dict | list) and node and (parent is None or draw(st.booleans())):
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            parent, node = node, node[key]
        if parent is None:
            return draw(_HOSTILE)
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "wrap"]))
        if kind == "replace":
            parent[key] = draw(_HOSTILE)
        elif kind == "remove":
            del parent[key]
        elif kind == "wrap":
            parent[key] = [node]
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(["", "x", "__metadata__", *sorted(parent)]))] = parent.pop(key)
    return document


@st.composite
def files(draw, document) -> bytes:
    """The bytes of a changed document, sometimes changed as bytes."""
    text = json.dumps(draw(changed(document))).encode()
    kind = draw(st.sampled_from(["as it is"] * 8 + ["cut", "not UTF-8", "deep", "twice", "empty", "no object"]))
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "not UTF-8":
        at = draw(st.integers(0, len(text)))
        return text[:at] + b"\xff\xc0" + text[at:]
    if kind == "deep":
        return draw(st.sampled_from([b"[" * 200_000, b'{"a":' * 200_000, text[:1] + b'"deep":' + b"[" * 5000]))
    if kind == "twice":
        return text[:1] + text[1:].rstrip(b"}") + b"," + text[1:]
    return {"empty": b"", "no object": b"[" + text + b"]"}.get(kind, text)


class Hung(BaseException):
    """An example did not end in time."""


def _hung(*_):
    raise Hung


@pytest.fixture(autouse=True)
def _less_memory():
    """Limits memory, so that excessive allocations fail here and do not affect the machine."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def check(target: Path, *arguments) -> int:
    """Runs a command; returns its exit code, 0 or 1."""
    previous = signal.signal(signal.SIGALRM, _hung)
    signal.alarm(SECONDS)
    try:
        result = invoke(*arguments)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    errors = [line for line in lines if line.startswith("lowbit: error: ")]
    if result.exit_code == 0:
        assert errors == []
    else:
        assert (result.exit_code, result.stdout, lines) == (1, "", errors) and len(errors) == 1, (result.stdout, lines)
        assert errors[0].isprintable() and len(errors[0]) < 3000
        assert "not enough memory" not in errors[0]
        assert os.listdir(target) == []
    shutil.rmtree(target)
    target.mkdir()
    return result.exit_code


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    """The shipped model in files with an index."""
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("sharded") / "model"
    AutoModelForCausalLM.from_pretrained(FLOAT).save_pretrained(path, max_shard_size="3MB")
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    return Path(shutil.copytree(FLOAT, tmp_path / "model"))


@pytest.fixture
def target(tmp_path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def document(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@FUZZ
@given(files(document(FLOAT / "config.json")))
def test_config(model, target, content):
    (model / "config.json").write_bytes(content)
    check(target, "quantize", model, target / "new", "--scale", "absmax")
    check(target, "generate", model, "--prompt", PROMPT, "--max-new-tokens", 2)


@pytest.mark.more
@FUZZ
@given(files(document(FLOAT / "generation_config.json")))
def test_generation_config(model, target, content):
    (model / "generation_config.json").write_bytes(content)
    check(target, "generate", model, "--prompt", PROMPT, "--max-new-tokens", 2)


@FUZZ
@given(st.data())
def test_index(sharded, tmp_path, target, data):
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(sharded, model)
    content = data.draw(files(document(sharded / "model.safetensors.index.json")))
    (model / "model.safetensors.index.json").write_bytes(content)
    inspected = check(target, "inspect", model)
    assert check(target, "quantize", model, target / "new", "--scale", "absmax") >= inspected


@FUZZ
@given(st.data())
def test_header(model, target, data):
    whole = (FLOAT / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = data.draw(files(json.loads(whole[8 : 8 + size])))
    says = data.draw(st.sampled_from([len(header)] * 8 + [0, len(header) + 1, 2**32, 2**63, 2**64 - 1]))
    (model / "model.safetensors").write_bytes(says.to_bytes(8, "little") + header + whole[8 + size :])
    inspected = check(target, "inspect", model)
    assert check(target, "quantize", model, target / "new", "--scale", "absmax") >= inspected


@FUZZ
@given(st.data())
def test_packed_header(packed, tmp_path, target, data):
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(packed[0], model)
    whole = (packed[0] / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = data.draw(files(json.loads(whole[8 : 8 + size])))
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + size :])
    inspected = check(target, "inspect", model)
    assert check(target, "generate", model, "--prompt", PROMPT, "--max-new-tokens", 1) >= inspected


@FUZZ
@given(st.data())
def test_packed_config(packed, tmp_path, target, data):
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(packed[0], model)
    content = document(packed[0] / "config.json")
    quantization = data.draw(changed(content["quantization_config"]))
    (model / "config.json").write_text(json.dumps(content | {"quantization_config": quantization}))
    check(target, "generate", model, "--prompt", PROMPT, "--max-new-tokens", 1)


@FUZZ
@given(files(document(FLOAT / "tokenizer.json")))
def test_tokenizer(model, target, content):
    (model / "tokenizer.json").write_bytes(content)
    check(target, "generate", model, "--prompt", PROMPT, "--max-new-tokens", 2)


@pytest.mark.more
@FUZZ
@given(files(document(FLOAT / "tokenizer_config.json") | {"chat_template": "{{ messages[0].content }}"}))
def test_tokenizer_config(model, target, content):
    (model / "tokenizer_config.json").write_bytes(content)
    check(target, "generate", model, "--chat", "--prompt", PROMPT, "--max-new-tokens", 2)
