"""Dependencies between the package's modules: no circular imports, and transformers' internals in only one folder."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from package_layers import BEGIN, END, LAYERS, MODULES, PACKAGE, PAGE, imported, layer_of, picture

# They import transformers' documented classes, but no submodule.
USERS_OF_TRANSFORMERS = {"lowbit.llm.loading", "lowbit.llm.shapes", "lowbit.cli.tune", "lowbit.tools.report.measure_methods"}


def test_the_walk_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from importlib import import_module\nimport transformers.utils\nfrom . import qat\nfrom .nn import Linear\n"
        "def f():\n    from ..files.replace import sync\n    import_module('transformers.models')\n"
        "if TYPE_CHECKING:\n    from .checkpoint import CheckpointEntry\n"
    )
    assert imported("lowbit.module", file) >= {"lowbit.qat", "lowbit.nn", "transformers.utils", "transformers.models"}
    assert "lowbit.files.replace" in imported("lowbit.llm.module", file)
    assert "lowbit.checkpoint" not in imported("lowbit.module", file)


def test_no_circular_imports():
    # Without the package itself, which imports nearly all modules: `from . import qat` gives lowbit.qat.
    modules = MODULES | {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in [*PACKAGE.with_name("lowbit_autoload").glob("*.py"), PACKAGE.with_name("lowbit_entry.py")]
    }
    graph = {name: (imported(name, path) & modules.keys()) - {"lowbit"} for name, path in modules.items()}
    assert {"lowbit.peft", "lowbit.executorch"} <= graph["lowbit_autoload.imports"]
    assert graph["lowbit.checkpoint.plan"] >= {"lowbit.hf.names", "lowbit.files.safetensors"}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for needed in sorted(graph[name]):
                visit(needed, [*way, name])
            done.add(name)

    for name in sorted(graph.keys() - {"lowbit"}):
        visit(name, [])


def test_imports_point_down():
    order = list(LAYERS)
    up = [
        f"{name} ({layer_of(name)}) imports {other} ({layer_of(other)})"
        for name, path in MODULES.items()
        for other in imported(name, path) & MODULES.keys()
        if "lowbit" not in (name, other) and order.index(layer_of(other)) < order.index(layer_of(name))
    ]
    assert not up


def test_the_picture_of_the_layers_is_current():
    """The layers in docs/internals/index.md; scripts/package_layers.py --write updates them."""
    assert f"{BEGIN}\n{picture()}\n{END}" in PAGE.read_text(encoding="utf-8")


def test_transformers_is_met_in_one_folder():
    for name, path in MODULES.items():
        used = {other for other in imported(name, path) if other.split(".")[0] == "transformers"}
        if f"{name}.".startswith("lowbit.hf."):
            continue
        assert not used - {"transformers"}, f"{name} imports {used}: what is in submodules belongs to lowbit.hf"
        assert not used or name in USERS_OF_TRANSFORMERS, f"{name} imports transformers"


def test_no_file_name_stands_twice():
    """A name in a traceback or a search finds one file."""
    names = [path.name for path in MODULES.values() if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
    beside = [path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert len(beside) <= 8, beside


FOLDERS = (
    "adapters", "bench", "cmake", "docs", "examples", "kernels", "make", "ops", "plan", "python", "runner", "scripts", "tests",
)  # fmt: skip
CODE = ("py", "pyi", "cpp", "h", "c", "sh", "cmake")


def test_no_line_is_too_long():
    """CONTRIBUTING.md's limit, for every source file; an #include may be longer."""
    repository = Path(__file__).parents[3]
    limit = int(re.search(r"A line has at most (\d+) columns", (repository / "CONTRIBUTING.md").read_text("utf-8"))[1])
    names = ["Makefile", "*.mk", "CMakeLists.txt", "CMakePresets.json", *(f"*.{end}" for end in CODE)]
    folders = [repository / name for name in FOLDERS]
    files = [path for name in names for path in (*repository.glob(name), *(p for f in folders for p in f.rglob(name)))]
    assert len(files) > 400
    long = [
        f"{path.relative_to(repository)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > limit and not line.startswith("#include")
    ]
    assert long == []


def test_few_files_of_the_kernels_name_a_single_width():
    """Width-dependent data comes from codec.h and widths.h, as CONTRIBUTING.md says."""
    compared = r"(?:==|!=|<=?|>=?)"
    names_width = re.compile(
        rf"\b(?:KERNELS?|INTERLEAVED|MANY|FEW|PANELS)\([2-7]\b|\bUnpack<[2-7]>|\b\w*[bB]its(?:\(\))?_? {compared} [2-7]\b"
    )
    root = Path(__file__).parents[3]
    kernels = root / "kernels"
    files = [path for path in kernels.rglob("*") if path.suffix in (".h", ".cpp")]
    named = {path.relative_to(kernels).as_posix() for path in files if names_width.search(path.read_text("utf-8"))}
    assert named == {"bits/codec.h", "bits/widths.h"} | {
        f"linear/{name}"
        for name in ("gemv_sme2.h", "linear_avx512.h", "one_row_neon.h", "streaming_sme2.h", "sums_avx2.h", "tile_neon.h")
    }
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text[text.index("## Recipe: the placement of a width") : text.index("## Recipe: a mapping")]
    assert [name for name in named if name.removeprefix("linear/") not in recipe] == [] and "Only eight files" in recipe


def test_one_file_of_kernels_and_operators_names_a_single_mapping():
    """mapping.h has a mapping's name, stored data and template dispatch, as CONTRIBUTING.md says."""
    root = Path(__file__).parents[3]
    sources = [path for part in ("kernels", "ops") for path in (root / part).rglob("*") if path.suffix in (".h", ".cpp")]
    names_mapping = re.compile(r"\bMapping::(?:symmetric|affine|levels)\b")
    assert [path.name for path in sources if names_mapping.search(path.read_text())] == ["mapping.h"]
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text[text.index("## Recipe: a mapping") : text.index("Every kernel that supports it")]
    edited = set(re.findall(r"`((?:kernels|ops)/[\w/]+\.(?:h|cpp))`", recipe))
    assert len(edited) == 8 and "in eight C++ files" in recipe and all((root / name).is_file() for name in edited)


def test_the_recipe_for_an_isa_names_all_its_files():
    root = Path(__file__).parents[3]
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = text[text.index("## Recipe: an ISA") : text.index("## Recipe: the placement of a width")]
    names_it = re.compile(r"avx_?vnni(?!_?int8)", re.IGNORECASE)
    parts = [root / part for part in ("kernels", "ops", "plan", "cmake", "python", "tests", "bench", "scripts")]
    files = [path for part in parts for path in part.rglob("*") if path.suffix in (".h", ".cpp", ".py", ".cmake", ".sh")]
    named = {
        path.relative_to(root).as_posix()
        for path in [root / "Makefile", *root.glob("make/*.mk"), *files]
        if path != Path(__file__) and names_it.search(path.read_text(encoding="utf-8"))
    }
    kernels = {"kernels/attention/avxvnni.cpp", "kernels/linear/avxvnni.cpp"}
    assert kernels <= named
    assert [path for path in sorted(named - kernels) if f"`{path}`" not in recipe] == []
    assert f"is in {len(named)} files" in recipe
    library = [path for path in named if path.startswith(("kernels/", "ops/", "cmake/"))]
    assert len(library) == 7, sorted(library)
