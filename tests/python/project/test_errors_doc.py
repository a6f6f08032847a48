"""docs/errors.md explains messages that the code raises."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^### (.*)\n(.*)\n", TEXT, re.M)
# Headings that do not quote a message of lowbit.
SYMPTOMS = {
    "A packed model answers differently from the float model, llama.cpp, transformers or vLLM",
    "`incompatible tensor type` when a tensor takes a packed weight as its data",
    "A packed Swin v2 does not load: StopIteration",
    "Rows of NaN",
    "peft says that a packed layer is not supported",
    "The first call is slow, or more threads are slower",
    "transformers knows no quantization type `lowbit`, and reports mismatched sizes",
}


def literal(path: Path) -> str:
    """A source file with adjacent literals joined, as by compilers."""
    return re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("heading", "below"), SECTIONS, ids=[heading for heading, _ in SECTIONS])
def test_the_message_is_in_the_code(heading, below):
    if heading in SYMPTOMS:
        assert not below.startswith("<!--")
        return
    source = literal(ROOT / re.fullmatch(r"<!-- (\S+) -->", below)[1])
    messages = re.findall(r"`(.*?)`", heading)
    assert messages
    for message in messages:
        parts = [part.strip() for part in message.split("...") if part.strip()]
        assert parts and all(part in source for part in parts), (message, parts)


def test_every_symptom_is_there():
    assert {heading for heading, _ in SECTIONS} > SYMPTOMS and len(SECTIONS) >= 20
