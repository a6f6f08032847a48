"""Docstrings are written for Python's help() and for Sphinx: this makes of them what mkdocstrings reads."""

import ast
import re
from pathlib import Path

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|mod):`~?([\w.]+)`")
# Several parameters in one entry, with the lines of its text.
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)", re.M)


def _imported_when_used() -> dict[str, str]:
    """What `lowbit` has by its __getattr__, which no reader of the source can know: name -> module."""
    tree = ast.parse(Path("python/lowbit/__init__.py").read_text(encoding="utf-8"))
    table = next(node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "_LAZY")
    return ast.literal_eval(table.value)


class Docstrings(griffe.Extension):
    """``:func:`pack``` becomes a link to what is called so, looked for from where it stands; ``bits, group_size:`` an entry for
    each."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"[`\1`][\1]", obj.docstring.value)
        head, found, rest = text.partition("Args:\n")
        arguments, blank, behind = rest.partition("\n\n")
        arguments = _SEVERAL.sub(
            lambda entry: "\n".join(f"{entry[1]}{name}{entry[3]}" for name in entry[2].split(", ")), arguments
        )
        obj.docstring.value = head + found + arguments + blank + behind

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        if pkg.path == "lowbit":
            for name, module in _imported_when_used().items():
                pkg.set_member(name, griffe.Alias(name, f"lowbit.{module}.{name}", parent=pkg))
