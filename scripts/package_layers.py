"""Prints the layers of the Python package from its imports, or writes them to docs/internals/index.md.

python scripts/package_layers.py [--write]
"""

from __future__ import annotations

import ast
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "lowbit"
PAGE = ROOT / "docs" / "internals" / "index.md"
BEGIN, END = "<!-- layers: scripts/package_layers.py --write -->\n", "<!-- end of layers -->\n"

# Highest first; a module may import from its own layer and lower layers. "core" has all other modules.
LAYERS = {
    "commands": ("__main__", "cli"),
    "tools": ("tools",),
    "calibration": ("calibration",),
    "servers": ("serve", "vllm"),
    "language models": ("llm", "exports", "speech"),
    "importers": ("importing",),
    "checkpoints": ("checkpoint",),
    "quantize_ and training": ("quantizing", "qat"),
    "transformers": ("hf", "transformers"),
    "files": ("files",),
    "plans": ("plan",),
    "libraries": ("executorch", "peft"),
    "core": (),
}
MODULES = {
    ".".join(("lowbit", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


class _WithoutTypeChecking(ast.NodeTransformer):
    """Removes blocks that never run."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if getattr(node.test, "id", "") == "TYPE_CHECKING" else self.generic_visit(node)


def imported(name: str, path: Path) -> set[str]:
    """Absolute names of a module's imports, including those inside functions and by import_module("...")."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    names: set[str] = set()
    tree = _WithoutTypeChecking().visit(ast.parse(path.read_text(encoding="utf-8")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                known = inner in MODULES or not module.startswith("lowbit")
                names.add(inner if known and node.module != "__future__" else module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and not arg.value.startswith(".")}
    return names


def layer_of(module: str) -> str:
    """The layer of a module of the package, "lowbit.hf.names"."""
    return next((layer for layer, rooms in LAYERS.items() if module.split(".")[1] in rooms), "core")


def picture() -> str:
    """The layers, highest first: modules and folders, imported layers, and required packages."""
    needs: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    packages: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    rooms: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for name, path in MODULES.items():
        if name == "lowbit":  # it imports nearly all
            continue
        layer = layer_of(name)
        rooms[layer].add(name.split(".")[1] + ("/" if (PACKAGE / name.split(".")[1]).is_dir() else ""))
        for other in imported(name, path):
            if other in MODULES and other != "lowbit":
                needs[layer].add(layer_of(other))
            elif not other.startswith("lowbit"):
                packages[layer].add(other.split(".")[0])
    lines = []
    for layer in LAYERS:
        below = needs[layer] - {layer}
        direct = [other for other in LAYERS if other in below and not any(other in needs[middle] for middle in below - {other})]
        external = sorted(packages[layer] - {"torch", *sys.stdlib_module_names})
        names = sorted(rooms[layer] - {"__main__"}, key=lambda room: (room[-1] != "/", room.startswith("_"), room))
        wrapped = textwrap.wrap(" ".join(names), 100)
        lines += [f"    {layer if row == wrapped[0] else '':<23} {row}" for row in wrapped]
        detail = [f"imports {', '.join(direct)}"] if direct else []
        detail += [f"needs {', '.join(external)}"] if external else []
        lines += [f"    {'':<23} {'; '.join(detail)}"] if detail else []
    return "\n".join(lines) + "\n"


def main() -> None:
    if "--write" not in sys.argv:
        print(picture(), end="")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
