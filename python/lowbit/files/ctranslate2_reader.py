"""Reads CTranslate2's model.bin: the name of its specification and the offsets of tensors.

Every number in the file is checked against the file's size before it is used.
"""

from __future__ import annotations

import math
from pathlib import Path

from .io import Header
from .safetensors import Stored
from .untrusted import check_regular, printable

VERSIONS = (5, 6)
_TYPES = {0: ("F32", 4), 1: ("I8", 1), 2: ("I16", 2), 3: ("I32", 4), 4: ("F16", 2), 5: ("BF16", 2)}  # name, bytes
_MOST_VARIABLES = 1 << 20
_MOST_DIMENSIONS = 8


class _Header(Header):
    def text(self, what: str) -> str:
        data = self.bytes(self.number(2, f"the length of {what}"), what)
        try:
            return data.removesuffix(b"\0").decode("ascii")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is {printable(repr(data[:50]))}; expected ASCII") from error


def read_ctranslate2(path: Path) -> tuple[str, dict[str, Stored]]:
    """The name of a file's specification, such as "WhisperSpec", and its variables, aliases included.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is damaged, or its version is not supported.
    """
    check_regular(path)
    with open(path, "rb") as file:
        header = _Header(file, path)
        version = header.number(4, "the version")
        if version not in VERSIONS:
            raise ValueError(
                f"{path} has the version {version} of CTranslate2's format; expected one of {', '.join(map(str, VERSIONS))}"
            )
        specification = header.text("the specification's name")
        header.number(4, "the specification's revision")
        count = header.number(4, "the number of variables")
        if count > _MOST_VARIABLES:
            raise ValueError(f"{path} has {count} variables; expected at most {_MOST_VARIABLES}")
        variables: dict[str, Stored] = {}
        for _ in range(count):
            variable = _variable(header)
            if variable.name in variables:
                raise ValueError(f"{path} has {variable.name} twice")
            variables[variable.name] = variable
        for _ in range(header.number(4, "the number of aliases")):
            alias, name = header.text("an alias"), header.text("an alias's variable")
            if name not in variables or alias in variables:
                raise ValueError(
                    f"{path} has the alias {printable(alias)} of {printable(name)}; expected a new name of a variable"
                )
            variables[alias] = variables[name]
        if header.at < header.size:
            raise ValueError(f"{path} has {header.size - header.at} bytes after its last entry; expected none: copy it again")
    return specification, variables


def _variable(header: _Header) -> Stored:
    name = header.text("a variable's name")
    if not name.isprintable():
        raise ValueError(f"{header.path} has a variable of the name '{printable(name)}'; expected printable characters")
    rank = header.number(1, f"the rank of {name}")
    if rank > _MOST_DIMENSIONS:
        raise ValueError(f"{header.path}: {name} has {rank} dimensions; expected at most {_MOST_DIMENSIONS}")
    shape = tuple(header.number(4, f"the shape of {name}") for _ in range(rank))
    kind = header.number(1, f"the type of {name}")
    if kind not in _TYPES:
        raise ValueError(f"{header.path}: {name} has the type {kind}; expected 0 to {max(_TYPES)}")
    dtype, size = _TYPES[kind]
    count = header.number(4, f"the size of {name}")
    if count != math.prod(shape) * size:
        raise ValueError(f"{header.path}: {name} is {dtype} {list(shape)} in {count} bytes; expected {math.prod(shape) * size}")
    return Stored(name, header.path, dtype, shape, header.skip(count, name), count)
