"""Type information: the stub of the compiled module agrees with the module. `make typecheck` checks the package."""

import ast
import re
from pathlib import Path

import lowbit
from lowbit import _C

PACKAGE = Path(lowbit.__file__).parent

INDEX = "typing.SupportsInt | typing.SupportsIndex"
# pybind11's names of C++ types, and the stub's.
TYPES = {
    INDEX: "int",
    "bool": "bool",
    "str": "str",
    "int": "int",
    "float": "float",
    "bytes": "bytes",
    "dict": "dict[str, Any]",
    "list": "list[dict[str, Any]]",
    f"collections.abc.Sequence[tuple[{INDEX}, {INDEX}]]": "Sequence[tuple[int, int]]",
    "tuple": "tuple[str, list[list[int]]]",
    "None": "None",
}
# A std::string accepts both; names of files are os.fsencode's result, a table of levels is bytes.
BYTES_TOO = {
    ("load_kernels", "path"),
    ("open_tokenizer", "file"),
    *((name, "levels") for name in ("packed_bytes", "describe_packed", "packed_header")),
}


def stub() -> dict[str, str]:
    """name -> "(parameter: type = default, ...) -> type" for functions, or the type for values."""
    found = {}
    for node in ast.parse((PACKAGE / "_C.pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = f"({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = ast.unparse(node.annotation)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                is_property = bool(member.decorator_list)
                names = "property" if is_property else ", ".join(argument.arg for argument in member.args.args)
                found[f"{node.name}.{member.name}"] = names
    return found


def members(kind: type) -> dict[str, str]:
    """Names of the parameters of methods; properties."""
    found = {}
    for name, value in vars(kind).items():
        if isinstance(value, property):
            found[f"{kind.__name__}.{name}"] = "property"
        elif "(self: " in (value.__doc__ or "") and (name == "__init__" or not name.startswith("_")):
            found[f"{kind.__name__}.{name}"] = ", ".join(re.findall(r"(?:\(|, )(\w+): ", value.__doc__))
    return found


def module() -> dict[str, str]:
    found = {}
    for name, value in vars(_C).items():
        if name.startswith("__"):
            continue
        if isinstance(value, type):
            found |= members(value)
            continue
        if not callable(value):
            found[name] = type(value).__name__
            continue
        arguments, result = re.fullmatch(rf"{name}\((.*)\) -> (?:lowbit\._C\.)?(\w+)\s*", value.__doc__, re.S).groups()
        parameters = []
        for text in filter(None, re.split(r", (?=\w+: )", arguments)):
            parameter, kind, default = re.fullmatch(r"(\w+): (.*?)( = .*)?", text).groups()
            optional = kind.endswith(" | None")
            kind = TYPES[kind.removesuffix(" | None")]
            kind += " | bytes" if (name, parameter) in BYTES_TOO else ""
            kind += " | None" if optional else ""
            parameters.append(f"{parameter}: {kind}{(default or '').replace(' = ', '=')}")
        found[name] = f"({', '.join(parameters)}) -> {TYPES.get(result, result)}"
    return found


def test_the_stub_says_what_the_module_has():
    assert stub() == module()


def test_the_package_is_marked_as_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_every_public_function_has_types():
    """Parameters and results of lowbit's public functions and of its classes' methods."""
    for name in lowbit.__all__:
        value = getattr(lowbit, name)
        functions = {name: value} if callable(value) and not isinstance(value, type) else {}
        if isinstance(value, type):
            functions = {
                f"{name}.{method}": function
                for method, function in vars(value).items()
                if callable(function) and not method.startswith("_") and not isinstance(function, type)
            }
        for qualified, function in functions.items():
            code, said = function.__code__, function.__annotations__
            names = [each for each in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if each != "self"]
            assert [each for each in [*names, "return"] if each not in said] == [], qualified


def test_names_that_load_lazily_have_types():
    """A type checker sees the import of each name, and no `__getattr__`, which would accept every name."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    is_typing = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imported = {alias.asname for node in is_typing for one in node.body for alias in one.names}
    assert imported == {*lowbit._OPERATORS, *lowbit._LAZY, *lowbit._LAZY_MODULES}
    seen = {node.name for node in ast.walk(ast.Module(tree.body, [])) if isinstance(node, ast.FunctionDef)}
    assert "__getattr__" in seen and "__getattr__" not in {getattr(node, "name", "") for node in tree.body}
    assert set(lowbit._LAZY) | set(lowbit.__all__) <= set(dir(lowbit))


LAZY = """
import sys
for name in ("transformers", "safetensors"):
    sys.modules[name] = None
import lowbit
assert not hasattr(lowbit, "LowBitConfig") and not hasattr(lowbit, "nothing")
import inspect
assert "LinearConfig" in dict(inspect.getmembers(lowbit))
try:
    lowbit.LowBitConfig
except AttributeError as error:
    assert "lowbit.LowBitConfig needs a package that does not load: " in str(error), error
    assert "transformers" in str(error)
try:
    from lowbit import LowBitConfig
except ImportError as error:
    assert "transformers" in str(error) and "cannot import name" not in str(error), error
from lowbit import *
"""


def test_names_that_load_lazily_without_their_packages(fork_python):
    result = fork_python(LAZY)
    assert result.returncode == 0, result.stderr


def test_internal_modules_are_not_public_names():
    """A module would shadow a helpful error: lowbit.quantize(model) suggests quantize_."""
    public = {"executorch", "levels", "nn", "peft", "qat", "tensor_parallel", "transformers"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert {name for name in modules if not name.startswith("_")} == public
    assert not hasattr(lowbit, "quantize")
