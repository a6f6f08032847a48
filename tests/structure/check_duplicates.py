"""Fails if a block of code is duplicated.

A block is a run of equal tokens, including names and numbers; comments, spaces and imports do not count.

Usage: check_duplicates.py [--tokens N] <the project's directory>
"""

import argparse
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

# The smallest reported block, in tokens; a line has 25 to 40. Shorter ones are shared signatures and calls that register a
# table. Kernels repeat more, because the file of each instruction set is independent.
LIMITS = {
    "python": 60,
    "ops": 70,
    "plan": 60,
    "runner": 60,
    "adapters": 70,
    "kernels": 110,
    "bench": 80,
    "scripts": 80,
    "tests": 120,
}
SUFFIXES = {".py", ".h", ".hpp", ".cpp", ".c"}

_STRING = r"""[A-Za-z]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_IMPORTS = r"^[ \t]*(?:from[ ][\w.]+[ ]import[ ](?:\([^)]*\)|[^\n]*)|import[ ][^\n]*)"
_SKIPPED = {"python": rf"\#[^\n]*|{_IMPORTS}", "c": r"//[^\n]*|/\*[\s\S]*?\*/|^[ \t]*\#[ \t]*(?:include|pragma)[^\n]*"}
_TOKENS = {name: re.compile(rf"(?P<skip>{skipped})|{_STRING}|\w+|[^\w\s]", re.M) for name, skipped in _SKIPPED.items()}


def tokens_of(path: pathlib.Path) -> Iterator[tuple[str, int]]:
    """Each token of a file with its line."""
    text = path.read_text(encoding="utf-8")
    line, at = 1, 0
    for match in _TOKENS["python" if path.suffix == ".py" else "c"].finditer(text):
        line += text.count("\n", at, match.start())
        at = match.start()
        if match["skip"] is None:
            yield match[0], line


def blocks(lined_files: list[list[tuple[str, int]]], least: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The longest equal runs of at least ``least`` tokens that start at a line, as two places (file, token) and the length.

    A run in three places gives two pairs with the first place.
    """
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    files = []
    for file, lined in enumerate(lined_files):
        tokens, done = [token for token, _ in lined], 0
        files.append(tokens)
        for at in [at for at in range(len(tokens) - least + 1) if at == 0 or lined[at][1] != lined[at - 1][1]]:
            run = tuple(tokens[at : at + least])
            other, begin = first.setdefault(run, (file, at))
            if at < done:
                continue
            if other == file and begin + least > at:  # new, or repeating itself like rows of a table
                first[run] = file, at
                continue
            length, end = least, at if other == file else len(files[other])
            while at + length < len(tokens) and begin + length < end and tokens[at + length] == files[other][begin + length]:
                length += 1
            yield other, begin, file, at, length
            done = at + length


def duplicates(root: pathlib.Path, limits: dict[str, int]) -> tuple[list[str], int]:
    """A line for each block, longest first, and the number of files."""
    found, count = [], 0
    for directory, least in limits.items():
        paths = sorted(path for path in (root / directory).rglob("*") if path.suffix in SUFFIXES)
        count += len(paths)
        read = [list(tokens_of(path)) for path in paths]
        for one, begin, other, at, length in blocks(read, least):
            places = [
                f"{paths[file].relative_to(root).as_posix()}:{read[file][start][1]}-{read[file][start + length - 1][1]}"
                for file, start in ((one, begin), (other, at))
            ]
            found.append((length, f"{' and '.join(places)}: {length} equal tokens; at most {least - 1} are allowed"))
    return [text for _, text in sorted(found, reverse=True)], count


def check_that_it_can_fail() -> None:
    block = "def {0}(a, b):\n    total = a * b + {1}\n    return [total, total + 1, total + 2]\n"
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        (root / "python").mkdir()
        for name, text in {
            "one.py": block.format("f", 1) + "# a comment\n" + block.format("h", 2),
            "two.py": "import re\n\n\n" + block.format("f", "1  # another comment"),
            "table.py": "ROWS = [" + "(1, 2), " * 100 + "]",
        }.items():
            (root / "python" / name).write_text(text, encoding="utf-8")
        found = [text.split(":")[0:3] for text in duplicates(root, {"python": 25})[0]]
        assert found == [["python/one.py", "1-3 and python/two.py", "4-6"]], f"self-check: found {found}"
        assert duplicates(root, {"python": 35})[0] == [], "self-check: a short block was reported"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, help="the smallest block, instead of LIMITS")
    parser.add_argument("root", type=pathlib.Path)
    options = parser.parse_args()
    check_that_it_can_fail()
    found, files = duplicates(options.root, LIMITS if options.tokens is None else dict.fromkeys(LIMITS, options.tokens))
    for text in found:
        print(text)
    if files < 10:
        print(f"only {files} source files under {options.root}: is this the project?")
        return 1
    print(f"{len(found)} blocks stand in two places, in {files} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
