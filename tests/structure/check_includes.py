"""Fails if a layer includes a header that it must not use.

    kernels/   only the standard library, intrinsics, system headers and kernels/
    ops/       kernels/ and ops/; torch only in torch_*, executorch only in executorch_ops.cpp, pybind11 only in module.cpp
    plan/      kernels/, ops/ and plan/; executorch only in executorch_backend.cpp, pybind11 only in module.cpp
    runner/    kernels/, ops/, plan/ and runner/; pybind11 only in module.cpp
    all        never tests/ or bench/

Usage: check_includes.py <the project's directory>
"""

import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
LAYERS = {  # what each may include
    "kernels": ("kernels",),
    "ops": ("kernels", "ops"),
    "plan": ("kernels", "ops", "plan"),
    "runner": ("kernels", "ops", "plan", "runner"),
}
HOSTS = {  # host framework: the prefix of its includes, and the only files that may have them
    "torch": (("torch", "ATen", "c10", "caffe2"), ("ops/torch_ops.cpp", "ops/torch_tensors.h", "ops/torch_threads.h")),
    "executorch": (("executorch",), ("ops/executorch_ops.cpp", "plan/executorch_backend.cpp")),
    "pybind11": (("pybind11", "Python.h"), ("ops/module.cpp", "plan/module.cpp", "runner/module.cpp")),
}
SUFFIXES = {".h", ".hpp", ".inc", ".cpp", ".cc", ".c"}


def violations(root: pathlib.Path) -> tuple[list[str], int]:
    found, files = [], 0
    for layer, allowed in LAYERS.items():
        for path in sorted((root / layer).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            files += 1
            for quote, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                file = path.relative_to(root).as_posix()
                where = f"{file} includes {name}"
                for host, (prefixes, only) in HOSTS.items():
                    if name.split("/")[0] in prefixes and file not in only:
                        found.append(f"{where}: {host} is for {' and '.join(only)} only")
                if quote == "<":
                    if name.split("/")[0] in (*LAYERS, "tests", "bench"):
                        found.append(f"{where}: the project's own headers are included by their relative path")
                    continue
                target = (path.parent / name).resolve()
                if not target.is_file():
                    if not any(name.split("/")[0] in prefixes for prefixes, _ in HOSTS.values()):
                        found.append(f"{where}: there is no such file")
                elif not any(target.is_relative_to((root / directory).resolve()) for directory in allowed):
                    found.append(f"{where}: {layer}/ knows only {' and '.join(d + '/' for d in allowed)}")
    return found, files


def check_that_it_can_fail() -> None:
    planted = {
        "kernels/a.cpp": '#include "../ops/op.h"',
        "kernels/b.cpp": "#include <torch/library.h>",
        "kernels/c.cpp": '#include "../tests/t.h"',
        "kernels/d.cpp": "  #  include <pybind11/pybind11.h>",
        "kernels/e.cpp": "#include <executorch/runtime/kernel/kernel_includes.h>",
        "ops/linear.cpp": "#include <executorch/runtime.h>",
        "ops/module.cpp": "#include <torch/library.h>",
        "ops/pack.cpp": '#include "../bench/b.h"',
        "ops/torch_ops.cpp": "#include <pybind11/pybind11.h>",
        "plan/executorch_ops.cpp": "#include <executorch/runtime.h>",
        "plan/model.cpp": '#include "../runner/r.h"',
    }
    allowed = {
        "ops/op.h": '#include "../kernels/k.h"\n#include <vector>',
        "kernels/k.h": "#include <cstdint>",
        "kernels/linear/x.cpp": '#include "../k.h"',
        "ops/executorch_ops.cpp": "#include <executorch/runtime.h>",
        "plan/executorch_backend.cpp": "#include <executorch/runtime.h>",
        "tests/t.h": "",
        "bench/b.h": "",
        "runner/r.h": '#include "../kernels/k.h"',
    }
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        for name, text in (planted | allowed).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n", encoding="utf-8")
        caught = {text.split(" includes ")[0] for text in violations(root)[0]}
        assert caught == planted.keys(), f"self-check: caught {sorted(caught)}, planted {sorted(planted)}"


def main() -> int:
    check_that_it_can_fail()
    found, files = violations(pathlib.Path(sys.argv[1]))
    for text in found:
        print(text)
    if files < 10:
        print(f"only {files} source files under {sys.argv[1]}: is this the project?")
        return 1
    print(f"{len(found)} wrong includes in {files} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
