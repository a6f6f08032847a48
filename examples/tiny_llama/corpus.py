"""English text from every Python installation: the documentation of the standard library (license: PSF-2.0).

    python examples/tiny_llama/corpus.py --heldout examples/tiny_llama/heldout.txt

A document is a module (its docstrings and longer comments, in the order of the source) or a topic of
`pydoc_data.topics`. Its first line is its name; paragraphs are separated by one blank line and keep only meaningful line
breaks. All text is ASCII.

To avoid data leakage, `documents` leaves out documents with the names of those in `heldout.txt`, and every paragraph that
shares EIGHT consecutive words with that file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import itertools
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELDOUT = Path(__file__).with_name("heldout.txt")
HELDOUT_BYTES = 80_000
HELDOUT_LONGEST = 12_000  # bytes of one document, so that several fit
EIGHT = 8  # consecutive words that make two paragraphs copies of each other

# Tests are not prose; the other modules do not exist on every system.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}

Documents = dict[str, str]  # text by name


def documents(heldout: Documents, most: int | None = None) -> Documents:
    """The training text: at most `most` documents, without paragraphs of `heldout` and without repetitions."""
    taken = {key for text in heldout.values() for paragraph in split(text) for key in keys(paragraph)}
    seen: set[str] = set()
    result = {}
    for name, paragraphs in itertools.islice(raw_documents(), most):
        if name in heldout:
            continue
        kept = []
        for paragraph in paragraphs:
            own = keys(paragraph)
            if own.isdisjoint(taken) and 2 * len(own & seen) < len(own):
                kept.append(paragraph)
                seen |= own
        if kept:
            result[name] = "\n\n".join([name, *kept])
    return result


def choose_heldout() -> Documents:
    """Documents with HELDOUT_BYTES or a little more in total, chosen by the hash of their names."""
    candidates = []
    for name, paragraphs in raw_documents():
        text = "\n\n".join([name, *paragraphs])
        if len(paragraphs) > 4 and len(text) <= HELDOUT_LONGEST:
            candidates.append((hashlib.sha256(name.encode()).hexdigest(), name, text))
    chosen: Documents = {}
    size = 0
    for _, name, text in sorted(candidates):
        if size >= HELDOUT_BYTES:
            break
        chosen[name] = text
        size += len(text)
    return dict(sorted(chosen.items()))


def read_heldout(path: Path = HELDOUT) -> Documents:
    """The documents of a file that `write_heldout` wrote."""
    texts = path.read_text(encoding="ascii").strip("\n").split("\n\n\n")
    return {text.split("\n", 1)[0]: text for text in texts}


def write_heldout(path: Path, heldout: Documents) -> None:
    path.write_text("\n\n\n".join(heldout.values()) + "\n", encoding="ascii")


def split(text: str) -> list[str]:
    """The paragraphs of a document, without its name."""
    return text.split("\n\n")[1:]


def keys(paragraph: str) -> set[str]:
    """Keys that two copies share: all runs of EIGHT words, or the whole text if it is shorter."""
    words = re.findall(r"\w+", paragraph.lower())
    return {" ".join(words[i : i + EIGHT]) for i in range(max(1, len(words) - EIGHT + 1))}


def fingerprint(texts: Documents) -> str:
    """A hash of all names and texts."""
    return hashlib.sha256("\0".join(itertools.chain(*sorted(texts.items()))).encode()).hexdigest()


# ---- where the text comes from


def raw_documents() -> Iterator[tuple[str, list[str]]]:
    """Names and paragraphs, sorted by name within modules and topics."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        # These, and directories with a dash in their names, are settings of a machine, not part of the library.
        machine = parts[-1] == "sitecustomize" or parts[-1].startswith("_sysconfigdata")
        if LEFT_OUT.isdisjoint(parts) and all(part.isidentifier() for part in parts) and not machine:
            modules[".".join(part for part in parts if part != "__init__")] = path
    for name in sorted(modules):
        paragraphs = module_paragraphs(modules[name].read_text(encoding="utf-8", errors="replace"))
        if paragraphs:
            yield name, paragraphs

    from pydoc_data import topics

    for name in sorted(topics.topics):
        paragraphs = prose(topics.topics[name])
        if paragraphs:
            yield f"topic {name}", paragraphs


def module_paragraphs(source: str) -> list[str]:
    """Docstrings, each after its function's name and parameters, and comments of several lines, in source order."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # templates and the like
        return []
    found = []
    strings = set()  # lines of strings, where "#" does not start a comment

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                add(child, prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    def add(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> None:
        text = ast.get_docstring(node)
        if text is None:
            return
        string = node.body[0]
        strings.update(range(string.lineno, string.end_lineno + 1))
        paragraphs = prose(text)
        if paragraphs and name:
            heading = f"class {name}" if isinstance(node, ast.ClassDef) else f"{name}({parameters(node.args)})"
            paragraphs[0] = f"{heading}\n{paragraphs[0]}"
        found.append((string.lineno, paragraphs))

    add(tree, "")
    visit(tree, "")
    lines = source.splitlines()
    for is_comment, block in itertools.groupby(
        range(1, len(lines) + 1), lambda number: number not in strings and lines[number - 1].lstrip().startswith("#")
    ):
        block = list(block)
        if is_comment and len(block) > 1:
            text = "\n".join(re.sub(r"^\s*#+ ?", "", lines[number - 1]) for number in block)
            found.append((block[0], [p for p in prose(text) if len(p.split()) >= EIGHT]))
    return [paragraph for _, paragraphs in sorted(found, key=lambda item: item[0]) for paragraph in paragraphs]


def parameters(arguments: ast.arguments) -> str:
    """Names of parameters as in a call: "self, key, *rest"."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ", ".join(names)


def prose(text: str) -> list[str]:
    """The English ASCII paragraphs of a text, with wrapped lines joined."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        paragraph = unwrap(inspect.cleandoc(paragraph.replace("\t", "    ")))
        words = paragraph.split()
        letters = sum(character.isalpha() or character in " .,'\n" for character in paragraph)
        if (
            re.fullmatch(r"[\n -~]+", paragraph)
            and ">>>" not in paragraph
            and letters >= 0.85 * len(paragraph)
            and len(words) > 1
            and max(map(len, words)) <= 40
        ):
            paragraphs.append(paragraph)
    return paragraphs


def unwrap(paragraph: str) -> str:
    """Joins a line to the previous one if that was full and both have the same indentation."""
    joined: list[str] = []
    before = ""
    for line in paragraph.split("\n"):
        text = " ".join(line.split())
        same = len(line) - len(line.lstrip()) == len(before) - len(before.lstrip())
        if joined and same and len(before) >= 50 and not re.match(r"[-*+o] |\d+[.)] |:\w+|@\w+", text):
            joined[-1] += f" {text}"
        else:
            joined.append(line[: len(line) - len(line.lstrip())] + text)
        before = line
    return "\n".join(joined).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Chooses held-out documents and writes them to a file.")
    parser.add_argument("--heldout", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    heldout = choose_heldout()
    write_heldout(options.heldout, heldout)
    print(f"{len(heldout)} documents, {sum(map(len, heldout.values()))} bytes")


if __name__ == "__main__":
    main()
