"""Converts docstrings written for Python's help() and Sphinx to the form that mkdocstrings reads."""

import ast
import re
from pathlib import Path

import griffe

_ROLE = re.compile(r":(?:func|class|meth|data|mod):`~?([\w.]+)`")
# Several parameters in one entry, with the lines of its text.
_SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+)(: .*(?:\n\1 +\S.*)*)", re.M)


def _imported_when_used() -> dict[str, str]:
    """Names that `lowbit` provides by __getattr__, which static analysis cannot find: name -> module."""
    tree = ast.parse(Path("python/lowbit/__init__.py").read_text(encoding="utf-8"))
    table = next(node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "_LAZY")
    return ast.literal_eval(table.value)


class Docstrings(griffe.Extension):
    """Makes :func:`pack` a link to the object of that name in scope, and splits the entry ``bits, group_size:`` in two."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(r"[`\1`][\1]", obj.docstring.value)
        if re.match(r"Args:\n\S", text):  # without another line, griffe finds no indentation
            text = text.replace("\n", "\n    ")
        if obj.is_function and obj.returns is not None:  # without a type, griffe takes the text before a colon
            text = text.replace("Returns:\n    ", f"Returns:\n    {obj.returns}: ")
        head, found, rest = text.partition("Args:\n")
        arguments, blank, behind = rest.partition("\n\n")
        arguments = _SEVERAL.sub(
            lambda entry: "\n".join(f"{entry[1]}{name}{entry[3]}" for name in entry[2].split(", ")), arguments
        )
        obj.docstring.value = head + found + arguments + blank + behind

    def on_class(self, *, cls: griffe.Class, **kwargs) -> None:
        """The fields of a dataclass with their trailing comments, if its docstring has no arguments."""
        if cls.docstring is None or "Args:\n" in cls.docstring.value:
            return
        if not any("dataclass" in str(each.value) for each in cls.decorators):
            return
        lines = cls.filepath.read_text(encoding="utf-8").splitlines()
        fields = []
        for name, member in cls.members.items():
            if member.is_attribute and "property" not in member.labels and not name.startswith("_"):
                comment = lines[member.lineno - 1].partition("  # ")[2]
                fields.append(f"    {name}: {comment or name.replace('_', ' ')}")
        cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        if pkg.path == "lowbit":
            for name, module in _imported_when_used().items():
                pkg.set_member(name, griffe.Alias(name, f"lowbit.{module}.{name}", parent=pkg))
