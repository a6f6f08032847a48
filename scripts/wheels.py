"""Builds the wheels for Linux: `make wheels`.

Each processor has one CMake build, which compiles liblowbit and the operator libraries once, and the module `_C` for each
version of CPython (pybind11 3.1 has no limited API). auditwheel determines the tag.

    python scripts/wheels.py [--processors x86_64,aarch64] [--pythons 3.11,3.12] [--output dist]

Run it with the Python of the build environment (requirements.txt). Headers of CPython come from an interpreter of that version
on this machine, or else from Debian (scripts/debian_python.sh). Versions without either are named at the end; the exit code is
1 if the command line named one.
"""

import argparse
import base64
import csv
import functools
import hashlib
import importlib.util
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PROCESSORS = ("x86_64", "aarch64")
GLIBC = 28  # the tag manylinux_2_28, like torch
# Libraries of torch and executorch.
HOSTS = ("libtorch_cpu.so", "libc10.so", "libexecutorch.so", "libexecutorch_threadpool.so")


class Missing(Exception):
    """This machine lacks something that a wheel needs."""


def headers_of_interpreter(python: str) -> Path | None:
    """Directory of Python.h of an interpreter of that version on this machine, if there is one with headers."""
    places = [sys.executable] if sys.version_info[:2] == tuple(map(int, python.split("."))) else []
    places += filter(None, [shutil.which(f"python{python}")])
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python{python}")), reverse=True)
    code = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_paths()['include'])"
    for place in places:
        found = subprocess.run([place, "-c", code], check=False, capture_output=True, text=True)
        version, _, directory = found.stdout.strip().partition(" ")
        if found.returncode == 0 and version == python and (Path(directory) / "Python.h").is_file():
            return Path(directory)
    return None


@functools.cache
def headers(python: str, processor: str) -> Path:
    """Directory of Python.h.

    From another processor's CPython if Debian has that version, else from this machine's: on 64-bit Linux, modules see no
    difference in pyconfig.h.
    """
    own = BUILD / "pythons" / f"{python}-{processor}" / "include"
    if (own / "Python.h").is_file():
        return own
    if processor == platform.machine() and (found := headers_of_interpreter(python)):
        return found
    if processor == "aarch64" and python == "3.11" and (BUILD / "arm-python").is_dir():
        return BUILD / "arm-python/root/usr/include/python3.11"
    script = [ROOT / "scripts/debian_python.sh", python, processor, own.parent]
    own.parent.parent.mkdir(parents=True, exist_ok=True)
    fetched = subprocess.run(script, check=False, stderr=subprocess.PIPE, text=True)
    if fetched.returncode == 0:
        return own
    if found := headers_of_interpreter(python):
        return found
    raise Missing(fetched.stderr.strip().splitlines()[-1])


def settings(processor: str, python: str) -> dict[str, str]:
    """CMake's settings for one wheel."""
    result = {
        "LOWBIT_MANYLINUX_2_28": "ON",
        "LOWBIT_BUILD_EXECUTORCH": "ON",
        "PYBIND11_USE_CROSSCOMPILING": "ON",  # only the headers of CPython are needed
        "Python_INCLUDE_DIR": str(headers(python, processor)),
        "PYTHON_MODULE_EXTENSION": f".cpython-{python.replace('.', '')}-{processor}-linux-gnu.so",
        "PYTHON_MODULE_DEBUG_POSTFIX": "",
    }
    host = Path(importlib.util.find_spec("torch").origin).parent
    result["LOWBIT_TORCH_DIR"] = str(host)
    result["LOWBIT_EXECUTORCH_DIR"] = str(host.parent / "executorch")
    if processor != platform.machine():
        # The headers of this environment's torch, the libraries of the oldest torch for Arm.
        packages = BUILD / "arm-python/root/usr/lib/python3/dist-packages"
        if not (packages / "torch").is_dir():
            raise Missing("torch for aarch64 is missing: `make build/arm-python/bin/python`")
        result["CMAKE_TOOLCHAIN_FILE"] = str(ROOT / f"cmake/{processor}-linux-gnu.cmake")
        result["LOWBIT_TORCH_LIBRARY_DIR"] = str(packages / "torch/lib")
        result["LOWBIT_EXECUTORCH_DIR"] = str(packages / "executorch")
    return result


