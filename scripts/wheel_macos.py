"""Builds the wheels for macOS on 64-bit Arm on a Linux machine, and checks every file in them: `make wheel-macos`.

Zig's Clang compiles liblowbit and the operator libraries once, and the module `_C` for each version of CPython, linked with the
libraries of torch 2.10 and executorch for macOS. Nothing is run.

    python scripts/wheel_macos.py [--pythons 3.11,3.12] [--output dist]

The tag is macosx_11_0_arm64, like torch 2.10 and 2.11; later versions of torch need macOS 14. CPython's headers are those for
Linux, except pyconfig.h (cmake/macos_pyconfig.h).
"""

import argparse
import functools
import importlib.util
import re
import shutil
import sys
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import wheels

ROOT, BUILD = wheels.ROOT, wheels.BUILD
SYSTEM = "11.0"
PACKAGES = BUILD / "macos-packages"  # torch 2.10 and executorch, downloaded by the Makefile
TOOLS = BUILD / "wheel-tools"
# Public headers of CPython with macros that only the interpreter or its module curses needs.
NOT_ASKED = ("pyconfig.h", "pymacconfig.h", "py_curses.h")


def undecided(headers: Path, ours: str) -> list[str]:
    """Macros of pyconfig.h that the headers in a directory use and `ours` neither defines nor undefines."""
    theirs = (headers / "pyconfig.h").read_text(encoding="utf-8")
    known = set(re.findall(r"^(?:#define|/\* #undef) +(\w+)", theirs, re.M))
    asked = set()
    for path in [*headers.glob("*.h"), *(headers / "cpython").glob("*.h")]:
        if path.name not in NOT_ASKED:
            text = path.read_text(encoding="utf-8").replace("\\\n", " ")
            for line in re.findall(r"^\s*#\s*(?:if|elif|ifdef|ifndef)\b(.*)", text, re.M):
                asked |= set(re.findall(r"\w+", line))
    return sorted(asked & known - set(re.findall(r"^#(?:define|undef) (\w+)", ours, re.M)))


def headers(python: str) -> Path:
    """A directory with Python.h and everything that it includes, as on a Mac."""
    linux = wheels.headers_of_interpreter(python) or wheels.headers(python, "aarch64")
    ours = ROOT / "cmake/macos_pyconfig.h"
    if missing := undecided(linux, ours.read_text(encoding="utf-8")):
        sys.exit(f"the headers of CPython {python} use {', '.join(missing)}; {ours.name} does not mention them")
    target = BUILD / "pythons" / f"{python}-macos" / "include"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(linux, target)
    shutil.copy(ours, target / "pyconfig.h")
    return target


def settings(python: str) -> dict[str, str]:
    """CMake's settings for one wheel."""
    (zig,) = TOOLS.glob("lib/python*/site-packages/ziglang/zig")
    return {
        "CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake/zig.cmake"),
        "LOWBIT_ZIG": str(zig),
        "LOWBIT_ZIG_TARGET": f"aarch64-macos.{SYSTEM}",
        "LOWBIT_LIBCXX": str(PACKAGES / "libc++.tbd"),
        # The headers of this environment's torch, the libraries of the oldest available torch.
        "LOWBIT_TORCH_DIR": str(Path(importlib.util.find_spec("torch").origin).parent),
        "LOWBIT_TORCH_LIBRARY_DIR": str(PACKAGES / "torch/lib"),
        "LOWBIT_BUILD_EXECUTORCH": "ON",
        "LOWBIT_EXECUTORCH_DIR": str(PACKAGES / "executorch"),
        "PYBIND11_USE_CROSSCOMPILING": "ON",
        "Python_INCLUDE_DIR": str(headers(python)),
        "PYTHON_MODULE_EXTENSION": f".cpython-{python.replace('.', '')}-darwin.so",
        "PYTHON_MODULE_DEBUG_POSTFIX": "",
    }


def build(python: str, output: Path, quick: bool) -> tuple[Path, str]:
    """Builds one wheel, with `quick` with little optimization; returns it and the result of the library check."""
    tag = f"macosx_{SYSTEM.replace('.', '_')}_arm64"
    defined = settings(python) | ({"CMAKE_CXX_FLAGS_RELEASE": "-O1", "LOWBIT_UNOPTIMIZED": "ON"} if quick else {})
    built = wheels.build_as_is("macos-arm64-quick" if quick else "macos-arm64", python, tag, defined)
    wheels.check(built, defined["PYTHON_MODULE_EXTENSION"])
    unpacked = built.parent / "unpacked"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(unpacked)
    libraries = [PACKAGES / f"torch/lib/{name}.dylib" for name in ("libc10", "libtorch_cpu")]
    libraries += sorted((PACKAGES / "executorch/lib").glob("*.dylib"))
    (system,) = TOOLS.glob("lib/python*/site-packages/ziglang/lib/libc/darwin/libSystem.tbd")
    files = sorted([*unpacked.glob("lowbit/*.so"), *unpacked.glob("lowbit/*.dylib")])
    said = wheels.run([
        TOOLS / "bin/python", ROOT / "scripts/macos_libraries.py", "check", f"--minimum={SYSTEM}", f"--system={system}",
        f"--python-headers={defined['Python_INCLUDE_DIR']}", "--libraries", *libraries, "--built", *files,
    ])  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    wheel = output / built.name
    shutil.move(built, wheel)
    shutil.rmtree(unpacked.parent)
    return wheel, said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", type=functools.partial(str.split, sep=","), default=wheels.PYTHONS)
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--quick", action="store_true", help="only to test that it compiles and links; not for users")
    arguments = parser.parse_args()
    for python in arguments.pythons:
        if python not in wheels.PYTHONS:
            sys.exit(f"--pythons has '{python}'; expected some of: {', '.join(wheels.PYTHONS)}")
    for python in arguments.pythons:
        started = time.monotonic()
        try:
            wheel, said = build(python, arguments.output, arguments.quick)
        except wheels.Missing as error:
            sys.exit(f"no wheel for CPython {python} on macOS: {error}")
        size = wheel.stat().st_size / 1e6
        print(f"{wheel.name}  {size:.2f} MB, {time.monotonic() - started:.0f} s; {said}", flush=True)


if __name__ == "__main__":
    main()