def run(command: list, **environment: str) -> str:
    """Runs a command and returns its output; on failure prints the output and exits."""
    done = subprocess.run(
        list(map(str, command)), check=False, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return done.stdout


def build_as_is(name: str, python: str, platform_tag: str, defined: dict[str, str]) -> Path:
    """Builds the wheel for one CPython with these CMake settings, and tags it for its processor and Python.

    Its directory is build/wheel-`name`-`python`. Objects of an earlier wheel of that name are reused.
    """
    (BUILD / f"wheel-{name}-objects/CMakeCache.txt").unlink(missing_ok=True)  # it has the settings of the last CPython
    new = BUILD / f"wheel-{name}-{python}"
    shutil.rmtree(new, ignore_errors=True)
    tag = "cp" + python.replace(".", "")
    options = ["-C", f"build-dir=build/wheel-{name}-objects"]
    for setting, value in defined.items():
        options += ["-C", f"cmake.define.{setting}={value}"]
    pip = [sys.executable, "-m", "pip"]
    run([*pip, "wheel", "-q", ".", "-w", new, "--no-build-isolation", "--no-deps", "--no-cache-dir", *options])
    (built,) = new.glob("*.whl")
    # The backend tags a wheel for the running Python.
    tags = ["--remove", "--python-tag", tag, "--abi-tag", tag, "--platform-tag", platform_tag]
    run([sys.executable, "-m", "wheel", "tags", *tags, built])
    (built,) = new.glob("*.whl")
    return built


def problems_of(wheel: Path, extension: str) -> list[str]:
    """Problems of a wheel file, one sentence each: its name, its list of contents, required files.

    Args:
        wheel: the file.
        extension: that of the module `_C`, for example ".cpython-311-darwin.so".
    """
    found = []
    _, version, *tags = wheel.stem.split("-")
    information = f"lowbit-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        if len(set(archive.namelist())) != len(archive.namelist()):
            found.append("a file name occurs twice")
    library = "liblowbit.dylib" if "darwin" in extension else "liblowbit.so"
    needed = [f"lowbit/_C{extension}", f"lowbit/{library}", "lowbit/lowbit_torch.so", "lowbit/lowbit_executorch.so"]
    needed += ["lowbit/__init__.py", "lowbit/_C.pyi", "lowbit/py.typed", "lowbit_autoload/__init__.py", "lowbit_entry.py"]
    needed += ["lowbit/include/lowbit/ops/operators.h", "lowbit/lib/cmake/lowbit/lowbit-config.cmake"]
    facts = ("WHEEL", "METADATA", "RECORD", "entry_points.txt", "licenses/LICENSE")
    needed += [f"{information}/{name}" for name in facts]
    found += [f"it has no {name}" for name in needed if name not in contents]
    binaries = {name for name in contents if re.search(r"[.](so|dylib)([.]|$)", name)}
    found += [f"it has an unexpected file {name}" for name in sorted(binaries - set(needed))]
    found += [f"it has {name}" for name in contents if name.endswith((".pyc", ".o", ".a"))]

    # The list of contents: each file except the list itself, with size and checksum.
    rows = list(csv.reader(io.StringIO(contents.get(f"{information}/RECORD", b"").decode())))
    listed = {row[0]: row[1:] for row in rows}
    found += [f"RECORD does not name {name}" for name in contents if name not in listed]
    found += [f"RECORD names {name}, which is missing" for name in listed if name not in contents]
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        right = ["", ""] if name == f"{information}/RECORD" else [f"sha256={digest}", str(len(data))]
        if name in listed and listed[name] != right:
            found.append(f"RECORD has a wrong size or checksum of {name}")

    # The tags of the name must equal those inside and those of the module.
    inside = re.findall(r"^Tag: (.*)$", contents.get(f"{information}/WHEEL", b"").decode(), re.M)
    each = {f"{python}-{abi}-{platform}" for python in tags[0].split(".") for abi in tags[1].split(".")
            for platform in tags[2].split(".")}  # fmt: skip
    if set(inside) != each:
        found.append(f"its name says {sorted(each)}, WHEEL says {sorted(inside)}")
    if tags[0] != "cp" + re.match(r"[.]cpython-(\d+)-", extension)[1] or tags[1] != tags[0]:
        found.append(f"its name says {tags[0]}-{tags[1]}; the module is _C{extension}")

    # No paths of the build machine.
    for name, data in contents.items():
        if str(ROOT).encode() in data:
            found.append(f"{name} has the path {ROOT} in it")
    return found


def check(wheel: Path, extension: str) -> None:
    """Exits with a message if the wheel has problems."""
    if found := problems_of(wheel, extension):
        sys.exit("\n".join(f"{wheel.name}: {problem}" for problem in found))


def build(processor: str, python: str, output: Path) -> Path:
    """Builds one wheel for Linux."""
    defined = settings(processor, python)
    built = build_as_is(processor, python, f"linux_{processor}", defined)
    new = built.parent
    tools = BUILD / "wheel-tools/bin"
    exclude = [f"--exclude={library}" for library in HOSTS]
    # auditwheel finds the oldest possible tag; for another processor's wheel it cannot be told a tag.
    run(
        [tools / "auditwheel", "repair", "--plat", "auto", "--only-plat", *exclude, "-w", new / "repaired", built],
        PATH=f"{tools}:{os.environ['PATH']}",
    )
    (repaired,) = (new / "repaired").glob("*.whl")
    found = re.search(r"-(?:manylinux_2_(\d+)|linux)_\w+\.whl$", repaired.name)
    if not found or int(found[1] or 99) > GLIBC:
        sys.exit(f"{repaired.name} needs a newer C or C++ library than manylinux_2_{GLIBC} has")
    name = f"manylinux_2_{GLIBC}_{processor}"
    run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", name, repaired])
    (repaired,) = (new / "repaired").glob("*.whl")
    check(repaired, defined["PYTHON_MODULE_EXTENSION"])
    output.mkdir(parents=True, exist_ok=True)
    wheel = output / repaired.name
    shutil.move(repaired, wheel)
    shutil.rmtree(new)
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--processors", type=names, default=PROCESSORS)
    parser.add_argument("--pythons", type=names, help=f"of {', '.join(PYTHONS)}; default: all available")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for kind, known in ("processors", PROCESSORS), ("pythons", PYTHONS):
        for name in getattr(arguments, kind) or ():
            if name not in known:
                sys.exit(f"--{kind} has '{name}'; expected some of: {', '.join(known)}")
    missing = []
    for processor in arguments.processors:
        for python in arguments.pythons or PYTHONS:
            started = time.monotonic()
            try:
                wheel = build(processor, python, arguments.output)
            except Missing as error:
                missing.append(f"no wheel for CPython {python} on {processor}: {error}")
                continue
            size = wheel.stat().st_size / 1e6
            print(f"{wheel.name}  {size:.2f} MB, {time.monotonic() - started:.0f} s", flush=True)
    for line in missing:
        print(line, file=sys.stderr)
    if missing and arguments.pythons:
        sys.exit(1)


if __name__ == "__main__":
    main()
